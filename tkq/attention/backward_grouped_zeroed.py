"""An attempt: as ``backward_grouped``, with the accumulator zeroed by a kernel before."""
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from tkq.attention.backward import build as build_alike
from tkq.attention.backward_background import FINISHED
from tkq.attention.backward_grouped import GroupedBackground, GroupedBackward
from tkq.attention.backward_grouped_config import GroupedConfig
from tkq.attention.backward_split import await_count
from tkq.attention.backward_tasks import claim


@dataclass(frozen=True)
class ZeroedConfig(GroupedConfig):
    zeroed: bool = True


class Zeroes:
    @cute.jit
    def __call__(self, acc: cute.Tensor, stream):
        self.kernel(acc).launch(grid=[cute.size(acc, mode=[0]), 1, 1], block=[256, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, acc: cute.Tensor):
        tile = acc[Int64(cute.arch.grid_dim()[0] - cute.arch.block_idx()[0] - 1), None]
        zeros, t = cute.make_rmem_tensor((4,), Float32), Int32(cute.arch.thread_idx()[0])
        zeros.fill(0.0)
        quads = cute.make_tensor(tile.iterator, cute.make_layout((4, cute.size(tile) // 4)))
        for i in range(cute.size(tile) // 4 // 256):
            cute.autovec_copy(zeros, quads[None, i * 256 + t])


class ZeroedBackground(GroupedBackground):
    @cute.jit
    def run(self, g):
        counters, tiles = g.background.counters, cute.size(g.acc, mode=[0])
        cute.arch.griddepcontrol_wait()
        n = claim(counters.next, FINISHED)
        while n < tiles:
            at = self.tile(g, n)
            await_count(counters.added, self.head(g, at), 4 * self.blocks(at.rows_k))
            self.convert(g, at)
            n = claim(counters.next, FINISHED)

    def await_head(self, g, t, head):
        pass


class ZeroedBackward(GroupedBackward):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.background = ZeroedBackground(spec, config, self.turn)

    @cute.jit
    def __call__(self, operands, gradients, workspace, sequences, numbers, stream):
        q = operands[1]
        tiles = (q.shape[1] + self.config.tile - 1) // self.config.tile * q.shape[2] * q.shape[0]
        end = (workspace.iterator + Int64(tiles) * 2 * self.config.tile).align(16)
        of_acc = self.config.tile * self.spec.width
        Zeroes()(cute.make_tensor(end, cute.make_layout((tiles, of_acc), stride=(of_acc, 1))), stream)
        GroupedBackward.__call__(self, operands, gradients, workspace, sequences, numbers, stream)


def build(spec, config):
    _, arguments = build_alike(spec, config)
    return ZeroedBackward(spec, config), arguments

"""V of packed sequences, transposed into a workspace in which each sequence begins with a tile of its own: so a tile
that tensor cores multiply has the keys of one sequence, and zeros."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tkq.attention.common.operands import Sequences
from tkq.attention.common.sequences import VarlenBatch, with_batch
from tkq.attention.fp8.spec import KEYS_TOGETHER as KEYS
from tkq.attention.fp8.spec import TransposePackedSpec
from tkq.attention.fp8.transpose import COLS, LANES, transpose_tile
from tkq.runtime.compile import fake


def first_tile(tasks, sequence, begin):
    """Of a sequence whose keys begin at row ``begin`` of V; of ``Varlen`` tasks. The rows behind the last sequence of Q
    count as one more, which has no keys, and a tile of zeros."""
    return _batch(tasks.cu_k, tasks.seqused_k, tasks.total_k).first_slot(KEYS, sequence, begin)


def _batch(cu_k, seqused_k, keys) -> VarlenBatch:
    """Of keys alone."""
    return VarlenBatch(Sequences(cu_k, cu_k, None, seqused_k), keys, keys)


class TransposePacked:
    """As ``TransposeValues``, of sequences that lie one behind the other: workspace[h, d, i] has the keys of sequence s
    from its ``first_tile`` on, in the operand's order, and zeros behind them up to the next sequence's. Every tile is
    written, also of a sequence without keys: what a task multiplies with weights of 0 is 0, and no NaN."""

    THREADS = 256

    def __init__(self, spec: TransposePackedSpec):
        self.spec = spec

    def fake_arguments(self) -> tuple:
        """Any sizes; strides of whole vectors."""
        total, H, numbers, padded, D = (*(fake.sym() for _ in range(3)), fake.sym(divisibility=KEYS),
                                        fake.sym(divisibility=COLS))
        some = lambda n: tuple(fake.sym64(divisibility=16) for _ in range(n))
        used = fake.tensor("int32", (fake.sym(),), align=4) if self.spec.seqused_k else None
        return (fake.tensor("e4m3", (total, H, D), (*some(2), 1), align=16),
                fake.tensor("e4m3", (H, D, padded), (*some(2), 1), align=16),
                fake.tensor("int32", (numbers,), align=4), used)

    @cute.jit
    def __call__(self, v: cute.Tensor, workspace: cute.Tensor, cu_k: cute.Tensor, seqused_k, stream: cuda.CUstream):
        v, workspace = with_batch(v, True), with_batch(workspace, True)
        threads = self.units(workspace) * LANES
        self.kernel(v, workspace, cu_k, seqused_k).launch(
            grid=[cute.ceil_div(threads, self.THREADS), 1, 1], block=[self.THREADS, 1, 1], stream=stream)

    def units(self, workspace):
        """Warps: each has 32 columns of a tile."""
        _, H, D, padded = workspace.shape
        return H * (D // COLS) * (padded // KEYS)

    @cute.kernel
    def kernel(self, v: cute.Tensor, workspace: cute.Tensor, cu_k: cute.Tensor, seqused_k):
        thread = cute.arch.block_idx()[0] * self.THREADS + cute.arch.thread_idx()[0]
        unit = cute.arch.make_warp_uniform(thread // LANES)
        if unit < self.units(workspace):
            self.transpose(unit, thread % LANES, v, workspace, _batch(cu_k, seqused_k, v.shape[1]))

    def transpose(self, unit, lane, v, workspace, batch: VarlenBatch):
        """Neighbouring warps have neighbouring columns and heads, as in ``TransposeValues``."""
        chunks, H = workspace.shape[2] // COLS, v.shape[2]
        chunk, rest = unit % chunks, unit // chunks
        h, tile = rest % H, rest // H
        begin, end = self.keys(tile, batch)
        transpose_tile(lane, v, workspace, (0, h, chunk), tile, begin, end)

    def keys(self, tile, batch: VarlenBatch):
        """(the first key of a tile, where its sequence's keys end). A whole warp."""
        s, first, _tiles, _begin, begin = batch.sequence_of(True, KEYS, tile)
        begin, keys = batch.rows(s, begin, batch.bounds[1], batch.given.seqused_k)
        keys = cutlass.select_(s < batch.count, keys, Int32(0))  # behind the last sequence
        return begin + (tile - first) * KEYS, begin + keys

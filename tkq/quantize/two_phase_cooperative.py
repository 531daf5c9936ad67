"""Float8 with one scale for all of x, or with scales for rows and for columns, of few tiles: x is read once."""
from typing import Optional

import cutlass.cute as cute
from cutlass import Int32

from .. import tile as tk
from .spec import TileSpec
from .tiles import THREADS, Operands, _same
from .two_phase import SECOND, Ticketed, _count, _wait_for
from .two_phase import build as of_claims


class Cooperative(Ticketed):
    """A block for each tile, all on the GPU at once: a cooperative launch. So each keeps its tile in registers while it
    waits for what is largest in all of them:

      x to registers | to amax | wait until all blocks are so far | registers and amax to q ..

    workspace: as `Claimed` has it, and shares it; of the tickets only the highest bit is used.
    """

    cooperative = True

    def blocks(self, tiles):
        return tiles

    @cute.kernel
    def kernel(self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, qt: Optional[cute.Tensor],
               scale_t: Optional[cute.Tensor], workspace: cute.Tensor, across: Int32, tiles: Int32):
        al, t, number = tk.SharedAllocator(), cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        second = Int32(workspace[0] < 0)
        found, amax = self.half(workspace, x, second)
        g, tile = Operands(x, q, scale, qt, scale_t, amax), (number // across, number % across)
        held = self.find.held(g, t, tile)
        self.clear_half(workspace, 1 - second, number * THREADS + t, tiles * THREADS)
        self.find.finish(g, al, t, tile, held)
        tk.sync_block()
        if t == 0:
            _count(found)
            _wait_for(found, tiles)
            if number == 0:  # all blocks have read it
                workspace[0] = (1 - second) * SECOND
        tk.sync_block()
        number, second = Int32(_same(number)), Int32(_same(second))  # so that nothing else is kept over the wait
        g = Operands(x, q, scale, qt, scale_t, self.half(workspace, x, second)[1])
        self.write.finish(g, al, t, (number // across, number % across), held)


def build(spec: TileSpec):
    """(kernel, fake arguments): as ``claimed.build``."""
    return Cooperative(spec), of_claims(spec)[1]

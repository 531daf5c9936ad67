"""Float8 with one scale for all of x, or with scales for rows and for columns, of any number of tiles: one launch."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from .. import tile as tk
from ..tile.bulk import _asm
from .spec import EDGE, VECTOR, TileSpec
from .tiles import THREADS, Operands, Tiles, operands
from .twice import Twice

TICKET, FOUND, LEFT = range(3)  # numbers of the room
AHEAD = 4  # and where amax begins in it: at 16 bytes


class OneScale(Tiles):
    """As Tiles, where any block may have tile 0."""

    def row_scales(self, g, al, t, tile, held, row0):
        one = self.scale_of(Int32(g.amax[0]).bitcast(Float32))
        self.put(g.scale, (0,), one, (t == 0) & (tile[0] + tile[1] == 0))
        return [one] * VECTOR


class Claimed(Twice):
    """What `Twice` does in three launches: of n tiles there are 2 n tasks and as many blocks, each of which claims one
    by a ticket when it begins.

      tickets 0 .. n - 1      x to amax, from the first tile to the last
      tickets n .. 2 n - 1    wait until all of these are done; x and amax to q .., from the last tile to the first: of
                              what was read last, much is in L2 still

    Tickets and not the blocks' numbers: so those that are waited for run, and wait for nobody. It ends, then, however
    many blocks other kernels leave room for, and in whatever order they begin: the launch need not be cooperative.

    room: int32, zeros before and after. Tickets that were claimed, tiles whose amax is found, tiles that are written;
    at AHEAD amax, as the kernels of the two steps have it. The last block that writes a tile makes zeros of all: nobody
    reads any more, and all tickets have been claimed.
    """

    def __init__(self, spec: TileSpec):
        super().__init__(spec)
        if spec.granularity == "tensor":
            self.write = OneScale(spec)
        self.spec = spec

    @cute.jit
    def __call__(self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, qt: Optional[cute.Tensor],
                 scale_t: Optional[cute.Tensor], room: cute.Tensor, stream: cuda.CUstream):
        down, across = cute.ceil_div(x.shape[0], EDGE), cute.ceil_div(x.shape[1], EDGE)
        size = 1 if const_expr(self.spec.granularity == "tensor") else (down + across) * EDGE
        amax = cute.make_tensor(room.iterator + AHEAD, cute.make_layout((size,)))
        self.kernel(Operands(x, q, scale, qt, scale_t, amax), room, across, down * across).launch(
            grid=[2 * down * across, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, g: Operands, room: cute.Tensor, across: Int32, tiles: Int32):
        al, t = tk.SharedAllocator(), cute.arch.thread_idx()[0]
        told = al.vector(1, dtype=Int32)
        if t == 0:
            told[0] = Int32(cute.arch.atomic_add(room.iterator + TICKET, Int32(1), sem="relaxed", scope="gpu"))
        tk.sync_block()
        number = told[0]
        if number < tiles:
            self.find.take(g, al, t, (number // across, number % across))
            tk.sync_block()
            if t == 0:
                _count(room.iterator.toint() + FOUND * 4)
        else:
            if t == 0:
                _wait_for(room.iterator.toint() + FOUND * 4, tiles)
            tk.sync_block()
            place = 2 * tiles - 1 - number
            self.write.take(g, al, t, (place // across, place % across))
            self.leave(room, g.amax, told, t, tiles)

    @cute.jit
    def leave(self, room: cute.Tensor, amax: cute.Tensor, told: cute.Tensor, t, tiles):
        tk.sync_block()
        if t == 0:
            told[0] = Int32(tk.grid_ticket(room.iterator.toint() + LEFT * 4, tiles))
        tk.sync_block()
        if told[0] == tiles - 1:
            for i in cutlass.range(t, amax.shape[0], THREADS, unroll=1):
                amax[i] = Int32(0)
            if t < LEFT:
                room[t] = Int32(0)


@dsl_user_op
def _count(counter, *, loc=None, ip=None):
    """One more at the global address. Releases what this thread wrote, and what it has seen of its block's."""
    _asm([Int64(counter)], "red.release.gpu.global.add.u32 [$0], 1;", "l", loc, ip)


@dsl_user_op
def _wait_for(counter, n, *, loc=None, ip=None):
    """Until it is n at the global address; and see what was released there."""
    _asm([Int64(counter), Uint32(n)],
         "{ .reg .pred p; .reg .b32 v; LOOK: ld.acquire.gpu.global.u32 v, [$0]; setp.lo.u32 p, v, $1; @p bra LOOK; }",
         "l,r", loc, ip)


def build(spec: TileSpec):
    """(kernel, fake arguments): as ``twice.build``, with the room in the place of amax."""
    from ..runtime import fake

    return Claimed(spec), (*operands(spec)[:-1], fake.tensor("int32", (fake.sym(),), (1,), align=16))

"""Float8 with one scale for all of x, or with scales for rows and for columns, in two phases: x to amax, then x and
amax to the result. `catalog.LAUNCHES` are the ways from the first phase to the second; `catalog.way` chooses."""
from dataclasses import replace
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from .. import tile as tk
from ..runtime.compile import fake
from ..tile.assembly import ptx
from .row_col_scales import RowColScales
from .spec import EDGE, TileSpec
from .tiles import THREADS, Operands, Tilewise, _same
from .workspace import LINE, first_of, half_of

SECOND = -(1 << 31)  # added to the tickets of a launch that has the second half


def _phases(spec):
    """The kernels that find amax, and that write the results."""
    kernel, columns_too = (RowColScales, spec.transpose) if spec.granularity == "row" else (Tilewise, False)
    return kernel(replace(spec, step="amax", transpose=columns_too)), kernel(spec)


class SeparateLaunches:
    """Three launches, for rows longer than the norms' kernel can hold, each of which needs all of the one before:

      clear       zeros to amax
      "amax"      x to amax
      "quantise"  x and amax to q, scale, qt, scale_t

    The last two are of `Tilewise` or `RowColScales`.
    """

    def __init__(self, spec: TileSpec):
        self.find, self.write = _phases(spec)

    def fake_arguments(self):
        """Compiled for x, q, scale, qt, scale_t, amax; None for what the spec does not have."""
        return self.write.fake_arguments()

    @cute.jit
    def __call__(self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, qt: Optional[cute.Tensor],
                 scale_t: Optional[cute.Tensor], amax: cute.Tensor, stream: cuda.CUstream):
        blocks = cute.ceil_div(amax.shape[0], THREADS)
        self.clear(amax).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)
        self.find(x, None, None, None, None, amax, stream)
        self.write(x, q, scale, qt, scale_t, amax, stream)

    @cute.kernel
    def clear(self, amax: cute.Tensor):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < amax.shape[0]:
            amax[i] = Int32(0)


class SingleLaunch:
    """Both phases in one launch, of n tiles.

    Ticketed, for any number of tiles: there are 2 n tasks and as many blocks, each of which claims a task by an atomic
    ticket when it begins.

      tickets 0 .. n - 1      x to amax, from the first tile to the last
      tickets n .. 2 n - 1    load x; wait until all of these are done; x and amax to q .., from the last tile to the
                              first: of what was read last, much is in L2 still

    Work is claimed by atomic ticket, not by blockIdx: phase-1 tickets are always resident before phase-2 tickets wait,
    so no cooperative launch is needed.

    Cooperative, for few tiles: n blocks, all on the GPU at once. Each holds its tile in registers while it waits for
    the amax of all of them, so that x is read once.

      x to registers | to amax | wait until all blocks have come to here | registers and amax to q ..

    workspace: int32, zeros at first. Kernels that follow each other share it, of any sizes and either kind, and leave
    it to each other:

      | tickets | half 0: tiles whose amax is found | amax | half 1: the same |     each but amax a line of its own

    A launch has one half, which is zeros, and while it finds amax makes zeros of the other, which was the previous
    launch's: no count of its readers is needed. The last ticket makes zero of the tickets again, and with their highest
    bit hands the other half to the next launch. A cooperative launch uses only that bit of the tickets.
    """

    def __init__(self, spec: TileSpec, cooperative: bool):
        self.spec, self.cooperative = spec, cooperative
        self.find, self.write = _phases(spec)

    def fake_arguments(self):
        """Compiled for x, q, scale, qt, scale_t, None for what the spec does not have, and the workspace."""
        return *self.write.fake_arguments()[:-1], fake.tensor("int32", (fake.sym(),), (1,), align=16)

    @cute.jit
    def __call__(self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, qt: Optional[cute.Tensor],
                 scale_t: Optional[cute.Tensor], workspace: cute.Tensor, stream: cuda.CUstream):
        down, across = cute.ceil_div(x.shape[0], EDGE), cute.ceil_div(x.shape[1], EDGE)
        tiles = down * across
        kernel, blocks = (self.resident, tiles) if const_expr(self.cooperative) else (self.ticketed, 2 * tiles)
        kernel(x, q, scale, qt, scale_t, workspace, across, tiles).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, cooperative=self.cooperative)

    @cute.kernel
    def ticketed(self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, qt: Optional[cute.Tensor],
                 scale_t: Optional[cute.Tensor], workspace: cute.Tensor, across: Int32, tiles: Int32):
        al, t = tk.SharedAllocator(), cute.arch.thread_idx()[0]
        claimed = al.vector(1, dtype=Int32)
        if t == 0:
            claimed[0] = Int32(cute.arch.atomic_add(workspace.iterator, Int32(1), sem="relaxed", scope="gpu"))
        tk.sync_block()
        ticket = claimed[0]
        second = Int32(ticket < 0)
        number = ticket - second * SECOND
        found, amax = self.half(workspace, x, second)
        g = Operands(x, q, scale, qt, scale_t, amax)
        if number < tiles:
            tile = number // across, number % across
            held = self.find.held(g, t, tile)
            self.clear_half(workspace, 1 - second, number * THREADS + t, tiles * THREADS)
            self.find.finish(g, al, t, tile, held)
            tk.sync_block()
            if t == 0:
                _count(found)
        else:
            place = 2 * tiles - 1 - number
            tile = place // across, place % across
            held = self.write.held(g, t, tile)  # before it waits
            if t == 0:
                if place == 0:
                    workspace[0] = (1 - second) * SECOND
                _wait_for(found, tiles)
            tk.sync_block()
            place = Int32(_same(place))  # so that nothing else is held over the wait
            self.write.finish(g, al, t, (place // across, place % across), held)

    @cute.kernel
    def resident(self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, qt: Optional[cute.Tensor],
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
        number, second = Int32(_same(number)), Int32(_same(second))  # so that nothing else is held over the wait
        g = Operands(x, q, scale, qt, scale_t, self.half(workspace, x, second)[1])
        self.write.finish(g, al, t, (number // across, number % across), held)

    def half(self, workspace, x, number):
        """(the address of its count, its amax)"""
        of_all = const_expr(self.spec.granularity == "tensor")
        size = 1 if of_all else sum(cute.ceil_div(n, EDGE) * EDGE for n in x.shape)
        begin = workspace.iterator.toint() + 4 * Int64(first_of(workspace.shape[0], number))
        at = cute.make_ptr(Int32, begin + 4 * LINE, cute.AddressSpace.gmem, assumed_align=16)
        return begin, cute.make_tensor(at, cute.make_layout((size,)))

    @cute.jit
    def clear_half(self, workspace: cute.Tensor, number: Int32, i: Int32, step: Int32):
        first = first_of(workspace.shape[0], number)
        for j in cutlass.range(i, half_of(workspace.shape[0]), step, unroll=1):
            workspace[first + j] = Int32(0)


@dsl_user_op
def _count(counter, *, loc=None, ip=None):
    """One more at the global address. Releases what this thread wrote, and what it has seen of its block's."""
    ptx([Int64(counter)], "red.release.gpu.global.add.u32 [$0], 1;", "l", loc, ip)


@dsl_user_op
def _wait_for(counter, n, *, loc=None, ip=None):
    """Until it is n at the global address; and see what was released there."""
    ptx([Int64(counter), Uint32(n)],
         "{ .reg .pred p; .reg .b32 v; LOOK: ld.acquire.gpu.global.u32 v, [$0]; setp.lo.u32 p, v, $1; @p bra LOOK; }",
         "l,r", loc, ip)

"""A barrier of the whole grid, in two halves, once a launch. All blocks must be resident: a cooperative launch.
And, for any launch, which block is the last."""
from cutlass import Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from .assembly import ptx


@dsl_user_op
def grid_arrive(counter, blocks, *, loc=None, ip=None):
    """The arrival of one of ``blocks`` blocks. Releases what this thread wrote, and what it has seen of its block's.

    counter: the global address of an int32 that is 0. ``grid_wait`` of all blocks leaves it at 0 again: it counts
    arrivals and departures, so a launch has one such barrier, and launches that may run side by side a counter each."""
    ptx([Int64(counter), _last(blocks)], "{ .reg .b32 o; atom.release.gpu.global.inc.u32 o, [$0], $1; }", "l,r", loc,
         ip)


@dsl_user_op
def grid_wait(counter, blocks, *, loc=None, ip=None):
    """Wait until all blocks have arrived, and see what they released. The thread that arrived; the last one to leave
    sets the counter to 0."""
    ptx([Int64(counter), Uint32(blocks), _last(blocks)],
         "{ .reg .pred p; .reg .b32 v; GRID_WAIT: ld.acquire.gpu.global.u32 v, [$0]; setp.lo.u32 p, v, $1; "
         "@p bra GRID_WAIT; red.relaxed.gpu.global.inc.u32 [$0], $2; }", "l,r,r", loc, ip)


@dsl_user_op
def grid_ticket(counter, blocks, *, loc=None, ip=None):
    """How many of ``blocks`` blocks came before this one: the one with blocks - 1 is the last, sees what the others'
    threads released here, and has set the counter to 0 again. One thread of each block; no thread waits.

    counter: as in ``grid_arrive``, and not the same in one launch."""
    return Uint32(ptx([Int64(counter), Uint32(blocks) - Uint32(1)],
                       "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", "=r,l,r", loc, ip, T.i32()))


def _last(blocks):
    """The count from which ``inc`` goes back to 0: all have arrived, and all but one have left."""
    return Uint32(2 * Uint32(blocks) - 1)

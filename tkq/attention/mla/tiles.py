"""Which tile of a task's rows a block of threads has: blocks beside each other have one each, and the same keys."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.attention.decode.plan import ROWS
from tkq.tile.assembly import ptx


def own(g, s):
    """A segment of the walk, of this block's tile; without keys where there is no such tile."""
    tile = s.tile * g.together + cute.arch.block_idx()[1]
    return s._replace(tile=tile, end=cutlass.select_(tile * ROWS < g.queries * g.group, s.end, s.first))


def sparse(g):
    """Does each query have a list of rows of the cache? Then it is a sequence of the plan."""
    return cute.rank(g.table) == 3


def place_of(g, s):
    """(sequence of q, first query) of a sequence of the plan."""
    if not sparse(g):
        return s.batch, 0
    queries = Int32(g.table.shape[1])
    return s.batch // queries, s.batch % queries


def length_of(g, s):
    """Keys of a sequence of the plan, as they are said to be now."""
    if not sparse(g):
        return g.seqlens[s.batch]
    if g.seqlens is None:
        return Int32(g.table.shape[2])
    place = place_of(g, s)
    return g.seqlens[place[:cute.rank(g.seqlens)]]


def rows_of(x, g, s):
    """(packed rows, columns) of a sequence of the plan, of x (B, Sq, H, D)."""
    batch, query, head, _ = x.stride
    sequence, first = place_of(g, s)
    at = x.iterator + cutlass.Int64(sequence) * batch
    if sparse(g):
        at = at + cutlass.Int64(first) * query
    at = at.align(16)
    return cute.make_tensor(at, cute.make_layout(((g.group, g.queries), x.shape[3]), stride=((head, query), 1)))


def see_tile(config):
    """Behind the wait for a tile: what cp.async wrote wgmma reads by another proxy; TMA writes by the same one."""
    if not config.multicast:
        tk.publish()


def place_in_slot(g, slot):
    """(first row of this block's part of a slot, rows of it): among all rows of all slots, 64 bits."""
    rows = g.partial.shape[1] // g.together
    return cutlass.Int64(slot) * g.partial.shape[1] + cute.arch.block_idx()[1] * rows, rows


@dsl_user_op
def lane_now(*, loc=None, ip=None):
    """The lane, asked where it is used: what follows from it would else take registers in all of the loop."""
    return Int32(ptx([], "mov.u32 $0, %laneid;", "=r", loc, ip, T.i32()))

"""What the sides of the launches for queries and for keys share: a warpgroup for y = x W and one for -y, each with the
state of 64 features."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.hedgehog.column_sums import lane_column, warp_columns
from tkq.linear_attention.hedgehog.config import WARPS
from tkq.linear_attention.hedgehog.features import LEAST, softmax
from tkq.linear_attention.hedgehog.spec import GradientSpec

FEATURES = 64  # columns of a map
SIDES = 2
SIDE_WARPS = SIDES * WARPS
SIDE_BARRIER = 1  # the named barrier of the first side's warpgroup; the other has the next
BOTH_BARRIER = 4  # the named barrier of both sides
LEAST_NARROW = {"bf16": 134 * 2.0**-27, "fp16": 17 * 2.0**-24}  # 1e-6, rounded: features at their least
PARTS_TILE = tk.st(8, FEATURES, Float32)  # what a side's warps add to sums: more rows than warps, the fewest


def near_power(spec: GradientSpec, g, t):
    """(1 / p, p): a power of 2 near the largest weight of keys before the window; of bfloat16, which has exponents for
    all weights, 1."""
    if spec.dtype == "bf16":
        return Float32(1.0), Float32(1.0)
    bits = (g.largest[t.batch, t.head] * g.linear[t.head]).bitcast(Int32) & Int32(0x7F800000)
    bits = cutlass.max(bits, Int32(0x00800000))  # not 0
    return (Int32(0x7F000000) - bits).bitcast(Float32), bits.bitcast(Float32)


def least(x):
    """A feature. NaN stays."""
    return cutlass.select_(x < LEAST, Float32(LEAST), x)


def features_of_y(s, side):
    """Where a side's features of y lie: at the beginning of its state."""
    return s.of_y[side * Int32(s.of_y.stages // SIDES)]


def _parts(s, side):
    """Of a state that is twice as large as the features behind these."""
    each = s.parts.stages // SIDES
    return s.parts[side * Int32(each) + Int32(each // 2)].tensor


@cute.jit
def side_softmax(c, side):
    """e = softmax of y, of the other side of -y, in its place."""
    if side == 0:
        softmax(c.e, c.row, c.e, 1.0)
    else:
        softmax(c.e, c.row, c.e, -1.0)


@cute.jit
def put_state(s, c, side):
    """State, rounded, to shared memory, where sums are; then the side's warps meet."""
    tk.store(s.state[side], c.sum)
    tk.publish()
    tk.sync(SIDE_BARRIER + side, tk.WARPGROUP)


@cute.jit
def add_sums(sums, x: tk.RegTile, side):
    """sums[j, side] += x[0, j], x: rows that are all alike: 16 columns by each warp."""
    view = x.rows_view
    for warp in cutlass.range_constexpr(WARPS):
        if tk.warp_id() % WARPS == warp and tk.lane_id() < 4:
            for j in range(4 * warp, 4 * warp + 4):
                at = tk.first_col() + 8 * (j // 2) + j % 2
                sums[at, side] = sums[at, side] + view[0, j]


@cute.jit
def put_state_and_sums(s, c, side):
    """State, rounded, and sums to shared memory; then the side's warps meet."""
    sums, total = s.sums, c.total
    tk.store(s.state[side], c.sum)
    if tk.thread_in_warpgroup() < FEATURES:
        sums[tk.thread_in_warpgroup(), side] = total[0]
    tk.publish()
    tk.sync(SIDE_BARRIER + side, tk.WARPGROUP)


def pairs_of_sums(s, side):
    """A side's sums: those of the columns of a thread's block, two by two."""
    sums = s.sums[None, side]
    return cute.make_tensor(sums.iterator, cute.make_layout((2, FEATURES // 2)))


@cute.jit
def put_features(s, c, side, weight, there):
    """e, features of y, to shared memory, and their columns, each row times its weight, added to the sums where there
    is such a chunk; the side's warps meet between."""
    parts, total = _parts(s, side), c.total
    tk.store(features_of_y(s, side), c.e)
    for n, found in enumerate(warp_columns(c.e, weight)):
        parts[tk.warp_id() % WARPS, lane_column() + n] = found
    tk.publish()
    tk.sync(SIDE_BARRIER + side, tk.WARPGROUP)
    if there and tk.thread_in_warpgroup() < FEATURES:
        for warp in cutlass.range_constexpr(WARPS):
            total[0] = total[0] + parts[warp, tk.thread_in_warpgroup()]

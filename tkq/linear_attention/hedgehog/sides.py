"""What the sides of the launches for queries and for keys share: a warpgroup for y = x W and one for -y, each with the
state of 64 features."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.hedgehog.config import WARPS
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.runtime.compile import fake

FEATURES = 64  # columns of a map
SIDES = 2
SIDE_WARPS = SIDES * WARPS
SIDE_BARRIER = 1  # the named barrier of the first side's warpgroup; the other has the next
LEAST_NARROW = {"bf16": 134 * 2.0**-27, "fp16": 17 * 2.0**-24}  # 1e-6, rounded: features at their least


def fake_map_gradients(B, H, spec: GradientSpec):
    """A map's gradients, (B, H, D, 64), for the compiler: in any order of rows."""
    return fake.tensor("fp32", (B, H, spec.head_dim, FEATURES), (*(fake.sym64(divisibility=4) for _ in range(3)), 1))


def near_power(spec: GradientSpec, g, t):
    """(1 / p, p): a power of 2 near the largest weight of keys before the window; of bfloat16, which has exponents for
    all weights, 1."""
    if spec.dtype == "bf16":
        return Float32(1.0), Float32(1.0)
    bits = (g.largest[t.batch, t.head] * g.linear[t.head]).bitcast(Int32) & Int32(0x7F800000)
    bits = cutlass.max(bits, Int32(0x00800000))  # not 0
    return (Int32(0x7F000000) - bits).bitcast(Float32), bits.bitcast(Float32)


def features_of_y(s, side):
    """Where a side's features of y lie: at the beginning of its state."""
    return s.of_y[side * Int32(s.of_y.stages // SIDES)]


def load_chunk(g, tiles, pipe, ring, t, i):
    """A producer's: chunk i of g is on its way to the ring's stage; behind the last chunk zeros."""
    tk.load_async(tiles[ring.stage], g, (t.batch, t.head, i, 0), pipe.acquire(ring))
    ring.advance()


def load_features(g, tiles, pipe, ring, t, i):
    """A producer's: features of chunk i, of each side to its tile."""
    sem = pipe.acquire(ring)
    for side in range(SIDES):
        tk.load_async(tiles[side], g, (t.batch, t.head, i, side), sem)


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
            for j in cutlass.range_constexpr(4 * warp, 4 * warp + 4):
                at = tk.first_col() + 8 * (j // 2) + j % 2
                sums[at, side] = sums[at, side] + view[0, j]


def pairs_of_sums(s, side):
    """A side's sums: those of the columns of a thread's block, two by two."""
    sums = s.sums[None, side]
    return cute.make_tensor(sums.iterator, cute.make_layout((2, FEATURES // 2)))

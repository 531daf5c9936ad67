"""dS of a tile, in the registers of a warpgroup that has P: in fp32, or in packed bf16x2."""
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.math import gradients
from tkq.attention.backward.spec import BackwardSpec
from tkq.tile.assembly import ptx, ptx_f32x2


def stats_of(s, ring, which, tile):
    """Row ``which`` of the statistics of ring's tile of ``tile`` queries, as a value for each query."""
    v = tk.cv(tile)
    row = cute.make_tensor(s.stats[None, ring.stage].iterator + which * tile, cute.make_layout((tile,)))
    tk.load_shared_cols(v, row)
    return v


@dsl_user_op
def mul_bf16x2(a, b, *, loc=None, ip=None):
    """a * b, of two bf16 each."""
    return Int32(ptx([Int32(a), Int32(b)], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", loc, ip, T.i32(), pure=True))


@dsl_user_op
def load_f32x2(address, *, loc=None, ip=None):
    """Two fp32 in shared memory, not before it is their turn: the registers they go to are in use until then."""
    return ptx_f32x2([Int32(address)], "ld.volatile.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", loc, ip)


def slope(spec: BackwardSpec, c):
    """Of ``probabilities``: in registers that are there."""
    return c.ds if spec.softcap else c.p


class Fp32Ds:
    """dS = P * (dP + delta) in fp32, rounded once. Where there is a softcap, or fp16, or no accumulator of dQ."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        self.spec, self.tile = spec, config.tile

    def multiply_dp(self, s, c):
        """dP of the tile."""
        tk.mm_ABt(c.dp, s.v[c.wg], s.do[c.ring.stage])

    def make(self, s, c):
        """dS of it."""
        gradients(c.ds, slope(self.spec, c), c.dp, stats_of(s, c.ring, 1, self.tile))


class PackedDs:
    """dS = P * (dP + delta) in pairs of 16 bits, with fewer instructions for each score: dP + delta is rounded to bf16
    and multiplied by P as it is there for dV, which need not be taken apart. Of the 433 instructions of a warp
    for a tile of 64 queries, head_dim 128, this takes 48 away.

    ``starts_from_delta``: the accumulators of dP are delta when its product begins, in place of an addition for each
    score: 17 instructions less. Delta is read once and copied: to read it again costs more than the additions, as
    shared memory is short of time.

    The error of dQ and dK before their own rounding is 1.2 times that with the same P times fp32, and 1.7 times that
    with P in fp32, too; with all that is in between in bf16 it is 3.7 times that. fp16 might overflow in dP, before P
    makes it small."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        self.tile = config.tile
        # where it is faster, by what was measured
        self.starts_from_delta = spec.width == 128 and not (spec.left or spec.right)

    def multiply_dp(self, s, c):
        """dP of the tile; where it starts from delta, dP + delta."""
        if self.starts_from_delta:
            self.begin_with_delta(s, c)
            tk.mma_ABt(c.dp, s.v[c.wg], s.do[c.ring.stage])
        else:
            tk.mm_ABt(c.dp, s.v[c.wg], s.do[c.ring.stage])

    def begin_with_delta(self, s, c):
        """In both of a thread's rows."""
        delta = Int32(s.stats[None, c.ring.stage].iterator.toint()) + 4 * self.tile + tk.lane_id() % 4 * 8
        for j in range(self.tile // 8):
            two = load_f32x2(delta + 32 * j)
            for row in range(2):
                c.dp.tensor[4 * j + 2 * row], c.dp.tensor[4 * j + 2 * row + 1] = two

    def make(self, s, c):
        """dS of it."""
        if self.starts_from_delta:
            tk.apply_narrow(c.ds, lambda dp: dp, c.dp)
        else:
            tk.apply_narrow(c.ds, lambda dp, delta: dp + delta, c.dp, stats_of(s, c.ring, 1, self.tile))
        ds, p = (cute.recast_tensor(x.tensor, Int32) for x in (c.ds, c.p))
        for i in range(cute.size(ds)):
            ds[i] = mul_bf16x2(ds[i], p[i])

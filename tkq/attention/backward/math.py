"""P and dS of attention's backward, in registers: what both of its kernels compute. Queries may be rows or columns."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk

NOWHERE = 1 << 30  # the first column that is seen, where none is


@dataclass(frozen=True)
class Scores:
    """What makes a logit of a product: s -> scale * s, or softcap * tanh(scale / softcap * s), times log2(e)."""

    outer: Float32  # scale * log2(e), or softcap * log2(e)
    inner: Float32  # scale / softcap
    capped: Constexpr[bool]

    @staticmethod
    def of(scale, softcap, capped) -> "Scores":
        """In the host function."""
        return Scores((softcap if capped else scale) * tk.LOG2E, scale / softcap if capped else scale, capped)


def probabilities(p, slope, s, lse, scores: Scores, limits=()):
    """p = exp2(logits of s + lse), 0 outside the limits; with a softcap slope = p * (1 - tanh ** 2) too.

    lse: -lse * log2(e), a vector along the queries. limits: of ``limits``, the first column of each row that is seen,
    and the one after the last. s itself is written by the tensor cores only: were it written here too, the assembler
    would serialise them."""
    def element(x, lse, col=0, first=None, end=None):
        x = cute.math.tanh(x * scores.inner, fastmath=True) if scores.capped else x
        e = cute.math.exp2(cute.math.fma(x, scores.outer, lse), fastmath=True)
        if first is not None:
            e = cutlass.select_(first <= col, e, Float32(0.0))
        e = e if end is None else cutlass.select_(col < end, e, Float32(0.0))
        return (e, e - e * x * x) if scores.capped else e

    tk.apply_narrow((p, slope) if scores.capped else p, element, s, lse, tk.COLUMN, *limits)


def gradients(ds, slope, dp, delta):
    """ds = slope * (dp + delta). slope: P, as it was rounded, for s is free by then; with a softcap what
    ``probabilities`` calls so. delta: dlse - rowsum(o * do), a vector along the queries."""
    tk.apply_narrow(ds, lambda slope, dp, delta: slope * (dp + delta), slope, dp, delta)


def limits(first, end, columns=None, rows=None):
    """For ``probabilities``: row i sees the columns ``first + i <= column < end + i`` below ``columns``; rows from
    ``rows`` on see none. None: no such limit."""
    def of_row(f):
        x = cute.make_rmem_tensor((2,), Int32)
        for r in range(2):
            x[r] = f(tk.first_row() + 8 * r)
        return tk.RowVec(x)

    def first_of(row):
        col = Int32(0) if first is None else first + row - tk.first_col()
        return col if rows is None else cutlass.select_(row < rows, col, Int32(NOWHERE))

    def end_of(row):
        ends = [x - tk.first_col() for x in (None if end is None else end + row, columns) if x is not None]
        return ends[0] if len(ends) == 1 else cutlass.min(*ends)

    found = [of_row(first_of)]
    return found if end is None and columns is None else [*found, of_row(end_of)]


@dsl_user_op
def mul_bf16x2(a, b, *, loc=None, ip=None):
    """a * b, of two bf16 each."""
    return Int32(llvm.inline_asm(
        T.i32(), [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip))


@dsl_user_op
def load_f32x2(address, *, loc=None, ip=None):
    """Two fp32 in shared memory, not before it is their turn: the registers they go to are in use until then."""
    found = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32(), T.f32()]), [Int32(address).ir_value(loc=loc, ip=ip)],
        "ld.volatile.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip)) for i in range(2)]


class PackedDs:
    """dS of ``AttentionBackward`` = P * (dP + delta) in pairs of 16 bits: dP + delta is rounded to bf16 and multiplied
    by P as it is there for dV, which need not be taken apart. Of the 433 instructions of a warp for a tile of 64
    queries, head_dim 128, this takes 48 away.

    ``begins``: the accumulators of dP are delta when its product begins, in place of an addition for each score: 17
    instructions less. Delta is read once and copied: to read it again costs more than the additions, as shared memory
    is short of time.

    The error of dQ and dK before their own rounding is 1.2 times that with the same P times fp32, and 1.7 times that
    with P in fp32, too; with all that is in between in bf16 it is 3.7 times that. fp16 might overflow in dP, before P
    makes it small."""

    @property
    def starts_from_delta(self) -> bool:
        """Where it is faster, by what was measured."""
        return self.spec.width == 128 and not (self.spec.left or self.spec.right)

    def multiply_dp(self, s, c):
        if self.starts_from_delta:
            self.begin_with_delta(s, c)
            tk.mma_ABt(c.dp, s.v[c.wg], s.do[c.ring.stage])
        else:
            super().multiply_dp(s, c)

    def begin_with_delta(self, s, c):
        """In both of a thread's rows."""
        tile = self.config.tile
        delta = Int32(s.stats[None, c.ring.stage].iterator.toint()) + 4 * tile + tk.lane_id() % 4 * 8
        for j in range(tile // 8):
            two = load_f32x2(delta + 32 * j)
            for row in range(2):
                c.dp.tensor[4 * j + 2 * row], c.dp.tensor[4 * j + 2 * row + 1] = two

    def make_ds(self, s, c):
        if self.starts_from_delta:
            tk.apply_narrow(c.ds, lambda dp: dp, c.dp)
        else:
            tk.apply_narrow(c.ds, lambda dp, delta: dp + delta, c.dp, self.stats(s, c.ring, 1))
        ds, p = (cute.recast_tensor(x.tensor, Int32) for x in (c.ds, c.p))
        for i in range(cute.size(ds)):
            ds[i] = mul_bf16x2(ds[i], p[i])

"""Flash attention backward with fewer instructions for each score."""
from dataclasses import replace

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.attention import backward
from tkq.attention.backward import AttentionBackward
from tkq.attention.backward_light_config import LightConfig
from tkq.attention.backward_math import probabilities
from tkq.attention.backward_seamless import Seamless
from tkq.attention.backward_spec import BackwardSpec


@dsl_user_op
def multiply_pairs(a, b, *, loc=None, ip=None):
    """a * b, of two bf16 each."""
    return Int32(llvm.inline_asm(
        T.i32(), [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip))


@dsl_user_op
def load_pair(address, *, loc=None, ip=None):
    """Two fp32 in shared memory, read by an instruction of their own."""
    found = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32(), T.f32()]), [Int32(address).ir_value(loc=loc, ip=ip)],
        "ld.volatile.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip)) for i in range(2)]


class Light:
    """Steps in the order of ``AttentionBackward``'s. With ``pairs`` P, which is there in 16 bits, is multiplied so:
    dP + delta is rounded before, and P is not taken apart. With ``begins`` the accumulators of dP are delta when its
    product begins: read from shared memory into each of them, once for each of a thread's two rows, with ``moves``
    once and copied. With ``keeps`` dS is made behind dV, where it need not be kept in other registers."""

    @cute.jit
    def whole_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        s.q_pipe.wait(c.ring)
        c.turns.take()
        tk.mm_ABt(c.s, s.k[c.wg], s.q[c.ring.stage])
        tk.mma_wait(0)
        self.make_p(g, s, t, c, m, masked)
        c.turns.give()
        s.do_pipe.wait(c.ring)
        self.multiply_do(s, c)
        tk.mma_wait(1)  # dP
        self.slopes(s, c)
        self.times_p(c.ds, c)
        self.hand_over(s, c)
        c.ds_ring.advance()
        tk.mma_AB(c.dk, c.ds, s.q[c.ring.stage])
        tk.mma_wait(1)  # dV
        s.do_pipe.release(c.ring)
        tk.mma_wait(0)
        s.q_pipe.release(c.ring)
        c.ring.advance()

    @cute.jit
    def late_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        s.q_pipe.wait(c.ring)
        c.turns.take()
        tk.mm_ABt(c.s, s.k[c.wg], s.q[c.ring.stage])
        tk.mma_AB(c.dk, c.kept, s.q[c.before.stage])
        tk.mma_wait(1)  # S
        self.make_p(g, s, t, c, m, masked)
        c.turns.give()
        tk.mma_wait(0)  # dK
        self.done_with_queries(s, c)
        s.do_pipe.wait(c.ring)
        self.multiply_do(s, c)
        tk.mma_wait(1)  # dP
        self.slopes(s, c)
        if const_expr(self.config.keeps):
            tk.mma_wait(0)  # dV
            self.times_p(c.kept, c)
            self.hand_over(s, replace(c, ds=c.kept))
        else:
            self.times_p(c.ds, c)
            self.hand_over(s, c)
            tk.mma_wait(0)  # dV
            self.keep(g, c)
        c.ds_ring.advance()
        s.do_pipe.release(c.ring)
        c.ring.advance()

    def make_p(self, g, s, t, c, m, masked):
        limits = self.limits(g, t, m, c.wg) if masked else ()
        probabilities(c.p, c.p, c.s, self.stats(s, c.ring, 0), g.scores, limits)

    def multiply_do(self, s, c):
        """dP, and dV with P."""
        do = s.do[c.ring.stage]
        if self.config.begins:
            self.begin(s, c)
            tk.mma_ABt(c.dp, s.v[c.wg], do)
        else:
            tk.mm_ABt(c.dp, s.v[c.wg], do)
        tk.mma_AB(c.dv, c.p, do)

    def begin(self, s, c):
        """dP's accumulators = delta."""
        tile = self.config.tile
        delta = s.stats[None, c.ring.stage].iterator.toint() + 4 * tile + tk.lane_id() % 4 * 8
        for j in range(tile // 8):
            found = load_pair(Int32(delta) + 32 * j)
            for row in range(2):
                if row and not self.config.moves:
                    found = load_pair(Int32(delta) + 32 * j)
                c.dp.tensor[4 * j + 2 * row], c.dp.tensor[4 * j + 2 * row + 1] = found

    def slopes(self, s, c):
        """c.ds = P * (dP + delta), with ``pairs`` without P."""
        begins, pairs = self.config.begins, self.config.pairs
        delta = 0.0 if begins else self.stats(s, c.ring, 1)
        whole = (lambda dp, _: dp) if begins else (lambda dp, delta: dp + delta)
        if pairs:
            tk.apply_narrow(c.ds, whole, c.dp, delta)
        else:
            tk.apply_narrow(c.ds, lambda p, *x: p * whole(*x), c.p, c.dp, delta)

    def times_p(self, to, c):
        """to = c.ds, with ``pairs`` times P."""
        if self.config.pairs:
            to, ds, p = (cute.recast_tensor(x.tensor, Int32) for x in (to, c.ds, c.p))
            for i in range(cute.size(to)):
                to[i] = multiply_pairs(ds[i], p[i])


class LightBackward(Light, AttentionBackward):
    """With seams."""


class LightSeamless(Light, Seamless):
    """Without seams."""


def build(spec: BackwardSpec, config: LightConfig):
    """As ``backward.build``."""
    if spec.dtype != "bf16" or spec.softcap or not spec.adds_dq or spec.width > 128:
        raise NotImplementedError("attention backward with fewer instructions: of bf16, widths up to 128, without "
                                  "softcap, and with dQ added up")
    kind = LightBackward if config.seams else LightSeamless
    return kind(spec, config), backward.build(spec, config)[1]

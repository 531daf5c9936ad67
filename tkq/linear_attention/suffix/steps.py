"""Mamba-2's step sizes in sums behind each token: what gates are made of them, and what they get."""
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, const_expr

from tkq.linear_attention.engine.packed import any_strides
from tkq.linear_attention.spec import StepSpec
from tkq.linear_attention.step.token import softplus
from tkq.runtime.compile import fake


class StepOperands(NamedTuple):
    """dt: (B, S, H). A: (H,) fp32. bias: None or (H,). low, high: dt's limits. of_q, of_x: (B, S, H) fp32, each
    token's q k, and its do x. ddt: (B, S, H), out. sums: (2, N, segments, H) fp64, out: parts of the gradients of A and
    of bias."""

    dt: cute.Tensor
    A: cute.Tensor
    bias: Optional[cute.Tensor]
    low: Float32
    high: Float32
    of_q: cute.Tensor
    of_x: cute.Tensor
    ddt: cute.Tensor
    sums: cute.Tensor


class StepSizes:
    """Gradients of dt, A and dt_bias, where d = clamp(softplus(dt + bias)) and gates are g = d A. less is multiplied by
    d before it is taken off; dg is the sum over a token and those behind it that `SuffixSums` makes:

        ddt = (less + q k times do x + A dg) sigmoid(dt + bias), 0 outside the limits
        dA = the sum over all tokens of d dg,   dbias = that of ddt

    q k times do x: a token's own pair, which neither x nor less has. Without softplus there is no sigmoid."""

    def __init__(self, spec: Optional[StepSpec]):
        self.spec, self.there = spec, spec is not None

    def fake_operands(self, B, S, H):
        """For the compiler; None without it."""
        if not self.there:
            return None

        dt, ddt = (any_strides(self.spec.dt, (B, S, H)) for _ in range(2))
        of_q, of_x = (any_strides("fp32", (B, S, H)) for _ in range(2))
        return StepOperands(dt, any_strides("fp32", (H,)), any_strides(self.spec.bias, (H,)), Float32(0.0),
                            Float32(0.0), of_q, of_x, ddt,
                            fake.tensor("fp64", (2, fake.sym(), fake.sym(), H), align=8))

    def begin(self) -> Any:
        """A thread's sums; None without it."""
        if not self.there:
            return None
        sums = cute.make_rmem_tensor((2,), Float64)
        sums.fill(0.0)
        return sums

    def sizes(self, o: StepOperands, at):
        """(dt + bias, that through softplus, d) of a token."""
        raw = Float32(o.dt[at])
        if const_expr(self.spec.bias is not None):
            raw = raw + Float32(o.bias[at[2]])
        found = softplus(raw) if const_expr(self.spec.softplus) else raw
        d = cutlass.select_(found < o.low, o.low, found)
        return raw, found, cutlass.select_(d > o.high, o.high, d)

    @cute.jit
    def put(self, o: StepOperands, at, inside, dg, taken, sums: cute.Tensor):
        """A token's ddt, and its part of the sums. inside: has it a sequence? taken: less, before d."""
        raw, found, d = self.sizes(o, at)
        of_d = Float32(taken) + o.of_q[at] * o.of_x[at] + o.A[at[2]] * dg
        within = found >= o.low and found <= o.high
        if const_expr(self.spec.softplus):
            slope = Float32(1.0) / (Float32(1.0) + cute.math.exp(-raw))
            of_d = cutlass.select_(within, of_d, Float32(0.0)) * slope
        else:
            of_d = cutlass.select_(within, of_d, Float32(0.0))
        of_d = cutlass.select_(inside, of_d, Float32(0.0))
        o.ddt[at] = o.ddt.element_type(Float32(of_d))
        sums[0] = sums[0] + Float64(cutlass.select_(inside, d * dg, Float32(0.0)))
        sums[1] = sums[1] + Float64(of_d)

"""What a token does to a state beside its decay and its outer product: gates, the delta rule, a state space."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.step.spec import StepSpec
from tkq.linear_attention.step.state import LaneState
from tkq.tile import vectors


def number(m, coord):
    """The element of m at `coord`, as fp32; its address is computed in 64 bits."""
    return Float32(vectors.run_at(m, coord, 1)[0])


class Recurrence:
    """Linear attention with its gates, and with the delta rule. A token's numbers are read before the one before it is
    done: they are in registers that `registers` makes and `read` fills."""

    def __init__(self, spec: StepSpec, state: LaneState):
        self.spec, self.state, self.config = spec, state, state.config

    def registers(self):
        """(logarithms of decays, beta), empty where there are none."""
        gates = {"none": 0, "head": 1, "token": 1, "channel": self.config.k_values}[self.spec.gate]
        return tuple(n and cute.make_rmem_tensor(n, Float32) for n in (gates, int(self.spec.delta is not None)))

    @cute.jit
    def read(self, g, at, t, held):
        spec = self.spec
        gates, beta = held
        if const_expr(spec.gate == "head"):
            gates[0] = number(g.g, (at.head,))
        if const_expr(spec.gate == "token"):
            gates[0] = number(g.g, (at.n, t, at.head))
        if const_expr(spec.gate == "channel"):
            self.state.read_rows(vectors.run_at(g.g, (at.n, t, at.head, at.part.k), 1), gates)
        if const_expr(spec.delta is not None):
            beta[0] = number(g.beta, (at.n, t, at.head))

    def decay(self, g, held):
        """None; a factor; or a list of one for each of the lane's rows of K."""
        if self.spec.gate == "none":
            return None
        factors = [cute.math.exp2(held[0][i] * tk.LOG2E, fastmath=True) for i in range(cute.size(held[0]))]
        return factors if self.spec.gate == "channel" else factors[0]

    def writes(self, values, given, held):
        """What the state takes up of values. given: what it gives for the token's key, with the delta rule."""
        if self.spec.delta is None:
            return values
        return [held[1][0] * (v - x) for v, x in zip(values, given)]

    def result(self, out, values, held):
        """Of what the state gives for the token's query."""
        return out


class StateSpace:
    """Mamba-2: dt is the gate and what is taken up. D x is added to a result, silu(z) multiplies it."""

    def __init__(self, spec: StepSpec, state: LaneState):
        self.spec, self.config, self.ssd = spec, state.config, spec.ssd

    def registers(self):
        """dt, A, dt_bias; D of the lane's columns, z."""
        skip = self.config.v_values if self.ssd.skip else 0
        z = self.config.v_values if self.ssd.z else 0
        return tuple(n and cute.make_rmem_tensor(n, Float32) for n in (3, skip, z))

    def of_head(self, at, name):
        """Coordinates of A, dt_bias, which may come expanded."""
        return (at.head, *(0,) * ({"A": 2, "dt_bias": 1}[name] * (name in self.ssd.expanded)))

    @cute.jit
    def read(self, g, at, t, held):
        ssd, c = self.ssd, self.config
        numbers, skip, z = held
        of_dt = (*at.of(t, ssd.tokens), at.head, *(0,) * int("dt" in ssd.expanded))
        numbers[0] = number(g.beta, of_dt)
        numbers[1] = number(g.g, self.of_head(at, "A"))
        numbers[2] = Float32(0.0)
        if const_expr(ssd.bias is not None):
            numbers[2] = number(g.bias, self.of_head(at, "dt_bias"))
        if const_expr(ssd.skip is not None):
            for j in cutlass.range_constexpr(c.v_values):
                row = (at.head, at.part.v + j)
                skip[j] = number(g.skip, row if const_expr("D" in ssd.expanded) else row[:1])
        if const_expr(ssd.z):
            coord = (*at.of(t, ssd.tokens), at.head, at.part.v)
            z.store(vectors.load(vectors.run_at(g.z, coord, c.v_values)).load().to(Float32))

    def dt(self, held):
        numbers, *_ = held
        x = numbers[0] + numbers[2]
        return softplus(x) if self.ssd.softplus else x

    def decay(self, g, held):
        return cute.math.exp2(held[0][1] * self.dt(held) * tk.LOG2E, fastmath=True)

    def writes(self, values, given, held):
        dt = self.dt(held)
        return [dt * v for v in values]

    def result(self, out, values, held):
        _, skip, z = held
        if self.ssd.skip:
            out = [x + skip[j] * v for j, (x, v) in enumerate(zip(out, values))]
        if self.ssd.z:
            out = [x * silu(z[j]) for j, x in enumerate(out)]
        return out


def softplus(x):
    """log(1 + exp(x)), with as many digits where exp(x) is small."""
    rest = cute.math.log1p(cute.math.exp2(-cute.math.absf(x) * tk.LOG2E, fastmath=True))
    return cutlass.max(x, Float32(0.0)) + rest


def silu(x):
    return x * cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * -tk.LOG2E, fastmath=True))

"""A step of linear attention: tokens of each sequence, one after the other, on states in a pool (Katharopoulos et al.,
2020; Yang et al., 2024; Dao and Gu, 2024)."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.linear_attention.step.config import LANES, StepConfig
from tkq.linear_attention.step.spec import StepSpec
from tkq.linear_attention.step.state import LaneState, Part
from tkq.linear_attention.step.token import Recurrence, StateSpace
from tkq.linear_attention.step.warps import WarpSums, first_row
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.dtypes import element_type


class Operands(NamedTuple):
    """q, k: (N, T, H, K). v, o: (N, T, HV, V), HV a multiple of H. g: None, (HV,), (N, T, HV) or (N, T, HV, K) fp32.
    beta: None or (N, T, HV). state: (M, HV, K, V), or (M, HV, V, K). indices: None, (N,), or with accepted (N,) of
    (N, T). Of a state space, where T may not be there: C, B, x, o, A, dt; skip is D, bias is dt_bias; z as x."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    g: Optional[cute.Tensor]
    beta: Optional[cute.Tensor]
    state: cute.Tensor
    indices: Optional[cute.Tensor]
    accepted: Optional[cute.Tensor]
    skip: Optional[cute.Tensor]
    z: Optional[cute.Tensor]
    bias: Optional[cute.Tensor]


@dataclass(frozen=True)
class Globals:
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    g: Optional[cute.Tensor]
    beta: Optional[cute.Tensor]
    state: cute.Tensor
    indices: Optional[cute.Tensor]
    accepted: Optional[cute.Tensor]
    skip: Optional[cute.Tensor]
    z: Optional[cute.Tensor]
    bias: Optional[cute.Tensor]
    scale: Float32
    tokens: Int32
    heads_per_k: cute.FastDivmodDivisor


@dataclass(frozen=True)
class At:
    """A warp's head of a sequence, and its lane's part of the state."""

    n: Int32
    head: Int32
    head_k: Int32
    part: Part

    def of(self, t, tokens: bool):
        """Coordinates of a token, where there are tokens."""
        return (self.n, t) if tokens else (self.n,)


class LinearStep:
    """Of each sequence, from its first token to the last, with its state S from the pool:

        S = exp(g[t]) S + k[t] u[t]',  o[t] = scale * S' q[t],  u[t] = v[t], or with the delta rule
        u[t] = beta[t] (v[t] - exp(g[t]) S' k[t])

    A warp has a slice of V of one head of one sequence, all of K, in registers: it reads its part of the state once and
    writes it once, and no warp waits for another. There is no shared memory. Of many states, and one token, the warps
    of a block share a slice that is wider, each with rows of its own, so that an access takes more of a row; they meet
    once, in `WarpSums`.

        row of the pool | q, k, v, gates of the first token -> the state, all loads at once
        token           | those of the next -> S'k and S'q, sums over K by shuffles -> u, o, S
        at the end      | the state

    S'k and S'q are of the state before the token, o = scale * (exp(g) S'q + (k q) u), so that one round of shuffles is
    enough. Rows are checked against the pool: of a sequence that has none, o is 0 and nothing else is touched."""

    def __init__(self, spec: StepSpec, config: StepConfig):
        self.spec, self.config, self.dtype = spec, config, element_type(spec.dtype)
        self.state = LaneState(spec, config)
        self.rule = (StateSpace if spec.ssd else Recurrence)(spec, self.state)
        self.warps = WarpSums(config, 1 + (spec.delta is not None)) if config.k_warps > 1 else None
        self.has_tokens = spec.ssd is None or spec.ssd.tokens

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any N, T, M and heads, and any strides but those of rows of q, k, v, o, z and g of channels, and
        of states that 16 bytes are taken of at once, which are multiples of 16 bytes."""
        spec, (N, T, H, HV, M) = self.spec, (fake.sym() for _ in range(5))
        K, V, ssd = spec.head_dim, spec.value_dim, spec.ssd
        tokens = (N, T) if self.has_tokens else (N,)

        def operand(heads, cols, dtype=spec.dtype, whole=8):
            shape = (*tokens, heads, cols)
            return fake.tensor(dtype, shape, (*(fake.sym64(divisibility=whole) for _ in shape[1:]), 1))

        def numbers(dtype, shape):
            return dtype and fake.tensor(dtype, shape, tuple(fake.sym64() for _ in shape), align=_BYTES[dtype])

        q, k, v, o = operand(H, K), operand(H, K), operand(HV, V), operand(HV, V)
        indices = numbers(spec.indices, (N, T) if spec.accepted else (N,))
        accepted = numbers(spec.accepted, (N,))
        if ssd is None:
            gates = {"none": None, "head": numbers("fp32", (HV,)), "token": numbers("fp32", (N, T, HV)),
                     "channel": operand(HV, K, "fp32", 4)}
            of_rule = gates[spec.gate], numbers(spec.delta, (N, T, HV))
            of_ssd = None, None, None
        else:
            def expanded(name, *dims):
                return dims if name in ssd.expanded else ()

            of_rule = (numbers(ssd.a, (HV, *expanded("A", V, K))), numbers(ssd.dt, (*tokens, HV, *expanded("dt", V))))
            of_ssd = (numbers(ssd.skip, (HV, *expanded("D", V))), operand(HV, V) if ssd.z else None,
                      numbers(ssd.bias, (HV, *expanded("dt_bias", V))))
        operands = Operands(q, k, v, o, *of_rule, self.fake_pool(M, HV), indices, accepted, *of_ssd)
        return q, tuple(operands[1:]), Float32(1.0), Int32(1)

    def fake_pool(self, M, heads):
        spec = self.spec
        cols = (spec.value_dim, spec.head_dim) if spec.v_first else (spec.head_dim, spec.value_dim)
        if spec.layout == "any":
            return fake.tensor(spec.state, (M, heads, *cols), tuple(fake.sym64() for _ in range(4)),
                               align=_BYTES[spec.state])
        dense = (cols[1], 1) if (spec.layout == "k") == spec.v_first else (1, cols[0])
        whole = 16 // _BYTES[spec.state]
        return fake.tensor(spec.state, (M, heads, *cols), (*(fake.sym64(divisibility=whole) for _ in range(2)), *dense))

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, warps: Int32, stream: cuda.CUstream):
        """others: those of `Operands` behind q. warps: of a block, a divisor of the slices of V, of which each has
        one; 1 with k_warps."""
        operands = Operands(q, *others)
        heads, heads_k = operands.v.shape[-2], operands.q.shape[-2]
        tokens = Int32(operands.v.shape[1]) if const_expr(self.has_tokens) else Int32(1)
        g = Globals(*operands, scale, tokens, cute.fast_divmod_create_divisor_v2(heads // heads_k))
        slices = self.spec.value_dim // self.config.columns
        block = LANES * self.config.k_warps * warps
        self.kernel(g).launch(grid=[slices // warps, heads, operands.v.shape[0]], block=[block, 1, 1], stream=stream,
                              max_number_threads=[self.config.threads, 1, 1])

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        part, head, n = cute.arch.block_idx()
        head_k, _ = divmod(head, g.heads_per_k)
        at = At(n, head, Int32(head_k), self.state.part(*self.first_of_warp(part)))
        held, memory = self.registers(), None
        if const_expr(self.warps is not None):
            memory = self.warps.memory()
        row = self.first_row(g, at)
        if const_expr(self.config.read_ahead or not self.spec.several):
            self.read(g, at, Int32(0), held)
        # The row is the sequence's: all warps of a block meet behind this branch, or none.
        if row >= 0:
            self.steps(g, at, row, held, memory)
        else:
            self.put_zeros(g, at)

    def first_of_warp(self, part):
        """Of V and of K."""
        c = self.config
        if c.k_warps > 1:
            return part * c.columns, first_row(c)
        warps = cute.arch.block_dim()[0] // LANES
        return (part * warps + tk.warp_id()) * c.columns, Int32(0)

    @cute.jit
    def first_row(self, g, at):
        """Of the pool, the one with the sequence's state; -1 where it has none."""
        row = Int64(at.n)
        if const_expr(self.spec.accepted is not None):
            row = Int64(-1)
            last = Int64(vectors.run_at(g.accepted, (at.n,), 1)[0]) - 1
            if last >= 0 and last < g.tokens:
                row = self.checked(g, Int64(vectors.run_at(g.indices, (at.n, last), 1)[0]))
        elif const_expr(self.spec.indices is not None):
            row = self.checked(g, Int64(vectors.run_at(g.indices, (at.n,), 1)[0]))
        return row

    @cute.jit
    def checked(self, g, row):
        """A row that the pool has, or -1."""
        if row < 0 or row >= Int64(g.state.shape[0]):
            row = Int64(-1)
        return row

    def registers(self):
        """Of the token that is read: q, k, v, and the rule's."""
        c = self.config
        return (*(cute.make_rmem_tensor(n, self.dtype) for n in (c.k_values, c.k_values, c.v_values)),
                self.rule.registers())

    @cute.jit
    def read(self, g, at, t, held):
        c, token = self.config, at.of(t, self.has_tokens)
        for x, of in ((held[0], g.q), (held[1], g.k)):
            self.state.read_rows(vectors.run_at(of, (*token, at.head_k, at.part.k), 1), x)
        cute.autovec_copy(vectors.run_at(g.v, (*token, at.head, at.part.v), c.v_values), held[2])
        self.rule.read(g, at, t, held[3])

    @cute.jit
    def steps(self, g, at, row, held, memory: Constexpr[Any]):
        state = self.state.registers()
        self.state.load(state, g.state, row, at.head, at.part)
        if const_expr(self.spec.several):
            for t in cutlass.range(g.tokens, unroll=1):
                self.token(g, at, t, state, held, memory)
                self.put_state_of_token(g, at, t, state)
        else:
            self.token(g, at, Int32(0), state, held, memory)
            self.put_state_of_token(g, at, Int32(0), state)
        if const_expr(self.spec.accepted is None):
            self.state.store(state, g.state, row, at.head, at.part)

    @cute.jit
    def put_state_of_token(self, g, at, t, state: cute.Tensor):
        if const_expr(self.spec.accepted is not None):
            row = self.checked(g, Int64(vectors.run_at(g.indices, (at.n, t), 1)[0]))
            if row >= 0:
                self.state.store(state, g.state, row, at.head, at.part)

    @cute.jit
    def token(self, g, at, t, state: cute.Tensor, held: Constexpr[Any], memory: Constexpr[Any]):
        if const_expr(self.spec.several and not self.config.read_ahead):
            self.read(g, at, t, held)
        q, k, v = (vectors.wide(x) for x in held[:3])
        decay = self.rule.decay(g, held[3])
        given, out, dots = self.products(state, q, k, decay, at.part, memory)
        scale, q_length, k_length = g.scale, None, None
        if const_expr(self.spec.l2norm):
            q_length, k_length = (cute.math.rsqrt(x + 1e-6, fastmath=True) for x in dots[1:])
            scale, k = scale * q_length, [x * k_length for x in k]
            given = [x * k_length for x in given]
        writes = self.rule.writes(v, given, held[3])
        met = dots[0] if const_expr(not self.spec.l2norm) else dots[0] * k_length
        out = [scale * (x + met * u) for x, u in zip(out, writes)]
        out = self.rule.result(out, v, held[3])
        if const_expr(self.spec.several and self.config.read_ahead):
            if t + 1 < g.tokens:
                self.read(g, at, t + 1, held)
        self.update(state, k, writes, decay)
        self.put(g, at, t, out)

    def products(self, state, q, k, decay, part, memory):
        """(S'k, empty without the delta rule, S'q, [q k, and with lengths q q, k k]), S with this token's decay."""
        c, spec = self.config, self.spec
        each = isinstance(decay, list)
        out, given, dots = ([Float32(0.0)] * n for n in (c.v_values, c.v_values * (spec.delta is not None), 3))
        for i in range(c.k_values):
            of_q, of_k = (q[i] * decay[i], k[i] * decay[i]) if each else (q[i], k[i])
            row = [state[self.state.at(i, j)] for j in range(c.v_values)]
            out = [total + of_q * x for total, x in zip(out, row)]
            given = [total + of_k * x for total, x in zip(given, row)]
            dots = [total + x * y for total, x, y in zip(dots, (q[i], q[i], k[i]), (k[i], q[i], k[i]))]
        sums = self.state.sums([*out, *given, *(dots if spec.l2norm else dots[:1])])
        found, dots = sums[:len(out) + len(given)], sums[len(out) + len(given):]
        if self.warps is not None:
            runs, dots = self.warps.total(memory, part, [found[:len(out)], found[len(out):]][:self.warps.runs], dots)
            found = [x for run in runs for x in run]
        if decay is not None and not each:
            found = [x * decay for x in found]
        return found[c.v_values:], found[:c.v_values], dots

    def update(self, state, k, writes, decay):
        each = isinstance(decay, list)
        for i, key in enumerate(k):
            for j, u in enumerate(writes):
                x = state[self.state.at(i, j)]
                if decay is not None:
                    x = (decay[i] if each else decay) * x
                state[self.state.at(i, j)] = x + key * u

    @cute.jit
    def put(self, g, at, t, out: Constexpr[Any]):
        """The first lane along K has it for all."""
        if at.part.first:
            coord = (*at.of(t, self.has_tokens), at.head, at.part.v)
            vectors.store(vectors.packed(out, self.dtype), vectors.run_at(g.o, coord, self.config.v_values))

    @cute.jit
    def put_zeros(self, g, at):
        for t in cutlass.range(g.tokens, unroll=1):
            self.put(g, at, t, [Float32(0.0)] * self.config.v_values)


_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int32": 4, "int64": 8}


"""Mamba-2's gradients (Dao and Gu, 2024), chunk by chunk, with the state in accumulators and in shared memory."""
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.fields import Globals, Task
from tkq.linear_attention.engine.gates import Gate
from tkq.linear_attention.engine.heads import Heads
from tkq.linear_attention.engine.operands import Operands
from tkq.linear_attention.engine.packed import any_strides
from tkq.linear_attention.engine.segmented import visited
from tkq.linear_attention.engine.ssd import Ssd
from tkq.linear_attention.spec import LinearSpec
from tkq.linear_attention.token_rows.config import RowsConfig
from tkq.linear_attention.token_rows.outputs import RowsOutputs
from tkq.linear_attention.token_rows.plan import FACTOR_STAGES, GROUPS
from tkq.linear_attention.token_rows.state import RowsState
from tkq.linear_attention.token_rows.sums import HeadPairs
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type


@dataclass(frozen=True)
class RowsShared:
    q: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile
    x: Any
    state: tk.SharedTile  # of each stage its parts, one behind the other
    o: tk.SharedTile  # of each of the outputs' warpgroups
    gate: Any
    skip: Any
    pairs: Any
    tokens: tk.Pipe
    factors: tk.Pipe
    states: tk.Pipe


class TokenRows:
    """What `engine.kernel.LinearAttention` computes for Mamba-2's gradients, in another layout: outputs are 64 tokens
    by V in accumulators, so that P never leaves registers, and sums of o times x are sums of rows. A block has one head
    of one sequence.

      factors (a warp)    what gates make of a chunk's tokens
      producer (a warp)   Q K V X of a chunk | of the next | ..
      state (1)           S rounded to shared memory, S = e^G[63] S + (f K)' V | ..
      outputs (2)         Q K', Q S, P, O = e^G Q S + P V, x O | of the next chunk but one | ..   (ping-pong)

      pipe     stages          full (arrivals)           empty (arrivals)
      tokens   config.stages   producer's bytes (1)      warps of the state and of a chunk's outputs (8)
      factors  FACTOR_STAGES   factors' warp (1)         the same (8)
      states   GROUPS          warps of the state (4)    warps of a chunk's outputs (4)
      pairs    GROUPS          bytes, by outputs (1)     warps of the other block's outputs (4)

    Of two heads whose outputs are added up (`HeadPairs`), the outputs' warpgroups give half of O to the other block and
    take its half before they write. In ping-pong each of them waits for every other chunk alone, and knows a phase by
    its parity: right also with three stages of tokens, as outputs of a chunk wait for its state, which comes behind the
    tokens of the chunk before.
    """

    def __init__(self, spec: LinearSpec, config: RowsConfig):
        self.spec, self.config, self.dtype, self.ssd = spec, config, element_type(spec.dtype), Ssd(spec)
        self.gate = Gate(spec, self.ssd, Heads(1, FACTOR_STAGES))
        self.pairs = HeadPairs(spec.summed, self.dtype)
        self.state = RowsState(spec, self.gate, self.pairs, config.states)
        self.outputs = RowsOutputs(spec, self.ssd, self.gate, self.state, self.pairs)
        self.qk_tile, self.v_tile = (tk.st(CHUNK, cols, self.dtype) for cols in (spec.head_dim, spec.value_dim))
        self.part_tile = tk.st(CHUNK, CHUNK, self.dtype)  # of v and x, 64 columns of which come at a time

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """As `LinearAttention` has them."""
        spec, (B, S, H, HV, HO) = self.spec, (fake.sym() for _ in range(5))
        out, K, V = fake.sym() if spec.summed else HO, spec.head_dim, spec.value_dim

        def operand(heads, cols):
            return fake.tensor(spec.dtype, (B, S, heads, cols), (*(fake.sym64(divisibility=8) for _ in range(3)), 1))

        states = B, HO, *((V, K) if spec.state_v_first else (K, V))
        dots = fake.tensor("fp32", (V // CHUNK, B, S, HO), align=4) if spec.dots else None
        operands = Operands(operand(H, K), operand(H, K), operand(HV, V), operand(out, V), None, None,
                            any_strides(spec.initial, states), any_strides(spec.final, states),
                            operand(fake.sym(), V) if spec.has_x else None, dots, *[None] * 12)
        return operands.q, tuple(operands[1:]), Float32(1.0), self.ssd.fake_operands(B, S, HO, B)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, ssd: Any, stream: cuda.CUstream):
        """others: those of `Operands` behind q."""
        operands = Operands(q, *others)
        q, k, v, o = (cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in operands[:4])
        x, x_heads, heads = None, Int32(1), ssd.dt.shape[2]
        if const_expr(self.spec.has_x):
            x = cute.make_tensor(operands.x.iterator, cute.select(operands.x.layout, [1, 3, 2, 0]))
            x_heads = heads // x.shape[2]
            x = tk.gl.load(x, self.part_tile)
        states = [y if y is None or not self.spec.state_v_first else cute.make_tensor(
            y.iterator, cute.select(y.layout, [0, 1, 3, 2])) for y in operands[6:8]]
        g = Globals(
            q=tk.gl.load(q, self.qk_tile), k=tk.gl.load(k, self.qk_tile), v=tk.gl.load(v, self.part_tile),
            o=tk.gl.store(o, self.outputs.tile), x=x, initial=states[0], final=states[1], dots=operands.dots,
            scale=scale, tokens=Int32(q.shape[0]), heads_per_k=heads // k.shape[2], heads_per_v=heads // v.shape[2],
            heads_per_x=x_heads, ssd=ssd)
        self.kernel(g).launch(grid=[1, heads, operands.q.shape[0]], block=[tk.WARPGROUP * (2 + GROUPS), 1, 1],
                              stream=stream, cluster=[1, 2, 1] if self.spec.summed else None, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        n, x, al = self.config.stages, int(self.spec.has_x), tk.SharedAllocator()
        s = RowsShared(
            al.tile(self.qk_tile, n), al.tile(self.qk_tile, n), al.tile(self.v_tile, n),
            al.tile(self.v_tile, n) if x else None, al.tile(self.state.tile, self.config.states * self.state.parts),
            al.tile(self.outputs.tile, GROUPS), self.gate.shared(al),
            al.vector(self.spec.value_dim, 4 * GROUPS) if self.spec.ssd.skip_gradient else None,
            self.pairs.shared(al, GROUPS), al.pipe(n, 2 * self.qk_tile.bytes + (1 + x) * self.v_tile.bytes, 8),
            al.pipe(FACTOR_STAGES, 0, 8), al.pipe(GROUPS, 0, 4, producers=4))
        tk.init_block(lambda: self.initialise(s), self.pairs.cluster)
        _, head, batch = cute.arch.block_idx()
        t = Task(batch, batch, head, head // g.heads_per_k, head // g.heads_per_v, Int32(0),
                 cute.ceil_div(g.tokens, CHUNK), None)
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=2),
                   tk.Role(lambda _: self.state.keep(g, s, t, self.order), some),
                   tk.Role(lambda wg: self.outputs.make(g, s, t, wg, self.order), many, GROUPS)))
        self.pairs.end()

    def initialise(self, s):
        """Counts of the pipes."""
        for pipe in (s.tokens, s.factors, s.states):
            pipe.init()
        self.pairs.initialise(s.pairs)

    def order(self, t, i):
        """The i-th chunk that is visited."""
        return visited(t, i, self.spec.reverse)

    @cute.jit
    def produce(self, g, s, t):
        """Factors by the first warp, as `engine.heads.Heads` has it, tokens by the next one."""
        if tk.warp_id() % 4 == 0:
            self.make_factors(g, s, t)
        else:
            self.load(g, s, t)

    @cute.jit
    def load(self, g, s, t):
        ring = s.tokens.ring()
        tk.prefetch(g.q, g.k, g.v, g.o)
        for i in cutlass.range(t.chunks, unroll=1):
            sem, chunk = s.tokens.acquire(ring), self.order(t, i)
            tk.load_async(s.k[ring.stage], g.k, (t.batch, t.head_k, chunk, 0), sem)
            tk.load_async(s.q[ring.stage], g.q, (t.batch, t.head_k, chunk, 0), sem)
            for n in cutlass.range_constexpr(self.spec.value_dim // CHUNK):
                part = self.pairs.columns(t, n)
                tk.load_async(s.v[ring.stage].panel(n), g.v, (t.batch, t.head_v, chunk, part), sem)
                if const_expr(self.spec.has_x):
                    tk.load_async(s.x[ring.stage].panel(n), g.x, (t.batch, t.head // g.heads_per_x, chunk, part), sem)
            ring.advance()

    @cute.jit
    def make_factors(self, g, s, t):
        ring = s.factors.ring()
        numbers = self.gate.first(g, t, self.order(t, 0))
        for i in cutlass.range(t.chunks, unroll=1):
            logs = self.gate.logs(g, t, self.order(t, i), numbers)
            self.gate.follow(g, t, self.order(t, i + 1), numbers)
            s.factors.acquire_empty(ring)
            self.gate.sums(g, logs, s.gate, ring.stage)
            s.factors.commit(ring)
            ring.advance()

"""Segments of sequences: the part of Hedgehog's kernel that knows of them."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.based.held import add_held, put_held
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.spec import HedgehogSpec
from tkq.runtime.compile import fake


class Segments:
    """A state has the keys of all chunks but the last one before it, so that a segment which begins with chunk c needs
    the sum of what chunks 0 to c - 2 add, and the keys and values of chunk c - 1, which are in its first window. No
    decay lies between: sums are all that segments need of those before.

    With part "states" the n-th block of a sequence adds up what chunks n * each - 1 to (n + 1) * each - 2 add, from
    zero, in the roles of the whole kernel: features of keys by the weights' warpgroup, the state by its own. With part
    "outputs" a block begins with the sum of the first ones, in their order: `finer` for each segment before it."""

    def __init__(self, spec: HedgehogSpec):
        self.part, self.features = spec.part, spec.features
        self.states, self.outputs = spec.part == "states", spec.part == "outputs"

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self, B, H, groups):
        """states, sums: as `kernel.Operands` has them."""
        if self.part is None:
            return None, None
        blocks = fake.sym()
        return (fake.tensor("fp32", (blocks, B, H, groups, self.features, tk.WARPGROUP)),
                fake.tensor("fp32", (blocks, B, H, 2 * self.features), align=4))

    # ---- device --------------------------------------------------------------------------------

    def place(self, g, n):
        """Of the n-th block of a head: (how many chunks it has, its first, how many sums of those before it begins
        with; which they are in "states")."""
        chunks = cute.ceil_div(g.tokens, CHUNK)
        if self.part is None:
            return chunks, 0, 0
        first = n * g.each
        if self.states:
            begin = cutlass.max(first - 1, Int32(0))
            end = cutlass.min(first + g.each - 1, chunks)
            return end - begin, begin, n
        return cutlass.min(g.each, chunks - first), first, n * g.finer

    @cute.jit
    def produce(self, g, s, t, groups: cutlass.Constexpr):
        """Of "states": keys and values."""
        tk.prefetch(g.k_map, g.k, g.v)
        tk.load_async(s.maps[1], g.k_map, (t.head, 0, 0), s.map_pipe.acquire(s.map_pipe.ring()))
        tokens, keys = s.tokens.ring(), s.keys.ring()
        for i in cutlass.range(t.chunks, unroll=1):
            tk.load_async(s.k[keys.stage], g.k, (t.batch, t.head, t.first + i, 0), s.keys.acquire(keys))
            values = s.tokens.acquire(tokens)
            for wg in cutlass.range_constexpr(groups):
                tk.load_async(s.v[groups * tokens.stage + wg], g.v, (t.batch, t.head, t.first + i, wg), values)
            tokens.advance()
            keys.advance()

    def load_before(self, g, s, t, groups, sem):
        """Of "outputs": values of the chunk before the first into the room of outputs."""
        for wg in range(groups):
            tk.load_async(s.o[wg], g.v, (t.batch, t.head, cutlass.max(t.first - 1, Int32(0)), wg), sem)

    @cute.jit
    def begin_sums(self, g, t, sums: cute.Tensor):
        """Of features, of each of the first threads one."""
        thread = tk.thread_in_warpgroup()
        if thread < 2 * self.features:
            total = cute.make_rmem_tensor((1,), Float32)
            total[0] = Float32(0.0)
            if const_expr(self.outputs):
                for n in cutlass.range(t.before, unroll=1):
                    total[0] = total[0] + g.sums[n, t.batch, t.head, thread]
            sums[thread, 0] = total[0]

    @cute.jit
    def begin_state(self, g, s, t, c, wg):
        """Zero, or the sum of those before; the values of the chunk before the first."""
        for x in (c.of_y, c.of_minus_y, c.before):
            tk.zero(x)
        if const_expr(self.outputs):
            for n in cutlass.range(t.before, unroll=1):
                add_held((c.of_y, c.of_minus_y), g.states[n, t.batch, t.head, wg, None, None])
            s.map_pipe.wait(s.map_pipe.ring())
            if t.first > 0:
                tk.load_T(c.before, s.o[wg])

    @cute.jit
    def end_sums(self, g, t, sums: cute.Tensor):
        """Of "states", once they are complete."""
        thread, to = tk.thread_in_warpgroup(), g.sums
        if thread < 2 * self.features:
            to[t.before, t.batch, t.head, thread] = sums[thread, 0]

    def end_state(self, g, t, c, wg):
        """Of "states"."""
        put_held(g.states[t.before, t.batch, t.head, wg, None, None], (c.of_y, c.of_minus_y))

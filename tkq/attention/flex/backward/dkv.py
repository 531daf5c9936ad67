"""P and dS of a tile of transposed scores, from the user's functions."""
import math
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Uint32

import tkq.tile as tk
from tkq.attention.backward.dkv import Dkv
from tkq.attention.backward.ds import stats_of
from tkq.attention.flex.emit import Emitted, select
from tkq.attention.flex.look import ALL, Look, all_seen, chosen

LARGEST = 3e38  # a score above it would make NaN of a row's -inf
ABSENT, MASKED = 0, 1  # states of a block; others are full
_FINITE = ("input", "const", "number", "cast", "where", "neg", "abs", "not", "add", "sub", "mul", "min", "max", "tanh",
           "erf", "and", "or", "xor", "shl", "shr", "lt", "le", "gt", "ge", "eq", "ne")


class FlexDkv(Dkv):
    """``Dkv``, with P = exp(score(scale * S) - lse) where the mask holds, and dS = P * d score * (dP + delta).

    Where d score is 1, the steps are ``Dkv``'s. Otherwise S and dP are there before P, the slope and dS are made of
    them, element by element: none of these is rounded before it is an operand, and none needs a tile in fp32 of its
    own. dP comes part by part (``dkv_parts``), as there are no registers for all of it.

    P of a key behind the last one is what the functions make of a score of 0, perhaps inf: of its dS, which the product
    of dQ takes, zeroes are made; rows of dK and dV behind the end are not written."""

    def __init__(self, graphs, config, tiles, scheduler):
        """graphs: the spec."""
        super().__init__(graphs.attention, config, tiles, scheduler)
        self.graphs, self.look_at = graphs, Look(graphs.mask, "q")
        self.safe = graphs.graph is None or finite(graphs.graph)

    @cute.jit
    def visit(self, g, s, t, c):
        """``step`` takes with a tile's place what the functions take of its head."""
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            step = self.step_of(self.of_head(g, t, self.scheduler.query_head(g, t, h)))
            self.scheduler.visit_head(g, s, t, c, h, step)

    def step_of(self, emitted):
        return lambda g, s, t, c, m, masked: self.step(g, s, t, c, (*m, emitted), masked)

    def of_head(self, g, t, head):
        """What the functions take of a head, made once: an ``Emitted``, or None."""
        if self.graphs.graph is None:
            return None
        emitted = Emitted(self.graphs.graph, g.score)
        emitted.prepare("q", "kv", "score", b=(t.batch_k, 0), h=(head, 0))
        return emitted

    def step(self, *args):
        return (self.fp32_step if self.graphs.joint is None else self.joint_step)(*args)

    @cute.jit
    def joint_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        tile, dtype, stage, parts = self.config.tile, self.tiles.q.dtype, c.ring.stage, self.config.dkv_parts
        of = replace(c, s=tk.rt_fl(tile), p=tk.rt(tile, dtype), ds=tk.rt(tile, dtype))
        s.q_pipe.wait(c.ring)
        s.do_pipe.wait(c.ring)
        c.ping_pong.take()
        tk.mm_ABt(of.s, s.k[c.wg], s.q[stage])
        seen, functions = self.look(g, t, of, m) if masked else None, self.functions_of(g, t, of, m)
        for i in cutlass.range_constexpr(parts):
            dp, (first, end) = tk.rt_fl(tile // parts), self.part(i)
            self.add_part(s.do[stage], of.dv, of.p, i - 1)  # before dP is asked for, whose registers are free then
            tk.mm_ABt(dp, s.v[c.wg], s.do[stage], b_part=i)
            self.add_part(s.q[stage], of.dk, of.ds, i - 1)
            tk.mma_wait(1 if i else 0)
            self.make_joint_part(s, replace(of, dp=dp), functions, seen, (first, end - first))
        c.ping_pong.give()
        self.add_last_part(s, t, of)

    def add_part(self, rows, to, x, i):
        """The product with a part of P or dS."""
        if i >= 0:
            tk.mma_AB(to, x, rows, k=self.part(i))

    def make_joint_part(self, s, c, functions, seen, which):
        """P as an operand and dS of some columns."""
        logits, factor, slopes = functions

        def element(x, dp, lse, delta, at):
            e = cute.math.exp2(cute.math.fma(logits(x, *at), factor, lse), fastmath=True)
            e = e if seen is None else chosen(seen, at[0], at[1], e, 0.0)
            ds = e * (dp + delta) * slopes(x, *at)
            return e, ds if self.safe else select(e == Float32(0.0), Float32(0.0), ds)

        stats = [stats_of(s, c.ring, i, self.config.tile, *which) for i in range(2)]
        self.apply(c, which, element, tk.columns(c.s, *which), c.dp, *stats)

    def make_p_fp32(self, g, t, c, m, p, lse):
        logits, factor, _ = self.functions_of(g, t, c, m)
        for i, at in enumerate(_places(0, self.config.tile)):
            x = cute.math.fma(logits(c.s.tensor[i], *at), factor, lse.tensor[at[1]])
            p.tensor[i] = cute.math.exp2(x, fastmath=True)

    def make_part(self, s, c, p, limits, which):
        """limits: what is seen, where the tile is masked."""
        def element(p, dp, delta, at):
            e = chosen(limits[0], at[0], at[1], p, 0.0) if limits else p
            return e, e * (dp + delta)

        delta = stats_of(s, c.ring, 1, self.config.tile, *which)
        self.apply(c, which, element, tk.columns(p, *which), tk.columns(c.dp, *which), delta)

    def apply(self, c, which, element, *operands):
        """P and dS of some columns as operands: ``element(.., (r, j, column))`` gives both."""
        places = _places(*which)
        to = tuple(tk.columns(x, *which) for x in (c.p, c.ds))
        tk.apply_narrow(to, lambda *of: element(*of, next(places)), *operands)
        assert next(places, None) is None, "an element for each of a thread's"

    def functions_of(self, g, t, c, m):
        """(score, the factor that makes a logit in base 2 of it, its slope or None): functions of (a product of q and
        k, r, j, column)."""
        of, (head, tile, emitted) = self.graphs, m
        if emitted is None:
            return lambda x, *_: x, g.scores.outer, None
        places, emitted = self.places(t, c, head, tile), emitted.again()
        inputs = lambda x, r, j, col: {**places(r, col), "score": (x * g.scale, (r, col))}
        at_most = lambda x: x if self.safe else select(x < Float32(LARGEST), x, Float32(LARGEST))
        value = len(of.graph.nodes) - 1 if of.joint is None else of.joint.value
        factor = Float32(1.0)
        if self.safe:
            value, factor = emitted.without_factor(value, b=(t.batch_k, 0), h=(head, 0))
        return (lambda *at: at_most(emitted.node_at(value, **inputs(*at))), Float32(tk.LOG2E) * factor,
                None if of.joint is None else lambda *at: emitted.node_at(of.joint.slope, **inputs(*at)))

    def look(self, g, t, c, m):
        """Two words: which of a tile's queries the thread's keys are seen by."""
        seen, (head, tile, *_) = cute.make_rmem_tensor((2,), Uint32), m
        if self.graphs.mask is None:
            all_seen(seen)
        else:
            places = self.places(t, c, head, tile)(0, 0)
            self.look_at.look(g.mask, {name: places[name] for name in ("b", "h")}, (places["kv"][0], places["q"][0]),
                              self.config.tile, seen)
        if self.graphs.states:
            state = g.states[t.batch_k, head, g.row_block(tile), 2 * t.block + c.wg]
            for r in range(2):
                seen[r] = select(state == ABSENT, Uint32(0), select(state == MASKED, seen[r], Uint32(ALL)))
        return seen

    def limits(self, g, t, c, m, seen):
        return seen,

    def places(self, t, c, head, tile):
        """(row, column of a thread's) -> inputs of the graphs: rows are keys, columns queries."""
        key = t.block * self.config.block + c.wg * 64 + tk.first_row()
        query = None if tile is None else tile * self.config.tile + tk.first_col()  # of none where none is asked for
        return lambda r, col: dict(b=(t.batch_k, 0), h=(head, 0), q=(query, col), kv=(key, 8 * r))

    @cute.jit
    def clear_dead_keys(self, t, c, ds):
        """In shared memory, by the warp that has written them."""
        alive = t.rows_k - (t.block * self.config.block + c.wg * 64)
        if alive < 64:
            cute.arch.sync_warp()
            first = tk.warp_id() % 4 * 16
            for row in cutlass.range(cutlass.max(alive, first), first + 16, unroll=1):
                for part in cutlass.range_constexpr(self.config.tile // 32):
                    ds.tensor[row, tk.lane_id() + 32 * part] = ds.type.dtype(0.0)


def _places(first, columns):
    """(r, j, column) of a thread's elements, in the tile's order, from a column on: the column beside the thread's
    first, j its number."""
    for i in range(columns // 2):
        j = first // 4 + i // 4 * 2 + i % 2
        yield i // 2 % 2, j, 8 * (j // 2) + j % 2


def finite(graph) -> bool:
    """Does a graph make numbers of all numbers, whatever the indices? Else a query behind the last one may have NaN or
    inf, of which exp2(.. - inf) would not be 0, and a score that is not seen a slope that times 0 is not 0."""
    depends = graph.inputs_of()
    divides = lambda node: node.op == "div" and not depends[node.args[1]] & {"q", "kv", "score"}
    number = lambda node: node.op != "const" or math.isfinite(node.args[0])
    return all((node.op in _FINITE or divides(node)) and number(node) for node in graph.nodes)

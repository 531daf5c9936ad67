"""P and dS of a tile of transposed scores, from the user's functions."""
import math
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Uint32, const_expr

import tkq.tile as tk
from tkq.attention.backward.dkv import Dkv
from tkq.attention.backward.ds import stats_of
from tkq.attention.flex.backward.tanh import Tanh, sole_tanh
from tkq.attention.flex.emit import Emitted, select
from tkq.attention.flex.look import ALL, Look, all_seen, chosen

LARGEST = 3e38  # a score above it would make NaN of a row's -inf
ABSENT, MASKED = 0, 1  # states of a block; others are full
_FINITE = ("input", "const", "number", "cast", "where", "neg", "abs", "not", "add", "sub", "mul", "min", "max", "tanh",
           "erf", "and", "or", "xor", "shl", "shr", "lt", "le", "gt", "ge", "eq", "ne")


class FlexDkv(Dkv):
    """``Dkv``, with P = exp(score(scale * S) - lse) where the mask holds, and dS = P * d score * (dP + delta).

    Where d score is 1, the steps are ``Dkv``'s. Otherwise P as an operand and P * d score in fp32 are made of S alone,
    and dS of the latter and dP, rounded once. dP comes part by part (``dkv_parts``), as there are no registers for all
    of it.

    P of a key behind the last one is what the functions make of a score of 0, perhaps inf: of its dS, which the product
    of dQ takes, zeroes are made; rows of dK and dV behind the end are not written."""

    def __init__(self, graphs, config, tiles, scheduler):
        """graphs: the spec."""
        super().__init__(graphs.attention, config, tiles, scheduler)
        self.graphs, self.look_at = graphs, Look(graphs.mask, "q")
        self.safe = graphs.graph is None or finite(graphs.graph)
        tanh = None if graphs.joint is None else sole_tanh(graphs.joint)
        self.tanh = None if tanh is None else Tanh(graphs.graph, tanh)

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
        c.ping_pong.take()
        tk.mm_ABt(of.s, s.k[c.wg], s.q[stage])
        seen, weights = self.look(g, t, of, m) if masked else None, tk.rt_fl(tile)
        tk.mma_wait(0)
        self.make_p_and_weights(g, s, t, of, m, seen, weights)
        c.ping_pong.give()
        s.do_pipe.wait(c.ring)
        for i in cutlass.range_constexpr(parts):
            dp, (first, end) = tk.rt_fl(tile // parts), self.part(i)
            tk.mm_ABt(dp, s.v[c.wg], s.do[stage], b_part=i)
            if const_expr(i == 0):
                tk.mma_AB(of.dv, of.p, s.do[stage])
            else:
                tk.mma_AB(of.dk, of.ds, s.q[stage], k=self.part(i - 1))
            tk.mma_wait(1)  # dP, and dV behind the first
            self.make_ds_of_weights(s, replace(of, dp=dp), weights, (first, end - first))
        self.add_last_ds(s, t, of, self.part(parts - 1))

    def make_p_and_weights(self, g, s, t, c, m, seen, weights):
        """P as an operand, and P * d score in fp32."""
        tile = self.config.tile
        if self.tanh is not None:
            self.tanh.replace(c.s, list(_places(0, tile)), m[-1], g.scale, dict(b=(t.batch_k, 0), h=(m[0], 0)))
        logits, factor, slopes = self.functions_of(g, t, c, m)
        places = enumerate(_places(0, tile))

        def element(x, lse):
            i, at = next(places)
            e = cute.math.exp2(cute.math.fma(logits(x, *at), factor, lse), fastmath=True)
            e = e if seen is None else chosen(seen, at[0], at[1], e, 0.0)
            weight = e * slopes(x, *at)
            weights.tensor[i] = weight if self.safe else select(e == Float32(0.0), Float32(0.0), weight)
            return e

        tk.apply_narrow(c.p, element, c.s, stats_of(s, c.ring, 0, tile))

    def make_ds_of_weights(self, s, c, weights, which):
        """Of some columns."""
        def element(weight, dp, delta):
            ds = weight * (dp + delta)
            return ds if self.safe else select(weight == Float32(0.0), Float32(0.0), ds)

        tk.apply_narrow(tk.columns(c.ds, *which), element, tk.columns(weights, *which), c.dp,
                        stats_of(s, c.ring, 1, self.config.tile, *which))

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

        def inputs(x, r, j, col):
            found = {**places(r, col), "score": (x * g.scale, (r, col))}
            if self.tanh is not None:  # x is that
                emitted.know(self.tanh.node, x, **found)
            return found

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

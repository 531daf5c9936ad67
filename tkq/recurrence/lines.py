"""Scans of tensors whose tokens are contiguous: forward, and the gradients in one pass."""
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.recurrence import products
from tkq.recurrence.carry import Run, WarpCarry
from tkq.recurrence.columns import Given, Operands, put
from tkq.recurrence.config import WARP
from tkq.runtime.compile import fake
from tkq.tile import vectors


class Place(NamedTuple):
    """A lane's line: its sequence, its channel; which of the line's runs; and the lane's number in the line. Behind the
    last line it is the last one once more, for which the same is written."""

    batch: Any
    channel: Any
    run: Any
    lane: Any


class Step(NamedTuple):
    """What some tokens make of the state that comes in: factor state + value. factor: as in `products`."""

    factor: Any
    value: Any


class Piece(NamedTuple):
    """Neighbouring tokens of a lane, in the scan's order: the first one's number; a, and b or dh, in fp32; the `Step`
    of all lanes' tokens up to this lane's last one, and that of all."""

    first: Any
    a: Any
    b: Any
    up_to: Step
    whole: Step


class LineScan:
    """The scan of `ColumnScan`, but tokens are joined in another order. `lanes` lanes of a warp have a line, each some
    of its vectors; a run has `tokens_per_thread / vector` pieces, a vector of each lane. A block's warps take the runs
    of `line_groups` lines (of a warp's, where it has several) in turn, one line's after the other's. Of a piece:

        each lane     the product of its factors, and what its tokens make of a state of 0, from token to token
        the lanes     the same of all lanes up to this one, by shuffles: over 1, 2, 4, 8, 16 lanes
        the state     what comes into a piece, from piece to piece and from run to run: factor state + value of a piece
        each lane     what comes into its tokens, likewise; from there token by token: h = a h + b

    So nothing goes through shared memory but a state a run (`WarpCarry`), and accesses are contiguous. How products are
    rounded: `products`.

    A backward's state is a[s] g[s], what the token s leaves to the next:

        g[s] = state + dh[s],  then a[s] g[s] is the state;  within a lane's tokens  g[s] = a[s - 1] g[s - 1] + dh[s]

    h[s + 1], for da, is a neighbour's at the end of a lane's tokens; at a run's end lanes load it themselves."""

    def __init__(self, spec, config):
        self.spec, self.config, self.dtype = spec, config, tk.element_type(spec.dtype)
        self.parts = 2 if spec.dtype == "fp32" else 1  # of a product: h of 16 bits is rounded more than one is off
        self.carry = WarpCarry(1 + spec.ends * self.parts, config.warps)
        self.pieces = config.tokens_per_thread // spec.vector
        self.lanes, self.lines = config.lanes, WARP // config.lanes  # of a line, of a warp
        self.tokens = config.tokens_per_thread * self.lanes  # of a run

    def fake_arguments(self):
        """Compiled for any sizes, and any strides but that of tokens."""
        spec, v = self.spec, self.spec.vector
        B, T, C = fake.sym(), fake.sym(divisibility=v), fake.sym()

        def rows(wanted=True):
            strides = fake.sym64(divisibility=v), 1, fake.sym64(divisibility=v)
            return fake.tensor(spec.dtype, (B, T, C), strides, align=v * self.dtype.width // 8) if wanted else None

        def states(kind):
            return fake.tensor(kind, (B, C), align=tk.element_type(kind).width // 8) if kind else None

        operands = Operands(rows(), rows(spec.reads_h), rows(spec.of_a), rows(spec.of_b),
                            states(spec.state), states(spec.final and "fp32"), states(spec.of_state and "fp32"),
                            states(spec.ends and "fp32"))
        return rows(), operands, Int32(0)

    @cute.jit
    def __call__(self, a: cute.Tensor, operands: Operands, way: Int32, stream: cuda.CUstream):
        """way: not looked at: the spec says it."""
        blocks = cute.ceil_div(a.shape[0] * cute.ceil_div(a.shape[2], self.lines), self.config.line_groups)
        self.kernel(Given(a, *operands, way)).launch(grid=[blocks, 1, 1], stream=stream, **self.config.launch)

    @cute.kernel
    def kernel(self, g: Given):
        slots = self.carry.slots()
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        self.thread(cute.arch.block_idx()[0], warp, tk.lane_id(), slots, g)

    @cute.jit
    def thread(self, block, warp, lane, slots, g: Given):
        """What one thread does: the tests run it on a CPU, one after the other."""
        (B, T, C), groups = g.a.shape, self.config.line_groups
        state = cute.make_rmem_tensor((self.carry.vector,), Float32)  # and behind it the product of the factors
        state.fill(0.0)
        across, runs = cute.ceil_div(C, self.lines), cute.ceil_div(T, self.tokens)
        count = runs * cutlass.min(B * across - block * groups, groups)
        for k in cutlass.range(warp, count, self.config.warps, unroll=1):
            line, at = (block, k) if groups == 1 else (block * groups + k // runs, k % runs)
            channel = line % across * self.lines + lane // self.lanes
            of = Place(line // across, cutlass.min(channel, C - 1), at, lane % self.lanes)
            run = Run(k, count, warp, lane)
            if (at + 1) * self.tokens <= T:
                self.run(state, slots, run, of, g)
            else:
                self.run(state, slots, run, of, g, True)

    # ---- where things lie -------------------------------------------------------------------------------------------

    def at(self, x, of, s, n):
        """n tokens of a lane's line in memory, of which the scan takes token s first."""
        size = x.element_type.width // 8
        t = x.shape[1] - s - n if self.spec.reverse else s
        address = x.iterator.toint() + (Int64(of.batch) * x.stride[0] + Int64(of.channel) * x.stride[2] + t) * size
        return cute.make_tensor(cute.make_ptr(x.element_type, address, x.memspace, assumed_align=n * size),
                                cute.make_layout(n))

    def load(self, x, of, first, rest):
        """The tokens from `first` on, in registers, in memory's order: where there are none the last ones."""
        first = cutlass.min(first, Int64(x.shape[1] - self.spec.vector)) if rest else first
        return vectors.load(self.at(x, of, first, self.spec.vector))

    def numbers(self, held):
        """Loaded tokens as fp32 values, in the scan's order."""
        return self.in_order(vectors.wide(held))

    def in_order(self, values):
        return values[::-1] if self.spec.reverse else values

    def firsts(self, of):
        """The first token of each of a lane's pieces: in 64 bits, as addresses are, so that one serves for all."""
        first = Int64(of.run * self.tokens + of.lane * self.spec.vector)
        return [first + i * self.lanes * self.spec.vector for i in range(self.pieces)]

    # ---- the scan ---------------------------------------------------------------------------------------------------

    @cute.jit
    def run(self, state, slots, run, of, g: Given, rest: cutlass.Constexpr = False):
        """rest: some of the run's tokens may be behind the last one."""
        T, firsts = g.a.shape[1], self.firsts(of)
        read = (g.a, g.b, g.h) if self.spec.of_a else (g.a, g.b)
        loaded = [[self.load(x, of, s, rest) for s in firsts] for x in read]
        edge = self.edge(g.h, of) if self.spec.of_a else None
        before, start = self.states_of(of, g)
        pieces = [self.piece(s, a, b, of) for s, a, b in zip(firsts, loaded[0], loaded[1], strict=True)]
        self.carry.take(state, slots, run)
        put(state, [cutlass.select_(of.run == 0, x, state[i]) for i, x in enumerate(start)])
        coming = self.coming(pieces, state)
        self.carry.pass_on(state, slots, run)
        earlier = self.earlier(loaded[2], edge, of) if self.spec.of_a else []
        for i in cutlass.range_constexpr(self.pieces):
            piece, own = pieces[i], self.into_lane(pieces[i].up_to, coming[i].value, of)
            if const_expr(self.spec.backward):
                found, after = slopes(piece.a, own, piece.b)
                self.out(g.db, found, piece, of, rest)
                if const_expr(self.spec.of_a):
                    last = piece.first + self.spec.vector >= T  # of whose last token h comes from the initial state
                    h = earlier[i][:-1] + [cutlass.select_(last, before, earlier[i][-1])]
                    self.out(g.da, [x * y for x, y in zip(found, h, strict=True)], piece, of, rest)
            else:
                found, after = states(piece.a, own, piece.b)
                self.out(g.h, found, piece, of, rest)
            if const_expr(rest or i == self.pieces - 1):
                self.end(after, coming[i].factor, piece, of, g)

    def states_of(self, of, g):
        """The initial state, and what comes into a line's first token, with the product of no factors behind it."""
        before = Float32(0.0 if g.state is None else g.state[of.batch, of.channel])
        start = before
        if self.spec.backward:
            start = Float32(0.0 if g.final is None else g.final[of.batch, of.channel])
        return before, [start, Float32(1.0), Float32(0.0)][:self.carry.vector]

    @cute.jit
    def end(self, after, factor, piece, of, g: Given):
        """What is behind the last token: the final state, or the initial one's gradient. factor: the product of all
        factors before the piece."""
        if piece.first + self.spec.vector == g.a.shape[1]:
            if const_expr(not self.spec.backward and g.final is not None):
                g.final[of.batch, of.channel] = after
            if const_expr(g.dstate is not None):
                g.dstate[of.batch, of.channel] = after
            if const_expr(g.product is not None):
                g.product[of.batch, of.channel] = products.rounded(
                    products.times(piece.up_to.factor, factor, self.parts))

    @cute.jit
    def out(self, x, values, piece, of, rest: cutlass.Constexpr):
        """A piece's results, which come in the scan's order, where they are wanted."""
        if const_expr(x is not None):
            held = vectors.packed(self.in_order(values), self.dtype)
            if const_expr(rest):
                if piece.first < x.shape[1]:
                    vectors.store(held, self.at(x, of, piece.first, self.spec.vector))
            else:
                vectors.store(held, self.at(x, of, piece.first, self.spec.vector))

    def piece(self, first, a, b, of):
        """What can be said of a piece before the state comes."""
        a, b = self.numbers(a), self.numbers(b)
        up_to = joined(self.of_lane(a, b), of.lane, self.lanes)
        return Piece(first, a, b, up_to, self.of_last(up_to, of))

    def coming(self, pieces, state):
        """What comes into each piece, and what the last one leaves, which state is then: the state, and in a segment
        the product of the factors so far."""
        found = [Step([state[1 + i] for i in range(self.parts)] if self.spec.ends else None, state[0])]
        for piece in pieces:
            factor, value = found[-1]
            if self.spec.ends:
                factor = products.times(piece.whole.factor, factor, self.parts)
            found.append(Step(factor, products.grown(piece.whole.factor, value, piece.whole.value)))
        put(state, [found[-1].value, *(found[-1].factor or ())])
        return found

    # ---- between lanes ----------------------------------------------------------------------------------------------

    def of_lane(self, a, b):
        """The `Step` of a lane's tokens. It begins with a state of 0, not with b: a factor that is no finite number
        shows behind the lane, too."""
        found = (slopes if self.spec.backward else states)(a, Float32(0.0), b)[1]
        return Step(products.of(a, self.parts), found)

    def of_last(self, step, of):
        """The last lane's of a line."""
        last = self.lanes - 1
        return Step([self.from_lane(x, of, last) for x in step.factor], self.from_lane(step.value, of, last))

    def into_lane(self, up_to, coming, of):
        """What comes into a lane's first token: of the lane before."""
        if self.lanes == 1:
            return coming
        after = products.grown(up_to.factor, coming, up_to.value)
        return cutlass.select_(of.lane == 0, coming, cute.arch.shuffle_sync_up(after, 1))

    def earlier(self, loaded, edge, of):
        """h of the token behind each of a lane's, by pieces. edge: of the run's last one."""
        own = [self.numbers(x) for x in loaded]
        next_ = [self.from_lane(x[0], of, (of.lane + 1) % self.lanes) for x in own] + [edge]
        at_end = of.lane == self.lanes - 1
        return [x[1:] + [cutlass.select_(at_end, next_[i + 1], next_[i])] for i, x in enumerate(own)]

    def edge(self, x, of):
        """The first token behind a run, or the last one that there is."""
        return Float32(self.at(x, of, cutlass.min((of.run + 1) * self.tokens, x.shape[1] - 1), 1)[0])

    def from_lane(self, x, of, lane):
        """x of another lane of the line."""
        return x if self.lanes == 1 else cute.arch.shuffle_sync(x, tk.lane_id() - of.lane + lane)


def joined(step, lane, lanes):
    """The `Step` of all lanes of a line up to this one."""
    for by in (1, 2, 4, 8, 16):
        if by < lanes:
            far, up = lane >= by, lambda x, by=by: cute.arch.shuffle_sync_up(x, by)
            factor = products.times(step.factor, [up(x) for x in step.factor], len(step.factor))
            value = products.grown(step.factor, up(step.value), step.value)
            step = Step([cutlass.select_(far, x, y) for x, y in zip(factor, step.factor, strict=True)],
                        cutlass.select_(far, value, step.value))
    return step


def states(a, state, b):
    """h of each token, and what the last one leaves, which is its h."""
    found = []
    for x, y in zip(a, b, strict=True):
        state = cute.math.fma(x, state, y)
        found.append(state)
    return found, state


def slopes(a, state, dh):
    """g of each token, and what the last one leaves: its a g."""
    found = [state + dh[0]]
    for x, y in zip(a, dh[1:], strict=False):
        found.append(cute.math.fma(x, found[-1], y))
    return found, a[-1] * found[-1]

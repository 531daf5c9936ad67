"""The state of `ChannelValues`, in a warpgroup's accumulators, and what comes out."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.channels.columns import HALVES, scaled, unpacked
from tkq.linear_attention.channels.parts import OUT_BARRIER, chunks, order
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.channels.value_pairs import ValuePairs
from tkq.linear_attention.channels.whole_of_values import carry
from tkq.linear_attention.config import CHUNK
from tkq.tile.dtypes import element_type


@dataclass(frozen=True)
class State:
    """Registers of 64 columns of v."""

    s: tk.RegTile  # the state, transposed: columns of v by those of q and k
    s16: tk.RegTile
    rest: Any  # with dot: what s16 has not of s
    v: tk.RegTile  # values, transposed
    left: tk.RegTile  # of a whole chunk: what rounding leaves of them
    o: tk.RegTile  # outputs, transposed: columns by tokens
    given: tk.RegTile  # those of a level, of 32 tokens, without the tokens' own factors
    x: Any  # with dot, of which it is that with the outputs: x, transposed, and the products
    dots: Any
    total: tk.RowVec
    o2: Any  # with pairs: what the second queries get; or reversed what the first keys' pairs give
    fresh: Any  # with pairs, reversed: of the state, what the first keys add to half of it


class ValueState:
    """What the state's warpgroup does of a chunk, whole or by levels, where s is the kernel's."""

    def __init__(self, spec: ChannelSpec, sequences):
        self.spec, self.sequences, self.dtype = spec, sequences, element_type(spec.dtype)
        self.whole = spec.dtype == "bf16"
        self.chunk = ValuePairs(self) if spec.pairs else self

    def registers(self) -> State:
        """Room for them."""
        K, dot, pairs = self.spec.head_dim, self.spec.dot, self.spec.pairs
        v, left, x = (tk.rt(CHUNK, self.dtype) for _ in range(3))
        return State(tk.rt_fl(K), tk.rt(K, self.dtype), tk.rt(K, self.dtype) if dot else None, v, left,
                     tk.rt_fl(CHUNK), tk.rt_fl(CHUNK // 2), x if dot else None, tk.rt_fl(CHUNK) if dot else None,
                     tk.rv(), tk.rt_fl(CHUNK) if pairs else None,
                     tk.rt_fl(CHUNK if K == 2 * CHUNK else K) if pairs and self.spec.reverse else None)

    @cute.jit
    def keep(self, g, s, t):
        """From the first chunk to the last."""
        c = self.registers()
        ring, steps, others = s.tokens.ring(), s.steps.ring(), s.others.ring() if self.spec.sums else None
        if const_expr(self.spec.initial is None):
            tk.zero(c.s)
        else:
            tk.load_from(c.s, self.sequences.state(g.initial, t), t.part * CHUNK, 0)
            if const_expr(self.spec.pairs and self.spec.reverse):
                tk.mul(c.s, c.s, -1.0)
        if const_expr(self.spec.sums):
            self.begin_sums(s.behind, g, t)
        for i in cutlass.range(chunks(self.spec, g, t), unroll=1):
            s.tokens.wait(ring)
            if const_expr(self.spec.dot and not self.spec.pairs):
                tk.load_T(c.x, s.x[ring.stage])
            s.steps.wait(steps)
            self.add_chunk(c, g, s, ring, steps)
            if const_expr(self.spec.sums):
                self.add_others(c, s, others)
            self.put_outputs(c, g, s, others, t, order(self.spec, g, t, i))
            if const_expr(self.spec.sums):
                s.others.release(others)
                others.advance()
            ring.advance()
        if const_expr(self.spec.final is not None):
            tk.store_elements(self.sequences.state(g.final, t), c.s, t.part * CHUNK, 0)
        tk.store_wait(read=False)

    @cute.jit
    def add_chunk(self, c, g, s, ring, steps):
        """c.o and c.dots are a chunk's, and its tokens are done with."""
        if const_expr(self.whole):
            if cute.arch.make_warp_uniform(s.whole[0, steps.stage]) != 0:
                self.chunk.add_whole(c, g, s, ring, steps)
            else:
                self.chunk.add_levels(c, g, s, ring, steps)
        else:
            self.chunk.add_levels(c, g, s, ring, steps)

    # ---- a chunk by one product ------------------------------------------------------------------

    @cute.jit
    def add_whole(self, c, g, s, ring, steps):
        """As `WholeOfValues` has it: the state and the chunk's pairs give to the same accumulator."""
        stage, ends = steps.stage, s.ends[None, steps.stage]
        self.decay(c, ends, 0)
        self.narrow_state(c)
        self.multiply_state(c, c.o, s.q[ring.stage])
        self.carry(c.v, s.v[ring.stage], s.factors, stage, c.left)
        self.multiply_pairs(c.o, c.v, (s.p[stage], s.carried[stage]))
        tk.mma_ABt(c.o, c.left, s.p[stage])
        tk.mma_AB(c.s, c.v, s.k[ring.stage])
        tk.mma_AB(c.s, c.left, s.k[ring.stage])
        tk.mma_wait(0)
        s.tokens.release(ring)
        self.begin_dots(c)
        self.see(c, c.o, lambda r, j: c.o.rows_view[r, j] * g.scale, s.factors, stage)
        self.decay(c, ends, 1)
        self.next(s, steps)

    def decay(self, c, ends, half):
        """The state, by what `ends` has of its columns: all, or the first half and then the second."""
        tk.load_rows(c.total, ends, half * CHUNK, (half + 1) * CHUNK)
        tk.mul_row(c.s, c.s, c.total)

    def narrow_state(self, c):
        """The state as operands of 16 bits: two, of which the second has what the first has not, with dot."""
        tk.copy(c.s16, c.s)
        if self.spec.dot:
            tk.apply_narrow(c.rest, lambda wide, rounded: wide - rounded, c.s, c.s16)

    def multiply_state(self, c, o, queries):
        """What the state gives is under way."""
        tk.mm_ABt(o, c.s16, queries)
        if self.spec.dot:
            tk.mma_ABt(o, c.rest, queries)

    def carry(self, to, values, factors, stage, left=None):
        """to, and what rounding leaves of it: a chunk's values with their factors."""
        tk.load_T(to, values)
        carry(to, left, lambda r, n: self.factors_at(factors, stage, r, n))

    def multiply_pairs(self, o, values, p, begins=False):
        """What a chunk's pairs give to o is under way; p: Q K' in two parts. begins: o has nothing before."""
        (tk.mm_ABt if begins else tk.mma_ABt)(o, values, p[0])
        tk.mma_ABt(o, values, p[1])

    def see(self, c, o, given, factors, stage):
        """As `give`, of x that is not rounded with its factors, as values were not."""
        f = {(r, n): self.factors_at(factors, stage, r, n) for r, n in pairs_of(range(CHUNK))}
        for r, n in pairs_of(range(CHUNK)):
            two = [given(r, 2 * n + e) * f[r, n][e] for e in range(2)]
            for e in range(2):
                o.rows_view[r, 2 * n + e] = two[e]
            if self.spec.dot:
                x = unpacked(cute.recast_tensor(c.x.tensor, Int32)[2 * n + r], self.dtype)
                self.add_dots(c, r, n, two, x)

    def add_dots(self, c, r, n, two, x):
        dots = c.dots.rows_view
        for e in range(2):
            dots[r, 2 * n + e] = cute.math.fma(two[e], x[e], dots[r, 2 * n + e])

    def begin_dots(self, c):
        if self.spec.dot:
            tk.zero(c.dots)

    def give(self, c, o, given, factors, stage):
        """o = given(r, j), as each token sees it, and its products with x are added to the dots."""
        f = {(r, n): self.factors_at(factors, stage, r, n) for r, n in pairs_of(range(CHUNK))}
        for r, n in pairs_of(range(CHUNK)):
            two = [given(r, 2 * n + e) for e in range(2)]
            for e in range(2):
                o.rows_view[r, 2 * n + e] = Float32(0.0)
            self.add(c, o, r, n, two, f[r, n])

    # ---- a chunk by levels -----------------------------------------------------------------------

    @cute.jit
    def add_levels(self, c, g, s, ring, steps):
        """A step for the state, one for each level, and one for the diagonal."""
        self.of_state(c, c.o, s.q[ring.stage])
        self.decay(c, s.ends[None, steps.stage], 0)
        self.begin_dots(c)
        self.give(c, c.o, lambda r, j: c.o.rows_view[r, j] * g.scale, s.factors, steps.stage)
        tk.load_T(c.v, s.carried[steps.stage])
        tk.mma_AB(c.s, c.v, s.k[ring.stage])
        tk.mma_wait(0)
        self.next(s, steps)
        for n in cutlass.range_constexpr(len(HALVES)):
            s.steps.wait(steps)
            tk.load_T(c.v, s.carried[steps.stage])
            self.add_level(c, c.o, s, s.p, steps.stage, HALVES[n])
            self.next(s, steps)
        s.steps.wait(steps)
        tk.load_T(c.v, s.v[ring.stage])
        self.add_level(c, c.o, s, s.p, steps.stage, 0)
        self.next(s, steps)
        s.tokens.release(ring)

    def of_state(self, c, o, queries):
        """o = what the state gives, with dot from the state in two parts."""
        tk.copy(c.s16, c.s)
        tk.mm_ABt(o, c.s16, queries)
        tk.mma_wait(0)
        if self.spec.dot:
            tk.apply_narrow(c.s16, lambda wide, rounded: wide - rounded, c.s, c.s16)
            tk.mma_ABt(o, c.s16, queries)
            tk.mma_wait(0)

    def next(self, s, steps):
        s.steps.release(steps)
        steps.advance()

    def add_level(self, c, o, s, p, stage, half):
        """A level's outputs, as each token sees them, 32 tokens at a time. half 0: the diagonal, without factors."""
        takes = [token for token in range(CHUNK) if not half or token // half % 2 != self.spec.reverse]
        for part in range(2):
            mine = [token for token in takes if token // 32 == part]
            if mine:
                tk.mm_ABt(c.given, c.v, p[stage], b_part=part)
                tk.mma_wait(0)
                for r, n in pairs_of(mine):
                    f = self.factors_at(s.factors, stage, r, n) if half else None
                    self.add(c, o, r, n, [c.given.rows_view[r, 2 * (n - 4 * part) + e] for e in range(2)], f)

    def add(self, c, to, r, n, given, f):
        """Two tokens' outputs, and those times x: with x's factors rounded as they are where x is what is carried."""
        o = to.rows_view
        for e in range(2):
            o[r, 2 * n + e] = o[r, 2 * n + e] + given[e] if f is None else cute.math.fma(
                given[e], f[e], o[r, 2 * n + e])
        if self.spec.dot:
            word = cute.recast_tensor(c.x.tensor, Int32)[2 * n + r]
            self.add_dots(c, r, n, given, unpacked(word if f is None else scaled(word, f, self.dtype), self.dtype))

    def factors_at(self, factors, stage, r, n):
        """Of a thread's r-th column and its two tokens among the n-th 8."""
        return [factors[stage, tk.first_col() + 8 * n + e, tk.first_row() + 8 * r] for e in range(2)]

    # ---- sums over a token and those behind it ---------------------------------------------------

    @cute.jit
    def begin_sums(self, behind: cute.Tensor, g, t):
        """What is behind the last token of each column. In shared memory for want of registers: each thread reads what
        it wrote itself, as the three others that have its columns did."""
        for r in cutlass.range_constexpr(2):
            row = tk.first_row() + 8 * r
            behind[row, 0] = Float64(0.0)
            if const_expr(self.spec.end):
                col = t.part * CHUNK + row
                if col < self.spec.value_dim and t.state >= 0:
                    behind[row, 0] = Float64(g.own.end[t.state, t.head, col])

    def add_others(self, c, s, others):
        """Dots become sums; outputs get the rest of them."""
        s.others.wait(others)
        if self.spec.rest:
            rest, view = mine_of(s.rest[others.stage]), c.o.rows_view
            for r in range(2):
                of = [[rest[r][e][n] for e in range(2)] for n in range(CHUNK // 8)]
                for n in range(CHUNK // 8):
                    for e in range(2):
                        view[r, 2 * n + e] = view[r, 2 * n + e] + of[n][e]
        self.add_up(c.dots, s.less[others.stage], s.behind)

    def add_up(self, dots, less: tk.SharedTile, behind):
        """dots = the sums of less - dots, from the chunk's last token on: in a chunk of fp32, those of chunks of
        float64. Four threads have the tokens of a column, two of each eight."""
        view, lane, row, mine = dots.rows_view, tk.lane_id() % 4, tk.first_row(), mine_of(less)
        for r in range(2):
            taken = [[mine[r][e][n] for e in range(2)] for n in range(CHUNK // 8)]
            before = behind[row + 8 * r, 0]
            after, end = Float32(0.0), Float32(before)
            for n in reversed(range(CHUNK // 8)):
                found = [taken[n][e] - view[r, 2 * n + e] for e in range(2)]
                own = found[0] + found[1]
                total = own
                for step in (1, 2):
                    other = cute.arch.shuffle_sync_down(total, offset=step)
                    total = total + cutlass.select_(lane + step < 4, other, Float32(0.0))
                later = cutlass.select_(lane < 3, cute.arch.shuffle_sync_down(total, offset=1), Float32(0.0)) + after
                view[r, 2 * n + 1] = (later + found[1]) + end
                view[r, 2 * n] = (later + own) + end
                after = after + cute.arch.shuffle_sync(total, tk.lane_id() - lane)
            behind[row + 8 * r, 0] = before + Float64(after)

    # ---- to global memory ------------------------------------------------------------------------

    @cute.jit
    def put_outputs(self, c, g, s, others, t, chunk):
        """A chunk's. Through shared memory those of 16 bits, dots and what pairs have besides: those before have left
        it; sums from where what they are less of has been."""
        leader, place = tk.warp_id() % 4 == 0, (t.batch, t.head, chunk, t.part)
        if leader:
            tk.store_wait()
        tk.sync(OUT_BARRIER, tk.WARPGROUP)
        through = self.through(c, g, s, others)
        for n in cutlass.range_constexpr(len(through)):
            _, tile, x = through[n]
            if const_expr(tile.type.dtype is Float32):
                self.stage(mine_of(tile), x.rows_view)
            else:
                tk.store_T(tile, x)
        tk.publish()
        tk.sync(OUT_BARRIER, tk.WARPGROUP)
        if leader:
            for n in cutlass.range_constexpr(len(through)):
                tk.store_async(through[n][0], through[n][1], place)
            if const_expr(self.spec.sums):
                tk.store_wait()
        if const_expr(not self.spec.narrow):
            self.put(g.o, g, t, c.o, chunk * CHUNK)

    def through(self, c, g, s, others):
        """[(to, tile, registers)] of outputs that leave through shared memory."""
        found = [(g.o, s.o[0], c.o)] if self.spec.narrow else []
        if self.spec.dot:
            found.append((g.own.of_x, s.less[others.stage] if self.spec.sums else s.dots[0], c.dots))
        if self.spec.pairs and not self.spec.reverse:
            found.append((g.own.o2, s.o2[0], c.o2))
        return found

    def stage(self, to, view):
        """Outputs, transposed, to a tile of tokens by columns: a warp's words are in banks of their own."""
        for r, n in pairs_of(range(CHUNK)):
            for e in range(2):
                to[r][e][n] = view[r, 2 * n + e]

    @cute.jit
    def put(self, to: cute.Tensor, g, t, o: tk.RegTile, token0):
        """Outputs to global memory, in pieces of 32 bytes."""
        x, view = to[t.batch, None, t.head, None], o.rows_view
        tokens = t.tokens if const_expr(self.spec.packed) else g.tokens
        row, token = t.part * CHUNK + tk.first_row(), token0 + tk.first_col()
        at = x.iterator + cute.crd2idx((token, row), x.layout)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(CHUNK // 4):
                behind = 8 * (j // 2) + j % 2
                if token + behind < tokens and row + 8 * r < self.spec.value_dim:
                    cute.make_tensor(at + (behind * x.stride[0] + 8 * r), cute.make_layout(1))[0] = view[r, j]


def mine_of(tile: tk.SharedTile):
    """[r][e]: of a tile of fp32, tokens by columns, what a thread has of its r-th column in the e-th of its two tokens
    of each eight. As it lies in memory: eight rows of 128 bytes, whose 16 bytes are moved by the row's number, repeat,
    so that four addresses are enough, where the tile's own layout would make one for each number."""
    plain = cute.recast_ptr(tile.staged.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32)
    found = []
    for r in range(2):
        col = tk.first_row() + 8 * r
        panel, word = col // 32 * (32 * CHUNK) + tile.stage * (CHUNK * CHUNK), col % 32
        rows = [tk.first_col() + e for e in range(2)]
        found.append([cute.make_tensor(plain + (panel + 32 * row + (word ^ (4 * row))),
                                       cute.make_layout(CHUNK // 8, stride=8 * 32)) for row in rows])
    return found


def pairs_of(tokens):
    """[(r, n)]: which of a thread's two columns, and which 8 tokens of which it has two, are of any of the tokens in
    any thread."""
    return [(r, n) for r in range(2) for n in range(CHUNK // 8) if any(token // 8 == n for token in tokens)]

"""The warpgroup that has the scores and their softmax."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode.consumer import Consumer
from tkq.attention.decode.output import Output as Refusal
from tkq.attention.decode.output import tell
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import Walk
from tkq.attention.mla.copies import copy_panels, query_rows
from tkq.attention.mla.output import Q_IS_THERE, Output
from tkq.attention.mla.state import HALF, Segment
from tkq.attention.mla.state import Scores as State
from tkq.attention.mla.tiles import lane_now, length_of, rows_of, see_tile


class Scores:
    """Of a block of keys: S = Q K', and its exponentials P, for the two other warpgroups.

    Columns 0 to 383 of Q are in registers, as many as there are: products that read both operands from shared memory
    would take all that it gives."""

    def __init__(self, spec, config):
        self.spec, self.config, self.walk = spec, config, Walk(spec)
        self.dtype, self.output = tk.element_type(spec.dtype), Output(spec, config)
        self.keys, self.refusal = Consumer(spec, config), Refusal(spec)

    def state(self, smem):
        ints = lambda: cute.make_rmem_tensor((3,), Int32)
        return State(q_left=tk.rt(HALF, self.dtype), q_right=tk.rt(HALF, self.dtype), s=tk.rt_fl(self.config.keys),
                     max=tk.rv(), norm=tk.rv(), correct=tk.rv(), shift=tk.rv(), total=tk.rv(), first=ints(), end=ints(),
                     deep=smem.left_pipe.ring(), pair=smem.p_pipe.ring(), segment=smem.segment_pipe.ring())

    @cute.jit
    def run(self, g, smem):
        regs = self.state(smem)
        smem.segment_pipe.wait(regs.segment)
        while smem.segments[0, regs.segment.stage] >= 0:
            self.segment(g, smem, regs)
            smem.segment_pipe.release(regs.segment)
            regs.segment.advance()
            smem.segment_pipe.wait(regs.segment)
        if self.walk.matches(g):
            pass
        else:
            self.refusal.refuse(g)

    @cute.jit
    def segment(self, g, smem, regs):
        s = Segment.read(smem, regs.segment)
        tk.zero(regs.norm)
        tk.neg_infty(regs.max)
        self.rest_of_q(g, smem, s)
        self.load_q(g, regs, s)
        fine = (s.inside != 0) & (s.length == length_of(g, s))
        tell(g.plan, fine, tk.thread_in_warpgroup())  # while Q is on its way
        self.keys.limits(g, regs, s, g.queries)
        cute.arch.cp_async_wait_group(0)
        tk.publish()
        tk.sync(Q_IS_THERE, tk.WARPGROUP)
        for block in cutlass.range(s.first, s.end, unroll=1):
            self.block(g, smem, regs, block)
        tk.quad_sum(regs.norm)
        self.output.scores(g, smem, regs, Segment.read(smem, regs.segment))

    def rest_of_q(self, g, smem, s):
        """The columns that there are no registers for. All of this warpgroup have done with those of the segment
        before: they met at its end."""
        rows = query_rows(g, s)
        copy_panels(smem.q, 0, rows, (6, 8), 2)
        copy_panels(smem.q_rope, 0, rows, (8, 9))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_q(self, g, regs, s):
        """The packed queries' first 384 columns, zeros behind the last query."""
        x, lane = rows_of(g.q, g, s), lane_now()
        first = s.tile * ROWS + tk.warp_id() % 4 * 16 + lane // 4
        for q, column, n in ((regs.q_left, 0, HALF // 8), (regs.q_right, HALF, HALF // 16)):
            words = cute.recast_tensor(q.tensor, Int32)
            for r in cutlass.range_constexpr(2):
                row = first + 8 * r
                for j in cutlass.range_constexpr(n):
                    words[2 * j + r] = Int32(0)
                if row < g.queries * g.group:
                    at = (x.iterator + (cute.crd2idx((row, 0), x.layout) + lane % 4 * 2 + column)).align(4)
                    pairs = cute.make_tensor(cute.recast_ptr(at, dtype=Int32), cute.make_layout(n, stride=4))
                    for j in cutlass.range_constexpr(n):
                        words[2 * j + r] = pairs[j]

    @cute.jit
    def block(self, g, smem, regs, block):
        there = self.products(smem, regs)
        if const_expr(not self.config.branch_free):
            self.release_rope(smem, regs)
        self.softmax(g, smem, regs, block, there)
        if const_expr(not self.config.branch_free):
            tk.store_rows(smem.correct[None, regs.pair.stage], regs.correct, 0, ROWS)
        tk.publish()
        smem.p_pipe.commit(regs.pair)
        if const_expr(self.config.branch_free):
            self.release_rope(smem, regs)
        regs.deep.advance()
        regs.pair.advance()

    def release_rope(self, smem, regs):
        """Of float8 rows the right half's values give its place back, behind P."""
        if smem.rope_pipe is not None:
            smem.rope_pipe.release(regs.pair)

    @cute.jit
    def products(self, smem, regs):
        """S = Q K'. The left half of the values goes on when all but the last ``scores_in_flight`` groups of products
        are done: under these lies what it takes to tell."""
        in_flight = self.config.scores_in_flight
        smem.left_pipe.wait(regs.deep)
        see_tile(self.config)
        first, *rest = self.groups(smem, regs)
        tk.mm_ABt(regs.s, first[0], first[1], k=first[2])
        if const_expr(smem.rope_pipe is not None):
            smem.rope_pipe.wait(regs.pair)
        smem.right_pipe.wait(regs.pair)
        see_tile(self.config)
        for q, k, columns in rest:
            tk.mma_ABt(regs.s, q, k, k=columns)
        smem.p_pipe.acquire_empty(regs.pair)  # under the products: what is behind them has no branch
        there = [smem.there[w, regs.deep.stage] for w in range(4)]  # and no wait for these
        tk.mma_wait(in_flight)
        tk.arrive(smem.scored[regs.pair.stage])
        if const_expr(in_flight > 0):
            tk.mma_wait(0)
        return there if self.config.branch_free else [smem.there[w, regs.deep.stage] for w in range(4)]

    def groups(self, smem, regs):
        """(columns of Q, keys, which of their columns) of each group of products; the first asks for the left half
        alone."""
        pair = regs.pair.stage
        left, right = (regs.q_left, smem.left[regs.deep.stage]), (regs.q_right, smem.right[pair])
        rope, last = (smem.q_rope[0], smem.rope[pair]), (smem.q[0], smem.right[pair])
        part = HALF // 2
        return [(*left, (0, HALF)), (*rope, (0, 64)), (*right, (0, part)), (*last, (part, HALF - 64)),
                (*last, (HALF - 64, HALF))]

    @cute.jit
    def softmax(self, g, smem, regs, block, there):
        """S, of a block of keys, becomes exponentials in shared memory."""
        self.keys.mask(regs, there)
        if const_expr(self.spec.edges):
            self.keys.edges(g, regs, block)
        if const_expr(self.config.lazy_row_max):
            tk.fill(regs.correct, 1.0)
            if self.risen(g, regs):
                self.follow(g, regs)
        else:
            self.follow(g, regs)
        self.tell(smem, regs)
        self.weights(g, smem, regs)
        tk.add(regs.norm, regs.norm, regs.total)

    def tell(self, smem, regs):
        """The factors of O's rows, from all four threads of a row: without a branch."""
        if self.config.branch_free:
            for r in range(2):
                smem.correct[tk.first_row() + 8 * r, regs.pair.stage] = regs.correct.tensor[r]

    def risen(self, g, regs):
        """Does a row of this warp have a score that is too large for the number so far? No lane waits for a row's
        largest one."""
        found, s = cutlass.Boolean(False), regs.s.rows_view
        for r in range(2):
            tops = [s[r, j] for j in range(self.config.keys // 4)]
            while len(tops) > 1:
                tops = [cute.arch.fmax(a, b) for a, b in zip(tops[::2], tops[1::2])]
            found = found | (tops[0] * g.scale > regs.max.tensor[r] + Float32(self.config.rise))
        return cute.arch.vote_any_sync(found)

    @cute.jit
    def follow(self, g, regs):
        """The number that a row's exponentials are relative to, from its largest score. Sums so far are rescaled."""
        tk.copy(regs.correct, regs.max)
        tk.row_max(regs.shift, regs.s)
        tk.mul(regs.shift, regs.shift, g.scale)
        for r in cutlass.range_constexpr(2):
            old, top = regs.max.tensor[r], cute.arch.fmax(regs.max.tensor[r], regs.shift.tensor[r])
            if const_expr(self.config.rise > 0):  # see MlaConfig
                top = cutlass.select_(top > old + Float32(self.config.rise), top, old)
            regs.max.tensor[r] = top
        tk.finite_or_zero(regs.shift, regs.max)
        tk.sub(regs.correct, regs.correct, regs.shift)
        tk.exp2(regs.correct, regs.correct)
        tk.mul(regs.norm, regs.norm, regs.correct)

    @cute.jit
    def weights(self, g, smem, regs):
        """P, and the sums of its rows."""
        p = tk.rt_fl(self.config.keys)
        tk.finite_or_zero(regs.shift, regs.max)
        tk.mul(p, regs.s, g.scale)
        tk.sub_row(p, p, regs.shift)
        tk.exp2(p, p)
        tk.row_sum_partial(regs.total, p)
        tk.store(smem.p[regs.pair.stage], p)

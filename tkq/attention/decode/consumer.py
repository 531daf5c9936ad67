"""The consumer warpgroup: scores, their softmax, the sum of values, and what comes of it."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.decode.output import Output, rows_of, tell
from tkq.attention.decode.plan import ROWS, padded
from tkq.attention.decode.scaling import Scaling
from tkq.attention.decode.state import State
from tkq.attention.decode.tree import TreeMask
from tkq.attention.decode.walk import Walk

INF = Float32.inf


class Consumer:
    def __init__(self, spec, config):
        self.spec, self.config, self.walk = spec, config, Walk(spec)
        self.dtype, self.output, self.scaling = tk.element_type(spec.inner), Output(spec), Scaling(spec, config)
        self.tree = TreeMask(spec, config)

    def state(self, smem):
        keys, spec, ints = self.config.keys, self.spec, lambda: cute.make_rmem_tensor((3,), Int32)
        return State(s=tk.rt_fl(keys), p=tk.rt(keys, self.dtype), o=tk.rt_fl(padded(spec.head_dim_v)),
                     max=tk.rv(), norm=tk.rv(), correct=tk.rv(), shift=tk.rv(), first=ints(), end=ints(), fault=ints(),
                     k=smem.k_pipe.ring(), v=smem.v_pipe.ring(),
                     q=tk.rt(padded(spec.head_dim), self.dtype) if self.config.q_in_registers else None,
                     scale=tk.rv() if spec.cache else None,
                     of_v=cute.make_rmem_tensor((1,), Float32) if spec.cache else None,
                     tree=cute.make_rmem_tensor((2,), Int64) if spec.tree else None,
                     drafts=cute.make_rmem_tensor((1,), Int32) if spec.tree else None)

    @cute.jit
    def run(self, g, smem):
        regs = self.state(smem)
        self.walk.each_segment(g, lambda s: self.segment(g, smem, regs, s))
        self.output.refuse_others(g)

    @cute.jit
    def segment(self, g, smem, regs, s):
        fine = s.inside & self.walk.planned(g, s)
        regs.fault[0] = cutlass.select_(fine, Int32(0), Int32(1))
        tell(g.plan, fine, tk.thread_in_warpgroup())
        self.load_q(g, smem, regs, s)
        tk.zero(regs.o)
        tk.zero(regs.norm)
        tk.neg_infty(regs.max)
        self.limits(g, regs, s, s.queries)
        self.first(g, smem, regs, s)
        for block in cutlass.range(s.first + 1, s.end, unroll=1):
            self.step(g, smem, regs, block)
        self.last(smem, regs)
        self.output.write(g, smem, regs, s)

    def seen(self):
        """Threads wrote the tile, which wgmma reads by another proxy."""
        tk.publish()

    def q(self, smem, regs):
        return regs.q if self.config.q_in_registers else smem.q[0]

    def first(self, g, smem, regs, s):
        """A segment's first scores."""
        smem.k_pipe.wait(regs.k)
        self.seen()
        tk.mm_ABt(regs.s, self.q(smem, regs), smem.k[regs.k.stage])
        tk.mma_wait(0)
        self.weights(regs, self.softmax(g, smem, regs, s.first))

    @cute.jit
    def step(self, g, smem, regs, block):
        """The next scores and their softmax, over the P @ V of the block before."""
        smem.k_pipe.wait(regs.k)
        smem.v_pipe.wait(regs.v)
        self.seen()
        tk.mm_ABt(regs.s, self.q(smem, regs), smem.k[regs.k.stage])
        tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage])
        tk.mma_wait(1)
        moved = self.softmax(g, smem, regs, block)
        tk.mma_wait(0)
        self.release(smem.v_pipe, regs.v)
        self.weights(regs, moved)

    def weights(self, regs, moved):
        """P of the next product, and O of the blocks before in its unit."""
        tk.copy(regs.p, regs.s)
        self.rescale(regs, moved)

    @cute.jit
    def rescale(self, regs, moved):
        if moved:
            tk.mul_row(regs.o, regs.o, regs.correct)

    def last(self, smem, regs):
        """The last P @ V."""
        smem.v_pipe.wait(regs.v)
        self.seen()
        tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage])
        tk.quad_sum(regs.norm)
        tk.mma_wait(0)
        self.release(smem.v_pipe, regs.v)

    def release(self, pipe, ring):
        pipe.release(ring)
        ring.advance()

    @cute.jit
    def load_q(self, g, smem, regs, s):
        """The tile's packed queries, zeros behind the last and in columns that only the tile has."""
        q = tk.rt(padded(self.spec.head_dim), tk.element_type(self.spec.dtype))
        q.tensor.fill(0.0)
        words, x = cute.recast_tensor(q.tensor, Int32), rows_of(g.q, g, s)
        for r in cutlass.range_constexpr(2):
            row = s.tile * ROWS + tk.first_row() + 8 * r
            if row < s.queries * g.group:
                at = (x.iterator + (cute.crd2idx((row, 0), x.layout) + tk.first_col())).align(4)
                pairs = cute.make_tensor(cute.recast_ptr(at, dtype=Int32),
                                         cute.make_layout(self.spec.head_dim // 8, stride=4))
                for j in cutlass.range_constexpr(self.spec.head_dim // 8):
                    words[2 * j + r] = pairs[j]
        if const_expr(self.spec.cache is not None):
            q = self.scaling.narrowed(q, regs)
            self.scaling.begin(g, regs, s)
        if const_expr(self.config.q_in_registers):
            regs.q.tensor.store(q.tensor.load())
        else:
            tk.sync(1, tk.WARPGROUP)  # all have done with the task before
            tk.store(smem.q[0], q)
            tk.publish()
            tk.sync(1, tk.WARPGROUP)

    @cute.jit
    def limits(self, g, regs, s, queries):
        """The keys that each of the thread's two rows sees. queries: of the sequence."""
        if const_expr(self.spec.tree):
            self.tree.load(g, regs, s, queries)
        if const_expr(self.spec.edges):
            for r in cutlass.range_constexpr(2):
                own = s.length - queries + (s.tile * ROWS + tk.first_row() + 8 * r) // g.group
                regs.first[r] = cutlass.select_(g.left < 0, Int32(0), own - g.left)
                end = cutlass.min(own + g.right + 1, s.length)
                regs.end[r] = cutlass.select_(g.right < 0, s.length, end)
            # The last key of the first query, and the first of the last: blocks between them need no mask.
            regs.first[2] = cutlass.select_(g.left < 0, Int32(0), s.length - 1 - g.left)
            regs.end[2] = cutlass.select_(g.right < 0, s.length, s.length - queries + g.right + 1)

    def there(self, smem, regs):
        """Which keys of the block are there: a word of each producer warp. And does the table lie?"""
        stage = regs.k.stage
        there = [smem.there[w, stage] for w in range(4)]
        bad = smem.bad[0, stage] | smem.bad[1, stage] | smem.bad[2, stage] | smem.bad[3, stage]
        regs.fault[0] = regs.fault[0] | bad
        return there

    @cute.jit
    def softmax(self, g, smem, regs, block):
        """S, of a block of keys, becomes exponentials. Did max of a row of the warp's move?"""
        stage, there = regs.k.stage, self.there(smem, regs)
        by_token, factor = self.spec.scales == "token", g.scale
        if const_expr(by_token):
            self.scaling.keys(smem, regs, stage)
        else:
            self.release(smem.k_pipe, regs.k)
        if const_expr(self.spec.softcap):
            self.times(regs.s, regs.scale if const_expr(self.spec.cache is not None) else g.cap)
            tk.tanh(regs.s, regs.s)
        elif const_expr(self.spec.cache is not None):
            factor = regs.scale
        self.mask(regs, there)
        if const_expr(self.spec.edges):
            self.edges(g, regs, block)
        if const_expr(self.spec.tree):
            self.tree.apply(regs, block)
        tk.copy(regs.correct, regs.max)
        tk.row_max(regs.shift, regs.s)
        tk.mul(regs.shift, regs.shift, factor)
        moved = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(2):
            top = regs.shift.tensor[r]
            if const_expr(self.spec.cache is not None):
                top = self.scaling.base(top)
            top = cute.arch.fmax(regs.max.tensor[r], top)
            moved = moved | (top > regs.max.tensor[r])
            regs.max.tensor[r] = top
        tk.finite_or_zero(regs.shift, regs.max)
        tk.sub(regs.correct, regs.correct, regs.shift)
        tk.exp2(regs.correct, regs.correct)
        tk.mul(regs.norm, regs.norm, regs.correct)
        self.times(regs.s, factor)
        tk.sub_row(regs.s, regs.s, regs.shift)
        tk.exp2(regs.s, regs.s)
        tk.row_sum_partial(regs.norm, regs.s, regs.norm)
        if const_expr(by_token):
            moved = moved | self.scaling.values(smem, regs, stage)
            self.release(smem.k_pipe, regs.k)
        return cute.arch.vote_any_sync(moved)

    def times(self, tile, factor):
        """factor: a number, or one for each row."""
        (tk.mul_row if isinstance(factor, tk.RowVec) else tk.mul)(tile, tile, factor)

    @cute.jit
    def mask(self, regs, there):
        """Scores of keys that are not there become -inf."""
        rows, view = self.config.rows_per_warp, regs.s.rows_view
        all_there = Int32((1 << rows) - 1 if rows < 32 else -1)
        if (there[0] & there[1] & there[2] & there[3]) != all_there:
            first = tk.first_col()
            own = [word >> first for word in there]
            for j in cutlass.range_constexpr(self.config.keys // 4):
                key = 8 * (j // 2) + j % 2
                if own[key // rows] & Int32(1 << key % rows) == 0:
                    view[0, j] = -INF
                    view[1, j] = -INF

    @cute.jit
    def edges(self, g, regs, block):
        """Scores of keys that a row does not see become -inf."""
        view, begin = regs.s.rows_view, block * self.config.keys
        if begin < regs.first[2] or begin + self.config.keys > regs.end[2]:
            for r in cutlass.range_constexpr(2):
                first, end = regs.first[r] - begin - tk.first_col(), regs.end[r] - begin - tk.first_col()
                for j in cutlass.range_constexpr(self.config.keys // 4):
                    key = 8 * (j // 2) + j % 2
                    if key < first or key >= end:
                        view[r, j] = -INF



"""A chunk's 64 x 64 scores with gates for each column, of products of operands that have parts of the decays."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import words
from tkq.linear_attention.channels.columns import HALVES, Columns, gather_lower, gather_scores
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.channels.whole import Whole
from tkq.linear_attention.config import CHUNK
from tkq.tile.dtypes import element_type


@dataclass(frozen=True)
class Scores:
    """Registers of a chunk's 64 x 64 scores."""

    x: tk.RegTile  # products: half of the columns, or all
    p: tk.RegTile
    lower: Any  # L, with the delta rule
    all: Any  # products of all columns: x, or beside it


class ChannelScores:
    """The part of `ChannelAttention` that makes P and, with the delta rule, L: by `Whole` or by levels of `Columns`, of
    operands in shared memory, where s is the kernel's. place: a chunk's q, k and products of decays."""

    def __init__(self, spec: ChannelSpec, columns: Columns, barrier: int, narrow: bool = False):
        """barrier: of the scores' warpgroup. narrow: with the delta rule, where there is less room: products of levels
        are of half of the columns, and both levels' operands of queries are one tile where all are put behind those of
        keys."""
        self.spec, self.columns, self.barrier = spec, columns, barrier
        self.one_other = narrow and columns.mine > HALVES[1]
        self.whole = Whole(spec, columns)
        self.scored, self.solved = not spec.updates, bool(spec.delta)
        # the delta rule's gradients go without: their values are rounded, and rounded again
        self.exact = self.scored and not (self.solved and spec.reverse)
        self.width = CHUNK if self.solved and not narrow else CHUNK // 2

    def registers(self) -> Scores:
        """Room for them."""
        x, p = tk.rt_fl(self.width), tk.rt(CHUNK, element_type(self.spec.dtype))
        return Scores(x, p, tk.rt_fl(CHUNK) if self.solved else None, x if x.cols == CHUNK else tk.rt_fl(CHUNK))

    def begin(self, c):
        """Nothing has been added."""
        tk.zero(c.p)
        if self.solved:
            tk.zero(c.lower)

    def put_whole(self, s, mine, place, stage, blocks):
        """Operands of `Whole`, which meet the state, too, and what that is multiplied by. blocks: of each block."""
        q, k, sums = place
        of_q, of_k = (words(s.levels[n]) if self.exact else None for n in range(2))
        rest = (of_q, of_k) if self.spec.reverse else (of_k, of_q)
        keys, others = (words(x) for x in ((q, k) if self.spec.reverse else (k, q)))
        self.whole.put(mine, sums, (keys, others if self.scored else None,
                                    words(s.started[stage]) if self.solved else None), rest, blocks)
        if blocks:
            self.whole.put_steps(mine, sums, s.whole, stage)
        else:
            self.whole.put_ends(sums, s.whole, stage, True)

    @cute.jit
    def multiply_whole(self, g, s, c, place, stage):
        """P and L of those operands; of P what rounding left of either, too, but in the delta rule's gradients. L takes
        the room of that. Pairs of different blocks are computed, too, and not read where f is a block's (see
        `ChannelState.add_blocks`)."""
        q, k, _ = place
        if const_expr(self.scored):
            tk.mm_ABt(c.all, q, k)
        if const_expr(self.exact):
            tk.mma_ABt(c.all, s.levels[0], k)
            tk.mma_ABt(c.all, q, s.levels[1])
        if const_expr(self.solved):
            tk.mm_ABt(c.lower, s.started[stage], q if self.spec.reverse else k)
        if const_expr(self.scored):
            tk.mma_wait(1 if self.solved else 0)
            self.whole.gather(c.p, c.all, g.scale)
        tk.mma_wait(0)
        if const_expr(self.exact and self.solved):
            tk.sync(self.barrier, tk.WARPGROUP)

    @cute.jit
    def add_levels(self, g, s, c, mine, place, near: Constexpr[bool]):
        """Two levels; near: the diagonal and four levels. A level has several products (`products`); while the first
        and the last are under way, the next level's operands are written."""
        q, k, products = place
        levels = range(2, len(HALVES)) if near else range(2)
        if const_expr(near and self.scored):
            self.multiply(c.x, (k, q), self.products(-1)[0], True)
        for n in cutlass.range_constexpr(levels.start, levels.stop):
            puts = self.rows(q, k, self.operands(s, n))
            before = n - 1 if n > levels.start else -1
            begun = self.products(before) if const_expr(near or n > 0) else []
            self.columns.early(mine, products, HALVES[n], puts)
            if const_expr(len(begun) > 0):
                self.go_on(g, c, self.operands(s, before) if before >= 0 else (k, q), before, begun)
                if const_expr(self.one_other):
                    tk.sync(self.barrier, tk.WARPGROUP)  # those of the level before have been read
            self.columns.late(mine, HALVES[n], puts)
            tk.publish()
            if const_expr(len(begun) > 1):
                self.gather(g, c, begun[-1], before)
            tk.sync(self.barrier, tk.WARPGROUP)
            self.multiply(c.x, self.operands(s, n), self.products(n)[0], False)
        last = levels.stop - 1
        all = self.products(last)
        self.go_on(g, c, self.operands(s, last), last, all)
        if const_expr(len(all) > 1):
            self.gather(g, c, all[-1], last)

    def products(self, n):
        """Of the n-th level, of which -1 is the diagonal, that L has nothing of: (of P, or of L?, the part of its
        columns)."""
        def of(scores):
            return [(scores, part) for part in range(CHUNK // self.width)]
        return of(True) * self.scored + of(False) * (self.solved and n >= 0)

    def go_on(self, g, c, operands, n, all):
        """The first of a level's products is there, the last is under way."""
        self.gather(g, c, all[0], n)
        for one in all[1:]:
            self.multiply(c.x, operands, one, n < 0)
            if one is not all[-1]:
                self.gather(g, c, one, n)

    def of_part(self, part):
        return dict(b_part=part) if self.width < CHUNK else {}

    def operands(self, s, n):
        """Of the n-th level: those of keys, with the delta rule those of queries apart."""
        return s.levels[n % 2], s.others[n % 2] if self.solved else None

    def multiply(self, x, operands, product, raw):
        """One of a level's products is under way. raw: operands are keys and queries as they came."""
        (keys, others), (scores, part) = operands, product
        first, second = keys, (others or keys) if scores else keys
        if raw or not self.spec.reverse:
            first, second = second, first
        tk.mm_ABt(x, first, second, **self.of_part(part))

    def gather(self, g, c, product, n):
        """One of the n-th level's products has arrived."""
        half, (scores, part) = HALVES[n] if n >= 0 else 0, product
        tk.mma_wait(0)
        if scores:
            gather_scores(c.p, c.x, part, half, self.spec.reverse, g.scale)
        else:
            gather_lower(c.lower, c.x, part, half)

    def rows(self, q, k, operands):
        """What is put in a level's early rows, and in the late ones. Queries and keys change places in the reversed
        order."""
        of_keys, of_others = (words(x) for x in ((q, k) if self.spec.reverse else (k, q)))
        to, rows = words(operands[0]), self.columns.rows
        if not self.solved:
            return rows((to, of_keys)), rows((to, of_others))
        if not self.scored:
            return rows((to, of_keys)), rows((to, of_keys))
        return rows((to, of_keys)), rows((to, of_keys), (words(operands[1]), of_others))

    def scale_in_place(self, s, mine, place, stage):
        """Operands that meet the state."""
        q, k, products = place
        keys, others = (words(x) for x in ((q, k) if self.spec.reverse else (k, q)))
        late = [(others, others)] if self.scored else []
        if self.solved:
            late.append((words(s.started[stage]), keys))
        rows = self.columns.rows
        self.columns.to_ends(mine, products, rows((keys, keys)), rows(*late), s.total[None, stage])

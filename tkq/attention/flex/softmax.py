"""Scores of the user's own, then the online softmax of ``flash_attn``."""
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.flex.capped import CappedScores, softcap_of
from tkq.attention.flex.emit import Emitted, Scaled, near_arguments
from tkq.attention.flex.linear_scores import LinearScores, slopes_of
from tkq.attention.flex.look import Look, all_seen, chosen
from tkq.attention.forward.softmax import Softmax

LOWEST = -3.4028234663852886e38  # of float32's numbers


def special(graph, columns):
    """What makes exponents of Q @ K.T by fewer instructions than node by node; None of most graphs. columns: of a
    thread."""
    if softcap_of(graph):
        return CappedScores(graph)
    return LinearScores(graph, columns) if slopes_of(graph) else None


class Known(NamedTuple):
    """Of a task. score: what is made of the score function of what needs neither scores nor rows nor keys, or the
    numbers of what is ``special``; rows: of ``Look``. None where that is nothing."""

    score: Any
    rows: Any


class FlexSoftmax:
    """Between Q @ K.T and the exponentials: the score function, the mask of blocks that need it, and the end of the
    keys. Any row may see no key of a block."""

    def __init__(self, spec, config):
        self.spec, self.config, self.online = spec, config, Softmax(spec.attention, config)
        self.look_at = Look(spec.mask, "kv")
        scored = spec.score is not None
        self.special = special(spec.score, config.kv // 4) if scored else None
        self.near = near_arguments(spec.score) if scored and not self.special else ()

    def first(self, g, regs, tile, seen, graph):
        """The first tile of keys of a task. seen: of ``look``; graph: of ``ready``."""
        tk.zero(regs.norm)
        tk.neg_infty(regs.max)
        now = self.score(g, regs, tile, graph)
        self.mask(regs, seen, self.spec.mask is not None)
        self.end_of_keys(g, regs, tile, self.keys_of(g, regs))
        exponents = self.special and self.special.exponents(graph, now)
        self.move(g, regs, exponents)
        self.exponentials(g, regs, exponents)

    def step(self, g, regs, tile, of, masked: bool):
        """S becomes exponentials. Did max of a row of the warp's move, so that O must be rescaled? of: what ``look``
        and ``ready`` gave."""
        seen, graph = of
        now = self.score(g, regs, tile, graph)
        self.mask(regs, seen, masked)
        if masked or self.spec.score is not None:
            self.end_of_keys(g, regs, tile, g.tasks.rows_k)
        exponents = self.special and self.special.exponents(graph, now)
        if self.special:
            if masked:
                self.special.tops(regs, now)
            moved = self.special.out_of_range(regs, exponents, now)
        else:
            moved = self.online.out_of_range(g, regs)
        self.move_if(g, regs, moved, exponents)
        self.exponentials(g, regs, exponents)
        return moved

    def exponentials(self, g, regs, exponents):
        if self.special:
            self.special.exponentials(regs, exponents)
        else:
            self.online.exponentials(g, regs, guarded=False)

    @cute.jit
    def move_if(self, g, regs, moved, exponents: Constexpr):
        if moved:
            self.move(g, regs, exponents)

    def move(self, g, regs, exponents):
        """``Softmax.move``, after which max is a number: ``LOWEST`` for a row that has seen no key, whose exponentials
        are 0 then. What is subtracted need not be looked at, in tiles where all rows may see none neither."""
        online, lowest = self.online, Float32(LOWEST)
        tk.copy(regs.correct, regs.max)
        tk.row_max(regs.shift, regs.s)
        if self.special:
            for r in range(2):
                regs.shift.tensor[r] = exponents.of(r, regs.shift.tensor[r])
        else:
            tk.mul(regs.shift, regs.shift, g.scale)
        online.raise_max(regs)
        for r in range(2):
            regs.max.tensor[r] = cute.arch.fmax(regs.max.tensor[r], lowest)
        tk.sub(regs.correct, regs.correct, regs.max)
        tk.exp2(regs.correct, regs.correct)
        tk.mul(regs.norm, regs.norm, regs.correct)
        if self.special:
            self.special.shift(regs, exponents)

    def place(self, regs, tile):
        """(batch, head, the thread's first row, its first column) of a tile of scores."""
        row = regs.task["tile"] * self.config.rows + regs.wg * 64 + tk.first_row()
        return regs.task["batch"], regs.task["head"], row, tile * self.config.kv + tk.first_col()

    def inputs(self, place, r, j):
        batch, head, row, col = place
        return dict(b=(batch, 0), h=(head, 0), q=(row, 8 * r), kv=(col, 8 * (j // 2) + j % 2))

    def of_task(self, g, regs) -> Known:
        """Once for a task."""
        shared = dict(b=(regs.task["batch"], 0), h=(regs.task["head"], 0))
        rows = self.look_at.of_rows(g.mask, shared, self.place(regs, Int32(0))[2])
        if self.spec.score is None or self.near:
            return Known(None, rows)
        if self.special:
            return Known(self.special.numbers(g, shared), rows)
        graph = Emitted(self.spec.score, g.score, sums=True)
        graph.prepare("score", "q", "kv", **shared)
        return Known(graph, rows)

    def ready(self, regs, tile, known: Known):
        """The score function, of which is made what needs no score and no key: before the scores are there."""
        place = self.place(regs, tile)
        if self.special:
            return self.special.ready(known.score, lambda r, j: self.inputs(place, r, j))
        if known.score is None:
            return None
        graph = known.score.again()
        for r in range(2):
            inputs = self.inputs(place, r, 0)
            graph.prepare("score", "kv", **{name: inputs[name] for name in ("b", "h", "q")})
        return graph

    def score(self, g, regs, tile, graph):
        """The result: what is kept of a tile where that is ``special``."""
        now = None
        if self.special:
            now, place = cute.make_rmem_tensor((4,), Float32), self.place(regs, tile)
            self.special.take(g, regs, graph, now, [((r, j), self.inputs(place, r, j))
                                                   for j in range(regs.s.cols // 4) for r in range(2)])
        elif self.near:
            self.near_or_far(g, regs, tile)
        elif self.spec.score is not None:
            self.score_each(g, regs, tile, graph)
        return now

    @cute.jit
    def near_or_far(self, g, regs, tile):
        """Where no tanh of a warp's is of more than 1, as most scores are far below a softcap, it is a polynomial:
        exponentials and reciprocals are what the softmax itself is short of."""
        if self.all_near(g, regs, tile):
            self.score_each(g, regs, tile, Emitted(self.spec.score, g.score, near=True))
        else:
            self.score_each(g, regs, tile, Emitted(self.spec.score, g.score))

    def all_near(self, g, regs, tile):
        top, graph = [Float32(0.0) for _ in range(4)], Emitted(self.spec.score, g.score)
        for n, (_, inputs) in enumerate(self.scores(g, regs, tile)):
            for i in self.near:
                top[n % 4] = cute.arch.fmax(top[n % 4], cute.math.absf(graph.node_at(i, **inputs)))
        top = cute.arch.fmax(cute.arch.fmax(top[0], top[1]), cute.arch.fmax(top[2], top[3]))
        return cute.arch.vote_all_sync(top <= Float32(1.0))

    def score_each(self, g, regs, tile, graph):
        view = regs.s.rows_view
        for at, inputs in self.scores(g, regs, tile):
            view[at] = graph.at(**inputs)

    def scores(self, g, regs, tile):
        """(place in a thread's tile, inputs of the score function) of each."""
        place, view = self.place(regs, tile), regs.s.rows_view
        for j in range(regs.s.cols // 4):
            for r in range(2):
                yield (r, j), dict(self.inputs(place, r, j), score=(Scaled(view[r, j], g.score_scale), (r, j)))

    @cute.jit
    def look_if(self, g, regs, tile, seen, known: Constexpr):
        """``look``, unless the task's first tile is full."""
        all_seen(seen)
        if const_expr(self.spec.mask is not None):
            if regs.task["n_masked_right"] != 0:
                self.look(g, regs, tile, seen, known)

    def look(self, g, regs, tile, seen, known: Known):
        """Which of a tile's keys its rows see."""
        batch, head, row, col = self.place(regs, tile)
        self.look_at.look(g.mask, dict(b=(batch, 0), h=(head, 0)), (row, col), self.config.kv, seen,
                          known.rows)

    def mask(self, regs, seen, masked: bool):
        """Scores of keys that a row does not see become -inf."""
        view = regs.s.rows_view
        for r in range(2):  # a row after the other: ptxas makes predicates of seven bits of a word at once (R2P)
            for j in range(regs.s.cols // 4 if masked else 0):
                view[r, j] = chosen(seen, r, j, view[r, j], -Float32.inf)

    @cute.jit
    def keys_of(self, g, regs):
        """How many keys a task may see: of one without blocks none."""
        keys = g.tasks.rows_k
        if const_expr(self.spec.blocks):
            if regs.task["n_masked_right"] < 0:
                keys = keys * 0
        return keys

    @cute.jit
    def end_of_keys(self, g, regs, tile, keys):
        """Columns behind the last key become -inf."""
        limit = keys - tile * self.config.kv
        if limit < self.config.kv:
            tk.right_fill(regs.s, limit, -Float32.inf)

    @cute.jit
    def end_of_full(self, g, regs, numbers):
        """``end_of_keys`` of a tile that needs nothing else, whose number is asked for where the keys end inside a
        listed block alone. numbers: of tiles of K, of which this one is not released yet."""
        if const_expr(self.spec.score is None):
            if g.tasks.rows_k % (self.config.kv * self.spec.kv_per) != 0:
                tile = cute.arch.make_warp_uniform(numbers[0, regs.k.stage])
                self.end_of_keys(g, regs, tile, g.tasks.rows_k)

    @cute.jit
    def statistics(self, g, regs, lse):
        """As ``Softmax.statistics``, and O times the norm's reciprocal: 0 for a row that saw no key, whatever the
        values are that its weights of 0 met."""
        self.online.statistics(g, regs, lse)
        tk.mul_row(regs.o, regs.o, regs.last_norm)
        for r in range(2):
            empty = regs.last_norm.tensor[r] == Float32(0.0)
            if empty:
                self.clear_row(regs, r)

    def clear_row(self, regs, r: Constexpr[int]):
        view = regs.o.rows_view
        for j in range(regs.o.cols // 4):
            view[r, j] = Float32(0.0)

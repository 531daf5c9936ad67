"""The losses of long rows of logits: every thread streams its part of the row and keeps two numbers of it."""
import functools
import operator
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

from .. import tile as tk
from ..rows.one_pass.columns import InterleavedColumns
from ..rows.one_pass.copies import in_registers
from ..rows.one_pass.kernel import Row
from ..softmax.online import INF, OnlineRow, exp, finite, larger, log
from ..utils import warp_reduce, widened
from .class_rows import ClassRows, Options, Saved, Target, element, rows_of


class Source(NamedTuple):
    """What a thread streams. x: its (vector, vectors of the row) in global memory. ring: (vector, vectors of a
    step, stages) in shared memory, or None. place: where it begins."""

    x: cute.Tensor
    ring: Optional[cute.Tensor]
    place: tuple


class StreamingRow:
    """A part of CrossEntropy, as `forward.HeldRow`: a row of which nothing is held, as a forward needs only its lse and
    the target's logit. A thread goes over it in steps of a few vectors, with the largest value so far and the sum of
    the exponentials below it. Rows are exchanged once, at their end, and a block's bytes on their way do not depend on
    how many registers it has:

      step            0          1          2          3 ...
      copies under    0 1        1 2        2 3        3 4          a ring of 3 stages; a thread copies (cp.async)
      way at its end what it reads itself: no waits between threads
      reads           0          1          2          3

    With load = "registers" there is no ring: a step's loads wait for memory, and the other blocks of the
    multiprocessor go on meanwhile. Where several blocks are on each, at different places of their rows, one's exchange,
    and the next one's start, are covered by the others; the longest rows, which seldom exchange, have one block with
    more on its way. The blocks of a cluster stream side by side.
    """

    def __init__(self, spec, config):
        self.config, self.rows = config, rows_of(spec, config, columns=InterleavedColumns)
        self.classes = ClassRows(spec, self.rows)
        self.online = OnlineRow(self.rows, self.classes.value)
        self.followed = spec.followed

    def work(self, here, mX, mT, mW, mLoss, mSaved, mAll, mD, o: Options):
        """One thread's."""
        rows, classes, online = self.rows, self.classes, self.online
        place, saved = rows.place(here, mX), Saved.of(mSaved, mAll, mX.shape[0])
        given = mT[place.there]  # not needed before the row's end: the load has the whole row to arrive
        top, total = self.over_row(self._source(mX, place), o)
        target, first = classes.known_target(Int64(given), mW, o), place.col <= 0
        z = self.at_target(mX, place, target, first, o)
        if self.followed:
            cute.arch.griddepcontrol_launch_dependents()
        top, total = online.join(*self.of_warp(top, total), Row(None, place, 0))
        rest = log(total)
        loss = classes.loss(target, top - z + rest, top + rest, None, o)
        classes.put_loss(mLoss, saved, loss, (top, rest, None), place, first, first, mX.shape[0])

    def _source(self, mX, place: tuple) -> Source:
        t, here, ring = self.rows.tile, place.here, None
        if self.config.load == "shared":
            shape = (t.vector, self.config.vectors, self.config.stages, t.threads)
            stride = (1, t.vector * t.threads, t.vector * t.threads * self.config.vectors, t.vector)
            layout = cute.make_layout(shape, stride=stride)
            memory = here.smem.allocate_tensor(self.rows.dtype, layout, byte_alignment=16)
            ring = memory[None, None, None, here.thread]
        return Source(self.rows.copies.view(mX, (place.there, place.col)), ring, place)

    @cute.jit
    def at_target(self, mX: cute.Tensor, place: Constexpr, target: Constexpr[Target], first, o: Constexpr[Options]):
        """z of the target, in the row's first thread. From L2, where streaming has just brought it; it comes while the
        warps exchange."""
        z = Float32(0)
        if first & target.known:
            z = element(mX, (place.there, target.column)).to(Float32)
        return self.classes.capped(z, o)

    @cute.jit
    def over_row(self, source: Constexpr[Source], o: Constexpr[Options]):
        """(largest value, sum of exponentials below it) of this thread's vectors."""
        begin, end, steps = self._whole_steps()
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = -INF, 0.0
        for step in cutlass.range_constexpr(self.config.stages - 1 if source.ring is not None else 0):
            self._start(source, Int32(step))
        for step in cutlass.range_constexpr(begin):
            self._step(source, pair, step, o)
        for step in cutlass.range(begin, end, unroll=1):
            self._step(source, pair, step, o)
        for step in cutlass.range_constexpr(end, steps):
            self._step(source, pair, step, o)
        if const_expr(self.rows.cluster_n > 1):
            tk.cluster_wait()
        return pair[0], pair[1]

    def _whole_steps(self):
        """(begin, end, steps): all vectors of steps begin .. end - 1 lie within the row, in every thread."""
        per, blocks = self.config.vectors, self.rows.tile.blocks
        steps = -(-blocks // per)
        whole = [all(j < blocks and self.rows.whole(j) for j in range(s * per, s * per + per)) for s in range(steps)]
        begin = 0 if whole[0] or True not in whole else 1
        end = begin + sum(whole[begin:])
        return begin, end, steps

    @cute.jit
    def _start(self, source: Constexpr[Source], step: Int32):
        """Start a step's copies; past the row's end there is nothing to copy, but a group to count."""
        rows, copies = self.rows, self.rows.copies
        atom, stage = copies.load_atom(source.x), step % self.config.stages
        # with it, fewer registers: 37, and not 42
        within = rows.first(source.place, step * self.config.vectors) < rows.N
        for v in cutlass.range_constexpr(self.config.vectors):
            j = step * self.config.vectors + v
            if within & (rows.first(source.place, j) < rows.N):
                copies.copy(atom, source.x[None, j], source.ring[None, v, stage])
        cute.arch.cp_async_commit_group()

    def _step(self, source: Source, pair, step, o: Options):
        """A step's vectors into the pair. step: a number known now, where not all of them need lie within the row."""
        if source.ring is not None:
            cute.arch.cp_async_wait_group(self.config.stages - 2)
            self._start(source, Int32(step + self.config.stages - 1))  # over the step before, which has been read
        vectors = self._vectors(source, step)
        values = [self._value(source, x, step * self.config.vectors + v, o) for v, x in enumerate(vectors)]
        tops = [x.reduce(cute.ReductionOp.MAX, -INF, 0) for x in values]
        top = functools.reduce(larger, tops, pair[0])
        below = finite(top)
        exponentials = [exp(x - below) for x in values]
        total = sum(exponentials[1:], exponentials[0]).reduce(cute.ReductionOp.ADD, 0.0, 0)
        pair[1] = pair[1] * exp(pair[0] - below) + total
        pair[0] = top

    def _vectors(self, source: Source, step):
        """Of a step, as they lie in memory; all at once, where they come from global memory."""
        per, known = self.config.vectors, isinstance(step, int)
        rows, copies = self.rows, self.rows.copies
        there = [v for v in range(per) if not known or step * per + v < rows.tile.blocks]
        if source.ring is not None:
            return [source.ring[None, v, step % self.config.stages] for v in there]
        held = [cute.make_rmem_tensor(rows.vector, rows.dtype) for _ in there]
        for v in there:
            j = step * per + v
            inside = source.place.inside[j] if known else True
            copies.fetch(copies.load_atom(source.x), source.x[None, j], held[v], inside)
        return held

    def _value(self, source: Source, x, j, o: Options):
        """z of vector j; -inf outside the row."""
        z = self.classes.value(widened(in_registers(x)), o)
        return self.rows.masked(z, Row(None, source.place, 0), j, -INF) if isinstance(j, int) else z

    def of_warp(self, top, total):
        """The same of this warp's part of the row."""
        most = warp_reduce(top, larger, self.online.lanes)
        return most, warp_reduce(total * exp(top - finite(most)), operator.add, self.online.lanes)

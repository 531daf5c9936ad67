"""Rotary position embedding: pairs of columns of every head rotate by an angle that depends on the token's position."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import tile as tk
from ..runtime.compile import fake
from ..tile import vectors
from ..utils import domain_offset_i64
from . import plan


class Given(NamedTuple):
    """What came in: see `Rope.__call__`."""

    mX: cute.Tensor
    mO: cute.Tensor
    mX2: Optional[cute.Tensor]
    mO2: Optional[cute.Tensor]
    mCos: cute.Tensor
    mSin: cute.Tensor
    mPositions: Optional[cute.Tensor]
    mStarts: Optional[cute.Tensor]
    offset: Int32
    sign: Float32


class Work(NamedTuple):
    """Units in all; groups of heads of the first tensor and of the second; dividers by all groups and by the length."""

    units: Int32
    groups: Int32
    more: Int32
    all_groups: cute.FastDivmodDivisorV2
    length: cute.FastDivmodDivisorV2


class Heads(NamedTuple):
    """What a thread works on in one token: addresses of its first column in head 0 of x and of the result, bytes from
    head to head, how many heads there are, the thread's first one and how far it is to its next."""

    source: Int64
    source_step: Int64
    result: Int64
    result_step: Int64
    count: Int32
    first: Int32
    pitch: Int32


class Rope:
    """Work is counted in units, and a thread takes one: a chunk of columns (plan.columns) in `heads_each` heads of a
    token, with cos and sin of its columns in registers for all of them.

        unit = (token * groups + group) * chunks + chunk;   group g has the heads g, g + groups, g + 2 groups, ...

    so neighbouring threads have neighbouring columns, then heads. Every load of x is in flight before the position is
    looked up; a pair is loaded and stored by one thread, so the result may be x. A thread past the end loads what the
    last one does and stores nothing. No barrier; shared memory only keeps further blocks off an SM (plan.plan_rope).

    Two tensors (q and k of the same tokens): the groups of q come before those of k.
    A position outside the table gives NaN; a token of no sequence (before the first of cu_seqlens, or from the last on)
    is copied.
    """

    memory = cute.AddressSpace.gmem

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.columns, self.past_l1 = plan.columns(spec), plan.past_l1(spec)
        self.dtype = tk.element_type(spec.dtype)

    def fake_arguments(self):
        """Compiled for what `__call__` has: x, result and table with any strides but the last."""
        spec = self.spec
        width = tk.element_type(spec.dtype).width
        length, batch = fake.sym(), fake.sym()
        leading = (length,) if spec.varlen else (batch, length)
        wide = spec.rotary_dim + spec.rest

        def heads(count):
            strides = tuple(fake.sym64(divisibility=spec.vector) for _ in range(len(leading) + 1))
            return fake.tensor(spec.dtype, (*leading, count, wide), (*strides, 1), align=spec.vector * width // 8)

        rows, table_bytes = fake.sym(), plan.table_alignment(spec)
        per = table_bytes // (tk.element_type(spec.table).width // 8)

        def table():
            stride = (fake.sym64(divisibility=per), 1)
            return fake.tensor(spec.table, (rows, spec.rotary_dim // 2), stride, align=table_bytes)

        def integers(shape):
            return fake.tensor(spec.index, shape, tuple(fake.sym64() for _ in shape),
                               align=tk.element_type(spec.index).width // 8)

        positions = None
        if spec.positions == "offsets":
            positions = integers((fake.sym() if spec.varlen else batch,))
        elif spec.positions == "ids":
            positions = integers(leading)
        starts = None
        if spec.varlen and spec.positions in ("offset", "offsets"):
            starts = fake.tensor("int32", (fake.sym(),), (1,), align=4)
        count, count_2 = fake.sym(), fake.sym()
        second = (heads(count_2), heads(count_2)) if spec.tensors == 2 else (None, None)
        return (heads(count), heads(count), *second, table(), table(), positions, starts, Int32(0), Float32(1))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mO: cute.Tensor, mX2: Optional[cute.Tensor], mO2: Optional[cute.Tensor],
                 mCos: cute.Tensor, mSin: cute.Tensor, mPositions: Optional[cute.Tensor],
                 mStarts: Optional[cute.Tensor], offset: Int32, sign: Float32, stream: cuda.CUstream):
        """mX, mO: (B, S, H, D), or (total, H, D) where lengths vary; mX2, mO2: a second pair or None.
        mCos, mSin: (rows, rotary_dim / 2). mPositions: offsets (B,) or ids (B, S) or (total,), or None.
        mStarts: cu_seqlens (B + 1,) or None. offset: of all positions. sign: 1, or -1 to rotate back."""
        given = Given(mX, mO, mX2, mO2, mCos, mSin, mPositions, mStarts, offset, sign)
        work = self._work(given)
        self.kernel(given, work).launch(grid=[cute.ceil_div(work.units, self.config.threads), 1, 1],
                                        block=[self.config.threads, 1, 1], smem=plan.held_back(self.config),
                                        stream=stream)

    def _work(self, g):
        each, length = self.config.heads_each, g.mX.shape[-3]
        groups = cute.ceil_div(g.mX.shape[-2], each)
        more = Int32(0) if g.mX2 is None else cute.ceil_div(g.mX2.shape[-2], each)
        tokens = length if self.spec.varlen else g.mX.shape[0] * length
        return Work(tokens * (groups + more) * self.columns.chunks, groups, more,
                    cute.fast_divmod_create_divisor_v2(groups + more), cute.fast_divmod_create_divisor_v2(length))

    @cute.kernel
    def kernel(self, g: Given, work: Work):
        self.thread(cute.arch.block_idx()[0] * self.config.threads + cute.arch.thread_idx()[0], g, work)

    @cute.jit
    def thread(self, unit: Int32, g: Given, work: Work):
        """One unit. Knows no block and no thread: the tests run it on a CPU, one after the other."""
        at = cutlass.min(unit, work.units - 1)
        token, group, chunk = (Int32(i) for i in plan.unit_of(at, self.columns.chunks, work.all_groups))
        batch, place = (Int32(i) for i in divmod(token, work.length))
        rotates, first, gap = plan.place_of(self.spec, chunk, cutlass.select_)
        where = (token, 0, first) if const_expr(self.spec.varlen) else (batch, place, 0, first)
        heads = self._heads(g.mX, g.mO, where, group, work.groups)
        if const_expr(g.mX2 is not None):
            second = self._heads(g.mX2, g.mO2, where, group - work.groups, work.more)
            heads = _either(group < work.groups, heads, second)
        held = [self._load(heads, j, gap) for j in range(self.config.heads_each)]

        row, in_sequence = self._position(g, token, batch, place)
        if const_expr(rotates is not True):
            chunk = cutlass.select_(rotates, chunk, 0)  # where nothing rotates, any row's first columns will do
        cos, sin = self._angle(g, row, chunk)
        rotates = _both(rotates, in_sequence)
        for j in cutlass.range_constexpr(self.config.heads_each):
            head = heads.first + j * heads.pitch
            if (unit < work.units) & (head < heads.count):
                self._store(heads, head, gap, self._rotate(held[j], cos, sin, rotates))

    # ---- which heads and position ----------------------------------------------------------

    def _heads(self, mX, mO, where, first, groups):
        bytes_ = self.dtype.width // 8
        address = [domain_offset_i64(where, m).iterator.toint() for m in (mX, mO)]
        step = [Int64(m.stride[-2]) * bytes_ for m in (mX, mO)]
        return Heads(address[0], step[0], address[1], step[1], mX.shape[-2], first, groups)

    @cute.jit
    def _position(self, g: Given, token, batch, place):
        """(row of the table, does the token belong to a sequence?)"""
        inside = True
        if const_expr(g.mStarts is not None):
            batch, place, inside = _sequence(g.mStarts, token)
        row = place + g.offset
        if const_expr(self.spec.positions == "token"):
            row = token
        elif const_expr(self.spec.positions == "offsets"):
            row = row + g.mPositions[batch]
        elif const_expr(self.spec.positions == "ids"):
            row = g.mPositions[token] if const_expr(self.spec.varlen) else g.mPositions[batch, place]
        return row, inside

    @cute.jit
    def _angle(self, g: Given, row, chunk):
        """cos and signed sin of a chunk, as fp32; NaN where the row is not in the table and the caller could not know.
        """
        n = const_expr(plan.table_vector(self.spec))
        known = const_expr(plan.rows_are_known(self.spec))
        valid = (row >= 0) & (row < g.mCos.shape[0])
        at = Int32(row) if const_expr(known) else Int32(cutlass.select_(valid, row, type(row)(0)))
        cos, sin = (vectors.wide(vectors.load(vectors.run_at(m, (at, chunk * n), n))) for m in (g.mCos, g.mSin))
        if const_expr(not known):
            cos = [cutlass.select_(valid, c, Float32(float("nan"))) for c in cos]
        return cos, [g.sign * s for s in sin]

    # ---- the elements of a thread ---------------------------------------------------------------------

    def _runs(self, address, step, head, gap):
        """Where a head's elements of this thread are: one or two runs of `vector`."""
        v, bytes_ = self.spec.vector, self.dtype.width // 8
        begin = address + Int64(head) * step
        places = [begin, begin + Int64(gap) * bytes_] if self.columns.two else [begin]
        pointers = [cute.make_ptr(self.dtype, p, self.memory, assumed_align=v * bytes_) for p in places]
        return [cute.make_tensor(p, cute.make_layout(v)) for p in pointers]

    def _load(self, heads, j, gap):
        head = cutlass.min(heads.first + j * heads.pitch, heads.count - 1)
        return [vectors.load(run, self.past_l1) for run in self._runs(heads.source, heads.source_step, head, gap)]

    def _rotate(self, held, cos, sin, rotates):
        """The results of what `_load` gave, as it lies in memory."""
        values = [vectors.wide(part) for part in held]
        a, b = values if self.columns.two else (values[0][::2], values[0][1::2])
        rotated = [(x * c - y * s, y * c + x * s) for x, y, c, s in zip(a, b, cos, sin, strict=True)]
        if rotates is not True:
            rotated = [(cutlass.select_(rotates, new_x, x), cutlass.select_(rotates, new_y, y))
                      for (new_x, new_y), x, y in zip(rotated, a, b, strict=True)]
        if self.columns.two:
            return [vectors.packed(part, self.dtype) for part in zip(*rotated, strict=True)]
        return [vectors.packed([x for pair in rotated for x in pair], self.dtype)]

    def _store(self, heads, head, gap, results):
        for result, run in zip(results, self._runs(heads.result, heads.result_step, head, gap), strict=True):
            vectors.store(result, run, once=True)


def _either(condition, a, b):
    return Heads(*(cutlass.select_(condition, x, y) for x, y in zip(a, b, strict=True)))


def _both(a, b):
    if a is True or b is True:
        return b if a is True else a
    return a & b


@cute.jit
def _sequence(starts: cute.Tensor, token):
    """(the last sequence that begins at or before the token, the token's place in it, is it within?)"""
    low, high = Int32(0), Int32(starts.shape[0] - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= token:
            low = middle
        else:
            high = middle
    begin = starts[low]
    # in 64 bits: a place that wraps around could be one of the table
    return low, Int64(token) - begin, (begin <= token) & (token < starts[low + 1])

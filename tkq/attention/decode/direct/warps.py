"""Up to 8 packed queries over a float8 cache: each warp reads keys of its own straight into its registers."""
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode.copies import pack_f16x2, widen4
from tkq.attention.decode.direct.fragments import EARLIER, LATER, mma, pairs, transposed
from tkq.attention.decode.direct.output import LENGTH, PAGE, DirectOutput
from tkq.attention.decode.direct.rows import DirectRows
from tkq.attention.decode.output import tell
from tkq.attention.decode.scaling import Scaling
from tkq.attention.decode.walk import Walk

INF = Float32.inf
COLUMNS = range(2)  # of the 8 packed queries a lane has 2t and 2t + 1


class DirectShared(NamedTuple):
    """o (warps * 8 * columns, 1) and, of each warp, what it took from scores, its sums (16, warps); ticket (1, 1)."""

    o: cute.Tensor
    sums: cute.Tensor
    ticket: cute.Tensor


@dataclass(frozen=True)
class DirectState:
    """A lane's registers, 4 * g + t. q: of packed query g, fp16 in words. k, v: words of e4m3 of a step. s: scores of
    keys g and g + 8 of each 16, of queries 2t and 2t + 1, in this order of fours; o: of columns of V likewise. max,
    norm, scale, of_v, first, end: as in `State`, of queries 2t and 2t + 1. fault: LENGTH or PAGE, or both, where such
    a thing lied. scales: of tokens, of the lane's key."""

    q: Any
    k: Any
    v: Any
    s: Any
    o: Any
    max: Any
    norm: Any
    scale: tk.RowVec
    of_v: Any
    first: Any
    end: Any
    fault: Any
    scales: Any


class Direct:
    """What the warps of a block do in the place of producers and a consumer.

    Warp w takes steps w, w + W, .. of a segment's keys, with a softmax of its own; the warps' results are merged where
    the segment ends. Nothing is shared until then, and no warp waits for another.

      S' = K Q'     16 keys x 8 queries: K is the first operand, whose fragments are words of its rows as they lie in
                    memory, widened: the order of the columns is the product's own affair, and q comes in the same
      O' += V' P'   16 columns x 8 queries: words of two keys' rows become pairs of one column's by a byte permutation;
                    P' is S' with each 8 x 8 transposed

    Loads: K of the next step as soon as K is in products, V likewise: a warp has a step of keys on its way at all times
    but while it computes.
    """

    def __init__(self, spec, config):
        self.spec, self.config, self.walk = spec, config, Walk(spec)
        self.rows, self.scaling = DirectRows(spec, config), Scaling(spec, config)
        self.output, self.tiles = DirectOutput(spec, config), config.step // 16

    def shared(self, al: tk.SharedAllocator) -> DirectShared:
        return DirectShared(*self.output.shared(al), al.vector(1, 1, Int32))

    def state(self) -> DirectState:
        spec, tiles = self.spec, self.tiles
        ints, floats = (lambda n, dtype=dtype: cute.make_rmem_tensor((n,), dtype) for dtype in (Int32, Float32))
        return DirectState(
            q=ints(spec.head_dim // 8), k=ints(tiles * spec.head_dim // 8), v=ints(tiles * spec.head_dim_v // 8),
            s=floats(4 * tiles), o=floats(spec.head_dim_v // 4), max=floats(2), norm=floats(2), scale=tk.rv(),
            of_v=floats(1), first=ints(3), end=ints(3), fault=ints(1), scales=floats(2))

    @cute.jit
    def run(self, g, smem):
        regs = self.state()
        self.walk.each_segment(g, lambda s: self.segment(g, smem, regs, s))
        self.output.refuse_others(g)

    @cute.jit
    def segment(self, g, smem, regs, s):
        fine = s.inside & self.walk.planned(g, s)
        regs.fault[0] = cutlass.select_(fine, Int32(0), Int32(LENGTH))
        tell(g.plan, fine, cute.arch.thread_idx()[0])
        own = s._replace(length=cutlass.min(s.length, s.end * self.config.keys))  # keys of other parts stay out
        begin, stride = s.first * self.config.keys + tk.warp_id() * self.config.step, Int32(
            self.config.warps * self.config.step)
        place, step = self.rows.start(g, begin, stride)
        now, place = self.rows.find(g, own, place, step, begin)
        soon, place = self.rows.find(g, own, place, step, begin + stride)
        regs.k.fill(0)
        regs.v.fill(0)  # where no row is, a lane's words stay what they were: never of another segment
        rows = self.rows.look(g, own, now)
        self.rows.load_k(regs.k, rows)
        self.rows.load_v(regs.v, rows)
        self.rows.load_scales(g, s, regs.scales, rows)
        page, row, seen = soon
        self.load_q(g, regs, s)
        self.scaling.begin(g, regs, s)
        self.limits(g, regs, s)
        regs.o.fill(0.0)
        regs.norm.fill(0.0)
        regs.max.fill(-INF)
        for key in cutlass.range(begin, own.length, stride, unroll=1):
            later = self.rows.look(g, own, (page, row, seen))
            (page, row, seen), place = self.rows.find(g, own, place, step, key + 2 * stride)
            regs.fault[0] = regs.fault[0] | cutlass.select_(rows.fault, Int32(PAGE), Int32(0))
            self.scores(regs)
            self.rows.load_k(regs.k, later)
            self.softmax(g, regs, key, rows.there)
            self.rows.load_scales(g, s, regs.scales, later)
            self.values(regs)
            self.rows.load_v(regs.v, later)
            rows = later
        self.output.write(g, smem, regs, s)

    @cute.jit
    def load_q(self, g, regs, s):
        """Packed query g, narrowed to fp16; zeros behind the last."""
        row, dim = tk.lane_id() // 4, self.spec.head_dim
        wide = cute.make_rmem_tensor((dim // 4,), tk.element_type(self.spec.dtype))
        wide.fill(0.0)
        self.read_q(g, s, row, cute.recast_tensor(wide, Int32))
        top = Float32(0.0)
        for j in cutlass.range_constexpr(dim // 4):
            x = Float32(wide[j])
            top = cute.arch.fmax(top, cute.arch.fmax(x, -x))
        for lane in (1, 2):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=lane))
        factor, inverse = self.scaling.of_row(top)
        for e in COLUMNS:
            regs.scale.tensor[e] = cute.arch.shuffle_sync(inverse, 4 * (tk.lane_id() % 4 * 2 + e))
        narrow = cute.make_rmem_tensor((dim // 4,), cutlass.Float16)
        for j in cutlass.range_constexpr(dim // 4):
            narrow[j] = cutlass.Float16(Float32(wide[j]) * factor)
        words = cute.recast_tensor(narrow, Int32)
        for j in cutlass.range_constexpr(dim // 8):
            regs.q[j] = words[j]

    @cute.jit
    def read_q(self, g, s, row, words):
        """A lane's words of its row: of each piece of K that it reads, the same columns."""
        x = self.output.rows_of(g.q, g, s)
        if row < s.queries * g.group:
            for piece in self.rows.k_pieces:
                column = piece.first + piece.bytes * (tk.lane_id() % 4)
                at = (x.iterator + (cute.crd2idx((row, 0), x.layout) + column)).align(16)
                found = cute.make_tensor(cute.recast_ptr(at, dtype=Int32), cute.make_layout(piece.bytes // 2))
                for j in range(piece.bytes // 2):
                    words[2 * piece.word + j] = found[j]

    @cute.jit
    def limits(self, g, regs, s):
        """The keys that each of the lane's two queries sees."""
        if const_expr(self.spec.edges):
            for e in COLUMNS:
                own = s.length - s.queries + (tk.lane_id() % 4 * 2 + e) // g.group
                regs.first[e] = cutlass.select_(g.left < 0, Int32(0), own - g.left)
                end = cutlass.min(own + g.right + 1, s.length)
                regs.end[e] = cutlass.select_(g.right < 0, s.length, end)

    def scores(self, regs):
        """S' of a step."""
        words = self.spec.head_dim // 16
        regs.s.fill(0.0)
        for w in range(words):
            for i in range(self.tiles):
                (a, c), (b, d) = (widen4(regs.k[(2 * i + r) * words + w]) for r in range(2))
                self.add(regs.s, 4 * i, (a, b, c, d), (regs.q[2 * w], regs.q[2 * w + 1]))

    def add(self, to, at, a, b):
        """to[at .. at + 4] += A @ B."""
        for e, x in enumerate(mma([to[at + e] for e in range(4)], a, b)):
            to[at + e] = x

    @cute.jit
    def softmax(self, g, regs, key, there):
        """S' becomes exponentials, and O what it is in their unit."""
        s, best, norm, count = regs.s, regs.max, regs.norm, 4 * self.tiles
        factors = [regs.scale.tensor[e] for e in COLUMNS]
        by_token = self.spec.scales == "token"
        if const_expr(by_token):
            self.times_scales(s, regs.scales[0])
        if const_expr(self.spec.softcap):
            for j in cutlass.range_constexpr(count):
                s[j] = cute.math.tanh(s[j] * factors[j % 2], fastmath=True)
            factors = [g.scale, g.scale]
        # Rounded before the largest is found: the exponential of the largest is no more than 2^15 however large it is.
        for j in cutlass.range_constexpr(count):
            s[j] = s[j] * factors[j % 2]
        self.mask(regs, key, there)
        tops = [s[e] for e in COLUMNS]
        for j in cutlass.range_constexpr(2, count):
            tops[j % 2] = cute.arch.fmax(tops[j % 2], s[j])
        tops = [self.scaling.base(top) for top in tops]
        if cute.arch.vote_any_sync((tops[0] > best[0]) | (tops[1] > best[1])):
            self.raise_max(regs, tops)
        bases = [cutlass.select_(best[e] == -INF, Float32(0.0), best[e]) for e in COLUMNS]
        for j in cutlass.range_constexpr(count):
            s[j] = cute.math.exp2(s[j] - bases[j % 2], fastmath=True)
            norm[j % 2] = norm[j % 2] + s[j]
        if const_expr(by_token):
            self.scale_values(regs)

    @cute.jit
    def raise_max(self, regs, tops):
        """A key of the step has a larger score than all before."""
        for e in cutlass.range_constexpr(2):
            top = tops[e]
            for step in cutlass.range_constexpr(3):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=4 << step))
            before = regs.max[e]
            top = cute.arch.fmax(before, top)
            correct = cute.math.exp2(before - cutlass.select_(top == -INF, Float32(0.0), top), fastmath=True)
            regs.max[e] = top
            regs.norm[e] = regs.norm[e] * correct
            for j in cutlass.range_constexpr(self.spec.head_dim_v // 8):
                regs.o[2 * j + e] = regs.o[2 * j + e] * correct

    def times_scales(self, s, scale):
        """Scores or exponentials, times the scales of their keys, which lanes have in order."""
        for i in range(self.tiles):
            for r in range(2):
                by = cute.arch.shuffle_sync(scale, 16 * i + 8 * r + tk.lane_id() // 4)
                for e in COLUMNS:
                    s[4 * i + 2 * r + e] = s[4 * i + 2 * r + e] * by

    @cute.jit
    def scale_values(self, regs):
        """Exponentials, times their values' scales over the largest that there was, O's unit."""
        own = cute.arch.fmax(regs.scales[1], -regs.scales[1])
        if cute.arch.vote_any_sync(own > regs.of_v[0]):
            top = own
            for step in cutlass.range_constexpr(5):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
            top = cute.arch.fmax(regs.of_v[0], top)
            correct = regs.of_v[0] * cute.arch.rcp_approx(top)
            regs.of_v[0] = top
            for j in cutlass.range_constexpr(self.spec.head_dim_v // 4):
                regs.o[j] = regs.o[j] * correct
        self.times_scales(regs.s, regs.scales[1] * cute.arch.rcp_approx(regs.of_v[0]))

    @cute.jit
    def mask(self, regs, key, there):
        """Scores of keys that are not there, or that the query does not see, become -inf."""
        step, own = self.config.step, tk.lane_id() // 4
        # Of 16 keys two lanes have each: all are there with all bits also then.
        if there != Int32(-1):
            mine = there >> own
            for j in cutlass.range_constexpr(2 * self.tiles):
                if mine & Int32(1 << 8 * j) == 0:
                    regs.s[2 * j] = -INF
                    regs.s[2 * j + 1] = -INF
        if const_expr(self.spec.edges):
            for e in cutlass.range_constexpr(2):
                first, end = regs.first[e] - key - own, regs.end[e] - key - own
                if first > 0 or end < step:
                    for j in cutlass.range_constexpr(2 * self.tiles):
                        if 8 * j < first or 8 * j >= end:
                            regs.s[2 * j + e] = -INF

    def values(self, regs):
        """O' += V' P' of a step."""
        words = self.spec.head_dim_v // 32
        for i in range(self.tiles):
            p = [transposed(pack_f16x2(regs.s[4 * i + 2 * r], regs.s[4 * i + 2 * r + 1])) for r in range(2)]
            for w in range(words):
                keys = [regs.v[(4 * i + j) * words + w] for j in range(4)]
                for h, selector in enumerate((EARLIER, LATER)):
                    first, second = (widen4(pairs(*keys[2 * j:2 * j + 2], selector)) for j in range(2))
                    self.add(regs.o, 4 * (2 * w + h), (*first, *second), p)

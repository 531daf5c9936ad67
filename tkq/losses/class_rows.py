"""What is common to the forwards and the backward of cross entropy: targets, softcap, class weights, a row's loss, the
gradient.

For the logits x of a row, z = softcap * tanh(x / softcap) where there is a softcap, else x; p = softmax(z), t the
target, w the class weights, e the label smoothing, N classes:
    loss = (1 - e) * w[t] * (lse - z[t]) + e / N * sum(w * (lse - z)) + z_loss * lse^2
    dloss / dz = p * ((1 - e) * w[t] + e / N * sum(w) + 2 * z_loss * lse) - e / N * w - (1 - e) * w[t] * (class is t)
"""
from dataclasses import dataclass
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32, const_expr

from ..rows.one_pass.kernel import OnePassRows
from ..softmax.online import exp, reciprocal
from ..utils import domain_offset_i64

NOWHERE = -(1 << 30)  # no column is this one, nor near it


@dataclass(frozen=True)
class Options:
    """The run-time numbers of a call. Rows whose target is ignore_index count for nothing."""

    ignore_index: Int64
    smoothing: Float32
    z_loss: Float32
    softcap: Float32


class Target(NamedTuple):
    """A row's target. index: its class, NOWHERE if it is none. weight: the class's, 1 without class weights."""

    index: Int32
    ignored: Boolean
    known: Boolean
    weight: Float32

    @property
    def column(self):
        """Where its logit is; column 0 of a target that is no class, so that no address is outside the row."""
        return cutlass.max(self.index, 0)


class Slope(NamedTuple):
    """A row's gradient is p * all - each * (class weight) - one * (class is the target)."""

    all: Float32
    each: Float32
    one: Float32


class Saved(NamedTuple):
    """What a forward saves for a backward, fp32.

    rows: of row m, [2 m] the largest z and [2 m + 1] log(sum(exp(z - largest))); their sum is its lse.
    all: [0] 1 / the sum of the targets' weights (reduction mean; where fused, what the gradients are multiplied by),
        [1] the sum of the class weights (label smoothing with class weights).
    """

    rows: cute.Tensor
    all: cute.Tensor

    @staticmethod
    def of(saved: Optional[cute.Tensor], part: Optional[cute.Tensor], rows):
        """saved: `rows`, then `all` where that is not given as a tensor of its own; None where nothing is saved."""
        if saved is None:
            return None
        if part is None:
            part = cute.make_tensor(saved.iterator + 2 * rows, cute.make_layout(2))
        return Saved(saved, part)


class ClassRows:
    """A part of a kernel. spec: a CrossEntropySpec. rows: the OnePassRows of the logits."""

    def __init__(self, spec, rows):
        self.spec, self.rows = spec, rows

    # ---- logits -----------------------------------------------------------------------------------------------------

    def value(self, x, o: Options):
        """z of a vector of logits."""
        if not self.spec.softcap:
            return x
        z = cute.make_rmem_tensor(self.rows.vector, Float32)
        z.store(x)
        for i in range(self.rows.vector):
            z[i] = self.capped(z[i], o)
        return z.load()

    def capped(self, x, o: Options):
        """z of one logit. 1 - 2 / (exp(2u) + 1) is tanh(u) within 2**-22, of 1 and not of itself."""
        if not self.spec.softcap:
            return x
        e = exp(x * (reciprocal(o.softcap) * 2.0))
        return o.softcap - reciprocal(e + 1.0) * (o.softcap * 2.0)

    def through_cap(self, d, z, o: Options):
        """The gradient of a logit, or a vector of them, from that of z."""
        if not self.spec.softcap:
            return d
        t = z * reciprocal(o.softcap)
        return d * (1.0 - t * t)

    # ---- targets ----------------------------------------------------------------------------------------------------

    def target(self, mT, mW: Optional[cute.Tensor], row, o: Options) -> Target:
        """Of a row that there is."""
        return self.known_target(Int64(mT[row]), mW, o)

    def known_target(self, given: Int64, mW: Optional[cute.Tensor], o: Options) -> Target:
        """given: what stands in the targets."""
        known = (given >= 0) & (given < self.rows.N)
        weight = Float32(1)
        if mW is not None:
            weight = mW[cutlass.select_(known, Int32(given), Int32(0))].to(Float32)
        return Target(cutlass.select_(known, Int32(given), Int32(NOWHERE)), given == o.ignore_index, known, weight)

    @cute.jit
    def hit(self, mX: cute.Tensor, place: Constexpr, target: Constexpr, o: Constexpr):
        """(has this thread the target's column, z there). It reads that logit a second time, from L2: less work than
        to look for it among what the thread holds. No other thread writes there."""
        mine, z = Boolean(False), Float32(0)
        for j in cutlass.range_constexpr(self.rows.tile.blocks):
            mine = mine | (Uint32(target.index - self.rows.first(place, j)) < self.rows.vector)
        if mine:
            z = element(mX, (place.there, target.column)).to(Float32)
        return mine, self.capped(z, o)

    # ---- class weights ----------------------------------------------------------------------------------------------

    def class_weights(self, mW, row, j):
        """Of vector j's classes, 0 outside the row. One by one: a row's vectors begin anywhere in mW."""
        w = cute.make_rmem_tensor(self.rows.vector, Float32)
        if mW is None:
            w.fill(1.0)
            return self.rows.masked(w.load(), row, j, 0.0)
        w.fill(0.0)
        self._class_weights(w, mW, self.rows.first(row.place, j), self.rows.whole(j))
        return w.load()

    @cute.jit
    def _class_weights(self, w: cute.Tensor, mW: cute.Tensor, first, whole: Constexpr):
        for i in cutlass.range_constexpr(self.rows.vector):
            if const_expr(whole):
                w[i] = mW[first + i].to(Float32)
            else:
                if Uint32(first + i) < self.rows.N:
                    w[i] = mW[first + i].to(Float32)

    # ---- the loss ---------------------------------------------------------------------------------------------------

    def loss(self, target, nll, lse, smoothing_loss, o):
        """A row's. nll: lse - z[target]. smoothing_loss: sum(w * (lse - z)) over the classes, with label smoothing."""
        loss = target.weight * nll
        if self.spec.smoothing:
            loss = loss * (1.0 - o.smoothing) + smoothing_loss * (o.smoothing * (1.0 / self.rows.N))
        loss = loss + cutlass.select_(o.z_loss == 0.0, Float32(0), o.z_loss * lse * lse)  # lse may be infinite
        return cutlass.select_(target.ignored, Float32(0), cutlass.select_(target.known, loss, Float32.nan))

    @cute.jit
    def put_loss(self, mLoss: cute.Tensor, saved: Constexpr, loss, found: Constexpr, place: Constexpr, writes, first,
                 rows):
        """found: largest z, log(sum) and sum of class weights."""
        if place.row < rows:
            if writes:
                mLoss[place.row] = loss
            if const_expr(saved is not None):
                if first:
                    saved.rows[2 * place.row] = found[0]
                    saved.rows[2 * place.row + 1] = found[1]
                    if const_expr(self.spec.smoothing):
                        if place.row == 0:
                            saved.all[1] = found[2]

    # ---- the gradient -----------------------------------------------------------------------------------------------

    def slope(self, target: Target, lse, weights, scale, o: Options) -> Slope:
        """scale: of the row's loss in what is differentiated. weights: the sum of the class weights."""
        one, each = target.weight, Float32(0)
        if self.spec.smoothing:
            each = o.smoothing * (1.0 / self.rows.N)
            one = one * (1.0 - o.smoothing)
        of_lse = cutlass.select_(o.z_loss == 0.0, Float32(0), 2.0 * o.z_loss * lse)  # lse may be infinite
        total = one + each * weights + of_lse if self.spec.smoothing else one + of_lse
        total = cutlass.select_(target.known, total, Float32.nan)
        return Slope(scale * total, scale * each, scale * one)

    def gradient(self, p, z, row, j, mW, slope: Slope, o: Options, target: Optional[Target] = None):
        """Vector j of the logits' gradient; as if the target were elsewhere, where it is not given."""
        d = p * slope.all
        if self.spec.smoothing:
            d = d - self.class_weights(mW, row, j) * slope.each
        if target is not None:
            d = self._less_at(d, target.index - self.rows.first(row.place, j), slope.one)
        return self.through_cap(d, z, o)

    def _less_at(self, d, i, one):
        """d, less `one` in its element i, if it has that. Two instructions an element; to read the logit at the target
        once more and to write over its gradient (`hit`, `put_hit`) are fewer, but keep a block waiting for memory twice
        as long, which a kernel without an exchange does not make up for."""
        less = cute.make_rmem_tensor(self.rows.vector, Float32)
        less.store(d)
        for k in range(self.rows.vector):
            less[k] = cutlass.select_(i == k, less[k] - one, less[k])
        return less.load()

    def cleared(self, d, mD, target: Target):
        """A vector of the gradient as mD's elements; zeros where the row is ignored, whatever it holds."""
        packed = self.rows.copies.packed(d, mD)
        self._clear(packed, target.ignored)
        return packed

    @cute.jit
    def _clear(self, packed: cute.Tensor, ignored):
        if ignored:
            packed.fill(0)

    @cute.jit
    def put_hit(self, mD: cute.Tensor, mine, p, z, place: Constexpr, target: Constexpr, slope: Constexpr,
                o: Constexpr):
        """The gradient at the target, over what its own thread has just written there."""
        if mine & (place.row < mD.shape[0]):
            if not target.ignored:
                d = p * slope.all - slope.one
                if const_expr(self.spec.smoothing):
                    d = d - slope.each * target.weight
                to = domain_offset_i64((place.row, target.column), mD)
                to[0, 0] = self.through_cap(d, z, o).to(self.rows.dtype)


def element(m, coord):
    """m[coord], its address computed in 64 bits."""
    return domain_offset_i64(coord, m)[tuple(0 for _ in coord)]


def rows_of(spec, config, **options):
    """The rows of logits that a forward reads.

    Rows that are only read, to registers, go past L1: 22.3 us for 24.1 at 32768 x 1024
    (docs/attempts/losses_and_pointwise.md). Where results are written too, as where fused, that costs.
    """
    past_l1 = spec.kind == "forward" and config.load == "registers"
    return OnePassRows(spec, config, spec.exchanges, Int64, past_l1, **options)

"""The losses of rows of logits, in one read; and, fused, the logits' gradient in the same pass."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int64, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp

from .. import tile as tk
from ..rows.one_pass.kernel import Row
from ..softmax.online import OnlineRow, exp, finite, log, reciprocal
from .class_rows import ClassRows, Kept, Options, Slope
from .plan import TotalConfig
from .reduce import Total
from .spec import ReduceSpec


class CrossEntropy(ClassRows, OnlineRow):
    """One pass over a row of logits. The thread that has the target's column writes the row's loss, the row's first
    thread what a backward needs (`Kept`). For a mean or a sum the losses lie behind that, and `Total` adds them up.
    """

    def __init__(self, spec, config):
        super().__init__(tk.element_type(spec.x), spec.N, spec.vector, config, spec.exchanges, spec.shifted)
        self.spec = spec
        self.holds = config.load == "registers"
        mean = spec.reduction == "mean"
        total = ReduceSpec(mean, True, *((spec.target, spec.weight) if mean else ()))
        self.finish = None if spec.reduction == "none" else Total(total, TotalConfig())

    @cute.jit
    def __call__(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mLoss: cute.Tensor,
                 mSaved: Optional[cute.Tensor], mAll: Optional[cute.Tensor], mD: Optional[cute.Tensor],
                 ignore_index: Int64, smoothing: Float32, z_loss: Float32, softcap: Float32, stream: cuda.CUstream):
        """mX: (M, N); mT: (M,); mW: (N,) or None; mLoss: (M,), or () where reduced; mSaved, mAll: see `Kept`; mD where
        fused: (M, N), may be mX."""
        tv_layout = self._layout()
        o = Options(ignore_index, smoothing, z_loss, softcap)
        losses, rows = mLoss, mX.shape[0]
        if const_expr(self.finish is not None):
            losses = cute.make_tensor(mSaved.iterator + (2 * rows + 2), cute.make_layout(rows))
        self.kernel(mX, mT, mW, losses, mSaved, mAll, mD, o, tv_layout).launch(
            **self._launch_shape(rows), stream=stream)
        if const_expr(self.finish is not None):
            of_mean = (mT, mW, Kept.of(mSaved, mAll, rows).all) if self.finish.spec.mean else (None, None, None)
            self.finish(losses, *of_mean[:2], mLoss, of_mean[2], ignore_index, stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mLoss: cute.Tensor,
               mSaved: Optional[cute.Tensor], mAll: Optional[cute.Tensor], mD: Optional[cute.Tensor], o: Options,
               tv_layout: cute.Layout):
        self.work(self._here(tv_layout), mX, mT, mW, mLoss, mSaved, mAll, mD, o)

    def work(self, here, mX, mT, mW, mLoss, mSaved, mAll, mD, o):
        """One thread's."""
        place, kept = self._place(here, mX), Kept.of(mSaved, mAll, mX.shape[0])
        target = self.target(mT, mW, place.there, o)
        self._in_order()
        row = self._row(mX, place)
        self._landed()
        owner, z = self.hit(mX, place, target, o)
        mine = self.top(row, o)
        self._forget()
        below = finite(mine)
        exponentials = self.exponentials(row, o, below)
        total = self.total(exponentials)
        if self.cluster_n > 1:
            tk.cluster_wait()
        top, total = self.join(mine, total, row)
        rest = log(total)
        spread, weights = self.over_classes(row, mW, below, top + rest, o)
        if self.finish is not None:
            cute.arch.griddepcontrol_launch_dependents()
        first = place.col <= 0
        loss = self.loss(target, top - z + rest, top + rest, spread, o)
        writes = cutlass.select_(target.known, owner, first)
        self.put(mLoss, kept, loss, (top, rest, weights), place, writes, first, mX.shape[0])
        if mD is not None:
            slope = self.slope(target, top + rest, weights, kept.all[0] if self.spec.part else Float32(1), o)
            probability = self.probabilities(row, exponentials, mine, top, total, o)
            self._forget()
            self.put_gradient(mD, mW, row, probability, target, slope, o)
            self.put_hit(mD, owner, exp(z - top) * reciprocal(total), z, place, target, slope, o)

    def _in_order(self):
        """Or ptxas moves the target's load behind a row's arrival in registers: 24.7 us for 24.1 at 32768 x 1024."""
        if self.holds:
            cute.arch.sync_warp()

    def _load_atom(self, m):
        """Rows that are only read go past L1: 22.3 us for 24.1 at 32768 x 1024
        (docs/attempts/losses_and_pointwise.md). Where results are written too, as where fused, that costs."""
        bits = self.tile.vector * m.element_type.width
        if self.spec.kind != "forward" or not self.holds or bits < 64:
            return super()._load_atom(m)
        return cute.make_copy_atom(CopyG2ROp(), m.element_type, num_bits_per_copy=bits,
                                   l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE)

    def over_classes(self, row: Row, mW, below, lse, o):
        """(sum(w * (lse - z)), sum(w)) of the row; nothing where there is no label smoothing."""
        if not self.spec.smoothing:
            return None, Float32(self.N)
        distance, weights = [], []
        for j in range(self.tile.blocks):
            w = self.class_weights(mW, row, j)
            distance.append(w * (self.values(row, j, o, neutral=below) - below))
            weights.append(w)
        weight = self.total(weights)
        spread = weight * (lse - below) - self.total(distance)
        return self.add_pairs(spread, weight, row._replace(stage=1))

    def loss(self, target, nll, lse, spread, o):
        """The row's loss: nll: lse - z[target]."""
        loss = target.weight * nll
        if self.spec.smoothing:
            loss = loss * (1.0 - o.smoothing) + spread * (o.smoothing * (1.0 / self.N))
        loss = loss + cutlass.select_(o.z_loss == 0.0, Float32(0), o.z_loss * lse * lse)  # lse may be infinite
        return cutlass.select_(target.ignored, Float32(0), cutlass.select_(target.known, loss, Float32.nan))

    @cute.jit
    def put(self, mLoss: cute.Tensor, kept: Constexpr, loss, found: Constexpr, place: Constexpr, writes, first, rows):
        """found: largest z, log(sum) and sum of class weights."""
        if place.row < rows:
            if writes:
                mLoss[place.row] = loss
            if const_expr(kept is not None):
                if first:
                    kept.rows[2 * place.row] = found[0]
                    kept.rows[2 * place.row + 1] = found[1]
                    if const_expr(self.spec.smoothing):
                        if place.row == 0:
                            kept.all[1] = found[2]

    def probabilities(self, row, exponentials, mine, top, total, o):
        """The function from j to vector j of the probabilities."""
        if self.holds:
            factor = exp(mine - top) * reciprocal(total)
            return lambda j: exponentials[j] * factor
        inverse = reciprocal(total)
        return lambda j: exp(self.values(row, j, o) - top) * inverse

    def put_gradient(self, mD, mW, row, probability, target, slope: Slope, o):
        found = (self.gradient(probability(j), self.values(row, j, o), row, j, mW, slope, o)
                 for j in range(self.tile.blocks))
        packed = [self.cleared(d, mD, target) for d in found]
        self._forget()  # or the compiler moves each store up to where its result is computed
        for j in range(self.tile.blocks):
            self._store(mD, row.place, j, packed[j])

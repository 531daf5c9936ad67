"""The losses of rows of logits, in one read; and, fused, the logits' gradient in the same pass."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from .. import tile as tk
from ..row_pass import Row
from ..softmax.online import OnlineRow, exp, finite, log
from .plan import TotalConfig
from .rows import ClassRows, Options, Slope
from .spec import TotalSpec
from .total import Total


class CrossEntropy(ClassRows, OnlineRow):
    """One pass over a row of logits, which lies on the chip only as far as its gradient is wanted.

    The thread that has the target's column writes the row's loss, the row's first thread what a backward needs:
      saved[2 m], saved[2 m + 1]   of row m the largest z and log(sum(exp(z - largest))); their sum is its lse
      saved[2 M]                   1 / sum of the targets' weights (reduction mean)
      saved[2 M + 1]               sum of the class weights (label smoothing with class weights)
      saved[2 M + 2 + m]           the row's loss (reduction mean and sum); then `Total` adds these up
    """

    def __init__(self, spec, config):
        super().__init__(tk.element_type(spec.x), spec.N, spec.vector, config, spec.exchanges, spec.shifted)
        self.spec = spec
        self.holds = config.load == "registers"
        mean = spec.reduction == "mean"
        total = TotalSpec(mean, True, *((spec.target, spec.weight) if mean else ()))
        self.finish = None if spec.reduction == "none" else Total(total, TotalConfig())

    @cute.jit
    def __call__(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mLoss: cute.Tensor,
                 mSaved: cute.Tensor, mD: Optional[cute.Tensor], mScale: Optional[cute.Tensor], ignore_index: Int64,
                 smoothing: Float32, z_loss: Float32, softcap: Float32, stream: cuda.CUstream):
        """mX: (M, N); mT: (M,); mW: (N,) or None; mLoss: (M,), or () where reduced; mSaved: see above. Where fused, mD:
        (M, N), may be mX; mScale: (), what the gradients are multiplied by."""
        tv_layout = self._layout()
        o = Options(ignore_index, smoothing, z_loss, softcap)
        losses, rows = mLoss, mX.shape[0]
        if const_expr(self.finish is not None):
            losses = cute.make_tensor(mSaved.iterator + (2 * rows + 2), cute.make_layout(rows))
        self.kernel(mX, mT, mW, losses, mSaved, mD, mScale, o, tv_layout).launch(
            **self._launch_shape(rows), stream=stream)
        if const_expr(self.finish is not None):
            inverse = cute.make_tensor(mSaved.iterator + 2 * rows, cute.make_layout(1))
            self.finish(losses, mT if self.finish.spec.mean else None, mW if self.finish.spec.mean else None, mLoss,
                        inverse if self.finish.spec.mean else None, ignore_index, stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mLoss: cute.Tensor,
               mSaved: cute.Tensor, mD: Optional[cute.Tensor], mScale: Optional[cute.Tensor], o: Options,
               tv_layout: cute.Layout):
        here = self._place(mX, tv_layout)
        target = self.target(mT, mW, here.there, o)
        row = self._row(mX, here)
        self._landed()
        owner, z = self.hit(mX, here, target, o)
        mine = self.top(row, o)
        self._forget()
        below = finite(mine)
        exponentials = self.exponentials(row, o, below)
        total = self.total(exponentials)
        if const_expr(self.cluster_n > 1):
            tk.cluster_wait()
        top, total = self.join(mine, total, row)
        rest = log(total)
        spread, weights = self.over_classes(row, here, mW, below, top + rest, o)
        if const_expr(self.finish is not None):
            cute.arch.griddepcontrol_launch_dependents()

        first = here.col <= 0
        loss = self.loss(target, top - z + rest, top + rest, spread, o)
        self.put(mLoss, mSaved, loss, top, rest, weights, here,
                 cutlass.select_(target.known, owner, first), first, mX.shape[0])
        if const_expr(mD is not None):
            slope = self.slope(target, top + rest, weights, mScale[()], o)
            probability = self.probabilities(row, exponentials, mine, top, total, o)
            self._forget()
            self.put_gradient(mD, mW, row, here, probability, target, slope, o)
            self.put_hit(mD, owner, exp(z - top) * cute.arch.rcp_approx(total), z, here, target, slope, o)

    def over_classes(self, row: Row, here, mW, below, lse, o):
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
        second = row._replace(buffer=here.buffer[None, None, 1],
                              mbar_ptr=None if here.mbar_ptr is None else here.mbar_ptr + 1)
        return self.add_pairs(spread, weight, second)

    def loss(self, target, nll, lse, spread, o):
        """The row's loss: nll: lse - z[target]."""
        loss = target.weight * nll
        if self.spec.smoothing:
            loss = loss * (1.0 - o.smoothing) + spread * (o.smoothing * (1.0 / self.N))
        loss = loss + cutlass.select_(o.z_loss == 0.0, Float32(0), o.z_loss * lse * lse)  # lse may be infinite
        return cutlass.select_(target.ignored, Float32(0), cutlass.select_(target.known, loss, Float32.nan))

    @cute.jit
    def put(self, mLoss: cute.Tensor, mSaved: cute.Tensor, loss, top, rest, weights, here: cutlass.Constexpr, writes,
            first, rows):
        if here.row < rows:
            if writes:
                mLoss[here.row] = loss
            if first:
                mSaved[2 * here.row] = top
                mSaved[2 * here.row + 1] = rest
                if const_expr(self.spec.smoothing):
                    if here.row == 0:
                        mSaved[2 * rows + 1] = weights

    def probabilities(self, row, exponentials, mine, top, total, o):
        """The function from j to vector j of the probabilities."""
        if self.holds:
            factor = exp(mine - top) * cute.arch.rcp_approx(total)
            return lambda j: exponentials[j] * factor
        inverse = cute.arch.rcp_approx(total)
        return lambda j: exp(self.values(row, j, o) - top) * inverse

    def put_gradient(self, mD, mW, row, here, probability, target, slope: Slope, o):
        packed = [self.gradient(probability(j), self.values(row, j, o), row, j, mW, target, slope, o)
                  for j in range(self.tile.blocks)]
        if not self.holds:
            cute.arch.sync_warp()  # or the compiler moves each store up to where its result is computed
        for j in range(self.tile.blocks):
            self._store(mD, here.row, here.col, here.inside, j, packed[j])

"""The gradient of the logits, from the logits and what the forward saved: one read, one write, no exchange; and what
scales gradients."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int64

from .. import tile as tk
from ..rows.one_pass.kernel import OnePassRows
from ..softmax.online import exp
from .class_rows import ClassRows, Kept, Options


class ElementPass(OnePassRows):
    """A OnePassRows without an exchange. Blocks go along the rows, `cluster` of them to each, and know nothing of each
    other."""

    def __init__(self, spec, config):
        super().__init__(tk.element_type(spec.x), spec.N, spec.vector, config, stage=0, shifted=spec.shifted)
        self.spec = spec

    def _block(self):
        block, parts = cute.arch.block_idx()[0], self.tile.cluster
        return (block // parts, block % parts) if parts > 1 else (block, 0)

    def _launch_shape(self, rows):
        return dict(grid=[cute.ceil_div(rows, self.tile.rows) * self.tile.cluster, 1, 1],
                    block=[self.tile.threads, 1, 1])


class CrossEntropyBackward(ClassRows, ElementPass):
    """dx = dloss * (what `rows` has), element by element."""

    @cute.jit
    def __call__(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mDLoss: cute.Tensor,
                 mSaved: cute.Tensor, mAll: Optional[cute.Tensor], mD: cute.Tensor, ignore_index: Int64,
                 smoothing: Float32, z_loss: Float32, softcap: Float32, stream: cuda.CUstream):
        """mX, mD: (M, N), may be one; mT: (M,); mW: (N,) or None; mDLoss: (M,), or () where the loss was reduced;
        mSaved, mAll: see `Kept`."""
        tv_layout = self._layout()
        o = Options(ignore_index, smoothing, z_loss, softcap)
        self.kernel(mX, mT, mW, mDLoss, mSaved, mAll, mD, o, tv_layout).launch(
            **self._launch_shape(mX.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mDLoss: cute.Tensor,
               mSaved: cute.Tensor, mAll: Optional[cute.Tensor], mD: cute.Tensor, o: Options, tv_layout: cute.Layout):
        self.work(self._here(tv_layout), mX, mT, mW, mDLoss, mSaved, mAll, mD, o)

    def work(self, here, mX, mT, mW, mDLoss, mSaved, mAll, mD, o):
        """One thread's."""
        place, kept = self._place(here, mX), Kept.of(mSaved, mAll, mX.shape[0])
        row = self._row(mX, place)
        target = self.target(mT, mW, place.there, o)
        top, rest = kept.rows[2 * place.there], kept.rows[2 * place.there + 1]
        scale = mDLoss[place.there] if self.spec.reduction == "none" else mDLoss[()]
        if self.spec.reduction == "mean":
            scale = scale * kept.all[0]
        weights = kept.all[1] if self.spec.smoothing and mW is not None else Float32(self.N)
        slope = self.slope(target, top + rest, weights, scale, o)
        for j in range(self.tile.blocks):
            z = self.value(row.block(j), o)
            d = self.gradient(exp(z - top - rest), z, row, j, mW, slope, o, target)
            self._store(mD, place, j, self.cleared(d, mD, target))


class Scale(ElementPass):
    """x *= factor, in place; where the factor is 1, nothing is read but that. 0 stays 0 where the factor is infinite or
    NaN: so rows that are ignored keep the gradient 0."""

    @cute.jit
    def __call__(self, mX: cute.Tensor, mFactor: cute.Tensor, stream: cuda.CUstream):
        """mX: (M, N); mFactor: ()."""
        tv_layout = self._layout()
        self.kernel(mX, mFactor, tv_layout).launch(**self._launch_shape(mX.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mFactor: cute.Tensor, tv_layout: cute.Layout):
        self.work(self._here(tv_layout), mX, mFactor[()])

    @cute.jit
    def work(self, here: Constexpr, mX: cute.Tensor, factor):
        """One thread's."""
        if factor != 1.0:
            place = self._place(here, mX)
            row = self._row(mX, place)
            for j in cutlass.range_constexpr(self.tile.blocks):
                x = row.block(j)
                self._store(mX, place, j, self._packed(cute.where(x == 0.0, x, x * factor), mX))

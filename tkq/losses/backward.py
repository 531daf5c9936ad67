"""The gradient of the logits, from the logits and what the forward saved: one read, one write, no exchange; and what
scales gradients."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int64

from ..rows.one_pass.kernel import OnePassRows
from ..runtime.compile import fake
from ..softmax.online import exp
from . import arguments
from .class_rows import ClassRows, Options, Saved


class CrossEntropyBackward:
    """dx = dloss * (what `class_rows` has), element by element."""

    def __init__(self, spec, config):
        self.spec, self.rows = spec, OnePassRows(spec, config, stage=0)
        self.classes = ClassRows(spec, self.rows)

    def fake_arguments(self):
        """Compiled for what `__call__` has; None for what the spec does not have."""
        return arguments.of_rows(self.spec)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mDLoss: cute.Tensor,
                 mSaved: cute.Tensor, mAll: Optional[cute.Tensor], mD: cute.Tensor, ignore_index: Int64,
                 smoothing: Float32, z_loss: Float32, softcap: Float32, stream: cuda.CUstream):
        """mX, mD: (M, N), may be one; mT: (M,); mW: (N,) or None; mDLoss: (M,), or () where the loss was reduced;
        mSaved, mAll: see `Saved`."""
        tv_layout = self.rows.layout()
        o = Options(ignore_index, smoothing, z_loss, softcap)
        self.kernel(mX, mT, mW, mDLoss, mSaved, mAll, mD, o, tv_layout).launch(
            **self.rows.launch_shape(mX.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mDLoss: cute.Tensor,
               mSaved: cute.Tensor, mAll: Optional[cute.Tensor], mD: cute.Tensor, o: Options, tv_layout: cute.Layout):
        self.work(self.rows.here(tv_layout), mX, mT, mW, mDLoss, mSaved, mAll, mD, o)

    def work(self, here, mX, mT, mW, mDLoss, mSaved, mAll, mD, o):
        """One thread's."""
        rows, classes = self.rows, self.classes
        place, saved = rows.place(here, mX), Saved.of(mSaved, mAll, mX.shape[0])
        row = rows.row(mX, place)
        target = classes.target(mT, mW, place.there, o)
        top, rest = saved.rows[2 * place.there], saved.rows[2 * place.there + 1]
        scale = mDLoss[place.there] if self.spec.reduction == "none" else mDLoss[()]
        if self.spec.reduction == "mean":
            scale = scale * saved.all[0]
        weights = saved.all[1] if self.spec.smoothing and mW is not None else Float32(self.spec.N)
        slope = classes.slope(target, top + rest, weights, scale, o)
        for j in range(rows.tile.blocks):
            z = classes.value(row.block(j), o)
            d = classes.gradient(exp(z - top - rest), z, row, j, mW, slope, o, target)
            rows.store(mD, place, j, classes.cleared(d, mD, target))


class Scale:
    """x *= factor, in place; where the factor is 1, nothing is read but that. 0 stays 0 where the factor is infinite or
    NaN: so rows that are ignored keep the gradient 0."""

    def __init__(self, spec, config):
        self.spec, self.rows = spec, OnePassRows(spec, config, stage=0)

    def fake_arguments(self):
        """Compiled for x (M, N) with any row stride, and the factor ()."""
        spec, stride = self.spec, (fake.sym64(divisibility=self.spec.vector), 1)
        x = fake.tensor(spec.x, (fake.sym(), spec.N), stride, align=spec.vector * spec.width // 8)
        return x, fake.scalar("fp32")

    @cute.jit
    def __call__(self, mX: cute.Tensor, mFactor: cute.Tensor, stream: cuda.CUstream):
        """mX: (M, N); mFactor: ()."""
        tv_layout = self.rows.layout()
        self.kernel(mX, mFactor, tv_layout).launch(**self.rows.launch_shape(mX.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mFactor: cute.Tensor, tv_layout: cute.Layout):
        self.work(self.rows.here(tv_layout), mX, mFactor[()])

    @cute.jit
    def work(self, here: Constexpr, mX: cute.Tensor, factor):
        """One thread's."""
        if factor != 1.0:
            rows = self.rows
            place = rows.place(here, mX)
            row = rows.row(mX, place)
            for j in cutlass.range_constexpr(rows.tile.blocks):
                x = row.block(j)
                rows.store(mX, place, j, rows.copies.packed(cute.where(x == 0.0, x, x * factor), mX))

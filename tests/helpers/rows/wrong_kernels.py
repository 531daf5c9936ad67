"""Subclasses of RowKernel and ReductionBase that are wrong in one way each: what a user may get wrong."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tkq.reduction_base import ReductionBase
from tkq.rows.persistent.kernel import RowKernel
from tkq.rows.persistent.monoid import Exchange, Monoid, add


class Scale(RowKernel):
    """A right one, of which the others are made."""

    loads, stores = ("x",), ("y",)

    def partial(self, e, r):
        return (e.x,)

    def row(self, sums, r):
        return dict(a=sums[0])

    def write(self, e, r):
        return dict(y=e.x * r.a)


class Sparing(Scale):
    """A right one: written in place; nothing for what is left out."""

    loads, stores, columns = ("x",), ("x", "y"), ("c",)

    def row(self, sums, r):
        return dict(a=sums[0], more=None)

    def write(self, e, r):
        return dict(x=e.x * r.a, y=e.x) if self.has("y") else dict(x=e.x * r.a)

    def down(self, e, r):
        return dict(c=e.x) if self.has("c") else None


# ---- what methods return


class WriteVector(Scale):
    def write(self, e, r):
        return e.x


class WriteNothing(Scale):
    def write(self, e, r):
        return None


class WriteUnknown(Scale):
    def write(self, e, r):
        return dict(y=e.x, z=e.x)


class WriteNumber(Scale):
    def write(self, e, r):
        return dict(y=r.a)


class WriteFloat(Scale):
    def write(self, e, r):
        return dict(y=1.0)


class WriteNone(Scale):
    def write(self, e, r):
        return dict(y=None)


class WritePart(Scale):
    def write(self, e, r):
        half = cute.make_rmem_tensor(2, Float32)
        half.fill(0.0)
        return dict(y=half.load())


class WriteColumn(Scale):
    """Beside ``down``, which has the columns."""

    columns = ("c",)

    def down(self, e, r):
        return dict(c=e.x)

    def write(self, e, r):
        return dict(y=e.x, c=e.x)


class DownVector(Scale):
    columns = ("c",)

    def down(self, e, r):
        return e.x


class RowNothing(Scale):
    def row(self, sums, r):
        pass


class RowTuple(Scale):
    def row(self, sums, r):
        return sums


class RowOfTuples(Scale):
    def row(self, sums, r):
        return dict(a=sums)


class NoResult(Scale):
    stores, results = (), ("s",)


class UnknownElement(Scale):
    def partial(self, e, r):
        return (e.z,)


class LeftOut(Scale):
    loads = ("x", "z")

    def partial(self, e, r):
        return (e.x * e.z,)


class UnknownNumber(Scale):
    def write(self, e, r):
        return dict(y=e.x * r.b)


class Mixed(Scale):
    exchanges = (Exchange(add(2)),)

    def partial(self, e, r):
        return e.x, e.x.reduce(cute.ReductionOp.ADD, Float32(0), 0)


class OfBooleans(Scale):
    """Right: counted."""

    def partial(self, e, r):
        return (e.x > 0.0,)


# ---- what a monoid combines


class CombineVector(Scale):
    exchanges = (Exchange(Monoid(lambda a, b: a[0] + b[0], (0.0,))),)


class CombineFewer(Scale):
    exchanges = (Exchange(Monoid(lambda a, b: (a[0] + b[0],), (0.0, 0.0))),)

    def partial(self, e, r):
        return e.x, e.x * e.x


class CombineMore(Scale):
    exchanges = (Exchange(Monoid(lambda a, b: (a[0] + b[0], a[0]), (0.0,))),)


class CombineNone(Scale):
    exchanges = (Exchange(Monoid(lambda a, b: (None,), (0.0,))),)


# ---- options, None among them


class Softcap(Scale):
    options = {"softcap": 30.0}  # noqa: RUF012


# ---- ReductionBase


class Reduction(ReductionBase):
    """A right one, of which the others are made."""

    def __init__(self, dtype, N, heads=1):
        super().__init__(dtype, N, stage=1)

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, scale: Float32, stream: cuda.CUstream, times: Int32 = 1):
        self.kernel(x, out, scale).launch(grid=[x.shape[0], 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, scale: Float32):
        row, _, _ = cute.arch.block_idx()
        out[row] = x[row, 0].to(Float32) * scale


class NoBits(Reduction):
    copy_bits = 0


class FewBits(Reduction):
    copy_bits = 16


class WordsForBits(Reduction):
    copy_bits = "128"


class ByName(Reduction):
    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, *, scale: Float32, stream: cuda.CUstream):
        pass


class NoCall(ReductionBase):
    pass


class Unannotated(Reduction):
    @cute.jit
    def __call__(self, x, out, scale: "Float32 | None", flag: cutlass.Constexpr, stream: cuda.CUstream):
        pass

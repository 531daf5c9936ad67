"""A product behind copies of those operands that TMA does not take.

The copies' memory is as large as what is copied, from torch's allocator, and free again when the call returns.
"""
from collections.abc import Callable
from typing import NamedTuple, Optional

from torch import Tensor

from ...runtime import Recipe, function
from ...runtime.call import alloc, dtypes
from ..epilogue.spec import GATED
from . import realign_plan
from .realign_config import RealignSpec
from .realign_plan import Around, Problem
from .spec import TMA_BYTES, fits_tma, fits_tma_store


class Fits(NamedTuple):
    """Does TMA take a, b and the result as they lie?"""

    a: bool
    b: bool
    out: bool


def fits(a: Tensor, b: Tensor, out: Tensor, majors, writable_padding: bool, loose: bool) -> Fits:
    """majors: is K contiguous in a, in b? writable_padding, loose: as of ``launch.run``. A row of a result that ends
    anywhere ends with a unit of 16 bytes, its padding included."""
    a_is_k, b_is_k = majors
    whole = out.dim() == 2 or out.shape[0] == 1 or out.stride(0) * out.element_size() % TMA_BYTES == 0
    return Fits(_fits(a, a_is_k) and not (loose and a_is_k), _fits(b, not b_is_k) and not (loose and b_is_k),
                whole and fits_tma_store(out.data_ptr(), out.stride(-2), out.shape[-2],
                                         TMA_BYTES if writable_padding else out.shape[-1], out.element_size()))


def _fits(x: Tensor, by_rows: bool) -> bool:
    """by_rows: its rows are contiguous, or its columns."""
    size = x.element_size()
    pitch, lines = (x.stride(-2), x.shape[-2]) if by_rows else (x.stride(-1), x.shape[-1])
    whole = x.dim() == 2 or x.shape[0] == 1 or x.stride(0) * size % TMA_BYTES == 0
    return whole and fits_tma(x.data_ptr(), pitch, lines, size)


def gate_fits(activation: str, b_is_k: bool, n: int) -> bool:
    """Does TMA take the columns of gate and up, wherever b lies? It takes neither every other one nor an odd half."""
    return activation not in GATED or b_is_k or (n % 16 == 0 and GATED[activation][1] == "split")


class Copied(NamedTuple):
    """How a matrix, or a batch of them, is copied. src_shape, src_stride: of it, as (batches, rows or columns, elements
    of one). copy_shape, copy_stride: of the copy, likewise. shape, stride: of the copy as the product takes it."""

    src_shape: tuple
    src_stride: tuple
    copy_shape: tuple
    copy_stride: tuple
    shape: tuple
    stride: tuple

    @staticmethod
    def of(x: Tensor, by_rows: bool) -> "Copied":
        """by_rows: x's rows are contiguous, or its columns."""
        each = TMA_BYTES // x.element_size()
        order = (-2, -1) if by_rows else (-1, -2)
        count, length = (x.shape[i] for i in order)
        pitch = -(-length // each) * each
        batches, apart = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
        steps = count * pitch, pitch, 1
        stride = steps[1:] if by_rows else (1, pitch)
        return Copied((batches, count, length), (apart, x.stride(order[0]), 1), (batches, count, pitch), steps,
                      tuple(x.shape), (steps[0], *stride) if x.dim() == 3 else stride)

    def memory(self, x: Tensor) -> Tensor:
        """New memory for the copy of x."""
        return alloc.empty(x.get_device(), self.copy_shape, self.copy_stride, x.dtype)

    def taken(self, memory: Tensor) -> Tensor:
        """As the product takes it."""
        return alloc.over(memory, self.shape, self.stride)


class Copies(NamedTuple):
    """Of one operand or of both, None where it is not copied, in one launch."""

    run: Callable
    a: Optional[Copied]
    b: Optional[Copied]

    @staticmethod
    def of(a: Tensor, b: Tensor, majors, around: Around) -> "Copies":
        """majors: is K contiguous in a, in b?"""
        spec = RealignSpec(dtypes.name_of(a.dtype), both=around.a and around.b)
        return Copies(function(Recipe("tkq.gemm.dense.realign:Realign", (spec,))),
                      Copied.of(a, majors[0]) if around.a else None,
                      Copied.of(b, not majors[1]) if around.b else None)

    def __call__(self, a: Tensor, b: Tensor):
        """(a, b) as the product takes them, copied."""
        pairs, found = [], []
        for x, copied in ((a, self.a), (b, self.b)):
            if copied is None:
                found.append(x)
                continue
            memory = copied.memory(x)
            pairs += [alloc.over(x, copied.src_shape, copied.src_stride), memory]
            found.append(copied.taken(memory))
        self.run(*pairs, *(None,) * (4 - len(pairs)))
        return found

    def samples(self, a: Tensor, b: Tensor) -> list:
        """The same, without what is in them."""
        return [x if c is None else c.taken(c.memory(x)) for x, c in ((a, self.a), (b, self.b))]


class Realigned(NamedTuple):
    """A kernel behind copies of its operands; called as the kernel itself."""

    kernel: Callable
    copies: Copies

    def __call__(self, a, b, *rest):
        self.kernel(*self.copies(a, b), *rest)


def around(found: Fits, kind) -> Optional[Around]:
    """What is to be copied, or None. kind: as of ``call.kind_of``, whose operands fit so."""
    _, _, (_, b_is_k, _, _, accumulate), (m, n, k, *batch), epilogue, _ = kind
    if accumulate or (epilogue and not gate_fits(epilogue[0], b_is_k, n)):
        return None
    return realign_plan.plan(Problem(m, n, k, batch[0] if batch else 1, found.a, found.b))

"""A product between copies: of operands that TMA does not take, into memory of this call, and of its result from there.

The memory is as large as what is copied, from torch's allocator, and free again when the call returns (on its stream).
"""
from collections.abc import Callable
from typing import NamedTuple, Optional

from torch import Tensor

from ..runtime import Recipe, dtypes, function, new
from . import realign_plan
from .epilogue import GATED
from .realign_config import RealignSpec
from .realign_plan import Around, Problem
from .spec import TMA_BYTES, fits_tma, fits_tma_store


class Fits(NamedTuple):
    """Does TMA take a, b and the result as they lie?"""

    a: bool
    b: bool
    out: bool


def fits(a: Tensor, b: Tensor, out: Tensor, majors, room: bool, loose: bool) -> Fits:
    """majors: is K contiguous in a, in b? room, loose: as of ``call.run``. A row of a result that ends anywhere ends
    with a unit of 16 bytes, its room included."""
    a_is_k, b_is_k = majors
    whole = out.dim() == 2 or out.shape[0] == 1 or out.stride(0) * out.element_size() % TMA_BYTES == 0
    return Fits(_fits(a, a_is_k) and not (loose and a_is_k), _fits(b, not b_is_k) and not (loose and b_is_k),
                whole and fits_tma_store(out.data_ptr(), out.stride(-2), out.shape[-2],
                                         TMA_BYTES if room else out.shape[-1], out.element_size()))


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
    """How a matrix, or a batch of them, is copied. lines, apart: of it, as (batches, lines, elements). room, steps: of
    the memory beside it. shape, stride: of that memory as the product takes it."""

    run: Callable
    lines: tuple
    apart: tuple
    room: tuple
    steps: tuple
    shape: tuple
    stride: tuple

    @staticmethod
    def of(x: Tensor, by_rows: bool, aligned: bool) -> "Copied":
        """aligned: x is copied to the memory, or that to x."""
        size = x.element_size()
        each = TMA_BYTES // size
        order = (-2, -1) if by_rows else (-1, -2)
        count, length = (x.shape[i] for i in order)
        pitch = -(-length // each) * each
        batches, apart = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
        steps = count * pitch, pitch, 1
        stride = steps[1:] if by_rows else (1, pitch)
        run = function(Recipe("tkq.gemm.realign:build", (RealignSpec(dtypes.name_of(x.dtype), aligned),)))
        return Copied(run, (batches, count, length), (apart, x.stride(order[0]), 1), (batches, count, pitch), steps,
                      tuple(x.shape), (steps[0], *stride) if x.dim() == 3 else stride)

    def memory(self, x: Tensor) -> Tensor:
        """New memory beside x."""
        return new.empty(x.get_device(), self.room, self.steps, x.dtype)

    def taken(self, memory: Tensor) -> Tensor:
        """As the product takes it."""
        return new.over(memory, self.shape, self.stride)

    def there(self, x: Tensor) -> Tensor:
        """x, copied to new memory, as the product takes it."""
        memory = self.memory(x)
        self.run(new.over(x, self.lines, self.apart), memory)
        return self.taken(memory)

    def back(self, memory: Tensor, x: Tensor) -> None:
        """x = what the product left in memory."""
        self.run(new.over(memory, self.lines, self.steps), new.over(x, self.lines, self.apart))


class Realigned(NamedTuple):
    """A kernel with copies around it; called as the kernel itself."""

    kernel: Callable
    a: Optional[Copied]
    b: Optional[Copied]
    out: Optional[Copied]

    def __call__(self, a, b, out, *rest):
        a = a if self.a is None else self.a.there(a)
        b = b if self.b is None else self.b.there(b)
        if self.out is None:
            self.kernel(a, b, out, *rest)
            return
        memory = self.out.memory(out)
        self.kernel(a, b, self.out.taken(memory), *rest)
        self.out.back(memory, out)


def copies(a: Tensor, b: Tensor, out: Tensor, majors, around: Around):
    """(of a, of b, of out), each None where it is not copied. majors: is K contiguous in a, in b?"""
    return (Copied.of(a, majors[0], True) if around.a else None,
            Copied.of(b, not majors[1], True) if around.b else None,
            Copied.of(out, True, False) if around.out else None)


def samples(a, b, out, copied):
    """The operands and the result as the kernel will get them; what is in them does not matter yet."""
    found = [x if c is None else c.taken(c.memory(x)) for x, c in zip((a, b, out), copied)]
    if out.dim() == 3:  # one that all of a batch share
        found = [x if x.dim() == 3 else x.expand(out.shape[0], *x.shape) for x in found]
    return found


def around(found: Fits, kind, bytes: int) -> Optional[Around]:
    """What is to be copied, or None. kind: as of ``call.kind_of``, whose operands and result fit so; bytes: of an
    element of the result."""
    _, _, (a_is_k, b_is_k, _, _, accumulate), (m, n, k, *batch), epilogue, _ = kind
    if accumulate or (epilogue and not gate_fits(epilogue[0], b_is_k, n)):
        return None
    batches, shared = batch or (1, "")
    problem = Problem(m, n, k, batches, *found, bytes, narrow=a_is_k and not shared)
    return realign_plan.plan(problem)

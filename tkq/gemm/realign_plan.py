"""When a product's operands, or its result, are copied into rows that TMA takes: pure Python, no torch, no DSL.

An operand that TMA does not take is read element by element by a kernel that multiplies at a twentieth of the speed, or
copied: it is read and written once, at the speed of memory. A result that TMA does not write goes out element by
element behind each tile, or through a copy of its own.
"""
from typing import NamedTuple, Optional

from .narrow_plan import MOST_ROWS


class Around(NamedTuple):
    """What is copied: a and b before the product, the result after it."""

    a: bool = False
    b: bool = False
    out: bool = False


class Problem(NamedTuple):
    """m, n, k: of each of ``batches`` products. a, b, out: does TMA take them as they are? bytes: of an element of the
    result. narrow: is there a kernel for few rows, which stores element by element in any case?"""

    m: int
    n: int
    k: int
    batches: int = 1
    a: bool = True
    b: bool = True
    out: bool = True
    bytes: int = 2
    narrow: bool = False


ELEMENTS = 37.0  # TFLOP/s of the kernel that reads element by element
TMA = 600.0  # of the others
COPY = 2500.0  # GB/s, read and written
LAUNCH = 3000.0  # ns of a copy, however small


def plan(p: Problem) -> Optional[Around]:
    """What to copy; None where nothing is."""
    operands = Around(not p.a, not p.b)
    if any(operands):
        if elements_ns(p) <= copied_ns(p, operands):
            return None
    through = not p.out and not (p.narrow and p.m <= MOST_ROWS) and through_scratch(p)
    found = operands._replace(out=through)
    return found if any(found) else None


def elements_ns(p: Problem) -> float:
    """Of the kernel that reads element by element."""
    return 2e-3 * p.batches * p.m * p.n * p.k / ELEMENTS


def copied_ns(p: Problem, around: Around) -> float:
    """Of copies of operands, and a product by TMA."""
    copies = [4 * p.batches * size / COPY + LAUNCH
              for size, copied in ((p.m * p.k, around.a), (p.k * p.n, around.b)) if copied]
    return sum(copies) + 2e-3 * p.batches * p.m * p.n * p.k / TMA


def through_scratch(p: Problem) -> bool:
    """Is a result that TMA does not write faster by way of another matrix?"""
    return False

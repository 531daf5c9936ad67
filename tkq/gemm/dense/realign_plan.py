"""When a product's operands are copied into rows that TMA takes: pure Python, no torch, no DSL.

An operand that TMA does not take is read element by element, by a kernel that multiplies at a fifteenth of the speed,
or copied: it is read and written once, at the speed of memory.
"""
from typing import NamedTuple, Optional


class Around(NamedTuple):
    """What is copied before the product."""

    a: bool = False
    b: bool = False


class Problem(NamedTuple):
    """m, n, k: of each of ``batches`` products. a, b: does TMA take them as they are?"""

    m: int
    n: int
    k: int
    batches: int = 1
    a: bool = True
    b: bool = True


# Measured on an H100 (docs/attempts/gemm.md):
TILE, STEP = (64, 128), 64  # of the kernel that reads element by element
STEP_NS = 6000.0  # of a block that has no other beside it on its SM
BUSY_STEP_NS = 2000.0  # of each of many, an SM
NUM_SMS = 132
COPY = 2800.0  # GB/s, read and written
LAUNCH_NS = 2500.0  # of copies, however small
PRODUCT_NS = 3500.0  # of the other kernel, however small
TMA = 600.0  # TFLOP/s of it


def plan(p: Problem) -> Optional[Around]:
    """What to copy; None where nothing is."""
    operands = Around(not p.a, not p.b)
    return operands if any(operands) and copied_ns(p) < elements_ns(p) else None


def elements_ns(p: Problem) -> float:
    """Of the kernel that reads element by element."""
    steps, tiles = -(-p.k // STEP), p.batches * -(-p.m // TILE[0]) * -(-p.n // TILE[1])
    return steps * max(STEP_NS, BUSY_STEP_NS * -(-tiles // NUM_SMS))


def copied_ns(p: Problem) -> float:
    """Of copies of the operands, and a product by TMA."""
    copied = p.batches * (p.m * p.k * (not p.a) + p.k * p.n * (not p.b))
    return LAUNCH_NS + 4 * copied / COPY + PRODUCT_NS + 2e-3 * p.batches * p.m * p.n * p.k / TMA

"""The kernels of scans that tkq itself can choose, and what their machine code must show."""
import itertools
from dataclasses import replace

from tkq.recurrence.launch import recipe
from tkq.recurrence.plan import plan, widest
from tkq.recurrence.spec import BITS, ScanSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

MANY, FEW = 1 << 16, 1 << 10  # columns
TOKENS = 1 << 11  # of each column


def shipped() -> list:
    """Without states, along channels of many columns and of few, along time with whole vectors: forward and
    backward."""
    found = []
    for dtype, gradients in itertools.product(("bf16", "fp32"), (None, "both")):
        for columns in (MANY, FEW):
            spec = ScanSpec(dtype, gradients=gradients)
            found.append((replace(spec, vector=widest(4, spec, columns)), columns))
        found += [(ScanSpec(dtype, 128 // BITS[dtype], "time", gradients=gradients, reverse=reverse), MANY)
                  for reverse in (False, True)]
    return [Shipped(_name(s, columns), recipe(s, plan(s, columns, TOKENS, 132)), expectation(s))
            for s, columns in found]


def _name(s: ScanSpec, columns: int) -> str:
    parts = ["scan", s.dtype, s.layout, "backward" if s.backward else "forward"]
    parts += ["reverse"] * s.reverse
    return "-".join(parts + ["few"] * (columns == FEW))


def expectation(s: ScanSpec) -> Expectation:
    """Accesses as wide as the vector, no division but the columns', registers for the warps of the plan. Along time
    lanes exchange products, which are rounded toward 0, in fp32 of two numbers, and registers are for 28 warps of an
    SM."""
    bits = s.vector * BITS[s.dtype]
    wide = (f"LDG.E.{bits}", f"STG.E.{bits}") if bits >= 64 else ("LDG.E", "STG.E")
    lanes = ("SHFL.UP", "SHFL.IDX", "FMUL.RZ", *["FFMA.RZ"] * (s.dtype == "fp32")) if s.layout == "time" else ()
    return Expectation(instructions=(*wide, *lanes, "BAR.SYNC", "BAR.ARV"), absent=("CALL", "ATOM", "RED"),
                       registers=72 if s.layout == "time" else 168)

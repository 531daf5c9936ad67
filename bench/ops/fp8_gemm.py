"""fp8_gemm against torch (cuBLASLt, CUTLASS) and QuACK: every scale granularity, small M, fused epilogues.

    python -m bench.ops.fp8_gemm [--sections tensor,row,1x128_128x128,1x128_1x128,few,epilogue,calls]
    [--shapes 8192x8192x8192] [--quick]

Operands are randn, quantised before the clock runs; results bf16. From 4096^3 on a turn is a burst of 20 ms after 0.1 s
of rest; --idle 0 takes turns at the power limit, `bench.studies.sustained` two seconds of each. "QuACK tuned" compiles
44
kernels, once for all shapes: --without leaves it out. Results go to OUT/fp8_gemm.json after every case; a table of all
of them is printed last. Exit status 0 if every bound that could be decided holds and every result is accurate, 1 if not
or if something did not run, 2 without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import tkq
from bench.core import harness
from bench.core.command import PRODUCTS, Bench, Job, main, mean_misses, rate_misses, rest
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops.gemm import randn
from bench.peers import common, fp8
from tkq.gemm.fp8.spec import ACTIVATIONS
from tkq.reference.fp8 import fp8_gemm as reference
from tkq.testing.timing import relative_error

LARGE = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384), (8192, 28672, 8192), (8192, 8192, 28672))
FEW = tuple((m, 8192, 8192) for m in (1, 4, 16, 32, 64, 128))
QUICK = (LARGE[0], LARGE[1], FEW[2])
AT_LEAST = {"tensor": (0.98, 1.01), "row": (0.98, 1.01), "1x128_128x128": (1.00, 1.04)}  # at each shape, in the mean
FEW_GBS, FEW_ROWS, CALL_US = 2200, 64, 14.0
SAMPLE_ROWS = 128

common.PEERS.update(fp8.PEERS)


def product_job(section: str, kind: str, shape, unit: str = "TFLOP/s", bound=None, options=None, roof=None) -> Job:
    m, n, k = shape
    options = options or {}

    def inputs(i):
        """Operands and scales, and of a product with options a bias behind them."""
        bias = (randn(0, n),) if options else ()
        return *fp8.both_orders(kind, fp8.operands(m, n, k, kind, i)), *bias

    def ours(a, b, sa, sb, *more):
        return tkq.fp8_gemm(a, b, sa, sb, bias=more[-1] if options else None, **options)

    def error(name, given, output):
        a, b, sa, sb = given[:4]
        rows = slice(max(0, m - SAMPLE_ROWS), m)
        bias = given[-1] if options and name != "plain" else None
        activation = None if name == "plain" else options.get("activation")
        wanted = reference(a[rows], b, sa if sa.dim() == 0 else sa[rows], sb, bias, activation,
                           torch.float32)
        left_out = sa * sb if name.startswith("QuACK") else 1.0  # its product is timed without the scales
        return relative_error(output[rows].float() * left_out, wanted)

    work = 2 * m * n * k if unit == "TFLOP/s" else n * k + m * k + 2 * m * n
    name = f"fp8_gemm {kind}" + "".join(f" {v}" for v in (options.get("activation"),) if v)
    # QuACK adds up in float32 where torch and we have the tensor cores' fast sums, and takes 4.5 to 5 times as long
    alike = ("torch",) if kind == "tensor" and not options else ()
    question = harness.Question(section, name, f"{m}x{n}x{k}", unit, work, bound, roof=roof, alike=alike)
    op, names = ("fp8_plain", ("plain",)) if options else ("fp8_gemm", tuple(fp8.PEERS["fp8_gemm"]))
    return Job(question, ours, op, names, inputs, error, {"kind": kind}, rest(m, n, k))


def large_jobs(kind: str, shapes) -> Iterator[Job]:
    bound = Bound(fp8.bound_names(kind), AT_LEAST[kind][0]) if kind in AT_LEAST else None
    for shape in shapes:
        yield product_job(kind, kind, shape, bound=bound)


def few_jobs(shapes) -> Iterator[Job]:
    for shape in shapes:
        for kind in ("tensor", "row", "1x128_128x128"):
            yield product_job("few", kind, shape, "GB/s")


def epilogue_jobs(shapes) -> Iterator[Job]:
    for shape in shapes:
        for kind in ("row", "tensor", "1x128_128x128"):
            for activation in (None, *ACTIVATIONS):
                options = {"activation": activation}
                yield product_job("epilogue", kind, shape, roof=Bound(("plain",), 0.97), options=options)


def calls() -> dict[str, Call]:
    """Eager calls on small tensors."""
    x = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16)
    found = {"x + x": Call(lambda: x + x)}
    for kind in KINDS:
        given = fp8.both_orders(kind, fp8.operands(128, 128, 128, kind, 0))
        found[f"fp8_gemm {kind} tkq"] = Call(lambda x=given: tkq.fp8_gemm(*x[:4]), False, CALL_US)
        theirs = fp8.torch_mm(kind)
        found[f"fp8_gemm {kind} torch"] = Call(lambda x=given, f=theirs: f(*x[:2], *x[4:]))
    return found


def judge(cases) -> list[str]:
    """What no single case decides: the mean over the large products, and the bytes a second of few rows."""
    problems = []
    for kind, (_, wanted) in AT_LEAST.items():
        problems += mean_misses(kind, [case for case in cases if case.section == kind], wanted, len(LARGE))
    few = [case for case in cases if case.section == "few" and int(case.shape.partition("x")[0]) <= FEW_ROWS]
    return problems + rate_misses("few", few, FEW_GBS)


def _large(kind):
    return lambda shapes: large_jobs(kind, shapes)


KINDS = ("tensor", "row", "1x128_128x128", "1x128_1x128")
BENCH = Bench(
    "fp8_gemm", __doc__,
    {**{kind: _large(kind) for kind in KINDS}, "few": few_jobs, "epilogue": epilogue_jobs},
    shapes={**dict.fromkeys(KINDS, LARGE), "few": FEW, "epilogue": LARGE[:2]},
    quick=QUICK,
    calls=calls,
    effort=PRODUCTS,
    judge=judge,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))

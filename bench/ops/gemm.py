"""gemm in bf16 against cuBLAS and QuACK: large GEMMs, fused epilogues, small M, batches, CPU time per call.

    python -m bench.ops.gemm [--sections calls,large,rows,epilogue,few,batched] [--quick] [--shapes 4096x4096x4096]

large: a @ b.t(), as a linear layer has it; rows: a @ b. Shapes are MxNxK. From 4096^3 on a turn is a burst of 20 ms
after 0.1 s of rest; --idle 0 takes turns at the power limit, `bench.studies.sustained` two seconds of each. "QuACK
tuned"
compiles 44 kernels, once for all shapes: --without leaves it out. Results go to OUT/gemm.json after every case; a table
is printed last.
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
from bench.peers import common, deepgemm, gemm
from tkq import reference
from tkq.testing.timing import relative_error

BF16 = torch.bfloat16
LARGE = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384), (8192, 28672, 8192), (8192, 8192, 28672))
FUSED = ((4096, 4096, 4096), (8192, 8192, 8192))
FEW = tuple((m, 8192, 8192) for m in (1, 4, 16, 32, 64, 128))
QUICK = (LARGE[0], LARGE[1], FEW[0], FEW[2], FEW[4])
EACH, IN_THE_MEAN, OF_PLAIN = 0.98, 1.01, 0.97
FEW_GBS, FEW_ROWS = 2450, 64  # GB/s, with at most FEW_ROWS rows
CALL_US, AUTOGRAD_CALL_US = 14.0, 25.0
RIVALS = ("cuBLAS", "QuACK", "QuACK tuned")

common.PEERS.update({op: {**common.PEERS.get(op, {}), **found} for op, found in gemm.PEERS.items()})


def randn(i: int, *shape: int) -> torch.Tensor:
    """bf16; a generator of its own: a capture that fails may leave torch's default one unusable."""
    return torch.randn(*shape, device="cuda", dtype=BF16, generator=torch.Generator("cuda").manual_seed(i))


def product_jobs(section: str, transposed: bool, shapes, unit="TFLOP/s") -> Iterator[Job]:
    """QuACK is tuned for the large products with b.t(): seconds a shape, and `rows` are the same shapes in b's other
    layout."""
    against = RIVALS if section == "large" else RIVALS[:2]
    names = (*against, deepgemm.NAME)
    for m, n, k in shapes:
        def inputs(i, m=m, n=n, k=k):
            return randn(i, m, k), randn(i + 1000, n, k).t() if transposed else randn(i + 1000, k, n)

        def error(_, ab, output):
            return relative_error(output[:256], ab[0][:256].float() @ ab[1].float())

        work = 2 * m * n * k if unit == "TFLOP/s" else 2 * (m * k + k * n + m * n)
        shape = f"{m}x{n}x{k} a @ b{'.t()' if transposed else ''}"
        question = harness.Question(section, "gemm", shape, unit, work, Bound(against, EACH))
        yield Job(question, lambda a, b: tkq.gemm(a, b), "gemm", names, inputs, error, idle_seconds=rest(m, n, k))


def epilogue_jobs(shapes) -> Iterator[Job]:
    for m, n, k in shapes:
        for activation in ("", "relu", "silu", "gelu", "gelu_tanh"):
            def inputs(i, m=m, n=n, k=k):
                return randn(i, m, k), randn(i + 1000, n, k).t(), randn(i + 2000, n)

            def ours(a, b, bias, activation=activation):
                return tkq.gemm(a, b, bias=bias, activation=activation or None)

            def error(name, tensors, output, activation=activation):
                if name == "plain":
                    return None
                a, b, bias = tensors
                wanted = reference.gemm(a[:256].float(), b.float(), bias=bias, activation=activation)
                return relative_error(output[:256], wanted)

            question = harness.Question("epilogue", "gemm", f"{m}x{n}x{k} bias {activation}", "TFLOP/s", 2 * m * n * k,
                                        Bound(gemm.LINEAR, 1.0), roof=Bound(("plain",), OF_PLAIN))
            yield Job(question, ours, "gemm_linear", (*gemm.LINEAR, "plain"), inputs, error,
                      {"activation": activation}, rest(m, n, k))


def batched_jobs(_) -> Iterator[Job]:
    for batches, m, n, k in ((32, 1024, 1024, 1024), (16, 2048, 2048, 512)):
        def inputs(i, batches=batches, m=m, n=n, k=k):
            return randn(i, batches, m, k), randn(i + 1000, batches, k, n)

        def error(_, ab, output):
            return relative_error(output[0], ab[0][0].float() @ ab[1][0].float())

        question = harness.Question("batched", "gemm", f"B{batches} {m}x{n}x{k}", "TFLOP/s", 2 * batches * m * n * k)
        yield Job(question, lambda a, b: tkq.gemm(a, b), "gemm_batched", ("cuBLAS",), inputs, error)


def calls() -> dict[str, Call]:
    """Eager calls on small tensors."""
    a, b, bias = randn(0, 256, 256), randn(1, 256, 256), randn(2, 256)
    out, few, layer = torch.empty_like(a), a[:8].contiguous(), tkq.nn.Linear(256, 256, device="cuda", dtype=BF16)
    a_r, b_r = a.clone().requires_grad_(), b.clone().requires_grad_()
    found = {
        "x + x": Call(lambda: a + a),
        "gemm tkq": Call(lambda: tkq.gemm(a, b), at_most=CALL_US),
        "gemm tkq, few rows": Call(lambda: tkq.gemm(few, b), at_most=CALL_US),
        "gemm tkq, bias and silu": Call(lambda: tkq.gemm(a, b, bias=bias, activation="silu"), at_most=CALL_US),
        "gemm tkq, c": Call(lambda: tkq.gemm(a, b, c=a, beta=1.0), at_most=CALL_US),
        "gemm tkq, out": Call(lambda: tkq.gemm(a, b, out=out), at_most=CALL_US),
        "gemm tkq, recorded": Call(lambda: tkq.gemm(a_r, b_r), True, AUTOGRAD_CALL_US),
        "nn.Linear tkq": Call(lambda: layer(a)),
        "nn.Linear torch": Call(lambda: torch.nn.functional.linear(a, layer.weight, layer.bias)),
    }
    for name, call in common.find("gemm", ("cuBLAS", "QuACK"))[0].items():
        found[f"gemm {name}"] = Call(lambda call=call: call(a, b))
    return found


def judge(cases) -> list[str]:
    """The bounds that no single case decides: the mean over large products, and the bytes a second of few rows."""
    problems = []
    for section in ("large", "rows"):
        problems += mean_misses(section, [case for case in cases if case.section == section], IN_THE_MEAN, len(LARGE))
    few = [case for case in cases if case.section == "few" and int(case.shape.partition("x")[0]) <= FEW_ROWS]
    return problems + rate_misses("few", few, FEW_GBS)


BENCH = Bench(
    "gemm", __doc__,
    {
        "large": lambda shapes: product_jobs("large", True, shapes),
        "rows": lambda shapes: product_jobs("rows", False, shapes),
        "epilogue": epilogue_jobs,
        "few": lambda shapes: product_jobs("few", True, shapes, "GB/s"),
        "batched": batched_jobs,
    },
    shapes={"large": LARGE, "rows": LARGE, "epilogue": FUSED, "few": FEW},
    quick=QUICK,
    calls=calls,
    effort=PRODUCTS,
    judge=judge,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))

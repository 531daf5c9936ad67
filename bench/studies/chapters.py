"""The docs' own kernels against the shipped ones: docs/write_your_own and examples/write_a_row_kernel.py.

    python -m bench.studies.chapters [--sections reduction,rows,gemm,attention] [--quick] [--shapes 4096]

bf16. "example" is the file of examples/. reduction: softmax of M x N, its roof a copy. rows: the backward of
silu(rmsnorm(x) * weight), which tkq does not ship: ours is the example, its roof torch.add. gemm: a @ b.t(), MxNxK.
attention: --shapes are lengths; B * S = 16384, 16 heads of 128 columns. Results go to OUT/chapters.json after every
case.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

import tkq
from bench.core import command, harness, markdown
from bench.core.command import Bench, Job
from bench.core.results import Bound, Case, Report
from bench.ops.gemm import randn
from bench.peers import common
from bench.peers.attention import inputs as attention_inputs
from bench.peers.attention import pairs
from tkq import reference
from tkq.reference import losses
from tkq.testing import timing
from tkq.testing.timing import relative_error

TEMPERATURE = 0.7
ROWS = ((32768, 4096), (16384, 16384), (8192, 131072))
BACKWARD = ((262144, 1024), (65536, 4096), (16384, 16384))
PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192))
TOKENS, HEADS, HEAD_DIM = 16384, 16, 128
LENGTHS = ((1024,), (4096,), (16384,))
ATTENTION, OF_ADD = 0.85, 0.95  # of tkq.flash_attn; of torch.add
EXAMPLE = "example"
FILES = {"reduction": "write_a_reduction.py", "rows": "write_a_row_kernel.py", "gemm": "write_a_gemm.py",
         "attention": "write_a_flash_attention.py"}


def example(name: str):
    """A module of examples/; it imports the DSL."""
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def _softmax():
    softmax = example("write_a_reduction").softmax
    return lambda x: softmax(x, TEMPERATURE)


def _gemm():
    gemm = example("write_a_gemm").gemm
    return lambda a, b: gemm(a, b.t())


def _attention(causal):
    flash_attention = example("write_a_flash_attention").flash_attention
    return lambda q, k, v: flash_attention(q, k, v, causal)


common.PEERS.update({
    "chapters reduction": {EXAMPLE: _softmax, "copy": lambda: common.copied},
    "chapters rows": {"add": lambda: lambda dy, x, weight, rstd: torch.add(dy, x)},
    "chapters gemm": {EXAMPLE: _gemm, "cuBLAS": lambda: torch.matmul},
    "chapters attention": {EXAMPLE: _attention},
})


def reduction_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        def error(name, inputs, output):
            if name == "copy":
                return None
            wanted = losses.softmax(inputs[0][:256].float(), 1 / TEMPERATURE)
            return relative_error(output[:256], wanted)

        question = harness.Question("reduction", "softmax", f"M{m} N{n}", "GB/s", 2 * m * n * 2)
        yield Job(question, lambda x: tkq.softmax(x, scale=1 / TEMPERATURE), "chapters reduction",
                  (EXAMPLE, "copy"), lambda i, m=m, n=n: (randn(i, m, n),), error)


def row_jobs(shapes) -> Iterator[Job]:
    module = example("write_a_row_kernel")
    for m, n in shapes:
        def error(name, inputs, output):
            if name == "add":
                return None
            dy, x, weight, _ = inputs
            wide = [t.float().requires_grad_() for t in (x[:256], weight)]
            with torch.enable_grad():
                y = F.silu(F.rms_norm(wide[0], x.shape[1:], wide[1], module.EPS))
                wanted, = torch.autograd.grad(y, wide[:1], dy[:256].float())
            return relative_error(output[0][:256], wanted)

        question = harness.Question("rows", "silu(rmsnorm) backward", f"M{m} N{n}", "GB/s", 3 * m * n * 2,
                                    roof=Bound(("add",), OF_ADD))
        yield Job(question, module.silu_norm_backward, "chapters rows", ("add",),
                  lambda i, m=m, n=n: module.inputs(m, n, "cuda", i), error)


def gemm_jobs(shapes) -> Iterator[Job]:
    for m, n, k in shapes:
        def error(_, ab, output):
            return relative_error(output[:256], ab[0][:256].float() @ ab[1].float())

        question = harness.Question("gemm", "gemm", f"{m}x{n}x{k}", "TFLOP/s", 2 * m * n * k)
        yield Job(question, lambda a, b: tkq.gemm(a, b), "chapters gemm", (EXAMPLE, "cuBLAS"),
                  lambda i, m=m, n=n, k=k: (randn(i, m, k), randn(i + 1000, n, k).t()), error)


def attention_jobs(shapes) -> Iterator[Job]:
    for (s,) in shapes:
        for causal in (False, True):
            def error(_, qkv, output, causal=causal):
                one = [x[:1, :, [0, -1]].float() for x in qkv]
                return relative_error(output[:1, :, [0, -1]], reference.flash_attn(*one, causal)[0])

            b = TOKENS // s
            shape = f"B{b} S{s} H{HEADS} D{HEAD_DIM} {'causal' if causal else 'full'}"
            question = harness.Question("attention", "flash_attn", shape, "TFLOP/s",
                                        4 * b * HEADS * HEAD_DIM * pairs(s, causal))
            yield Job(question, lambda q, k, v, causal=causal: tkq.flash_attn(q, k, v, causal=causal),
                      "chapters attention", (EXAMPLE,),
                      attention_inputs(b, s, HEADS, HEADS, HEAD_DIM, HEAD_DIM), error, {"causal": causal})


def share(case: Case) -> float | None:
    """The example's speed as a share of tkq's own at the same shape; None where one of them was not timed."""
    timed = {t.name: t for t in case.comparison.timings if t.ok}
    return timing.ratio(timed[EXAMPLE], timed["tkq"]) if {EXAMPLE, "tkq"} <= timed.keys() else None


def judge(cases: Iterable[Case]) -> list[str]:
    """The bounds that are not of tkq's own functions: how fast an example is, and how exact."""
    wrong = []
    for case in cases:
        errors = {t.name: t.error for t in case.comparison.timings if t.error is not None}
        if EXAMPLE in errors and not errors[EXAMPLE] <= 2 * errors.get("tkq", 0.0) + 1e-3:
            wrong.append(f"{case.op} {case.shape}: the example's error is {errors[EXAMPLE]:.1e}")
        reached = share(case)
        if case.section == "attention" and reached is not None and reached < ATTENTION:
            wrong.append(f"{case.op} {case.shape}: the example has {reached:.3f}x tkq's speed, bound {ATTENTION}")
    return wrong


def table(report: Report) -> str:
    """The speed of the examples: a row for each case."""
    rows = []
    for case in report.cases:
        name = EXAMPLE if EXAMPLE in (t.name for t in case.comparison.timings) else case.ours
        timed = {t.name: t for t in case.comparison.timings if t.ok}
        if name not in timed:
            continue
        beside = [f"{timing.ratio(timed[name], t):.3f}x {_whose(case, t.name)}" for t in timed.values()
                  if t.name != name]
        rows.append((f"`{FILES[case.section]}`", case.shape, f"{case.rate(name):.0f} {case.unit}", ", ".join(beside)))
    return markdown.table(("example", "shape", "rate", "relative speed"), rows)


def _whose(case: Case, name: str) -> str:
    return {"tkq": f"`tkq.{case.op}`", "copy": "copy", "add": "`torch.add`"}.get(name, name)


BENCH = Bench(
    "chapters", __doc__,
    {"reduction": reduction_jobs, "rows": row_jobs, "gemm": gemm_jobs, "attention": attention_jobs},
    shapes={"reduction": ROWS, "rows": BACKWARD, "gemm": PRODUCTS, "attention": LENGTHS},
    quick=(ROWS[0], BACKWARD[1], PRODUCTS[0], LENGTHS[1]),
    judge=judge,
)


def main(argv: list[str] | None = None) -> int:
    return command.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())

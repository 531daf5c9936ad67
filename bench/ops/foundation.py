"""A short run against the bounds: attention, norms and gemm with their baselines, and CPU time per call.

    python -m bench.ops.foundation [--sections attention,norms,gemm,calls] [--seconds 280] [--out bench/results/h100]

Results go to OUT/foundation.json after every case; a table of all of them is printed last. Exit status 0 if every bound
that could be decided holds and every result is accurate, 1 if not or if something did not run, 2 without a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound, Cost
from bench.core.shapes import NORM_SHAPES
from bench.peers import common
from tkq import reference
from tkq.testing.timing import relative_error

BF16 = torch.bfloat16
TOKENS, WIDTH = 16384, 2048  # attention: B * S and H * D
LENGTHS = (1024, 4096, 16384)
ATTENTION_BOUNDS = {(128, False): (1.00, 1.00, 1.00), (128, True): (1.10, 1.04, 1.04)}
D64_BOUND, NORM_BOUND, GEMM_BOUND = 0.97, 0.99, 0.96
GEMM_SIZES = (4096, 8192)
CALL_BOUNDS_US = {"rmsnorm": 12.0, "flash_attn": 20.0}
FIRST_CALL_BOUND_US = 50_000.0
NORM_SAMPLE_ROWS = 256


def generator(seed: int) -> torch.Generator:
    """A generator of our own: a capture that fails may leave torch's default one unusable."""
    return torch.Generator("cuda").manual_seed(seed)


# ---- the cases ---------------------------------------------------------------------------------------------------


def attention_jobs() -> Iterator[Job]:
    for d in (128, 64):
        for causal in (False, True):
            for i, s in enumerate(LENGTHS):
                yield _attention_job(s, d, causal, ATTENTION_BOUNDS.get((d, causal), (D64_BOUND,) * 3)[i])


def _attention_job(s: int, d: int, causal: bool, at_least: float) -> Job:
    b, h = TOKENS // s, WIDTH // d
    flops = 4 * b * h * s * s * d * (0.5 if causal else 1)

    def inputs(i):
        g = generator(i)
        return tuple(torch.randn(b, s, h, d, device="cuda", dtype=BF16, generator=g) for _ in range(3))

    def error(_, qkv, output):
        heads = (0, h - 1)
        pairs = [
            (output[:1, :, [x]], reference.flash_attn(*(t[:1, :, [x]].float() for t in qkv), causal)[0]) for x in heads
        ]
        return max(relative_error(o, wanted) for o, wanted in pairs)

    shape = f"B{b} S{s} H{h} D{d} {'causal' if causal else 'full'}"
    question = harness.Question("attention", "flash_attn", shape, "TFLOP/s", flops, Bound(("FA4", "cuDNN"), at_least))

    def ours(q, k, v):
        return tkq.flash_attn(q, k, v, causal=causal)

    return Job(question, ours, "attention", ("FA4", "cuDNN"), inputs, error, {"causal": causal})


def norm_jobs() -> Iterator[Job]:
    for m, n in NORM_SHAPES:
        yield norm_job("rmsnorm", m, n)
        yield norm_job("layernorm", m, n)
        yield norm_job("layernorm", m, n, with_bias=True)


def norm_job(op: str, m: int, n: int, with_bias: bool = False) -> Job:
    layer = op == "layernorm"

    def inputs(i):
        g = generator(i)
        x = torch.randn(m, n, device="cuda", dtype=BF16, generator=g)
        vector = torch.float32 if layer else BF16  # QuACK's layernorm takes float32 vectors only, so everyone gets them
        weight = torch.randn(n, device="cuda", dtype=vector, generator=g)
        return x, weight, torch.randn(n, device="cuda", dtype=vector, generator=g) if with_bias else None

    def error(name, xwb, output):
        if name == "copy":
            return None
        x, weight, bias = xwb
        rows = slice(0, NORM_SAMPLE_ROWS), slice(m - NORM_SAMPLE_ROWS, m)
        oracle, eps = (reference.layernorm, common.LAYER_EPS) if layer else (reference.rmsnorm, common.RMS_EPS)
        return max(relative_error(output[r], oracle(x[r].float(), weight, bias, eps)) for r in rows)

    def ours(x, weight, bias):
        if layer:
            return tkq.layernorm(x, weight, bias, eps=common.LAYER_EPS)
        return tkq.rmsnorm(x, weight, bias=bias, eps=common.RMS_EPS)

    shape = f"M{m} N{n}{' with bias' if with_bias else ''}"
    question = harness.Question("norms", op, shape, "GB/s", 2 * m * n * 2, Bound(("QuACK",), NORM_BOUND))
    return Job(question, ours, op, ("QuACK", "torch.compile", "copy"), inputs, error)


def gemm_jobs() -> Iterator[Job]:
    for size in GEMM_SIZES:
        for transposed in (False, True):
            yield _gemm_job(size, transposed)


def _gemm_job(size: int, transposed: bool) -> Job:
    def inputs(i):
        g = generator(i)
        a, b = (torch.randn(size, size, device="cuda", dtype=BF16, generator=g) for _ in range(2))
        return a, b.t() if transposed else b

    def error(_, ab, output):
        rows = slice(0, 256)
        return relative_error(output[rows], ab[0][rows].float() @ ab[1].float())

    shape = f"{size}^3 a @ b{'.t()' if transposed else ''}"
    question = harness.Question("gemm", "gemm", shape, "TFLOP/s", 2 * size**3, Bound(("cuBLAS",), GEMM_BOUND))
    return Job(question, lambda a, b: tkq.gemm(a, b), "gemm", ("cuBLAS",), inputs, error)


# ---- the cost of a call and of starting --------------------------------------------------------------------------


def calls() -> dict[str, harness.Call]:
    """Eager calls on tiny tensors, tkq's and its peers'."""
    x = torch.randn(8, 256, device="cuda", dtype=BF16)
    w = torch.randn(256, device="cuda", dtype=BF16)
    q, k, v = (torch.randn(1, 128, 2, 128, device="cuda", dtype=BF16) for _ in range(3))
    found = {
        "x + x": Call(lambda: x + x),
        "rmsnorm tkq": Call(lambda: tkq.rmsnorm(x, w), at_most=CALL_BOUNDS_US["rmsnorm"]),
        "flash_attn tkq": Call(lambda: tkq.flash_attn(q, k, v), at_most=CALL_BOUNDS_US["flash_attn"]),
    }
    for name, call in common.find("rmsnorm", ("torch", "QuACK"))[0].items():
        found[f"rmsnorm {name}"] = Call(lambda call=call: call(x, w, None))
    for name, call in common.find("attention", ("torch", "FA4"), causal=False)[0].items():
        found[f"flash_attn {name}"] = Call(lambda call=call: call(q, k, v))
    return found


FIRST_CALL = """
import json, sys, time
import torch
begin = time.perf_counter()
import tkq
op = getattr(tkq, sys.argv[1])
imported = time.perf_counter() - begin
shape = (8, 256) if sys.argv[1] == "rmsnorm" else (1, 128, 2, 128)
tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
arguments = (tensors[0], torch.ones(256, device="cuda", dtype=torch.bfloat16)) if sys.argv[1] == "rmsnorm" else tensors
(tensors[0] + tensors[1]).sum().item()
begin = time.perf_counter()
op(*arguments)
torch.cuda.synchronize()
first = time.perf_counter() - begin
print(json.dumps({"import_us": imported * 1e6, "first_us": first * 1e6, "cutlass": "cutlass" in sys.modules}))
"""


def first_call_costs(op: str, processes: int = 3) -> list[Cost]:
    """The first call of a fresh process whose kernel is in the disk cache (`calls` put it there)."""
    root = Path(__file__).resolve().parents[2]
    seen = []
    for _ in range(processes):
        command = [sys.executable, "-c", FIRST_CALL, op]
        run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=root)
        if run.returncode:
            raise RuntimeError(f"a new process failed: {run.stderr.strip()[-300:]}")
        seen.append(json.loads(run.stdout.strip().splitlines()[-1]))
    how = "cutlass was imported" if any(s["cutlass"] for s in seen) else "without importing cutlass"
    return [
        _cost(f"first call in a second process: {op}", [s["first_us"] for s in seen], FIRST_CALL_BOUND_US, how),
        _cost(f"import tkq after torch: {op}", [s["import_us"] for s in seen], None, ""),
    ]


def _cost(name, values, at_most, note) -> Cost:
    ordered = sorted(values)
    return Cost(name, ordered[len(ordered) // 2], ordered[0], ordered[-1], len(ordered), at_most, note)


BENCH = Bench(
    "foundation", __doc__,
    {"gemm": lambda _: gemm_jobs(), "attention": lambda _: attention_jobs(), "norms": lambda _: norm_jobs()},
    calls=calls,
    others={f"starting: {op}": lambda op=op: first_call_costs(op) for op in CALL_BOUNDS_US},
)

if __name__ == "__main__":
    sys.exit(main(BENCH))

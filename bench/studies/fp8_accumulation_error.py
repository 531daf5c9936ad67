"""The bias of float8 accumulation along K: the mean signed error of both modes, and of torch's.

    python -m bench.studies.fp8_accumulation_error [--out bench/results/h100]

The tensor cores cut off what they add, they do not round, so sums come out too near to zero: by so much in the mean, as
a share of the mean absolute result, whose exact value is a float64 sum. Results go to OUT/fp8_sums.json.
Exit status 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import tkq
from bench.core.results import run_here

M, N, LENGTHS = 4096, 512, (1024, 4096, 16384)  # enough results that no blocks share K: of few, less is cut off
FP8 = torch.float8_e4m3fn


def operands(kind: str, k: int, device="cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """a (M, K) and b (K, N), "positive": between 0 and 1, or "normal"."""
    g = torch.Generator(device).manual_seed(k)
    draw = torch.rand if kind == "positive" else torch.randn
    a, b = (draw(rows, k, device=device, generator=g).to(FP8) for rows in (M, N))
    return a, b.t()


def ways() -> dict[str, Callable]:
    """By name, f(a, b) to float32."""
    def ours(accumulate):
        return lambda a, b, one: tkq.fp8_gemm(a, b, one, one, out_dtype=torch.float32, accumulate=accumulate)

    def torchs(fast):
        return lambda a, b, one: torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast)

    return {'tkq, "fast"': ours("fast"), 'tkq, "fp32"': ours("fp32"), "torch, fast": torchs(True),
            "torch, not fast": torchs(False)}


def error(got: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """mean_signed: below 0 where results are too near to zero; both as a share of the mean of |truth|."""
    off, scale = got.double() - truth, truth.abs().mean()
    return {"mean_signed": (off * truth.sign()).mean().div(scale).item(),
            "root_mean_square": off.square().mean().sqrt().div(scale).item()}


def measure(device="cuda", lengths=LENGTHS) -> list[dict]:
    found = []
    for kind in ("positive", "normal"):
        for k in lengths:
            a, b = operands(kind, k, device)
            truth, one = a.double() @ b.double(), torch.ones((), device=device)
            for name, f in ways().items():
                try:
                    result = error(f(a, b, one), truth)
                except Exception as problem:  # a way that this torch has not
                    result = {"note": f"{type(problem).__name__}: {str(problem)[:120]}"}
                found.append({"operands": kind, "K": k, "way": name, **result})
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.fp8_accumulation_error",
                                     description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.studies.fp8_accumulation_error runs kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    with torch.no_grad():
        found = measure()
    for x in found:
        print(f"{x['operands']:9s} K {x['K']:6d} {x['way']:16s} "
              + (x["note"] if "note" in x else f"{x['mean_signed']:+.2e} {x['root_mean_square']:.2e}"))
    options.out.mkdir(parents=True, exist_ok=True)
    run = run_here()
    text = json.dumps({"run": run, "device": run["device"], "type": "float8_e4m3fn", "errors": found}, indent=1)
    (options.out / "fp8_sums.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

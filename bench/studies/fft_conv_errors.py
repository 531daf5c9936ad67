"""Errors of long convolutions of both precisions, and of torch.fft in float32: of y and of the filter's gradient.

    python -m bench.studies.fft_conv_errors [--tokens 4096,262144] [--dtypes fp16] [--out bench/results/h200]

Relative errors in the L2 norm, against float64: of y as it is rounded, of the filter's gradient in float32. Signals:
random numbers, a constant, an alternating one; filters of as many taps as tokens. Results go to
OUT/fft_conv_errors.json. Exit status 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

import tkq
from bench.core.results import run_here
from tkq.reference import long_convolution as reference
from tkq.testing.timing import relative_error

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIGNALS = "random", "constant", "alternating"
TOKENS = 1024, 4096, 32768, 262144, 1048576, 4194304
SEQUENCES, HEADS = 2, 2


def inputs(signal: str, tokens: int, dtype: torch.dtype, device="cuda"):
    """u, k, dy."""
    g = torch.Generator(device).manual_seed(tokens)
    randn = lambda *shape: torch.randn(shape, device=device, generator=g)
    u, k, dy = randn(SEQUENCES, HEADS, tokens), randn(HEADS, tokens) / tokens**0.5, randn(SEQUENCES, HEADS, tokens)
    if signal == "constant":
        u.fill_(3), k.fill_(1 / tokens)
    if signal == "alternating":
        u.copy_(1 - 2.0 * (torch.arange(tokens, device=device) % 2).expand_as(u))
    return u.to(dtype), k, dy.to(dtype)


def measure(device="cuda", tokens=TOKENS, dtypes=tuple(DTYPES), signals=SIGNALS) -> list[dict]:
    found = []
    for dtype in dtypes:
        for L in tokens:
            for signal in signals:
                u, k, dy = inputs(signal, L, DTYPES[dtype], device)
                want = reference.fft_conv(u.double(), k.double())
                of_filter = reference.fft_conv_backward(dy.double(), u.double(), k.double())[1]
                row = {"dtype": dtype, "tokens": L, "signal": signal}
                for way, (y, dk) in (("half", both(u, k, dy, "half")), ("split", both(u, k, dy, "split")),
                                     ("torch", torchs(u, k, dy))):
                    row[way] = {"y": relative_error(y, want), "dk": relative_error(dk, of_filter)}
                found.append(row)
    return found


def both(u, k, dy, precision):
    """y and the filter's gradient, by tkq."""
    with torch.enable_grad():
        leaf = k.detach().requires_grad_()
        y = tkq.fft_conv(u, leaf, precision=precision)
        return y.detach(), *torch.autograd.grad(y, leaf, dy)


def torchs(u, k, dy):
    """The same through torch.fft in float32."""
    return reference.fft_conv(u, k).to(u.dtype), reference.fft_conv_backward(dy, u, k)[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.fft_conv_errors", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--tokens", type=lambda words: tuple(map(int, words.split(","))), default=TOKENS)
    parser.add_argument("--dtypes", type=lambda words: tuple(words.split(",")), default=tuple(DTYPES))
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.studies.fft_conv_errors runs kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    with torch.no_grad():
        found = measure(tokens=options.tokens, dtypes=options.dtypes)
    for x in found:
        words = "  ".join(f"{way} {x[way]['y']:.2e} {x[way]['dk']:.2e}" for way in ("half", "split", "torch"))
        print(f"{x['dtype']} {x['tokens']:8d} {x['signal']:12s} {words}")
    options.out.mkdir(parents=True, exist_ok=True)
    run = run_here()
    text = json.dumps({"run": run, "device": run["device"], "errors": found}, indent=1)
    (options.out / "fft_conv_errors.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Attention's gradients beside FA4's and cuDNN's, everything that a call launches included.

    python -m bench.attention_backward [--quick | --shapes 1024,4096] [--dims 64,128] [--out bench/results/h100]

B * S = 16384 and H * D = 2048. FLOPs: 2.5 times the forward's. A result is judged against the formula in float32 on two
heads. Exit status 0 if each bound holds, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench import harness
from bench.results import Bound, Environment, Report, geometric_mean
from tkq import reference_attention_backward as reference_attention
from tkq.testing.timing import Effort, relative_error

BF16 = torch.bfloat16
TOKENS, WIDTH = 16384, 2048  # B * S and H * D
LENGTHS, DIMS = (1024, 2048, 4096, 8192, 16384), (64, 128, 256)
QUICK = (1024, 4096, 16384)
AT_LEAST, MEAN_AT_LEAST = 0.97, 1.02


@dataclasses.dataclass(frozen=True)
class Shape:
    """batch and heads follow from length and dim; kv_heads: 0 for as many as query heads."""

    length: int
    dim: int
    causal: bool
    kv_heads: int = 0

    @property
    def batch(self) -> int:
        return TOKENS // self.length

    @property
    def heads(self) -> int:
        return WIDTH // self.dim

    @property
    def flops(self) -> float:
        return 10 * self.batch * self.heads * self.length**2 * self.dim * (0.5 if self.causal else 1)

    def __str__(self):
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads else "")
        return f"B{self.batch} S{self.length} {heads} D{self.dim} {'causal' if self.causal else 'full'}"


def shapes(lengths, dims) -> Iterator[Shape]:
    for dim in dims:
        for causal in (False, True):
            for length in lengths:
                yield Shape(length, dim, causal)


def inputs(shape: Shape) -> Callable[[int], tuple]:
    """i -> (do, q, k, v, o, lse), o and lse by our own forward, or by PyTorch's where we have none."""
    import tkq

    def forward(q, k, v):
        try:
            return tkq.flash_attn(q, k, v, causal=shape.causal, return_lse=True)
        except NotImplementedError:
            found = torch.ops.aten._scaled_dot_product_flash_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), 0.0, shape.causal)
            return found[0].transpose(1, 2), found[1]

    def make(i):
        g = torch.Generator("cuda").manual_seed(i)
        new = lambda h: torch.randn(shape.batch, shape.length, h, shape.dim, device="cuda", dtype=BF16, generator=g)
        q, do = new(shape.heads), new(shape.heads)
        k, v = new(shape.kv_heads or shape.heads), new(shape.kv_heads or shape.heads)
        return do, q, k, v, *forward(q, k, v)

    return make


def error(shape: Shape) -> Callable:
    """The largest relative error of dq, dk and dv of the first and the last head of the first sequence."""

    def of(_, given, found):
        group = given[1].shape[2] // given[2].shape[2]
        if shape.length * shape.length * group > 1 << 28:  # the formula has matrices of that size
            return None
        worst = 0.0
        for h in (0, given[2].shape[2] - 1):
            queries, keys = slice(h * group, (h + 1) * group), slice(h, h + 1)
            do, q, o = (given[i][:1, :, queries].float() for i in (0, 1, 4))
            k, v = (given[i][:1, :, keys].float() for i in (2, 3))
            want = reference_attention.flash_attn_backward(do, q, k, v, o, given[5][:1, queries], None, shape.causal)
            for a, b, part in zip(found, want, (queries, keys, keys)):
                worst = max(worst, relative_error(a[:1, :, part], b))
        return worst

    return of


# ---- the candidates --------------------------------------------------------------------------------


def ours(shape: Shape, config=None) -> Callable:
    from tkq.attention import backward_ops
    from tkq.attention.arguments import Options

    options = Options(shape.causal)

    def call(do, q, k, v, o, lse):
        if config is None:
            return backward_ops.attention_backward((do, q, k, v, o, lse, None), None, options)
        out = [torch.empty_like(x) for x in (q, k, v)]
        backward_ops.run((do, q, k, v, o, lse, None), out, options, config=config)
        return out

    return call


def flash_attention_4(shape: Shape) -> Callable:
    from flash_attn.cute.interface import _flash_attn_bwd

    def call(do, q, k, v, o, lse):
        return _flash_attn_bwd(q, k, v, o, do, lse, causal=shape.causal)[:3]

    return call


def cudnn(shape: Shape) -> Callable:
    """By autograd, on a graph that was recorded for these inputs the first time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    graphs = {}

    def recorded(q, k, v):
        with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            x = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
            o = torch.nn.functional.scaled_dot_product_attention(
                *x, is_causal=shape.causal, enable_gqa=q.shape[2] != k.shape[2])
            return o, x

    def call(do, q, k, v, o, lse):
        key = q.data_ptr()
        if key not in graphs:
            graphs[key] = recorded(q, k, v)
        o, x = graphs[key]
        return [t.transpose(1, 2) for t in torch.autograd.grad(o, x, do.transpose(1, 2), retain_graph=True)]

    return call


PEERS = {"FA4": flash_attention_4, "cuDNN": cudnn}


def find_peers(shape: Shape, names) -> tuple[dict, dict]:
    """As ``bench.peers.find``: callables, and the missing ones with the reason."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = PEERS[name](shape)
        except Exception as problem:  # not installed, or installed and broken
            missing[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
    return found, missing


# ---- running ---------------------------------------------------------------------------------------


def compare(shape: Shape, candidates, missing, effort, monitor, gpu):
    """Time candidates, "tkq" among them, side by side."""
    question = harness.Question("attention_backward", "backward", str(shape), "TFLOP/s", shape.flops,
                                Bound(tuple(PEERS), AT_LEAST), missing)
    return harness.compare(question, candidates, inputs(shape), effort, error=error(shape), monitor=monitor, gpu=gpu)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.attention_backward", description=__doc__.split("\n")[0])
    p.add_argument("--quick", action="store_true", help=f"lengths {QUICK} only, short turns")
    p.add_argument("--shapes", default="", help=f"lengths, of {LENGTHS}")
    p.add_argument("--dims", default=",".join(map(str, DIMS)))
    p.add_argument("--gqa", action="store_true", help="one K/V head to 4 query heads, beside as many K/V heads")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--round-seconds", type=float, default=0.04)
    p.add_argument("--seconds", type=float, default=280, help="start no case after so long")
    p.add_argument("--without", default="", help="peers to leave out")
    p.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    args = p.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.attention_backward times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    from tkq.testing import timing

    lengths = tuple(map(int, args.shapes.split(","))) if args.shapes else QUICK if args.quick else LENGTHS
    dims = tuple(map(int, args.dims.split(",")))
    seconds = 0.02 if args.quick else args.round_seconds
    effort = Effort(7 if args.quick else args.rounds, seconds, warmup_seconds=6 * seconds)
    monitor, gpu = harness.Monitor(), timing.Gpu()
    report = Report(Environment.here(monitor.driver))
    deadline = time.monotonic() + args.seconds
    cases = list(shapes(lengths, dims))
    if args.gqa:
        cases = [dataclasses.replace(s, kv_heads=s.heads // 4) for s in cases]
    for shape in cases:
        if time.monotonic() > deadline:
            report.problems.append(f"{shape}: not run, the time is up")
            continue
        found, missing = find_peers(shape, [n for n in PEERS if n not in args.without.split(",")])
        try:
            case = compare(shape, {"tkq": ours(shape), **found}, missing, effort, monitor, gpu)
        except Exception as problem:  # out of memory, say: the other shapes can still run
            report.problems.append(f"{shape}: {type(problem).__name__}: {str(problem)[:300]}")
            continue
        report.cases.append(case)
        report.save(args.out / f"attention_backward{'_gqa' if args.gqa else ''}.json")
        print("\n".join(harness.case_lines(case)), flush=True)
    print("\n" + harness.summary(report.cases, []))
    best = [case.against_best()[1] for case in report.cases if case.against_best()]
    if best:
        print(f"geometric mean over {len(best)} shapes: {geometric_mean(best):.3f}, bound {MEAN_AT_LEAST}")
    print("\n".join(f"PROBLEM {x}" for x in report.problems))
    wrong = [case for case in report.cases if case.holds() is False or case.accurate() is False]
    return 1 if wrong or report.problems or not best or geometric_mean(best) < MEAN_AT_LEAST else 0


if __name__ == "__main__":
    sys.exit(main())

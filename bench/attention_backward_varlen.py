"""The gradients of flash_attn_varlen beside FA4's, everything that a call launches included.

    python -m bench.attention_backward_varlen [--dims 64,128] [--rounds 7] [--out bench/results/h100]

16384 tokens, H * D = 2048. FLOPs: 2.5 times the forward's, of pairs of a query and a key that it sees (causal: half of
all). A result is judged against the formula in float32 on the first head. Exit status 0 if each bound holds, 1 if not,
2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from bench import attention_peers, harness
from bench.attention_forward import MANY, MIXED
from bench.results import Bound, Environment, Report
from tkq import reference_attention_backward as reference_attention
from tkq.testing.timing import Effort, relative_error

WIDTH, AT_LEAST = 2048, 1.05
BATCHES = (("mixed 1..8192", MIXED), ("64 of 32..480", MANY), ("16 of 1024", (1024,) * 16))


def inputs(lengths, heads, dim, causal):
    """i -> (do, q, k, v, o, lse, cu_seqlens), o and lse by our own forward."""
    import tkq

    packed, n = attention_peers.varlen_inputs(lengths, heads, heads, dim), max(lengths)

    def make(i):
        q, k, v, cu = packed(i)
        o, lse = tkq.flash_attn_varlen(q, k, v, cu, cu, n, n, causal=causal, return_lse=True)
        return torch.randn_like(o), q, k, v, o, lse, cu

    return make


def ours(longest, causal, config=None):
    from tkq.attention import backward_varlen_ops
    from tkq.attention.arguments import Lengths, Options

    options = Options(causal)

    def call(do, q, k, v, o, lse, cu):
        lengths = Lengths(cu, cu, None, None, longest, longest)
        if config is None:
            return backward_varlen_ops.attention_varlen_backward((do, q, k, v, o, lse, None), None, lengths, options)
        found = [torch.empty_like(x) for x in (q, k, v)]
        backward_varlen_ops.run((do, q, k, v, o, lse, None), found, lengths, options, config=config)
        return found

    return call


def flash_attention_4(longest, causal):
    from flash_attn.cute.interface import _flash_attn_bwd

    return lambda do, q, k, v, o, lse, cu: _flash_attn_bwd(
        q, k, v, o, do, lse, causal=causal, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest,
        max_seqlen_k=longest)[:3]


def error(causal):
    """The largest relative error of dq, dk and dv of the first head."""

    def of(_, given, found):
        do, q, k, v, o = (x[:, :1].float() for x in given[:5])
        cu = given[6]
        want = reference_attention.flash_attn_varlen_backward(
            do, q, k, v, o, given[5][:1], None, (cu, cu, None, None), (causal, None, -1, -1, 0.0), None)
        return max(relative_error(a[:, :1], b) for a, b in zip(found[:3], want))

    return of


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.attention_backward_varlen", description=__doc__.split("\n")[0])
    p.add_argument("--dims", default="128,64")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--round-seconds", type=float, default=0.03)
    p.add_argument("--seconds", type=float, default=120, help="start no case after so long")
    p.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    args = p.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.attention_backward_varlen times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    from tkq.testing import timing

    effort = Effort(args.rounds, args.round_seconds, warmup_seconds=4 * args.round_seconds)
    monitor, gpu = harness.Monitor(), timing.Gpu()
    report, deadline = Report(Environment.here(monitor.driver)), time.monotonic() + args.seconds
    for dim in map(int, args.dims.split(",")):
        for name, lengths in BATCHES:
            for causal in (False, True):
                shape = f"{name} H{WIDTH // dim} D{dim} {'causal' if causal else 'full'}"
                if time.monotonic() > deadline:
                    report.problems.append(f"{shape}: not run, the time is up")
                    continue
                found, missing = {"tkq": ours(max(lengths), causal)}, {}
                try:
                    found["FA4"] = flash_attention_4(max(lengths), causal)
                except Exception as problem:  # not installed, or installed and broken
                    missing["FA4"] = f"{type(problem).__name__}: {str(problem)[:200]}"
                flops = 10 * WIDTH * sum(attention_peers.pairs(n, causal) for n in lengths)
                question = harness.Question("attention_backward_varlen", "backward", shape, "TFLOP/s", flops,
                                            Bound(("FA4",), AT_LEAST), missing)
                case = harness.compare(question, found, inputs(lengths, WIDTH // dim, dim, causal), effort,
                                       error=error(causal), monitor=monitor, gpu=gpu)
                report.cases.append(case)
                report.save(args.out / "attention_backward_varlen.json")
                print("\n".join(harness.case_lines(case)), flush=True)
    print("\n" + harness.summary(report.cases, []))
    print("\n".join(f"PROBLEM {x}" for x in report.problems))
    return 1 if report.problems or any(c.holds() is False or c.accurate() is False for c in report.cases) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The norms' backward passes beside their peers and beside torch.add, which moves as many bytes and computes nothing.

    python -m bench.norm_backward [--quick] [--shapes 1024x4096] [--match rmsnorm] [--without torch.compile]

rmsnorm: dx and dweight, all in bf16. layernorm: dx, dweight and dbias, the vectors in float32, as QuACK has them.
Bytes: two reads and one write of M x N. Results go to OUT/norm_backward.json. Exit status 0 if every bound that could
be decided holds and every result is accurate, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import harness
from bench.foundation import Job, Run
from bench.results import Bound, Case, geometric_mean, within
from tkq import reference_backward
from tkq.norms.backward_ops import norm_backward
from tkq.testing.timing import Effort, relative_error

BF16 = torch.bfloat16
KINDS = ("rmsnorm", "layernorm")
SHAPES = ((32768, 1024), (32768, 4096), (32768, 8192), (16384, 16384), (16384, 32768), (8192, 65536), (4096, 131072))
MODERATE = ((8192, 4096), (4096, 4096), (1024, 4096))
QUICK = ((32768, 1024), (32768, 4096), (16384, 16384), (1024, 4096))
PEERS = ("QuACK", "torch.compile", "Liger", "add")
LIGER_MOST_COLUMNS = 65536
AGAINST_PEERS, AGAINST_QUACK_MODERATE, AGAINST_PEERS_MEAN = 1.02, 1.15, 1.10
EPS = 1e-5
SAMPLE_ROWS, CHUNK_ROWS = 256, 2048


def against_add(n: int) -> float:
    """The least ratio to torch.add."""
    return 0.95 if 4096 <= n <= 65536 else 0.92


def jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        for kind in KINDS:
            yield _job(kind, m, n)


def _job(kind: str, m: int, n: int) -> Job:
    layer = kind == "layernorm"

    def inputs(i):
        g = torch.Generator("cuda").manual_seed(i)
        dy, x = (torch.randn(m, n, device="cuda", dtype=BF16, generator=g) for _ in range(2))
        weight = torch.randn(n, device="cuda", dtype=torch.float32 if layer else BF16, generator=g)
        return dy, x, weight, *_statistics(kind, x)

    def ours(dy, x, weight, rstd, mean):
        return norm_backward(kind, dy, x, weight, rstd, mean, needs=(True, True, layer))

    if (m, n) in MODERATE:
        bound = Bound(("QuACK",), AGAINST_QUACK_MODERATE)
    else:
        peers = tuple(name for name in PEERS if name != "add" and (name != "Liger" or n <= LIGER_MOST_COLUMNS))
        bound = Bound(peers, AGAINST_PEERS)
    question = harness.Question("backward", f"{kind}_backward", f"M{m} N{n}", "GB/s", 3 * m * n * 2, bound)
    return Job(question, ours, f"{kind}_backward", PEERS, inputs, _error(kind))


def _statistics(kind, x):
    """(rstd, mean or None), some rows at a time: the inputs must not need three times their memory."""
    rstd, mean = [], []
    for part in x.split(CHUNK_ROWS):
        wide = part.float()
        mean.append(wide.mean(-1))
        centred = wide - mean[-1][:, None] if kind == "layernorm" else wide
        rstd.append(torch.rsqrt(centred.square().mean(-1) + EPS))
    return torch.cat(rstd), torch.cat(mean) if kind == "layernorm" else None


def _error(kind):
    def error(name, inputs, output):
        """The worst of dx (first and last rows), dweight and dbias."""
        if name == "add":
            return None
        dy, x, weight, rstd, mean = inputs

        def wanted(rows):
            return reference_backward.norm_backward(
                kind, dy[rows], x[rows], weight, rstd[rows], None if mean is None else mean[rows]
            )

        M = x.shape[0]
        ends = (slice(0, SAMPLE_ROWS), slice(M - SAMPLE_ROWS, M))
        errors = [relative_error(output[0][rows], wanted(rows)[0]) for rows in ends]
        sums = [wanted(slice(i, i + CHUNK_ROWS))[1:] for i in range(0, M, CHUNK_ROWS)]
        for i, column in enumerate(output[1:]):
            if column is not None and i < (2 if kind == "layernorm" else 1):
                errors.append(relative_error(column, sum(s[i].double() for s in sums).float()))
        return max(errors)

    return error


def table(cases: list[Case]) -> str:
    """Every case against its bound, against torch.add, and the means."""
    rows = [f"{'op':20s} {'shape':16s} {'GB/s':>6s} {'best peer':>22s} {'add':>6s} {'least':>6s}"]
    ratios = []
    for case in cases:
        found, best = case.ratios(), case.against_best()
        n = int(case.shape.split("N")[1])
        if not case.comparison[case.ours].ok:
            rows.append(f"{case.op:20s} {case.shape:16s} FAILED {case.comparison[case.ours].note}")
            continue
        against = f"{best[0]} {best[1]:.3f}" if best else "none"
        mark = {True: "ok", False: "MISSED", None: ""}[case.holds()]
        roof = found.get("add")
        reached = "-" if roof is None else f"{roof:.3f}"
        below = roof is not None and case.bound.at_least == AGAINST_PEERS and not within(roof, against_add(n))
        rows.append(f"{case.op:20s} {case.shape:16s} {case.rate(case.ours):6.0f} {against:>15s} {mark:>6s} "
                    f"{reached:>6s} {against_add(n):>6.2f} {'MISSED' if below else ''}")
        if best and case.bound.at_least == AGAINST_PEERS:
            ratios.append(best[1])
    if ratios:
        rows.append(f"mean against the best peer {geometric_mean(ratios):.3f}, least {AGAINST_PEERS_MEAN}")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.norm_backward", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four shapes")
    parser.add_argument("--shapes", help="such as 1024x4096,32768x1024")
    parser.add_argument("--match", default="", help="only cases whose operation and shape contain this text")
    parser.add_argument("--without", default="", help="peers to leave out: torch.compile compiles for a while")
    parser.add_argument("--seconds", type=float, default=280, help="start no case after so long")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-seconds", type=float, default=0.04, help="one candidate's turn")
    parser.add_argument("--no-graphs", action="store_true", help="time eager calls behind a backlog, no CUDA graphs")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.norm_backward times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    shapes = QUICK if options.quick else SHAPES + MODERATE
    if options.shapes:
        shapes = tuple(tuple(map(int, shape.split("x"))) for shape in options.shapes.split(","))
    chosen = [job for job in jobs(shapes) if options.match in f"{job.question.op} {job.question.shape}"]
    effort = Effort(options.rounds, options.round_seconds, graphs=not options.no_graphs)
    without = tuple(filter(None, options.without.split(",")))
    run = Run(options.out / "norm_backward.json", options.seconds, effort, without)
    for left, job in zip(range(len(chosen), 0, -1), chosen):
        run.case(job, left)
    print("\n" + table(run.report.cases))
    print("\n".join(f"PROBLEM {p}" for p in run.report.problems))
    bad = [case for case in run.report.cases if case.holds() is False or case.accurate() is False]
    return 1 if bad or run.report.problems else 0


if __name__ == "__main__":
    sys.exit(main())

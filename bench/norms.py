"""The norms' forwards beside their peers and beside copies: plain, with a residual, quantising, of heads; calls' cost.

    python -m bench.norms [--sections calls,forward,residual,quant,heads] [--quick] [--shapes 32768x4096]

Everything is bf16, but for layernorm's vectors, which are float32 as QuACK has them. Bytes: x and the result; with a
residual both sums too; a quantised result is half of bf16's. Results go to OUT/norms.json after every case; a table of
all of them is printed last. Exit status 0 if every bound that could be decided holds and every result is accurate, 1 if
not or if something did not run, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import tkq
from bench import harness, norms_peers, peers
from bench.foundation import BF16, Job, Run, _generator, _norm_job
from bench.peers import RMS_EPS
from bench.results import Bound, Cost
from bench.shapes import NORM_SHAPES
from tkq import reference_norms
from tkq.norms.heads_ops import heads_backward
from tkq.norms.spec import GROUP
from tkq.testing.timing import Effort, relative_error

QUICK = ((32768, 1024), (32768, 4096), (16384, 16384), (8192, 131072))
HEADS = ((4, 4096, 32, 128), (4, 4096, 8, 128), (1, 4608, 48, 128), (4, 4096, 32, 64))  # B, S, H, D
BEST_PEER, QUANT_COST = 0.99, 1.05
CALL_US, AUTOGRAD_CALL_US = 9.0, 20.0
SAMPLE_ROWS = 256

peers.PEERS.update(norms_peers.PEERS)
for _op, _make in norms_peers.LIGER.items():
    peers.PEERS[_op]["Liger"] = _make


def _randn(i: int, *shape: int, dtype=BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=_generator(i))


def _ends(m: int) -> tuple[slice, slice]:
    return slice(0, SAMPLE_ROWS), slice(m - SAMPLE_ROWS, m)


# ---- the cases ---------------------------------------------------------------------------------------------------


def forward_jobs(shapes) -> Iterator[Job]:
    """Against the best peer; Liger's layernorm needs a bias, and its kernels hold a row of at most 65536 columns."""
    for m, n in shapes:
        for op, with_bias in (("rmsnorm", False), ("layernorm", False), ("layernorm", True)):
            job = _norm_job(op, m, n, with_bias)
            liger = ("Liger",) if n <= 65536 and (op == "rmsnorm" or with_bias) else ()
            against = ("QuACK", "torch.compile", *liger)
            question = dataclasses.replace(job.question, section="forward", bound=Bound(against, BEST_PEER))
            yield dataclasses.replace(job, question=question, peer_names=(*against, "copy"))


def residual_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        yield _residual_job(m, n)


def _residual_job(m: int, n: int) -> Job:
    def inputs(i):
        return _randn(3 * i, m, n), _randn(3 * i + 1, m, n), _randn(3 * i + 2, n)

    def ours(x, residual, weight):
        return tkq.rmsnorm(x, weight, residual=residual, prenorm=True, eps=RMS_EPS)

    def error(name, xrw, output):
        if name == "copy":
            return None
        x, residual, weight = xrw

        def wanted(rows):
            return reference_norms.norm("rmsnorm", x[rows], weight, None, residual[rows], eps=RMS_EPS)[0]

        return max(relative_error(output[0][r], wanted(r)) for r in _ends(m))

    liger = ("Liger",) if n <= 65536 else ()
    against = ("QuACK", "torch.compile", *liger)
    op = "rmsnorm + residual"
    question = harness.Question("residual", op, f"M{m} N{n}", "GB/s", 4 * m * n * 2, Bound(against, BEST_PEER))
    return Job(question, ours, op, (*against, "copy"), inputs, error)


def quant_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        for granularity in ("row", "block"):
            yield _quant_job(m, n, granularity)
        yield _quant_residual_job(m, n)


def _quant_job(m: int, n: int, granularity: str) -> Job:
    def inputs(i):
        return _randn(2 * i, m, n), _randn(2 * i + 1, n)

    def ours(x, weight):
        return tkq.rmsnorm_quant(x, weight, eps=RMS_EPS, granularity=granularity)

    def error(name, xw, output):
        if name == "plain":
            return None
        x, weight = xw
        width = n if granularity == "row" else GROUP
        return max(
            relative_error(
                output[0][r].float() * output[1][r].repeat_interleave(width, 1)[:, :n],
                reference_norms.norm("rmsnorm", x[r], weight, eps=RMS_EPS)[0],
            )
            for r in _ends(m)
        )

    op = f"rmsnorm_quant {granularity}"
    question = harness.Question("quant", op, f"M{m} N{n}", "GB/s", 3 * m * n, Bound(("plain",), 1 / QUANT_COST))
    return Job(question, ours, op, ("plain", "torch.compile"), inputs, error)


def _quant_residual_job(m: int, n: int) -> Job:
    def inputs(i):
        return _randn(3 * i, m, n), _randn(3 * i + 1, m, n), _randn(3 * i + 2, n)

    def ours(x, residual, weight):
        return tkq.rmsnorm_quant(x, weight, residual=residual, prenorm=True, eps=RMS_EPS)

    op = "rmsnorm_quant + residual"
    question = harness.Question("quant", op, f"M{m} N{n}", "GB/s", 7 * m * n, Bound(("plain",), 1 / QUANT_COST))
    return Job(question, ours, op, ("plain",), inputs, lambda *_: None)


def heads_jobs(_) -> Iterator[Job]:
    """q/k norm on a slice of a packed (B, S, 3, H, D), at shapes of its own."""
    for shape in HEADS:
        yield _heads_job(*shape)
        yield _heads_backward_job(*shape)


def _heads_job(b: int, s: int, h: int, d: int) -> Job:
    def inputs(i):
        return _randn(2 * i, b, s, 3, h, d)[:, :, 1], _randn(2 * i + 1, h, d)

    def error(name, xw, output):
        if name == "copy":
            return None
        x, weight = (t.float() for t in (xw[0][:1], xw[1]))
        return relative_error(output[:1], reference_norms.norm("rmsnorm", x, weight, eps=RMS_EPS)[0])

    op, shape, against = "rmsnorm heads", f"B{b} S{s} H{h} D{d}", ("QuACK", "torch.compile")
    question = harness.Question("heads", op, shape, "GB/s", 2 * b * s * h * d * 2, Bound(against, BEST_PEER))
    return Job(question, lambda x, w: tkq.rmsnorm(x, w, eps=RMS_EPS), op, (*against, "copy"), inputs, error)


def _heads_backward_job(b: int, s: int, h: int, d: int) -> Job:
    def inputs(i):
        dy, x, weight = _randn(3 * i, b, s, h, d), _randn(3 * i + 1, b, s, h, d), _randn(3 * i + 2, h, d)
        return dy, x, weight, torch.rsqrt(x.float().square().mean(-1) + RMS_EPS).flatten()

    def ours(dy, x, weight, rstd):
        rows = (-1, h, d)
        dx, dweight, _, _ = heads_backward(
            dy.view(rows), x.view(rows), weight, rstd, dresidual_out=None, weight_offset=0.0,
            needs=(True, True, False), dx_dtype=BF16, dresidual_dtype=None, dbias_dtype=None,
        )
        return dx.view(x.shape), dweight

    def error(name, inputs_, output):
        if name == "add":
            return None
        dy, x, weight, rstd = inputs_
        wanted = reference_norms.norm_backward("rmsnorm", dy, x, weight, rstd, needs=(True, True, False))
        return max(relative_error(o, w.float()) for o, w in zip(output, wanted))

    op = "rmsnorm heads backward"
    shape = f"B{b} S{s} H{h} D{d}"
    question = harness.Question("heads", op, shape, "GB/s", 3 * b * s * h * d * 2, Bound(("torch.compile",), 1.0))
    return Job(question, ours, op, ("torch.compile", "add"), inputs, error)


JOBS = {"forward": forward_jobs, "residual": residual_jobs, "quant": quant_jobs, "heads": heads_jobs}


# ---- the cost of a call ------------------------------------------------------------------------------------------


def call_costs() -> dict[str, tuple[Callable, bool, float | None]]:
    """By name: a call on tiny tensors, whether autograd records it, and the bound of its host time in microseconds."""
    x, w, f = _randn(0, 8, 256), _randn(1, 256), _randn(2, 256, dtype=torch.float32)
    wide, q, wh = x.view(2, 4, 256), _randn(3, 2, 4, 3, 8, 128)[:, :, 1], _randn(4, 8, 128)
    xr, wr = x.clone().requires_grad_(), w.clone().requires_grad_()
    calls = {
        "x + x": (lambda: x + x, False, None),
        "x + x, recorded": (lambda: xr + xr, True, None),
        "rmsnorm tkq": (lambda: tkq.rmsnorm(x, w), False, CALL_US),
        "layernorm tkq": (lambda: tkq.layernorm(x, f, f), False, CALL_US),
        "rmsnorm tkq, three dimensions": (lambda: tkq.rmsnorm(wide, w), False, CALL_US),
        "rmsnorm tkq, residual and prenorm": (lambda: tkq.rmsnorm(x, w, residual=x, prenorm=True), False, None),
        "rmsnorm tkq, heads": (lambda: tkq.rmsnorm(q, wh), False, None),
        "rmsnorm_quant tkq": (lambda: tkq.rmsnorm_quant(x, w), False, None),
        "rmsnorm tkq, recorded": (lambda: tkq.rmsnorm(xr, wr), True, AUTOGRAD_CALL_US),
        "layernorm tkq, recorded": (lambda: tkq.layernorm(xr, wr, wr), True, AUTOGRAD_CALL_US),
        "rmsnorm tkq, residual and prenorm, recorded": (
            lambda: tkq.rmsnorm(xr, wr, residual=xr, prenorm=True), True, None),
    }
    for name, call in peers.find("rmsnorm", ("torch", "QuACK", "Liger"))[0].items():
        calls[f"rmsnorm {name}"] = (lambda call=call: call(x, w, None), False, None)
        calls[f"rmsnorm {name}, recorded"] = (lambda call=call: call(xr, wr, None), True, None)
    return calls


def price(name: str, call: Callable, recorded: bool, at_most: float | None, together: int = 20) -> list[Cost]:
    """Recorded calls run several together: the harness times without gradients, and switching them on costs too."""
    if not recorded:
        return [harness.cpu_time_per_call(f"CPU per eager call: {name}", call, at_most=at_most)]

    def several():
        with torch.enable_grad():
            for _ in range(together):
                call()

    cost = harness.cpu_time_per_call(f"CPU per eager call: {name}", several, calls=10)
    each = {field: getattr(cost, field) / together for field in ("median_us", "least_us", "most_us")}
    return [dataclasses.replace(cost, at_most=at_most, **each)]


# ---- running -----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.norms", description=__doc__.split("\n")[0])
    parser.add_argument("--sections", default="calls,forward,residual,quant,heads", help="which to run, in this order")
    parser.add_argument("--quick", action="store_true", help="four shapes, short rounds, without torch.compile")
    parser.add_argument("--shapes", help="of all but heads, such as 32768x4096,32768x1024")
    parser.add_argument("--match", default="", help="only cases whose operation and shape contain this text")
    parser.add_argument("--without", default="", help="peers to leave out: torch.compile compiles for minutes")
    parser.add_argument("--seconds", type=float, default=280, help="start no case after so long; costs always run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-seconds", type=float, default=0.04, help="one candidate's turn")
    parser.add_argument("--no-graphs", action="store_true", help="time eager calls behind a backlog, no CUDA graphs")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    options = parser.parse_args(argv)
    sections = options.sections.split(",")
    if unknown := sorted(set(sections) - {*JOBS, "calls"}):
        parser.error(f"--sections: unknown {unknown}; allowed {[*JOBS, 'calls']}")
    if not torch.cuda.is_available():
        print("bench.norms times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    without = tuple(filter(None, options.without.split(","))) + (("torch.compile",) if options.quick else ())
    rounds, seconds = (7, 0.02) if options.quick else (options.rounds, options.round_seconds)
    effort = Effort(rounds, seconds, graphs=not options.no_graphs)
    run = Run(options.out / "norms.json", options.seconds, effort, without)
    shapes = QUICK if options.quick else NORM_SHAPES
    if options.shapes:
        shapes = tuple(tuple(map(int, shape.split("x"))) for shape in options.shapes.split(","))
    jobs = [j for s in sections if s in JOBS for j in JOBS[s](shapes)]
    jobs = [j for j in jobs if options.match in f"{j.question.op} {j.question.shape}"]
    return run_all(run, jobs, "calls" in sections)


def run_all(run: Run, jobs: list[Job], calls: bool) -> int:
    e = run.report.environment
    print(f"{e.device}, driver {e.driver}, {', '.join(f'{k} {v}' for k, v in e.versions.items() if v)}", flush=True)
    for name, (call, recorded, bound) in call_costs().items() if calls else ():
        run.costs(name, lambda name=name, call=call, recorded=recorded, bound=bound: price(name, call, recorded, bound))
    for i, job in enumerate(jobs):
        run.case(job, len(jobs) - i)
    report = run.report
    print("\n" + harness.summary(report.cases, report.costs))
    print("\n".join(f"PROBLEM {p}" for p in report.problems))
    missed = [x for x in (*report.cases, *report.costs) if x.holds() is False]
    wrong = [case for case in report.cases if case.accurate() is False]
    return 1 if missed or wrong or report.problems else 0


if __name__ == "__main__":
    sys.exit(main())

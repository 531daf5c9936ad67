"""What bench.softmax, bench.cross_entropy and bench.linear_cross_entropy share: options, inputs, running, a table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from bench import harness, losses_peers, peers
from bench.foundation import Job, Run
from bench.results import Case, Cost, within
from bench.shapes import NORM_SHAPES
from tkq.testing.timing import Effort

BF16 = torch.bfloat16
SAMPLE_ROWS = 256
BACKWARD_SHAPES = tuple((min(m, (1 << 29) // n), n) for m, n in NORM_SHAPES if n <= 131072)  # as in the targets
QUICK = ((32768, 1024), (32768, 4096), (16384, 16384), (16384, 65536), (8192, 65536), (8192, 131072), (4096, 131072))
CALL_US, AUTOGRAD_CALL_US = 9.0, 20.0

peers.PEERS.update(losses_peers.PEERS)


def randn(i: int, *shape: int) -> torch.Tensor:
    """bf16; a generator of its own: a capture that fails may leave torch's default one unusable."""
    return torch.randn(*shape, device="cuda", dtype=BF16, generator=torch.Generator("cuda").manual_seed(i))


def targets(i: int, m: int, n: int) -> torch.Tensor:
    """int64, none ignored."""
    return torch.randint(n, (m,), device="cuda", generator=torch.Generator("cuda").manual_seed(i))


def ends(m: int) -> tuple[slice, slice]:
    """The rows whose results are looked at."""
    return slice(0, SAMPLE_ROWS), slice(max(0, m - SAMPLE_ROWS), m)


def call_cost(name: str, call: Callable, recorded: bool, together: int = 20) -> list[Cost]:
    """Host microseconds of an eager call. A recorded one goes forward only, with autograd's bookkeeping, several times
    in one `enable_grad`."""
    at_most = None if " tkq" not in name else AUTOGRAD_CALL_US if recorded else CALL_US
    if not recorded:
        return [harness.cpu_time_per_call(f"CPU per eager call: {name}", call, at_most=at_most)]

    def several():
        with torch.enable_grad():
            for _ in range(together):
                call()

    cost = harness.cpu_time_per_call(f"CPU per eager call: {name}", several, calls=10)
    times = (t / together for t in (cost.median_us, cost.least_us, cost.most_us))
    return [Cost(cost.name, *times, cost.samples, at_most, cost.note)]


def table(cases: list[Case], roofs: Mapping[str, Callable[[Case], float | None]]) -> str:
    """Every case against its bound and against its roof. roofs: by the roof's name, the least ratio for a case."""
    rows = [f"{'op':24s} {'shape':18s} {'GB/s':>6s} {'best peer':>22s} {'bound':>12s} {'roof':>12s}"]
    for case in cases:
        label = f"{case.op:24s} {case.shape:18s}"
        if not case.comparison[case.ours].ok:
            rows.append(f"{label} FAILED {case.comparison[case.ours].note}")
            continue
        best, ratios = case.against_best(), case.ratios()
        against = f"{best[0]} {best[1]:.3f}" if best else "none"
        least = "" if case.bound is None else f"{case.bound.at_least:.2f}"
        mark = {True: "ok", False: "MISSED", None: ""}[case.holds()]
        under = []
        for name, bound in roofs.items():
            if name in ratios:
                low = bound(case) is not None and not within(ratios[name], bound(case))
                under.append(f"{name} {ratios[name]:.3f}" + (" MISSED" if low else ""))
        rows.append(f"{label} {case.rate(case.ours):6.0f} {against:>22s} {least:>5s} {mark:>6s} {', '.join(under)}")
    return "\n".join(rows)


def main(argv, name: str, doc: str, sections: Mapping[str, Callable[[tuple], Iterator[Job]]],
         shapes: Mapping[str, tuple], calls: Callable[[], Mapping[str, tuple]],
         roofs: Mapping[str, Callable[[Case], float | None]]) -> int:
    """Parse the options and run. sections: from shapes to jobs; shapes: of each section; calls: (call, recorded) by
    name, of section "calls". Exit status 0 if every bound that could be decided holds, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=doc.split("\n")[0])
    parser.add_argument("--sections", default=",".join(("calls", *sections)), help="which to run, in this order")
    parser.add_argument("--quick", action="store_true", help="four shapes of each section")
    parser.add_argument("--shapes", help="such as 32768x1024,16384x16384")
    parser.add_argument("--match", default="", help="only cases whose operation and shape contain this text")
    parser.add_argument("--without", default="", help="peers to leave out: torch.compile compiles for a while")
    parser.add_argument("--seconds", type=float, default=280, help="start no case after so long")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-seconds", type=float, default=0.04, help="one candidate's turn")
    parser.add_argument("--no-graphs", action="store_true", help="time eager calls behind a backlog, no CUDA graphs")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    options = parser.parse_args(argv)
    chosen = options.sections.split(",")
    if unknown := sorted(set(chosen) - {*sections, "calls"}):
        parser.error(f"--sections: unknown {unknown}; allowed {[*sections, 'calls']}")
    if not torch.cuda.is_available():
        print(f"bench.{name} times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    effort = Effort(options.rounds, options.round_seconds, graphs=not options.no_graphs)
    run = Run(options.out / f"{name}.json", options.seconds, effort, tuple(filter(None, options.without.split(","))))
    for what, (call, recorded) in (calls() if "calls" in chosen else {}).items():
        run.costs(what, lambda what=what, call=call, recorded=recorded: call_cost(what, call, recorded))
    jobs = [job for section in chosen if section in sections
            for job in sections[section](_shapes(options, shapes[section]))
            if options.match in f"{job.question.op} {job.question.shape}"]
    for left, job in zip(range(len(jobs), 0, -1), jobs):
        run.case(job, left)
    report = run.report
    print("\n" + table(report.cases, roofs))
    print("\n".join(f"{c.name:58s} {c.median_us:6.1f} us {'MISSED' if c.holds() is False else ''}"
                    for c in report.costs))
    print("\n".join(f"PROBLEM {p}" for p in report.problems))
    bad = [x for x in (*report.cases, *report.costs) if x.holds() is False]
    wrong = [case for case in report.cases if case.accurate() is False]
    return 1 if bad or wrong or report.problems else 0


def _shapes(options, all_of_them):
    if options.shapes:
        return tuple(tuple(map(int, shape.split("x"))) for shape in options.shapes.split(","))
    return tuple(shape for shape in all_of_them if not options.quick or shape in QUICK)

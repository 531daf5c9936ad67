"""Shared by all files of cases: the command line, a run within a time budget, a table at the end."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.core import harness, ops
from bench.core.join_results import joined
from bench.core.results import SHORT_US, Case, Cost, Environment, Report, busy, geometric_mean
from bench.peers import common
from tkq.runtime import ignore_tuned
from tkq.testing.timing import Effort

CALLS = "calls"  # the section of calls' costs
IDLE_HELP = "idle seconds before each turn; default 0, but 0.1 for large GEMMs, which are timed in bursts"
USUAL, QUICK = Effort(9, 0.04), Effort(7, 0.02)
PRODUCTS = Effort(9, 0.02)  # a burst of a large one after a rest is this long: in 40 ms the power limit slows it down
REST, LARGE_FLOPS = 0.1, 1e11  # seconds before a turn; products of this many operations or more: from 4096^3 on
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Job:
    """One case to run: the question, our call, the peers to find and the inputs. idle_seconds: rest before each turn
    that counts, unless --idle says otherwise."""

    question: harness.Question
    ours: Callable
    peer_op: str
    peer_names: tuple[str, ...]
    make_inputs: Callable[[int], tuple]
    error: Callable[[str, tuple, object], float | None]
    peer_options: dict = field(default_factory=dict)
    idle_seconds: float = 0.0


def rest(m: int, n: int, k: int) -> float:
    """Of a product, `Job.idle_seconds`: large ones are timed as bursts after a rest, as without one the power limit
    decides, and neighbours share its clock; `bench.studies.sustained` has them for two seconds each."""
    return REST if 2 * m * n * k >= LARGE_FLOPS else 0.0


@dataclass(frozen=True)
class Bench:
    """A file of cases.

    sections: by name, from shapes to jobs. shapes: of each section that has a choice of them. quick: those that --quick
        leaves. calls: what to price in the section "calls". others: more costs, by name, after those. default: the
        sections that run unless others are named. judge: what is wrong with all cases together. after: more to measure
        at the end, from the options; what is wrong with it.
    """

    name: str
    doc: str
    sections: Mapping[str, Callable[[Shapes], Iterable[Job]]]
    shapes: Mapping[str, Shapes] = field(default_factory=dict)
    quick: Shapes = ()
    calls: Callable[[], Mapping[str, harness.Call]] | None = None
    others: Mapping[str, Callable[[], list[Cost]]] = field(default_factory=dict)
    default: tuple[str, ...] = ()
    effort: Effort = USUAL
    judge: Callable[[list[Case]], list[str]] = lambda cases: []
    after: Callable[[argparse.Namespace], list[str]] = lambda options: []

    @property
    def names(self) -> tuple[str, ...]:
        return ((CALLS,) if self.calls else ()) + tuple(self.sections)


class Run:
    """A report that grows, within a time budget.

    before: of the same file, what the folder has already: it is joined by what is run now. say: prints a text.
    """

    def __init__(self, path: Path, seconds: float, effort: Effort, without: tuple[str, ...] = (), *,
                 before: Report | None = None, say: Callable[[str], None] | None = None):
        self._path, self._effort, self._without = path, dataclasses.replace(
            effort, host=True, short_us=SHORT_US), without
        self._before, self._say = before, say or functools.partial(print, flush=True)
        self._deadline = time.monotonic() + seconds
        self._monitor = harness.Monitor()
        self.report = Report(Environment.here(self._monitor.driver))
        if before is not None:
            joined([before, self.report])  # another machine or version: it raises before anything is timed

    def save(self) -> None:
        report = self.report if self._before is None else joined([self._before, self.report])
        report.save(self._path)

    def effort(self, cases_left: int, candidates: int, idle_seconds: float = 0.0) -> Effort:
        """The effort asked for, or shorter turns if the time left would not do: half of a case is making inputs. Each
        candidate has a turn that does not count, to warm up; every other one begins with a lead-in of up to 10 ms.
        """
        share = (self._deadline - time.monotonic()) / cases_left
        laps = self._effort.rounds + 1
        turn = min(self._effort.round_seconds, max(0.01, 0.5 * share / laps / candidates - idle_seconds))
        return dataclasses.replace(self._effort, round_seconds=turn, warmup_seconds=0.0, idle_seconds=idle_seconds)

    def case(self, job: Job, cases_left: int) -> None:
        q = job.question
        if time.monotonic() > self._deadline:
            self.problem(f"{q.op} {q.shape}: not run, out of time")
            return
        names = tuple(name for name in job.peer_names if name not in self._without)
        found, missing = common.find(job.peer_op, names, **job.peer_options)
        left_out = {name: "left out (--without)" for name in job.peer_names if name in self._without}
        question = dataclasses.replace(q, missing={**missing, **left_out})
        candidates = {"tkq": job.ours, **found}
        effort = self.effort(cases_left, len(candidates), job.idle_seconds)
        begin = time.monotonic()
        try:
            case = harness.compare(
                question, candidates, job.make_inputs, effort, error=job.error, monitor=self._monitor
            )
        except Exception as problem:  # out of memory for the inputs, say: the other cases can still run
            self.problem(f"{q.op} {q.shape}: {type(problem).__name__}: {str(problem)[:300]}")
            return
        self.report.cases.append(dataclasses.replace(case, seconds=round(time.monotonic() - begin, 2)))
        self.save()
        self._say("\n".join(harness.case_lines(case)))

    def warm(self, job: Job) -> None:
        """Call everyone that compiles something once: it is then in their caches on the disk."""
        skipped = {*self._without, *ops.LIBRARIES, *ops.ROOFS, *ops.TUNING}
        names = [name for name in job.peer_names if name not in skipped]
        try:
            inputs = job.make_inputs(0)
        except Exception as problem:  # others fill the memory: it is compiled when it is timed
            print(f"{job.question.op} {job.question.shape}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            return
        for name in ("tkq", *names):
            found, missing = ({name: job.ours}, {}) if name == "tkq" else common.find(
                job.peer_op, (name,), **job.peer_options)
            try:
                with torch.no_grad():
                    for call in found.values():
                        call(*inputs)
                torch.cuda.synchronize()
            except Exception as problem:
                missing = {name: f"{type(problem).__name__}: {str(problem)[:200]}"}
            for name_, why in missing.items():
                print(f"{job.question.op} {job.question.shape}: {name_}: {why}", flush=True)

    def warm_calls(self, make: Callable[[], Mapping[str, harness.Call]]) -> None:
        """Make those calls once that `calls` prices."""
        self._working(make, lambda text: print(text, flush=True))

    def calls(self, make: Callable[[], Mapping[str, harness.Call]]) -> None:
        """Price calls together, but those of peers that are left out. One that fails is reported, and left out too."""
        working = {f"CPU per eager call: {name}": call for name, call in self._working(make, self.problem).items()}
        self.costs("calls", lambda: harness.quiet_cpu_times(lambda: harness.cpu_times(working)))
        if said := busy(self.report.costs):
            self._say(said)

    def _working(self, make, problem: Callable[[str], None]) -> dict[str, harness.Call]:
        working, made = {}, {}
        try:
            made = make()
        except Exception as why:
            problem(f"calls: {type(why).__name__}: {str(why)[:400]}")
        for name, call in made.items():
            if name.partition(",")[0].partition(" ")[2] in self._without:  # "rmsnorm QuACK, recorded"
                continue
            try:
                harness.call_once(call)
                working[name] = call
            except Exception as why:
                problem(f"call of {name}: {type(why).__name__}: {str(why)[:400]}")
        return working

    def costs(self, name: str, measure: Callable[[], list[Cost]]) -> None:
        try:
            costs = measure()
        except Exception as problem:
            self.problem(f"cost of {name}: {type(problem).__name__}: {str(problem)[:400]}")
            return
        self.report.costs += costs
        self.save()

    def problem(self, text: str) -> None:
        self._say(f"PROBLEM {text}")
        self.report.problems.append(text)
        self.save()


def mean_misses(what: str, cases: Iterable[Case], at_least: float, of: int = 0) -> list[str]:
    """For a ``judge``: prints the geomean speedup of these cases over their best baselines; says so if it misses its
    bound. of: the number of cases that the bound is for; with fewer nothing is decided."""
    found = [best[1] for case in cases if (best := case.against_best())]
    if not found:
        return []
    mean, part = geometric_mean(found), len(found) < of
    said = f"{what}: geomean {mean:.3f}x the best baseline, bound {at_least}"
    print(f"{said}, {len(found)} of {of} shapes: undecided" if part else f"{said}, {len(found)} shapes")
    if part or mean >= at_least:
        return []
    return [said]


def rate_misses(what: str, cases: Iterable[Case], at_least: float) -> list[str]:
    """For a ``judge``: the cases whose rate is below the bound, in their unit."""
    return [f"{what}: {case.op} {case.shape}: {case.rate(case.ours):.0f} {case.unit}, bound {at_least}"
            for case in cases if case.comparison[case.ours].ok and case.rate(case.ours) < at_least]


def main(bench: Bench, argv: list[str] | None = None) -> int:
    """Parse the options and run. Exit status 0 if every bound that could be decided holds and every result is accurate,
    1 if not or if something did not run, 2 without a GPU."""
    options = _options(bench, argv)
    if not torch.cuda.is_available():
        print(f"bench.ops.{bench.name} times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    ignore_tuned()  # what is measured is what is planned
    effort = dataclasses.replace(bench.effort, rounds=options.rounds, round_seconds=options.round_seconds)
    if options.quick:
        effort = dataclasses.replace(effort, rounds=QUICK.rounds, round_seconds=QUICK.round_seconds)
    if options.no_graphs:
        effort = dataclasses.replace(effort, graphs=False)
    run = Run(options.out / f"{bench.name}.json", options.seconds, effort, options.without)
    e = run.report.environment
    print(f"{e.device}, driver {e.driver}, {', '.join(f'{k} {v}' for k, v in e.versions.items() if v)}", flush=True)
    jobs = list(chosen_jobs(bench, options.sections, options))
    if options.warm:
        part, parts = options.warm
        for job in jobs[part::parts]:
            run.warm(job)
            torch.cuda.empty_cache()
        return 0
    run.report.copy_gbs = harness.device_copy()
    if CALLS in options.sections:
        run.calls(bench.calls)
        for name, measure in bench.others.items():
            run.costs(name, measure)
    for i, job in enumerate(jobs):
        run.case(job, len(jobs) - i)
    return _conclude(bench, run, options)


def chosen_jobs(bench: Bench, sections, options) -> Iterable[Job]:
    for section in sections:
        if section in bench.sections:
            for job in bench.sections[section](_shapes(bench, section, options)):
                if options.match in f"{job.question.op} {job.question.shape}":
                    yield job if options.idle is None else dataclasses.replace(job, idle_seconds=options.idle)


def _shapes(bench, section, options) -> Shapes:
    every = bench.shapes.get(section, ())
    if options.shapes and every:
        return options.shapes
    return tuple(shape for shape in every if shape in bench.quick) if options.quick and bench.quick else every


def _options(bench, argv):
    parser = argparse.ArgumentParser(prog=f"python -m bench.ops.{bench.name}", description=bench.doc.split("\n")[0])
    default = ",".join(bench.default or bench.names)
    parser.add_argument("--sections", default=default, help=f"any of {', '.join(bench.names)}, in this order")
    parser.add_argument("--quick", action="store_true", help="a few shapes, short rounds")
    parser.add_argument("--shapes", default="", help="for cases with selectable shapes, such as 32768x4096,16384x8192")
    parser.add_argument("--match", default="", help="only cases whose operation and shape contain this text")
    parser.add_argument("--without", default="", help="baselines to exclude: torch.compile compiles for minutes")
    parser.add_argument("--seconds", type=float, default=280, help="start no case after this time; calls always run")
    parser.add_argument("--rounds", type=int, default=bench.effort.rounds)
    parser.add_argument("--round-seconds", type=float, default=bench.effort.round_seconds,
                        help="a candidate's turn; 2 with --idle 0: sustained speed")
    parser.add_argument("--idle", type=float, help=IDLE_HELP)
    parser.add_argument("--no-graphs", action="store_true", help="time eager calls behind a backlog, no CUDA graphs")
    parser.add_argument("--warm", default="", help="such as 0/4: time nothing; compile the baselines of every fourth "
                        "case, for a later run; several such processes can run in parallel")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    options = parser.parse_args(argv)
    options.sections = options.sections.split(",")
    if unknown := sorted(set(options.sections) - set(bench.names)):
        parser.error(f"--sections: unknown {unknown}; allowed {list(bench.names)}")
    options.without = tuple(filter(None, options.without.split(",")))
    try:
        options.warm = tuple(map(int, filter(None, options.warm.split("/"))))
    except ValueError:
        parser.error(f"--warm: got {options.warm!r}, allowed is such as 0/4")
    if options.warm and not (len(options.warm) == 2 and 0 <= options.warm[0] < options.warm[1]):
        parser.error(f"--warm: got {options.warm}, allowed is such as 0/4")
    try:
        options.shapes = tuple(tuple(map(int, s.split("x"))) for s in filter(None, options.shapes.split(",")))
    except ValueError:
        parser.error(f"--shapes: got {options.shapes!r}, allowed are numbers, such as 32768x4096,16384x8192")
    return options


def _conclude(bench: Bench, run: Run, options) -> int:
    report = run.report
    if report.cases:
        print("\n" + harness.summary(report.cases), flush=True)
    problems = [*report.problems, *bench.judge(report.cases)]
    try:
        problems += bench.after(options)
    except Exception as problem:  # what was timed is still to be reported
        problems.append(f"after the cases: {type(problem).__name__}: {str(problem)[:400]}")
    print("\n".join([*harness.cost_lines(report.costs), *(f"PROBLEM {p}" for p in problems)]))
    missed = [x for x in (*report.cases, *report.costs) if x.holds() is False]
    wrong = [case for case in report.cases if case.accurate() is False]
    return 1 if missed or wrong or problems else 0

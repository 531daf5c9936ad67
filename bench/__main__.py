"""Times tkq's operations and their baselines: `python -m tkq bench [op ...]` in a source checkout.

    python -m tkq bench                                    every operation with every baseline
    python -m tkq bench rmsnorm swiglu --against quack,torch.compile,liger --quick
    python -m tkq bench gemm --shapes FILE --out results   lines of FILE: gemm 4096x4096x4096 64x512x512
    python -m tkq bench --part 0/4 --out results           a quarter of it; the others can follow in that folder
    python -m tkq bench rmsnorm --compare old/norms.json   regressions beyond the spread of both runs
    python -m tkq bench --resume --out results             continue an interrupted run: only missing cases
    python -m tkq bench --again short --out results        short kernels not yet timed between other kernels
    python -m tkq bench --calls-only --out results         CPU time of eager calls only
    python -m tkq bench --results results                  redo a folder's tables and plots; needs no GPU

The cases are defined in bench/*.py (`python -m bench.ops.norms` runs one file). All candidates of a case take turns in
one process on the same inputs, with a cold L2. The output folder receives one JSON file per file of cases, merged with
existing results, `results.md` with everything measured, and plots as PNG and SVG if matplotlib is installed.

Exit status: 0 if everything ran, every result is accurate and, with --compare, nothing got slower; 1 if not; 2 without
a GPU or with a wrong argument.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from bench.core import ahead, bounds, calls, command, compared, harness, ops, row_peers, turns
from bench.core.command import Bench, Job
from bench.core.command_line import jobs_of, parse
from bench.core.join_results import Mixed, join_folders
from bench.core.progress import Progress
from bench.core.results import Case, Report, reports_in
from bench.report import plots, summary
from tkq.runtime import ignore_tuned

# ---- running -----------------------------------------------------------------------------------------------------


def measure(options) -> int:
    """Run the cases, then the files with a main of their own; how many did not run as they should."""
    ignore_tuned()  # what is measured is what is planned
    i, n = options.part
    every = every_job(options)
    jobs = every[i::n]
    options.once = _begun_here([bench.name for bench, _ in every], i, n)
    jobs = _left(jobs, options)
    extras = [name for name in options.ops if name in ops.EXTRAS][i::n]
    by_bench = _by_file(jobs)
    for name, why in ops.absent(options.against).items():
        print(f"missing: {name}: {why}", flush=True)
    for name in options.against if options.against != ops.USUAL else ():
        if not any(set(job.peer_names) & set(ops.meant(name, job)) for _, job in jobs):
            print(f"missing: {name}: no case has this baseline", flush=True)
    if not jobs and not extras:
        print("no cases left after --sections, --match, --shapes, --part, --resume and --again")
        return 0 if options.resume or options.again else 1
    progress, left = Progress(len(jobs) + len(extras)), len(jobs)
    options.deadline = time.monotonic() + options.seconds
    copy_gbs = harness.device_copy() if jobs else None
    bad = 0
    for bench, some in by_bench.values():
        bad += _measure(bench, some, left, options, progress, copy_gbs)
        left -= len(some)
    for name in extras:
        progress.step(name)
        bad += _extra(name, options)
    progress.end()
    return bad


def price(options) -> int:
    """--calls-only: price the calls of the files whose cases are asked for; how many did not run."""
    ignore_tuned()
    pairs = every_job(options)
    options.once = _begun_here([bench.name for bench, _ in pairs], *options.part)
    files = [(bench, some) for bench, some in _by_file(pairs).values() if _to_be_priced(bench, options)]
    if not files:
        print("no calls left after --sections, --match, --shapes, --part and --resume")
        return 0 if options.resume else 1
    progress = Progress(len(files))
    bad = calls.price([(bench, _run_of(bench, some, options, options.seconds, progress)) for bench, some in files],
                      progress)
    progress.end()
    return bad


def _by_file(jobs: list[tuple[Bench, Job]]) -> dict[str, tuple[Bench, list[Job]]]:
    found: dict[str, tuple[Bench, list[Job]]] = {}
    for bench, job in jobs:
        found.setdefault(bench.name, (bench, []))[1].append(job)
    return found


def every_job(options) -> list[tuple[Bench, Job]]:
    """All cases that are asked for, of all parts."""
    return [pair for op in options.ops if op in ops.OPS for pair in jobs_of(op, options)]


def _left(jobs: list[tuple[Bench, Job]], options) -> list[tuple[Bench, Job]]:
    """Those of the cases that --resume and --again leave, by what the folder's files have."""
    if not options.resume and not options.again:
        return jobs
    there = {(name, case.section, case.op, case.shape): case for name, report in
             (reports_in(options.out).items() if options.out.is_dir() else ()) for case in report.cases}

    def wanted(bench: Bench, job: Job) -> bool:
        q = job.question
        case = there.get((bench.name, q.section, q.op, q.shape))
        return options.resume if case is None else bool(_stale(case, job) & set(options.again))

    return [(bench, job) for bench, job in jobs if wanted(bench, job)]


def _stale(case: Case, job: Job) -> set[str]:
    """How a case would now be timed that its file lacks, of `command_line.AGAIN`: between other kernels, with more
    peers."""
    short = {"short"} if case.short and not case.between else set()
    new = [name for name in job.peer_names if row_peers.became_of(case, name) == row_peers.NOT_REQUESTED]
    return short | ({"peers"} if new else set())


def _begun_here(names: list[str], i: int, n: int) -> set[str]:
    """Files of cases whose first case is of this part: what a file measures once is measured here."""
    first: dict[str, int] = {}
    for k, name in enumerate(names):
        first.setdefault(name, k % n)
    return {name for name, part in first.items() if part == i}


def _extra(name: str, options) -> bool:
    """Run a file with a main of its own; did it go wrong?"""
    argv = ["--out", str(options.out)]
    if name in ops.WITHOUT:
        argv += ["--without", ",".join(_unwanted(options))]
    try:
        return ops.extra_of(name).main(argv) != 0
    except Exception as problem:  # what was timed before is still to be reported
        print(f"PROBLEM {name}: {type(problem).__name__}: {str(problem)[:400]}", flush=True)
        return True


def _measure(bench: Bench, jobs: list[Job], left: int, options, progress: Progress, copy_gbs: float | None) -> int:
    """Run one file's cases, of those that are left; how many have problems, or results that are not accurate."""
    run = _run_of(bench, jobs, options, options.deadline - time.monotonic(), progress)
    run.report.copy_gbs = copy_gbs
    if _to_be_priced(bench, options):
        progress.say(f"calls of {bench.name}")
        calls.told(bench, run, progress)
    for k, job in enumerate(jobs):
        progress.step(f"{job.question.op} {job.question.shape}")
        run.case(job, left - k)
        torch.cuda.empty_cache()
    if bench.name in options.once:
        _after(bench, run, options)
    run.save()
    return len(run.report.problems) + sum(case.accurate() is False for case in run.report.cases)


def _run_of(bench: Bench, jobs: list[Job], options, seconds: float, progress: Progress) -> command.Run:
    """A run of a file's cases, which joins what the folder has of that file."""
    return command.Run(_path(bench, options), seconds, effort(bench, options), _left_out(options, jobs),
                       before=_before(bench, options), say=progress.say)


def _to_be_priced(bench: Bench, options) -> bool:
    """Are a file's calls to be priced in this run? With --resume, not those that the folder has."""
    if not bench.calls or options.no_calls or bench.name not in options.once:
        return False
    before = _before(bench, options) if options.resume else None
    return before is None or not before.costs


def _before(bench: Bench, options) -> Report | None:
    path = _path(bench, options)
    return Report.from_json(path.read_text()) if path.exists() else None


def _path(bench: Bench, options) -> Path:
    return options.out / f"{bench.name}.json"


def _after(bench: Bench, run: command.Run, options) -> None:
    """What a file measures behind its cases."""
    after = argparse.Namespace(shapes=options.shapes.get(bench.name, ()), without=_unwanted(options), out=options.out)
    try:
        for text in bench.after(after):
            run.problem(text)
    except Exception as problem:  # what was timed is still to be reported
        run.problem(f"after the cases: {type(problem).__name__}: {str(problem)[:400]}")


def _unwanted(options) -> tuple[str, ...]:
    """The candidates that --against leaves out."""
    return tuple(peer for name, peers in ops.AGAINST.items() if name not in options.against for peer in peers)


def _left_out(options, jobs: Iterable[Job]) -> tuple[str, ...]:
    """Those of them that no case of these has: cuBLAS is the candidate "torch" where torch multiplies float8."""
    there = {name for job in jobs for name in job.peer_names}
    return tuple(name for name in _unwanted(options) if name not in there)


def effort(bench: Bench, options):
    """The file's own effort, with the options'."""
    found = bench.effort
    if options.quick:
        found = dataclasses.replace(found, rounds=command.QUICK.rounds, round_seconds=command.QUICK.round_seconds)
    given = {"rounds": options.rounds, "round_seconds": options.round_seconds}
    return dataclasses.replace(found, **{name: value for name, value in given.items() if value is not None})


def warm_part(options) -> int:
    """One of the processes that compile ahead: its share of what `measure` is about to time."""
    turns.end_after(options.at_most)  # though no process should be left to end it
    ignore_tuned()
    i, n = options.part
    pairs = every_job(options)
    benches = {bench.name: bench for bench, _ in pairs}
    once = () if options.no_calls else _begun_here([bench.name for bench, _ in pairs], i, n)
    run = command.Run(options.out / "never.json", 0.0, command.QUICK, _left_out(options, (job for _, job in pairs)))
    priced = [bench.calls for name, bench in benches.items() if name in once and bench.calls]
    mine = [] if options.calls_only else _left(pairs[i::n], options)
    ahead.compile_part(run, priced, [job for _, job in mine], options.warm_part)
    return 0


# ---- what is left behind -----------------------------------------------------------------------------------------


def report(reports: Mapping[str, Report], out: Path, draw: bool = True) -> None:
    """Write the tables and the pictures of results, and print the short one."""
    reports = row_peers.with_roofs(reports)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text(summary.document(reports))
    print(f"\n{summary.summary(reports)}\n")
    try:
        pictures = plots.write(reports, out / "plots") if draw else []
    except ImportError as problem:
        print(f"no plots: {problem}; pip install matplotlib, then: python -m tkq bench --results {out}")
        pictures = []
    print(f"{out}: {len(reports)} result files, results.md, {len(pictures)} plots in plots/\n")
    missed, undecided = bounds.missed(reports), bounds.undecided(reports)
    print("\n".join([f"Bounds missed: {len(missed)}; undecided, for a baseline was not timed: {undecided}", *missed]))


def results(options) -> Mapping[str, Report]:
    """What --results names: a file's, a folder's, or several folders' joined into --out.

    Raises:
        Mixed: folders of different machines or versions."""
    if len(options.results) == 1:
        return reports_in(options.results[0])
    join_folders(options.results, options.out)
    return reports_in(options.out)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv, __doc__)
    old = reports_in(options.compare) if options.compare else {}  # before the run writes over them
    if options.results is None:
        if not torch.cuda.is_available():
            print("tkq bench times kernels: it needs a GPU, and PyTorch finds none here. (--results DIR shows existing "
                  "results.)")
            return 2
        if options.warm_part:
            return warm_part(options)
        if options.warm or options.warm_only:
            ahead.compile_all(argv, options.warm_only or options.warm, options.at_most or ahead.SECONDS)
        if options.warm_only:
            return 0
    try:
        bad = 0 if options.results else _in_turn(options)
        reports = results(options) if options.results else reports_in(options.out)
    except Mixed as problem:  # the folder has results of another machine or version
        print(f"{options.out}: {problem}. Choose another folder with --out.", file=sys.stderr)
        return 2
    if reports:
        report(reports, options.out, not options.no_pictures)
    if options.compare:
        bad += compared.tell(compared.named(old, options.compare, reports), reports)
    return 1 if bad else 0


def _in_turn(options) -> int:
    """`measure`, when no other process does that names the same file."""
    with contextlib.ExitStack() as until_measured:
        if options.turn:
            turns.get_ready(options.against)
            print("ready, waiting for its turn", flush=True)
            until_measured.enter_context(turns.wait(options.turn))
        turns.end_after(options.at_most)
        bad = price(options) if options.calls_only else measure(options)
    turns.end_after(0)  # tables and pictures may take their time
    return bad


if __name__ == "__main__":
    sys.exit(main())

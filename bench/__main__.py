"""Times tkq's operations beside their peers: `python -m tkq bench [op ...]` in a source checkout.

    python -m tkq bench                                    every operation beside every peer
    python -m tkq bench rmsnorm swiglu --against quack,torch.compile,liger --quick
    python -m tkq bench gemm --shapes FILE --out results   FILE has lines such as: gemm 4096x4096x4096 64x512x512
    python -m tkq bench --part 0/4 --out results           a quarter of it; the others may follow in the same folder
    python -m tkq bench rmsnorm --compare old/norms.json   what got slower since, beyond the spread of both
    python -m tkq bench --resume --out results             what that folder lacks: a run that was ended, continued
    python -m tkq bench --calls-only --out results         what eager calls cost, and nothing else
    python -m tkq bench --results results                  tables and pictures of a folder anew; needs no GPU

The cases are those of the files beside this one (`python -m bench.norms` runs one). All candidates of a case take turns
in this process on the same inputs, with a cold L2. The folder gets a file of results for each file of cases, which
join what is there already, `results.md` with all that was measured, and pictures as PNG and SVG, where matplotlib is.

Exit status 0 if everything ran, every result is accurate and, with --compare, nothing got slower; 1 if not; 2 without a
GPU, or where an argument is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from bench import ahead, bounds, calls, command, compared, harness, ops, plots, tables, turns
from bench.command import Bench, Job
from bench.join_results import Mixed, join_folders
from bench.progress import Progress
from bench.results import Report, reports_in
from tkq.runtime import ignore_tuned

OUT = Path("bench_results")


# ---- what is asked for -------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tkq bench", description=__doc__.partition("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog=__doc__.partition("\n\n")[2])
    names = lambda text: tuple(filter(None, text.split(",")))
    every = (*ops.OPS, *ops.EXTRAS)
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(ops.OPS)}, which are timed "
                        f"without any; or, by a main of their own, {', '.join(ops.EXTRAS)}")
    parser.add_argument("--against", type=names, default=ops.USUAL, help=f"peers, of {', '.join(ops.AGAINST)}; "
                        "otherwise all but quack-tuned, which compiles 44 kernels")
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="lines of an operation and shapes of its cases")
    parser.add_argument("--out", type=Path, help=f"folder of the results; {OUT} otherwise")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="results, a file or a folder: what got slower")
    parser.add_argument("--results", type=Path, metavar="DIR", action="append", help="take a folder's results "
                        "instead of measuring; given several times, those folders' results joined, into --out")
    parser.add_argument("--resume", action="store_true", help="only cases that the files in --out lack")
    parser.add_argument("--sections", type=names, default=(), help="only cases of these sections, of any file")
    parser.add_argument("--match", default="", help="only cases whose operation and shape contain this text")
    parser.add_argument("--part", type=_share, default=(0, 1), metavar="I/N", help="every Nth case from the Ith")
    parser.add_argument("--quick", action="store_true", help="a few shapes, short rounds")
    parser.add_argument("--rounds", type=int, help="of each case; at least 7")
    parser.add_argument("--round-seconds", type=float, help="one candidate's turn; 2 with --idle 0: sustained speed")
    parser.add_argument("--idle", type=float, help=command.IDLE_HELP)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after so long")
    parser.add_argument("--at-most", type=float, default=0, metavar="SECONDS", help="end the run after so long, "
                        "wherever it hangs; --resume goes on")
    parser.add_argument("--turn", type=Path, metavar="FILE", help="of runs that name this file, one has the GPU at a "
                        "time; the others get ready")
    parser.add_argument("--no-pictures", action="store_true", help="draw none; --results does it later")
    parser.add_argument("--no-calls", action="store_true", help="do not price eager calls on tiny tensors")
    parser.add_argument("--calls-only", action="store_true", help="price those calls, and time no case: all calls of "
                        "all files are made once, then each file's are priced")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="compile everything first, in N processes "
                        "side by side: peers take seconds at each shape")
    parser.add_argument("--warm-only", type=int, default=0, metavar="N", help="compile like that, and time nothing: a "
                        "run after it finds everything compiled")
    parser.add_argument("--warm-part", type=_share, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(argv)  # operations may stand behind options, too
    for what, given, valid in (("op", options.ops, every), ("--against", options.against, ops.AGAINST),
                               ("--sections", options.sections, sorted(_sections()) if options.sections else ())):
        if problem := ops.unknown(what, given, valid):
            parser.error(problem)
    if options.calls_only and options.no_calls:
        parser.error("--calls-only and --no-calls: allowed is one of them")
    if options.rounds is not None and options.rounds < 7:
        parser.error(f"--rounds: at least 7, so that a median means something; got {options.rounds}")
    try:
        options.shapes = read_shapes(options.shapes.read_text()) if options.shapes else {}
    except (OSError, ValueError) as problem:
        parser.error(f"--shapes: {problem}")
    options.ops = options.ops or list(options.shapes or ops.OPS)
    if options.calls_only and (without := [name for name in options.ops if name in ops.EXTRAS]):
        parser.error(f"--calls-only: {', '.join(without)} has no calls to price; allowed are {', '.join(ops.OPS)}")
    for path in filter(None, (options.compare, *(options.results or ()))):
        if problem := _unreadable(path):
            parser.error(f"{path} {problem}")
    several = options.results and len(options.results) > 1
    if several and not (options.out and all(path.is_dir() for path in options.results)):
        parser.error("--results: several of them are folders, and --out says where they are joined")
    if options.out is None:  # of a single file, the folder keeps the tables that it has of all files
        options.out = options.results[0] if options.results and options.results[0].is_dir() else OUT
    return options


def _unreadable(path: Path) -> str | None:
    """Why there are no results in a file or folder, None where there are."""
    if not path.exists():
        return "is not there"
    try:
        return None if reports_in(path) else "has no results of benchmarks"
    except ValueError as problem:
        return f"cannot be read: {problem}"


def _share(text: str) -> tuple[int, int]:
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is such as 0/4")
    return int(i), int(n)


def _sections() -> set[str]:
    return {section for parts in ops.OPS.values() for part in parts for section in part.sections}


def read_shapes(text: str) -> dict[str, command.Shapes]:
    """Shapes by operation, of lines such as "rmsnorm 32768x4096 16384x8192"; # begins a comment.

    Raises:
        ValueError: an operation that there is not, or a shape of other sizes than that operation's."""
    found = {}
    for line in (line.partition("#")[0].split() for line in text.splitlines()):
        if not line:
            continue
        op, *shapes = line
        if problem := ops.unknown("op", [op], ops.OPS):
            raise ValueError(problem)
        usual = [shape for part in ops.OPS[op] for section in part.sections
                 for shape in ops.bench_of(part.bench).shapes.get(section, ())]
        if not usual:
            raise ValueError(f"{op}: its shapes cannot be chosen")
        try:
            found[op] = tuple(tuple(map(int, shape.split("x"))) for shape in shapes)
        except ValueError:
            raise ValueError(f"{op}: got {' '.join(shapes)}, allowed are such as {_text(usual[0])}") from None
        if wrong := [shape for shape in found[op] if len(shape) != len(usual[0])]:
            raise ValueError(f"{op}: got {_text(wrong[0])}, allowed are such as {_text(usual[0])}")
        if not shapes:
            raise ValueError(f"{op}: no shapes, such as {_text(usual[0])}")
    return found


def _text(shape) -> str:
    return "x".join(map(str, shape))


def jobs_of(op: str, options) -> list[tuple[Bench, Job]]:
    """An operation's cases, with the peers that are asked for."""
    found = []
    for part in ops.OPS[op]:
        bench = ops.bench_of(part.bench)
        chosen = argparse.Namespace(shapes=options.shapes.get(op, ()), quick=options.quick, match=options.match,
                                    idle=options.idle)
        for section in part.sections:
            if options.sections and section not in options.sections:
                continue
            if chosen.shapes and section not in bench.shapes:
                continue  # its shapes cannot be chosen
            found += [(bench, dataclasses.replace(job, peer_names=ops.beside(job, options.against)))
                      for job in command.chosen_jobs(bench, (section,), chosen) if part.has(section, job.question.op)]
    return found


# ---- running -----------------------------------------------------------------------------------------------------


def measure(options) -> int:
    """Run the cases, then the files with a main of their own; how many did not run as they should."""
    ignore_tuned()  # what is measured is what is planned
    i, n = options.part
    every = every_job(options)
    jobs = every[i::n]
    options.once = _begun_here([bench.name for bench, _ in every], i, n)
    if options.resume:
        jobs = _not_there(jobs, options.out)
    extras = [name for name in options.ops if name in ops.EXTRAS][i::n]
    by_bench = _by_file(jobs)
    for name, why in ops.absent(options.against).items():
        print(f"missing: {name}: {why}", flush=True)
    for name in options.against if options.against != ops.USUAL else ():
        if not any(set(job.peer_names) & set(ops.meant(name, job)) for _, job in jobs):
            print(f"missing: {name}: no case is timed beside it", flush=True)
    if not jobs and not extras:
        print("no cases: --sections, --match, --shapes, --part and --resume leave none")
        return 0 if options.resume else 1
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
        print("no calls: --sections, --match, --shapes, --part and --resume leave none")
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


def _not_there(jobs: list[tuple[Bench, Job]], out: Path) -> list[tuple[Bench, Job]]:
    """Those of the cases that a folder's files lack."""
    there = {(name, case.section, case.op, case.shape)
             for name, report in (reports_in(out).items() if out.is_dir() else ()) for case in report.cases}
    return [(bench, job) for bench, job in jobs
            if (bench.name, job.question.section, job.question.op, job.question.shape) not in there]


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
        return importlib.import_module(f"bench.{name}").main(argv) != 0
    except Exception as problem:  # what was timed before is still to be told
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
    except Exception as problem:  # what was timed is still to be told
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
    turns.end_after(options.at_most)  # though nobody should be left to end it
    ignore_tuned()
    i, n = options.part
    pairs = every_job(options)
    benches = {bench.name: bench for bench, _ in pairs}
    once = () if options.no_calls else _begun_here([bench.name for bench, _ in pairs], i, n)
    run = command.Run(options.out / "never.json", 0.0, command.QUICK, _left_out(options, (job for _, job in pairs)))
    priced = [bench.calls for name, bench in benches.items() if name in once and bench.calls]
    mine = [] if options.calls_only else _not_there(pairs[i::n], options.out) if options.resume else pairs[i::n]
    ahead.compile_part(run, priced, [job for _, job in mine], options.warm_part)
    return 0


# ---- what is left behind -----------------------------------------------------------------------------------------


def tell(reports: Mapping[str, Report], out: Path, draw: bool = True) -> None:
    """Write the tables and the pictures of results, and print the short one."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text(tables.document(reports))
    print(f"\n{tables.summary(reports)}\n")
    try:
        pictures = plots.write(reports, out / "plots") if draw else []
    except ImportError as problem:
        print(f"no pictures: {problem}; pip install matplotlib, then: python -m tkq bench --results {out}")
        pictures = []
    print(f"{out}: {len(reports)} files of results, results.md, {len(pictures)} pictures in plots/\n")
    missed, undecided = bounds.missed(reports), bounds.undecided(reports)
    print("\n".join([f"Bounds missed: {len(missed)}; not decided, as a peer was not timed: {undecided}", *missed]))


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
    options = parse(argv)
    old = reports_in(options.compare) if options.compare else {}  # before the run writes over them
    if options.results is None:
        if not torch.cuda.is_available():
            print("tkq bench times kernels: it needs a GPU, and PyTorch finds none here. (--results DIR shows results "
                  "that are there.)")
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
        tell(reports, options.out, not options.no_pictures)
    if options.compare:
        bad += compared.tell(compared.named(old, options.compare, reports), reports)
    return 1 if bad else 0


def _in_turn(options) -> int:
    """`measure`, when nobody else does who names the same file."""
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

"""The command line of `python -m tkq bench`: its options, the shapes of a file, an operation's cases."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from bench.core import command, ops
from bench.core.command import Bench, Job
from bench.core.results import reports_in

OUT = Path("bench_results")
AGAIN = ("short", "peers")


def parse(argv: list[str] | None, doc: str = "") -> argparse.Namespace:
    """The options of a command line; doc: what --help shows."""
    parser = argparse.ArgumentParser(prog="python -m tkq bench", description=doc.partition("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog=doc.partition("\n\n")[2])
    names = lambda text: tuple(filter(None, text.split(",")))
    every = (*ops.OPS, *ops.EXTRAS)
    parser.add_argument("ops", nargs="*", metavar="op", help=f"any of {', '.join(ops.OPS)} (default: all), "
                        f"or of {', '.join(ops.EXTRAS)}, which have their own main")
    parser.add_argument("--against", type=names, default=ops.USUAL, help=f"baselines, any of {', '.join(ops.AGAINST)}; "
                        "default: all but quack-tuned, which compiles 44 kernels")
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="a file with lines of an operation and its shapes")
    parser.add_argument("--out", type=Path, help=f"output folder; default {OUT}")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="report regressions against a file or folder")
    parser.add_argument("--results", type=Path, metavar="DIR", action="append", help="use a folder's results "
                        "instead of measuring; several such folders are merged into --out")
    parser.add_argument("--resume", action="store_true", help="only cases missing in --out")
    parser.add_argument("--again", type=names, default=(), metavar="short,peers", help="repeat cases in --out that "
                        "were timed differently: short kernels not timed between others; cases without a baseline that "
                        "would be timed now")
    parser.add_argument("--sections", type=names, default=(), help="only cases of these sections")
    parser.add_argument("--match", default="", help="only cases whose operation and shape contain this text")
    parser.add_argument("--part", type=_share, default=(0, 1), metavar="I/N", help="every Nth case from the Ith")
    parser.add_argument("--quick", action="store_true", help="a few shapes, short rounds")
    parser.add_argument("--rounds", type=int, help="of each case; at least 7")
    parser.add_argument("--round-seconds", type=float, help="a candidate's turn; 2 with --idle 0: sustained speed")
    parser.add_argument("--idle", type=float, help=command.IDLE_HELP)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--at-most", type=float, default=0, metavar="SECONDS", help="end the run after this time, "
                        "even if it hangs; --resume continues")
    parser.add_argument("--turn", type=Path, metavar="FILE", help="a lock file: runs that name the same file use the "
                        "GPU one at a time")
    parser.add_argument("--no-pictures", action="store_true", help="draw no plots; --results can do it later")
    parser.add_argument("--no-calls", action="store_true", help="do not measure the CPU time of eager calls")
    parser.add_argument("--calls-only", action="store_true", help="measure only the CPU time of eager calls, after one "
                        "warm-up of all of them")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="compile everything first, in N parallel "
                        "processes: baselines take seconds at each shape")
    parser.add_argument("--warm-only", type=int, default=0, metavar="N", help="only compile, for a later run")
    parser.add_argument("--warm-part", type=_share, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(argv)  # operations may stand behind options, too
    for what, given, valid in (("op", options.ops, every), ("--against", options.against, ops.AGAINST),
                               ("--again", options.again, AGAIN),
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

"""Large GEMMs, 8192^3, as bursts after idle and sustained, against torch, QuACK and DeepGEMM, with clock and power.

    python -m bench.studies.sustained [--kinds bf16,tensor,row,1x128_128x128] [--shapes 8192x8192x8192] [--seconds 2]
    [--rounds 7]

Shapes are MxNxK. A burst: 10 ms, after as long a lead-in, after 0.15 s without work; all take turns (none with
--rounds 0). Sustained: a quarter of a second of each, then each works for some seconds, in two turns with nothing
between them: torch, tkq, tkq, torch, with the others around tkq where they have such a product; a reading every 0.1 s.
These are no rounds: a ratio is that of the medians. "QuACK tuned" compiles 44 kernels: --without leaves it out. Results
go to OUT/gemm_sustained.json after every case. Exit status 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import tkq
from bench.core import harness
from bench.core.results import SUSTAINED, Case, Environment, Report
from bench.ops.gemm import randn
from bench.peers import fp8, gemm
from tkq.runtime import ignore_tuned
from tkq.testing import timing

KINDS = ("bf16", "tensor", "row", "1x128_128x128")
OTHERS = ("QuACK", "QuACK tuned", "DeepGEMM")  # that may be missing, and be left out
IDLE, BURST, PIECE, LEAD_IN = 0.15, 0.01, 0.1, 0.25  # seconds


def candidates(kind: str, m: int, n: int, k: int) -> tuple[dict[str, Callable], Callable[[int], tuple]]:
    """(by name, what makes torch's, the others' and tkq's call; the i-th inputs)."""
    if kind == "bf16":
        makers = {"torch": gemm.PEERS["gemm"]["cuBLAS"], **_others(gemm.PEERS["gemm"])}
        return {**makers, "tkq": lambda: tkq.gemm}, lambda i: (randn(i, m, k), randn(i + 9, n, k).t())
    there = {name: fp8.PEERS["fp8_gemm"][name] for name in fp8.names(kind)}
    makers = {name: lambda make=make: make(kind) for name, make in there.items()}
    ours = lambda: lambda a, b, sa, sb, ta, tb: tkq.fp8_gemm(a, b, sa, sb)
    return {**makers, "tkq": ours}, lambda i: fp8.both_orders(kind, fp8.operands(m, n, k, kind, i))


def _others(there: dict) -> dict:
    return {name: make for name, make in there.items() if name in OTHERS}


def bursts(batches: dict, rounds: int, read: Callable) -> Iterator[tuple]:
    """(name, milliseconds, what was read) of each turn."""
    for round_ in range(rounds):
        for name in timing.turn_order(list(batches), round_):
            time.sleep(IDLE)
            found = []
            ms = batches[name].run(BURST, lambda found=found: found.append(read()))
            yield name, ms, found[0]


def sustained(batches: dict, seconds: float, read: Callable) -> Iterator[tuple]:
    """(name, milliseconds, what was read) of each 0.1 s."""
    for name in batches:
        batches[name].run(LEAD_IN, None)
    for name in (*batches, *reversed(batches)):
        for _ in range(max(1, round(seconds / 2 / PIECE))):
            found = []
            ms = batches[name].run(PIECE, lambda found=found: found.append(read()))
            yield name, ms, found[0]


def case(section: str, kind: str, shape: tuple, batches: dict, turns: Iterator[tuple], sizes: tuple, missing: dict,
         round_seconds: float) -> Case:
    """What the turns gave. shape: M, N and K. sizes: as of ``Comparison``."""
    m, n, k = shape
    named = f"{m}^3" if m == n == k else f"{m}x{n}x{k}"
    times, readings = {name: [] for name in batches}, {name: [] for name in batches}
    for name, ms, reading in turns:
        times[name].append(ms)
        readings[name].append(reading)
    timings = tuple(timing.Timing(name, b.mode, tuple(times[name]), b.launches, note=b.note)
                    for name, b in batches.items())
    comparison = timing.Comparison(timings, *sizes)
    return Case(section, f"gemm {kind}", f"{named} {section}", "TFLOP/s", 2 * m * n * k, comparison,
                readings={name: tuple(found) for name, found in readings.items()}, missing=missing,
                round_seconds=round_seconds, idle_seconds=IDLE if section == "burst" else 0.0)


def ready(makers: dict, sets: list, without: tuple[str, ...], gpu) -> tuple[dict, dict]:
    """(what runs each candidate, which are missing and why). Only tkq and torch have to be there."""
    batches, missing = {}, {}
    for name, make in makers.items():
        if name in without:
            missing[name] = "left out (--without)"
            continue
        try:
            call = make()
            _, seconds = gpu.first_calls(call, sets)
            batches[name] = gpu.batch(call, sets, timing.calls_per_batch(seconds, len(sets)))
        except Exception as problem:
            if name not in OTHERS:
                raise
            missing[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
    return batches, missing


def cases(kind: str, shape: tuple, options, gpu, monitor) -> Iterator[Case]:
    makers, make_inputs = candidates(kind, *shape)
    with torch.no_grad():
        first = make_inputs(0)
        bytes_, l2 = timing.tensor_bytes(first), gpu.l2_bytes()
        sets = [first, *(make_inputs(i) for i in range(1, timing.input_sets(bytes_, l2, gpu.free_bytes())))]
        batches, missing = ready(makers, sets, options.without, gpu)
        sizes = len(sets), bytes_, l2
        if options.rounds:
            turns = bursts(batches, options.rounds, monitor.read)
            yield case("burst", kind, shape, batches, turns, sizes, missing, BURST)
        turns = sustained(batches, options.seconds, monitor.read)
        yield case(SUSTAINED, kind, shape, batches, turns, sizes, missing, options.seconds / 2)
        batches.clear()
        gpu.release()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.sustained", description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--shapes", default="8192x8192x8192", help="such as 8192x8192x8192,4096x4096x4096")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each, sustained")
    parser.add_argument("--rounds", type=int, default=7, help="bursts of each; 0: none")
    parser.add_argument("--without", default="", help=f"of {', '.join(OTHERS)}: leave these out")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    options = parser.parse_args(argv)
    options.without = tuple(name for name in options.without.split(",") if name in OTHERS)
    kinds = options.kinds.split(",")
    try:
        shapes = [(int(m), int(n), int(k)) for m, n, k in (text.split("x") for text in options.shapes.split(","))]
    except ValueError:
        parser.error(f"--shapes: got {options.shapes!r}, allowed are such as 8192x8192x8192,4096x4096x4096")
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"--kinds: unknown {unknown}; allowed {list(KINDS)}")
    if not torch.cuda.is_available():
        print("bench.studies.sustained times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    ignore_tuned()  # what is measured is what is planned
    gpu, monitor = timing.Gpu(), harness.Monitor()
    report = Report(Environment.here(monitor.driver))
    for kind, shape in ((kind, shape) for shape in shapes for kind in kinds):
        try:
            for found in cases(kind, shape, options, gpu, monitor):
                report.cases.append(found)
                report.save(options.out / "gemm_sustained.json")
                print("\n".join([found.section, *harness.case_lines(found)]), flush=True)
        except Exception as problem:  # the other kinds can still run
            report.problems.append(f"gemm {kind} {shape}: {type(problem).__name__}: {str(problem)[:300]}")
            report.save(options.out / "gemm_sustained.json")
            print("PROBLEM", report.problems[-1], flush=True)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Products of 8192^3 as a burst after idle and sustained, beside torch, with the SM clock and the power of each.

    python -m bench.sustained [--kinds bf16,tensor,row,block] [--size 8192] [--seconds 2] [--rounds 7]

A burst: 10 ms, after as long a lead-in, after 0.15 s without work; the two take turns. Sustained: half a second of
both, then each works for so many seconds, in two turns of which nothing lies between: torch, tkq, tkq, torch; a reading
every 0.1 s. Results go to OUT/gemm_sustained.json after every case. Exit status 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import tkq
from bench import fp8_peers, harness
from bench.gemm import randn
from bench.results import Case, Environment, Report
from tkq.testing import timing

KINDS = ("bf16", "tensor", "row", "block")
IDLE, BURST, PIECE, LEAD_IN = 0.15, 0.01, 0.1, 0.5  # seconds


def candidates(kind: str, size: int) -> tuple[dict[str, Callable], Callable[[int], tuple]]:
    """(torch's and tkq's call, the i-th inputs)."""
    if kind == "bf16":
        return {"torch": torch.matmul, "tkq": tkq.gemm}, lambda i: (randn(i, size, size), randn(i + 9, size, size).t())
    theirs = fp8_peers.torch_mm(kind)
    calls = {"torch": lambda a, b, sa, sb, ta, tb: theirs(a, b, ta, tb),
             "tkq": lambda a, b, sa, sb, ta, tb: tkq.fp8_gemm(a, b, sa, sb)}
    return calls, lambda i: fp8_peers.both_orders(kind, fp8_peers.operands(size, size, size, kind, i))


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
    first, second = batches
    for name in batches:
        batches[name].run(LEAD_IN / 2, None)
    for name in (first, second, second, first):
        for _ in range(max(1, round(seconds / 2 / PIECE))):
            found = []
            ms = batches[name].run(PIECE, lambda found=found: found.append(read()))
            yield name, ms, found[0]


def case(section: str, kind: str, size: int, batches: dict, turns: Iterator[tuple], sizes: tuple) -> Case:
    """What the turns gave. sizes: as of ``Comparison``."""
    times, readings = {name: [] for name in batches}, {name: [] for name in batches}
    for name, ms, reading in turns:
        times[name].append(ms)
        readings[name].append(reading)
    timings = tuple(timing.Timing(name, b.mode, tuple(times[name]), b.launches, note=b.note)
                    for name, b in batches.items())
    comparison = timing.Comparison(timings, *sizes)
    return Case(section, f"gemm {kind}", f"{size}^3 {section}", "TFLOP/s", 2 * size**3, comparison,
                readings={name: tuple(found) for name, found in readings.items()})


def cases(kind: str, options, gpu, monitor) -> Iterator[Case]:
    calls, make_inputs = candidates(kind, options.size)
    with torch.no_grad():
        first = make_inputs(0)
        bytes_, l2 = timing.tensor_bytes(first), gpu.l2_bytes()
        sets = [first, *(make_inputs(i) for i in range(1, timing.input_sets(bytes_, l2, gpu.free_bytes())))]
        batches = {}
        for name, call in calls.items():
            _, seconds = gpu.first_calls(call, sets)
            batches[name] = gpu.batch(call, sets, timing.calls_per_batch(seconds, len(sets)))
        sizes = len(sets), bytes_, l2
        yield case("burst", kind, options.size, batches, bursts(batches, options.rounds, monitor.read), sizes)
        yield case("sustained", kind, options.size, batches, sustained(batches, options.seconds, monitor.read), sizes)
        batches.clear()
        gpu.release()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sustained", description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--size", type=int, default=8192, help="M, N and K")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each, sustained")
    parser.add_argument("--rounds", type=int, default=7, help="bursts of each")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    options = parser.parse_args(argv)
    kinds = options.kinds.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"--kinds: unknown {unknown}; allowed {list(KINDS)}")
    if not torch.cuda.is_available():
        print("bench.sustained times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    gpu, monitor = timing.Gpu(), harness.Monitor()
    report = Report(Environment.here(monitor.driver))
    for kind in kinds:
        try:
            for found in cases(kind, options, gpu, monitor):
                report.cases.append(found)
                report.save(options.out / "gemm_sustained.json")
                print("\n".join([found.section, *harness.case_lines(found)]), flush=True)
        except Exception as problem:  # the other kinds can still run
            report.problems.append(f"{kind}: {type(problem).__name__}: {str(problem)[:300]}")
            report.save(options.out / "gemm_sustained.json")
            print("PROBLEM", report.problems[-1], flush=True)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""The start of a new process: imports, and the first call of each op, from a warm cache and from a bundle.

    python -m bench.studies.cold_start [--ops "rmsnorm;gemm"] [--rounds 3] [--bundle DIR] [--seconds 70]

Each measurement is of a process of its own that has done its imports (see bench.studies.cold_process). Those that take
the
cache find it warm: one that had to compile is asked again. Those that take the bundle have neither the DSL, nor a
compiler, nor a cache. With gradients two calls are measured: the forward pass, which autograd records, and the backward
pass. The bound is for each call; that of imports is for all of tkq's after torch. What the imports made is left out of
Python's garbage collections (gc.freeze): one in a program's first call, which is rare, adds to it.

One thing is measured at a time. A case's process has left the GPU before the next begins: with two at once, one
starting or ending CUDA while the other loads a kernel, one first call in nine took 30 to 70 ms instead of 10 to 20.
Imports were measured twice a run, side by side: 0.20 and 0.23 s, or 0.27 and 0.33, said little of a bound of 0.3.
Results are saved as they come, all cases once before any comes again, and from the third round on those first that have
taken longest, should the time be up; more imports come last.
"""
from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from bench.core import harness
from bench.core.results import Cost, Environment, Report
from bench.studies.cold_process import TORCH

SOURCES = ("cache", "bundle")
ROOT = Path(__file__).resolve().parents[2]
FIRST_CALL_BOUND_US = 30_000
IMPORT_BOUND_US = 300_000
AFTER_TORCH, ALL_AFTER_TORCH = ("tkq", "tvm_ffi", "functions"), "tkq, tvm-ffi and all functions, after torch"
OPS = ("rmsnorm, gradients", "flash_attn, gradients", "linear_cross_entropy, gradients", "gemm, gradients",
       "cross_entropy, gradients", "softmax, gradients", "layernorm, gradients", "swiglu, gradients",
       "rope, gradients", "flash_attn_varlen, gradients", "linear_attn, gradients", "gated_delta_rule, gradients",
       "mamba2_ssd, gradients", "hedgehog, gradients", "based, gradients",
       "causal_conv1d, gradients", "scan, gradients", "fft_conv, gradients", TORCH, "gemm", "fp8_gemm", "grouped_gemm",
       "rmsnorm", "flash_attn", "flash_attn_varlen", "flash_attn_fp8", "flash_attn_fp8_varlen", "linear_attn",
       "gated_delta_rule", "mamba2_ssd", "hedgehog",
       "based", "causal_conv1d", "scan", "fft_conv", "causal_conv1d_step", "flash_attn_with_kvcache", "mla_decode",
       "plan_decode", "kv_append", "merge_state", "cascade_attention", "linear_attn_step", "gated_delta_rule_step",
       "ssd_step",
       "cross_entropy, mean",
       "cross_entropy_and_gradient", "rmsnorm_quant", "layernorm_quant by blocks", "layernorm", "softmax", "swiglu",
       "rope_qk", "quantize_fp8", "quantize_qkv",
       "rmsnorm of three dimensions with a residual", "log_softmax of three dimensions", "geglu of one tensor", "rope",
       "gemm with an epilogue")


class Results:
    """What the processes saw, saved with every new one."""

    def __init__(self, report: Report, out: Path):
        self.report, self._out = report, out
        self._imports, self._seen = [], {}

    def add(self, op: str, source: str, seen: dict) -> None:
        """op: "" for the imports."""
        if "problem" in seen:
            self.report.problems.append(f"{op or 'imports'}, {source}: {seen['problem']}")
            print(f"PROBLEM {self.report.problems[-1]}", flush=True)
        elif not op:
            self._imports.append(seen)
        else:
            show(costs_of(op, source, [seen]))
            self._seen.setdefault((op, source), []).append(seen)
        self.report.costs[:] = self.costs()
        self.report.save(self._out)

    def longest(self, op: str, source: str) -> float:
        """Seconds of the longest first call so far, the bound's where none was seen."""
        seen = self._seen.get((op, source), ())
        return max((max(calls(s["first"])) for s in seen), default=FIRST_CALL_BOUND_US / 1e6)

    def missing(self, ops) -> None:
        """Say which cases were not measured: the time was up."""
        for op, source in asked_for(ops):
            tried = any(p.startswith(f"{op}, {source}:") for p in self.report.problems)
            if not tried and (op, source) not in self._seen:
                self.add(op, source, {"problem": "not measured"})

    def costs(self) -> list[Cost]:
        found = [c for (op, source), seen in self._seen.items() for c in costs_of(op, source, seen)]
        if self._imports:
            found += [cost("import torch", [s["torch"] for s in self._imports]),
                      cost("import tkq, after torch", [s["tkq"] for s in self._imports]),
                      cost("tvm-ffi, which launches, after that", [s["tvm_ffi"] for s in self._imports]),
                      cost("all functions of tkq, after that", [s["functions"] for s in self._imports]),
                      cost(ALL_AFTER_TORCH, [sum(s[part] for part in AFTER_TORCH) for s in self._imports],
                           IMPORT_BOUND_US)]
        return found


def asked_for(ops) -> list:
    """(case, source) of each measurement; torch's own takes neither cache nor bundle."""
    return [(op, source) for op in ops for source in SOURCES if op != TORCH or source == "cache"]


def in_order(ops, rounds: int, results: Results):
    """(case, source) of each measurement, in the order of the rounds; later ones begin with what has taken longest."""
    for turn in range(rounds):
        cases = asked_for(ops)
        if turn > 1:
            cases.sort(key=lambda case: results.longest(*case), reverse=True)
        yield from cases


def calls(seconds) -> list:
    """Of one call, or of the forward and the backward pass."""
    return [seconds] if isinstance(seconds, float) else seconds


def costs_of(op: str, source: str, seen: list) -> list[Cost]:
    """What is reported of a case: each call, and with gradients both together."""
    how = "the DSL was imported" if any(s["dsl"] for s in seen) else ""
    at_most = None if op == TORCH else FIRST_CALL_BOUND_US
    if isinstance(seen[0]["first"], float):
        return [cost(f"first call, {source}: {op}", [s["first"] for s in seen], at_most, how),
                cost(f"second call, {source}: {op}", [s["second"] for s in seen])]
    op = op.removesuffix(", gradients")
    return [cost(f"first call, {source}: {op}, recorded", [s["first"][0] for s in seen], at_most, how),
            cost(f"first call, {source}: {op}, backward", [s["first"][1] for s in seen], at_most, how),
            cost(f"first calls, {source}: {op}, both", [sum(s["first"]) for s in seen]),
            cost(f"second calls, {source}: {op}, both", [sum(s["second"]) for s in seen])]


def cost(name: str, seconds: list, at_most: float | None = None, note: str = "") -> Cost:
    us = [1e6 * s for s in seconds]
    return Cost(name, statistics.median(us), min(us), max(us), len(us), at_most, note)


def show(costs) -> None:
    for c in costs:
        print(f"{c.name:<72} {c.median_us / 1e3:8.2f} ms {c.note}{'' if c.holds() is not False else ' MISSED'}",
              flush=True)


def started(source: str, bundle: Path) -> subprocess.Popen:
    """A process that measures cases when it is asked: see `bench.studies.cold_process`."""
    environment = {name: value for name, value in os.environ.items() if name != "TKQ_BUNDLE"}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy's: Python warns of a process with threads that copies itself
    if source == "bundle":
        environment |= {"TKQ_BUNDLE": str(bundle), "TKQ_CACHE_DIR": str(bundle / "no cache")}
    return subprocess.Popen([sys.executable, "-m", "bench.studies.cold_process", source], cwd=ROOT, env=environment,
                            text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def ask(process, op: str, source: str) -> dict:
    """Have it measure a case; again, where a kernel had to be compiled."""
    for _ in range(2):
        process.stdin.write(op + "\n")
        process.stdin.flush()
        seen = answer(process)
        if source == "bundle" or not seen.get("dsl"):
            break
    return seen


def answer(process) -> dict:
    line = process.stdout.readline()
    if line:
        return json.loads(line)
    process.wait()
    return {"problem": "the process that measures has ended"}


def measure(ops, rounds: int, bundle: Path, results: Results, until: float) -> None:
    """One thing after the other: the processes that measure cases report their imports, the cases come, and then more
    processes only import, so that each source has its rounds of that."""
    with ExitStack() as both:
        processes = {}
        for source in SOURCES:
            processes[source] = both.enter_context(started(source, bundle))
            results.add("", source, answer(processes[source]))
        for op, source in in_order(ops, rounds, results):
            if time.monotonic() >= until:
                break
            if processes[source].poll() is None:
                results.add(op, source, ask(processes[source], op, source))
    for source in SOURCES * (rounds - 1):
        if time.monotonic() >= until:
            break
        with started(source, bundle) as process:
            results.add("", source, answer(process))


def main(words=None) -> int:
    """0 where all bounds hold, 1 where one does not or something did not run, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies.cold_start", description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", default="", help="cases whose name is one of these, apart by semicolons")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case, and of imports")
    parser.add_argument("--bundle", type=Path, help="one that has the cases' kernels; otherwise it is made")
    parser.add_argument("--seconds", type=float, default=math.inf, help="what has not begun by then is left out")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    chosen = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("bench.studies.cold_start times first calls: it needs a GPU, and PyTorch finds none here.")
        return 2
    began = time.monotonic()
    report = Report(Environment.here(harness.Monitor().driver))
    results = Results(report, chosen.out / "cold_start.json")
    ops = tuple(chosen.ops.split(";")) if chosen.ops else OPS
    compileall.compile_dir(ROOT / "tkq", quiet=2)  # as pip does
    with tempfile.TemporaryDirectory() as made:
        if not chosen.bundle:
            subprocess.run([sys.executable, "-m", "tests.helpers.ops.smoke", "bundle", made, "-j", str(os.cpu_count())],
                           cwd=ROOT,
                           check=True)
        measure(ops, chosen.rounds, (chosen.bundle or Path(made)).absolute(), results, began + chosen.seconds)
    results.missing(ops)
    print(f"\nof all rounds, {time.monotonic() - began:.0f} s:")
    show(report.costs)
    return 1 if report.problems or any(c.holds() is False for c in report.costs) else 0


if __name__ == "__main__":
    sys.exit(main())

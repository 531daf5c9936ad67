"""What a new process waits for: imports, and the first call of each op, from a warm cache and from a bundle.

    python -m bench.cold_start [--ops "rmsnorm;gemm"] [--rounds 3] [--at-once 1] [--bundle DIR] [--seconds 45]

Each measurement is of a process of its own that has done its imports (see bench.cold_process). Those that take the
cache find it warm: one that had to compile is asked again. Those that take the bundle have neither the DSL, nor a
compiler, nor a cache. With gradients two calls are measured: the forward pass, which autograd records, and the backward
pass. The bound is for each call. Results are saved as they come, all cases once before any comes again.
"""
from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from bench import harness
from bench.cold_process import TORCH
from bench.results import Cost, Environment, Report

ROOT = Path(__file__).resolve().parent.parent
FIRST_CALL_BOUND_US = 30_000
IMPORT_BOUND_US = 300_000
OPS = ("rmsnorm, gradients", "flash_attn, gradients", "linear_cross_entropy, gradients", "gemm, gradients",
       "cross_entropy, gradients", TORCH, "gemm", "fp8_gemm", "grouped_gemm", "rmsnorm", "flash_attn",
       "flash_attn_varlen", "cross_entropy, mean", "rmsnorm_quant", "layernorm", "softmax", "swiglu", "rope_qk",
       "quantize_fp8", "rmsnorm of three dimensions with a residual", "log_softmax of three dimensions",
       "geglu of one tensor", "rope", "gemm with an epilogue")


class Results:
    """What the processes saw, saved with every new one."""

    def __init__(self, report: Report, out: Path):
        self.report, self._out, self._one_at_a_time = report, out, threading.Lock()
        self._imports, self._seen = [], {}

    def add(self, op: str, source: str, seen: dict) -> None:
        """op: "" for the imports."""
        with self._one_at_a_time:
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
                      cost("import tkq, after torch", [s["tkq"] for s in self._imports], IMPORT_BOUND_US),
                      cost("all functions of tkq, after that", [s["functions"] for s in self._imports])]
        return found


def asked_for(ops) -> list:
    """(case, source) of each measurement; torch's own takes neither cache nor bundle."""
    return [(op, source) for op in ops for source in ("cache", "bundle") if op != TORCH or source == "cache"]


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
    us = sorted(1e6 * s for s in seconds)
    return Cost(name, us[len(us) // 2], us[0], us[-1], len(us), at_most, note)


def show(costs) -> None:
    for c in costs:
        print(f"{c.name:<72} {c.median_us / 1e3:8.2f} ms {c.note}{'' if c.holds() is not False else ' MISSED'}",
              flush=True)


def ask(source: str, bundle: Path, wanted: queue.Queue, results: Results, until: float) -> None:
    """Have a process measure cases, till none is left or the time is up."""
    environment = {name: value for name, value in os.environ.items() if name != "TKQ_BUNDLE"}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy's: Python warns of a process with threads that copies itself
    if source == "bundle":
        environment |= {"TKQ_BUNDLE": str(bundle), "TKQ_CACHE_DIR": str(bundle / "no cache")}
    with subprocess.Popen([sys.executable, "-m", "bench.cold_process", source], cwd=ROOT, env=environment, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        results.add("", source, answer(process))
        while process.poll() is None and time.monotonic() < until:
            try:
                op = wanted.get_nowait()
            except queue.Empty:
                break
            for _ in range(2):
                process.stdin.write(op + "\n")
                process.stdin.flush()
                seen = answer(process)
                if source == "bundle" or not seen.get("dsl"):
                    break
            results.add(op, source, seen)
        process.stdin.close()


def answer(process) -> dict:
    line = process.stdout.readline()
    if line:
        return json.loads(line)
    process.wait()
    return {"problem": "the process that measures has ended"}


def measure(ops, rounds: int, at_once: int, bundle: Path, results: Results, until: float) -> None:
    asking = []
    for source in ("cache", "bundle"):
        wanted = queue.Queue()
        for op, of in asked_for(ops) * rounds:
            if of == source:
                wanted.put(op)
        asking += [threading.Thread(target=ask, args=(source, bundle, wanted, results, until)) for _ in range(at_once)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()


def main(words=None) -> int:
    """0 where all bounds hold, 1 where one does not or something did not run, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.cold_start", description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", default="", help="cases whose name is one of these, apart by semicolons")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case")
    parser.add_argument("--at-once", type=int, default=1, help="measured side by side, of each source")
    parser.add_argument("--bundle", type=Path, help="one that has the cases' kernels; otherwise it is made")
    parser.add_argument("--seconds", type=float, default=math.inf, help="what has not begun by then is left out")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    chosen = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("bench.cold_start times first calls: it needs a GPU, and PyTorch finds none here.")
        return 2
    until = time.monotonic() + chosen.seconds
    report = Report(Environment.here(harness.Monitor().driver))
    results = Results(report, chosen.out / "cold_start.json")
    ops = tuple(chosen.ops.split(";")) if chosen.ops else OPS
    compileall.compile_dir(ROOT / "tkq", quiet=2)  # as pip does
    with tempfile.TemporaryDirectory() as made:
        if not chosen.bundle:
            subprocess.run([sys.executable, "-m", "tests.smoke", "bundle", made, "-j", str(os.cpu_count())], cwd=ROOT,
                           check=True)
        measure(ops, chosen.rounds, chosen.at_once, (chosen.bundle or Path(made)).absolute(), results, until)
    results.missing(ops)
    print("\nof all rounds:")
    show(report.costs)
    return 1 if report.problems or any(c.holds() is False for c in report.costs) else 0


if __name__ == "__main__":
    sys.exit(main())

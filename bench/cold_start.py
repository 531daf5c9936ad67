"""What a new process waits for: imports, and the first call of each op, from a warm cache and from a bundle.

    python -m bench.cold_start [--ops "rmsnorm;gemm"] [--processes 3] [--at-once 1] [--bundle DIR] [--warm]

Each measurement is a process of its own. Those that take the cache find it warm: a process before them has made the
same call (with --warm, somebody has). Those that take the bundle have neither the DSL, nor a compiler, nor a cache.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

from bench import harness
from bench.results import Cost, Environment, Report

ROOT = Path(__file__).resolve().parent.parent
FIRST_CALL_BOUND_US = 30_000
OPS = ("rmsnorm", "rmsnorm of three dimensions with a residual", "rmsnorm, gradients", "layernorm", "rmsnorm_quant",
       "softmax", "log_softmax of three dimensions", "cross_entropy, mean", "cross_entropy, gradients",
       "linear_cross_entropy, gradients", "swiglu", "geglu of one tensor", "rope", "rope_qk", "flash_attn",
       "flash_attn, gradients", "flash_attn_varlen", "gemm", "gemm with an epilogue", "gemm, gradients", "fp8_gemm",
       "grouped_gemm", "quantize_fp8")
PROCESS = """
import json, sys, time
if sys.argv[2] == "bundle":
    import tests.without_dsl
begin = time.perf_counter()
import torch
torch_s, begin = time.perf_counter() - begin, time.perf_counter()
import tkq
for name in tkq.__all__:
    if name not in ("Exchange", "Monoid", "ReductionBase", "RowKernel", "tune"):  # those import the DSL
        getattr(tkq, name)
tkq_s = time.perf_counter() - begin
from tests import smoke
g = smoke.inputs("cuda")
(g.x + g.x).sum().item()
leaf = g.w.detach().requires_grad_()
torch.autograd.grad(leaf * 2, leaf, g.w)  # torch imports sympy for it
call, seconds = smoke.cases(g)[sys.argv[1]], []
for _ in range(2):
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - begin)
print(json.dumps(dict(torch=torch_s, tkq=tkq_s, first=seconds[0], second=seconds[1], dsl="cutlass" in sys.modules)))
"""


def measured(op: str, source: str, bundle: Path | None) -> dict:
    """What a process saw. source: "cache" or "bundle"."""
    environment = {name: value for name, value in os.environ.items() if name != "TKQ_BUNDLE"}
    if source == "bundle":
        environment |= {"TKQ_BUNDLE": str(bundle), "TKQ_CACHE_DIR": str(bundle / "no cache")}
    command = [sys.executable, "-c", PROCESS, op, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{op}, {source}: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


def costs_of(op: str, source: str, seen: list) -> list[Cost]:
    how = "the DSL was imported" if any(s["dsl"] for s in seen) else ""
    return [cost(f"first call, {source}: {op}", [s["first"] for s in seen], FIRST_CALL_BOUND_US, how),
            cost(f"second call, {source}: {op}", [s["second"] for s in seen])]


def cost(name: str, seconds: list, at_most: float | None = None, note: str = "") -> Cost:
    us = sorted(1e6 * s for s in seconds)
    return Cost(name, us[len(us) // 2], us[0], us[-1], len(us), at_most, note)


def gather(wanted: dict, report, out: Path) -> list:
    """What the processes saw. wanted: {(op, source): futures}. Results are saved after each."""
    everything = []
    for (op, source), futures in wanted.items():
        try:
            seen = [future.result() for future in futures]
        except (RuntimeError, subprocess.TimeoutExpired, concurrent.futures.CancelledError) as problem:
            report.problems.append(f"{op}, {source}: {type(problem).__name__} {problem}")
            print(f"PROBLEM {report.problems[-1]}", flush=True)
            continue
        everything += seen
        for c in costs_of(op, source, seen):
            report.costs.append(c)
            print(f"{c.name:<50} {c.median_us / 1e3:8.2f} ms ({c.least_us / 1e3:.2f} to {c.most_us / 1e3:.2f}) "
                  f"{c.note}{'' if c.holds() is not False else ' MISSED'}", flush=True)
        report.save(out)
    return everything


def warm(pool, ops, report) -> None:
    for op, future in {op: pool.submit(measured, op, "cache", None) for op in ops}.items():
        if problem := future.exception():
            report.problems.append(f"warming: {problem}")
            print(f"PROBLEM warming: {op}: {problem}", flush=True)


def main(words=None) -> int:
    """0 where all bounds hold, 1 where one does not or something did not run, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.cold_start", description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", default="", help="cases whose name is one of these, apart by semicolons")
    parser.add_argument("--processes", type=int, default=3, help="for each case")
    parser.add_argument("--at-once", type=int, default=1, help="processes that are measured side by side")
    parser.add_argument("--bundle", type=Path, help="one that has the cases' kernels; otherwise it is made")
    parser.add_argument("--warm", action="store_true", help="the cache has the cases' kernels already")
    parser.add_argument("--seconds", type=float, help="what has not begun by then is not measured")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    chosen = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("bench.cold_start times first calls: it needs a GPU, and PyTorch finds none here.")
        return 2
    report = Report(Environment.here(harness.Monitor().driver))
    ops, out = tuple(chosen.ops.split(";")) if chosen.ops else OPS, chosen.out / "cold_start.json"
    with tempfile.TemporaryDirectory() as made, concurrent.futures.ThreadPoolExecutor(chosen.at_once) as pool:
        bundle = chosen.bundle or Path(made)
        if not chosen.bundle:
            subprocess.run([sys.executable, "-m", "tests.smoke", "bundle", made, "-j", str(os.cpu_count())], cwd=ROOT,
                           check=True)
        if not chosen.warm:
            warm(pool, ops, report)
        wanted = {(op, source): [pool.submit(measured, op, source, bundle) for _ in range(chosen.processes)]
                  for op in ops for source in ("cache", "bundle")}
        if chosen.seconds:
            stop = threading.Timer(chosen.seconds, lambda: [f.cancel() for each in wanted.values() for f in each])
            stop.daemon = True
            stop.start()
        everything = gather(wanted, report, out)
    if everything:
        report.costs += [cost("import torch", [s["torch"] for s in everything]),
                         cost("import tkq and its functions, after torch", [s["tkq"] for s in everything], 300_000)]
    for c in report.costs[-2:]:
        print(f"{c.name:<50} {c.median_us / 1e3:8.2f} ms")
    report.save(out)
    return 1 if report.problems or any(c.holds() is False for c in report.costs) else 0


if __name__ == "__main__":
    sys.exit(main())

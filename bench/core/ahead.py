"""Compiles everything before a benchmark, in parallel processes: the run then finds it on disk and only times.

Each candidate that compiles is called once for each case: tkq, torch.compile, QuACK, FA4, Liger, fla. None tunes here:
what chooses by its own timings would choose badly beside others, so "QuACK tuned" is left out, and the choices of
torch.compile and of peers in Triton among a kernel's configurations are not stored: they make them anew, of compiled
kernels, when they are timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from bench.core import results
from bench.core.command import Job, Run

SECONDS = 300  # then they are ended, and the run goes on with what there is
POLL = 0.2
CHOOSE_NOTHING = {"TRITON_CACHE_AUTOTUNING": "0", "FLA_CACHE_RESULTS": "0"}  # that lasts: others are at work beside it
ROOT = Path(__file__).resolve().parents[2]


def compile_all(argv: list[str], processes: int, seconds: float = SECONDS, start: Callable | None = None) -> float:
    """Start the processes, wait for all of them, and return the seconds that it took. argv: of the run; start: for
    tests, makes a process of its arguments."""
    begin = time.monotonic()
    running = [(start or _process)([*argv, "--warm-part", f"{i}/{processes}"]) for i in range(processes)]
    late = 0
    for process in running:
        try:
            process.wait(timeout=max(POLL, begin + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            late += 1
    took = time.monotonic() - begin
    ended = f"; {late} were ended after {seconds:.0f} s" if late else ""
    print(f"compiled ahead in {processes} processes: {took:.0f} s{ended}", flush=True)
    return took


def _process(arguments: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", **CHOOSE_NOTHING}
    code = f"import runpy, sys; sys.path.insert(0, {os.fspath(ROOT)!r}); runpy.run_module('bench', run_name='__main__')"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment)


def in_turn(jobs: Iterable[Job]) -> list[Job]:
    """One job of each kind, then a second of each, and so on: those of a kind are likely to need the same kernels, and
    two processes should not compile them at one time."""
    jobs, seen, ranks = list(jobs), Counter(), []
    for job in jobs:
        kind = job.question.op, results.kind_of(job.question.shape)
        ranks.append(seen[kind])
        seen[kind] += 1
    return [jobs[i] for i in sorted(range(len(jobs)), key=ranks.__getitem__)]


def compile_part(run: Run, calls: Iterable[Callable], jobs: Iterable[Job], part: tuple[int, int]) -> None:
    """One process's share: calls of tiny tensors by what makes them, and jobs."""
    import torch._inductor.config as inductor

    inductor.autotune_local_cache = False
    i, n = part
    tasks = [(run.warm_calls, make) for make in calls] + [(run.warm, job) for job in in_turn(jobs)]
    for do, what in tasks[i::n]:
        do(what)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

"""Concurrent runs of the benchmarks, of which one at a time uses the GPU: the others prepare and wait.

A new process takes ten seconds and more until torch, tkq and the peers are imported. Runs that are started together and
name the same file do that side by side; then each has the GPU for itself, one after the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import math
import os
import signal
from collections.abc import Iterable
from pathlib import Path

MODULES = {"torch.compile": ("torch._inductor.compile_fx",), "quack": ("quack",), "fa4": ("flash_attn.cute",),
           "flex": ("torch._inductor.compile_fx",), "flex-fa4": ("torch._inductor.compile_fx", "flash_attn.cute"),
           "liger": ("liger_kernel.transformers.functional",)}


def get_ready(against: Iterable[str]) -> None:
    """Import what the peers of these names need, of what is installed."""
    for name in against:
        for module in MODULES.get(name, ()):
            with contextlib.suppress(Exception):  # missing, or broken: where it is to be timed, that is said
                importlib.import_module(module)


def wait(path: Path):
    """Wait until no other process has this file. It is ours until what is returned is closed, or the process ends; our
    number is in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = path.open("a")
    fcntl.flock(held, fcntl.LOCK_EX)
    held.truncate(0)
    print(os.getpid(), file=held, flush=True)
    return held


def end_after(seconds: float) -> None:
    """Let the system end this process after so long, wherever it hangs; 0: no longer."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(seconds))

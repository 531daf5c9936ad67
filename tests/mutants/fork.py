"""Programs in forks of a process that has imported what no mutant changes, which takes as long as some tests."""
from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import runpy
import signal
import sys
import threading

PRELOADED = ["torch", "cutlass", "pytest"]
PACKAGES = "tkq", "tests", "examples", "bench"  # those that a copy of the tree has its own modules of

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)
_statuses = threading.Lock()  # starting a process reads those of others that have ended, also where a thread does


def run(program: list[str], root: pathlib.Path, environment: dict, output: pathlib.Path, timeout: float) -> int | None:
    """A module and its arguments, as `python -m` runs it in a copy of the tree. What it prints goes to the file. The
    exit status, negative for a signal; None beyond the time limit, where its process group is killed."""
    process = _context.Process(target=_begin, args=(program, str(root), environment, str(output)))
    with _statuses:
        process.start()
    ended = multiprocessing.connection.wait([process.sentinel], timeout)
    if not ended:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet, or has ended by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        multiprocessing.connection.wait([process.sentinel])
    with _statuses:
        process.join()
    return process.exitcode if ended else None


def _begin(program, root, environment, output):
    os.setsid()
    threading.Thread(target=_end_with_the_runner, daemon=True).start()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.chdir(root)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = True
    here = str(pathlib.Path(__file__).resolve().parents[2])
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path[:] = [root, *(place for place in sys.path if place not in ("", here))]
    sys.argv = [*program]
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)


def _end_with_the_runner():
    """A deadlock would keep the GPU busy for good."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)

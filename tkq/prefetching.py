"""``tkq.prefetch``: compile what a model will need while the program gets ready."""
from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys

from . import _PUBLIC, models


class Prefetch:
    """What ``prefetch`` started. It ends with the program; what was compiled until then stays in the cache."""

    def __init__(self, process):
        self._process, self._told = process, None
        atexit.register(self.stop)

    @property
    def done(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout: float | None = None) -> str:
        """Wait, at most so many seconds, until all is compiled; what there was to do, in words.

        Raises:
            TimeoutError: it takes longer; it goes on.
            RuntimeError: something could not be compiled, in words.
        """
        if self._told is None:
            try:
                self._told = self._process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"prefetch: not done after {timeout} s") from None
        out, error = self._told
        if self._process.returncode:
            raise RuntimeError(f"prefetch: {error.strip()[-2000:] or out.strip()[-2000:] or 'it was ended'}")
        return out.strip().rpartition("\n")[2]

    def stop(self) -> None:
        """End it, if it is still at work."""
        if not self.done:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGTERM)  # with its own processes, which would compile on
            self._process.wait()


def prefetch(*of, ops=(), jobs: int = 1) -> Prefetch:
    """Compile what models will need, in the background, and put it into the disk cache.

    It is done by processes of their own, at low priority: calls of this one do not wait for kernels that they do not
    need. A call that needs a kernel which is just being compiled waits for it. Where several processes (ranks) prefetch
    the same, each kernel is compiled once.

    Args:
        of: names of ``tkq.models.MODELS`` ("llama-8b"), a ``tkq.models.Model``, or a decoder's configuration as
            transformers has them.
        ops: only kernels of these functions of tkq: "rmsnorm", "flash_attn", ...
        jobs: processes that compile.

    Returns:
        A handle: ``done``, ``wait(timeout)``, ``stop()``.

    Raises:
        TypeError: jobs that is no integer.
        ValueError: a name that is not known, a configuration that lacks a size, or jobs below 1.

    Example::

        ready = tkq.prefetch("llama-8b", ops=("rmsnorm", "flash_attn"), jobs=4)
        ...  # load weights
        ready.wait()
    """
    from .runtime import cache

    if not isinstance(jobs, int):
        raise TypeError(f"prefetch: jobs: got {type(jobs).__name__}, expected an int")
    if jobs < 1:
        raise ValueError(f"prefetch: jobs: got {jobs}, allowed are numbers from 1 on")
    if isinstance(ops, str):
        raise ValueError(f"prefetch: ops: got {ops!r}, allowed are several names, as in ops=({ops!r},)")
    ops = tuple(ops)
    for op in ops:
        if op not in _PUBLIC:
            raise ValueError(f"prefetch: ops: got {op!r}, allowed are functions of tkq: rmsnorm, flash_attn, gemm, ...")
    known = [models.found(one) for one in of]
    folders = os.pathsep.join(map(str, (*cache().before, cache().folder)))
    process = subprocess.Popen(
        [sys.executable, "-m", "tkq.prefetching"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "TKQ_CACHE_DIR": folders})
    process.stdin.write(json.dumps([known, list(ops), jobs]))
    process.stdin.close()
    process.stdin = None  # so that communicate() leaves it alone
    return Prefetch(process)


def main() -> int:
    """The process: what to do comes from stdin."""
    from . import catalog
    from .runtime import fill

    known, ops, jobs = json.load(sys.stdin)
    os.nice(10)
    kernels = models.kernels([models.Model(*one) for one in known])
    try:
        kernels = catalog.of_ops(kernels, ops)
    except ValueError as error:  # a function that these models do not call
        sys.exit(str(error))
    return fill.into_cache(kernels, jobs)


if __name__ == "__main__":
    sys.exit(main())

"""``tkq.prefetch``: compile what a model will need while the program gets ready."""
from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import warnings

from . import catalog, models


class Prefetch:
    """What ``prefetch`` started. It ends with the program; what was compiled until then stays in the cache. One that
    ends otherwise before all is compiled says so by a warning."""

    def __init__(self, process):
        self._process, self._output, self._owner, self._stopped = process, ("", ""), os.getpid(), False
        self._watcher = threading.Thread(target=self._watch, name="tkq-prefetch", daemon=True)
        self._watcher.start()
        atexit.register(self.stop)

    @property
    def done(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout: float | None = None) -> str:
        """Wait, at most ``timeout`` seconds, until all is compiled; what there was to do, in words.

        Raises:
            TimeoutError: it takes longer; it goes on.
            RuntimeError: something could not be compiled, or the process ended, in its last words.
        """
        self._watcher.join(timeout)
        if self._watcher.is_alive():
            raise TimeoutError(f"prefetch: not done after {timeout} s")
        if self._process.returncode:
            raise RuntimeError(f"prefetch: {self._last_words()}")
        return self._output[0].strip().rpartition("\n")[2]

    def stop(self) -> None:
        """End it, if it is still at work. In a process forked from the one that started it: nothing."""
        if os.getpid() != self._owner:
            return
        self._stopped = True
        if not self.done:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGTERM)  # with its own processes, which would compile on
            self._process.wait()
        self._watcher.join(1)

    def _watch(self):
        """Read what it says, so that no pipe is ever full, until it ends."""
        self._output = self._process.communicate()
        if self._process.returncode and not self._stopped:
            warnings.warn(f"tkq.prefetch: it ended before all was compiled ({self._last_words()}); calls compile what "
                          "they need.", stacklevel=1)

    def _last_words(self):
        out, error = self._output
        status = self._process.returncode
        return error.strip()[-2000:] or out.strip()[-2000:] or (
            "it was ended" if status < 0 else f"it ended with status {status}")


def prefetch(*of, ops=(), jobs: int = 1) -> Prefetch:
    """Compile what models will need, in the background, and put it into the disk cache.

    It is done by processes of their own, at low priority: calls of this one do not wait for kernels that they do not
    need. A call that needs a kernel which is just being compiled waits for it. Where several processes (ranks) prefetch
    the same, each kernel is compiled once.

    Args:
        of: names of ``tkq.warmup.models.MODELS`` ("llama-8b"), a ``tkq.warmup.models.Model``, or a decoder's
        configuration as
            transformers has them.
        ops: only kernels of these functions of tkq: "rmsnorm", "flash_attn", ...
        jobs: processes that compile.

    Returns:
        A handle: ``done``, ``wait(timeout)``, ``stop()``.

    Raises:
        TypeError: jobs is no int; ops are no names.
        ValueError: jobs is below 1; no model; one name in the place of ops; a name that is not known, a configuration
            that lacks a size.

    Example::

        ready = tkq.prefetch("llama-8b", ops=("rmsnorm", "flash_attn"), jobs=4)
        ...  # load weights
        ready.wait()
    """
    from ..runtime import arguments, cache
    from ..runtime.system import child

    jobs = arguments.checker("prefetch", "jobs")(jobs)
    if isinstance(ops, str):
        raise ValueError(f"prefetch: ops: got {ops!r}, allowed are several names, as in ops=({ops!r},)")
    try:
        ops = tuple(ops)
    except TypeError:
        raise TypeError(f"prefetch: ops: got {type(ops).__name__}, allowed are several names, in a tuple") from None
    for op in ops:
        if not isinstance(op, str):
            raise TypeError(f"prefetch: ops: got {op!r}, allowed are names of functions of tkq")
        if op not in catalog.ops():
            raise ValueError(f"prefetch: ops: got {op!r}, allowed are functions of tkq: rmsnorm, flash_attn, gemm, ...")
    if not of:
        raise ValueError("prefetch: of: no model is named; allowed are models' names and configurations")
    try:
        known = [models.found(one) for one in of]
    except ValueError as error:
        raise ValueError(f"prefetch: of: {error}") from None
    folders = os.pathsep.join(map(str, (*cache().before, cache().folder)))
    process = subprocess.Popen(
        child.command("tkq.warmup.prefetch"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True, env={**os.environ, "TKQ_CACHE_DIR": folders})
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and the handle says so
        process.stdin.write(json.dumps([known, list(ops), jobs]))
        process.stdin.close()
    process.stdin = None  # so that communicate() leaves it alone
    return Prefetch(process)


def main() -> int:
    """The process: what to do comes from stdin."""
    from . import precompile

    known, ops, jobs = json.load(sys.stdin)
    os.nice(10)
    kernels = models.kernels([models.Model(*one) for one in known])
    try:
        kernels = catalog.of_ops(kernels, ops)
    except ValueError as error:  # a function that these models do not call
        sys.exit(str(error))
    return precompile.into_cache(kernels, jobs)


if __name__ == "__main__":
    sys.exit(main())

"""Temporary folders, and programs that work in them, of which either may fail: no room, no end, no sense."""
from __future__ import annotations

import os
import signal
import subprocess
import tempfile

LONGEST = 60.0  # seconds: a C compiler takes one or two for what it is given here


class NoEnd(OSError):
    """A program that did not end in time."""


def worked(work, *places):
    """work(a temporary folder): below the system's place for them ($TMPDIR), else below one of ``places``: the disk of
    one may be full while another has room. Raises the first OSError where it fails everywhere."""
    problem = None
    for place in (None, *places):
        prefix = "tkq-build-" if place is None else ".tkq-build-"
        try:
            with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as folder:
                return work(folder)
        except NoEnd:
            raise
        except OSError as error:
            problem = problem or error
    raise problem


def run(command: list, folder: str, seconds: float | None = None) -> None:
    """A program to its end, which takes at most so many seconds (``LONGEST``); the folder is for what it leaves behind.

    Raises:
        NoEnd: it was ended, with all that it started.
        OSError: it could not be started, or has failed; its last words.
    """
    seconds, said = LONGEST if seconds is None else seconds, os.path.join(folder, "said")
    with open(said, "wb") as out:  # no pipe: what the program started may hold it open for ever
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                                   env={**os.environ, "TMPDIR": folder})
        try:
            status = process.wait(seconds)
        except BaseException as problem:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(problem, subprocess.TimeoutExpired):
                raise NoEnd(f"{command[0]} did not end in {seconds:.0f} s") from None
            raise
    if status:
        with open(said, "rb") as file:
            words = file.read().decode(errors="replace").strip()[-2000:]
        raise OSError(f"{command[0]}: {words or f'it ended with status {status}'}")

"""Temporary folders with another place to fall back to, and programs with a time limit."""
from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import tempfile

from . import trusted

LONGEST = 30.0  # seconds: a C compiler takes one or two for the files here


class NoEnd(OSError):
    """A program that did not end in time."""


def worked(work, *places):
    """work(a temporary folder): in the system's place for them ($TMPDIR), else in one of ``places``, if that is full or
    others can replace what is in it. Raises the first OSError if it fails everywhere."""
    problem = None
    for place in (None, *places):
        prefix = "tkq-build-" if place is None else ".tkq-build-"
        try:
            with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as folder:
                trusted.folder(pathlib.Path(folder))
                return work(folder)
        except NoEnd:
            raise
        except OSError as error:
            problem = problem or error
    raise problem


def run(command: list, folder: str, seconds: float | None = None) -> None:
    """Run a program for at most ``seconds`` (``LONGEST``), with the folder as its $TMPDIR.

    Raises:
        NoEnd: the time is over; it was killed, with the processes that it started.
        OSError: it could not be started, or failed, with its last words.
    """
    seconds, said = LONGEST if seconds is None else seconds, os.path.join(folder, "said")
    with open(said, "wb") as out:  # not a pipe, which a background process of the program's could hold open
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                                   env={**os.environ, "TMPDIR": folder})
        try:
            status = _ended(process, seconds)
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


def _ended(process, seconds):
    """The status, as soon as it ends: ``Popen.wait`` with a timeout looks at times up to 50 ms apart, longer than a
    link takes. Raises subprocess.TimeoutExpired."""
    try:
        number = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or an old one
        return process.wait(seconds)
    try:
        ends = select.poll()
        ends.register(number, select.POLLIN)
        ends.poll(seconds * 1000)
    finally:
        os.close(number)
    return process.wait(0)

"""What a forked process must not inherit: locks held by threads that exist only in the parent, descriptors of lock
files, and temporary folders that the parent removes."""
from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading


class Renewed:
    """A lock between threads that is free in a forked process, whatever held it in the parent.

    make: ``threading.Lock`` or ``RLock``. For module-level locks: its fork handlers are never removed.
    wait: seconds, at most, that a fork waits until no other thread holds it: of work that would leave a forked process
    with locks that are not ours (modules that are being imported, a compiler's)."""

    def __init__(self, make, wait: float = 0.0):
        self._make, self._lock, self._most, self._forking = make, make(), wait, threading.local()
        if wait:
            os.register_at_fork(before=self._wait, after_in_parent=self._go_on)
        os.register_at_fork(after_in_child=self._renew)

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *problem):
        with contextlib.suppress(RuntimeError):  # held by the very thread that was forked inside the block
            self._lock.release()

    def _wait(self):
        self._forking.has_it = self._lock.acquire(timeout=self._most)

    def _go_on(self):
        if self._forking.has_it:
            self._lock.release()

    def _renew(self):
        self._lock = self._make()


class Descriptors:
    """Descriptors that a forked process closes at once. A file lock lasts until all copies of its descriptor are
    closed: a child that left one open would hold the lock beyond its parent's end."""

    def __init__(self):
        self._numbers, self._gate = set(), threading.Lock()
        os.register_at_fork(before=self._wait, after_in_parent=self._go_on, after_in_child=self._close_all)

    def open(self, *arguments, **named) -> int:
        """As ``os.open``. The gate keeps a fork from coming between the opening and the bookkeeping."""
        with self._gate:
            number = os.open(*arguments, **named)
            self._numbers.add(number)
        return number

    def close(self, number: int) -> None:
        """Close it; a no-op in a process forked since it was opened."""
        with self._gate:
            if number in self._numbers:
                self._numbers.remove(number)
                os.close(number)

    def has(self, number: int) -> bool:
        return number in self._numbers

    def _wait(self):
        self._gate.acquire()

    def _go_on(self):
        self._gate.release()

    def _close_all(self):
        self._gate = threading.Lock()
        for number in self._numbers:
            with contextlib.suppress(OSError):
                os.close(number)
        self._numbers = set()


_private: dict = {}  # process -> its folder: one, the last that was made


def private_folder() -> str:
    """A temporary folder that is removed at this process's end; a new one if it was removed meanwhile."""
    found = _private.get(os.getpid())
    if found is None or not os.path.isdir(found):
        found = tempfile.mkdtemp(prefix="tkq-")
        if os.getpid() not in _private:
            atexit.register(_remove, os.getpid())
        _private[os.getpid()] = found
    return found


def _remove(process):
    if os.getpid() == process:  # not a process forked from it
        shutil.rmtree(_private[process], ignore_errors=True)

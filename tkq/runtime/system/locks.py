"""Locks between processes: files of a folder, locked by flock.

A lock ends with its process, however that dies: forked children close the file at once (see ``forks``), and started
programs do not inherit it (O_CLOEXEC). The file's text names the holder for the message of those that wait. It is
overwritten in place, never truncated, and only in a file that is empty or has such a line. On a file system without
locks processes do not wait: several may compile the same kernel, which costs time alone.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time

from . import forks
from .trusted import Folder, Untrusted

PATIENCE = 5.0  # seconds that a process waits for another one before it says so
LONGEST = 1800.0  # seconds after which it goes on without the lock: the holder may be stopped
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HEAD, _LINE = b"tkq lock: ", 256
_log = logging.getLogger("tkq")
_descriptors = forks.Descriptors()


class _Held(threading.local):
    """names: of the locks that this thread holds, by their files and the process: a forked child holds none."""

    def __init__(self):
        self.names = {}


_held = _Held()


@contextlib.contextmanager
def held(folder: Folder, file: str, name: str):
    """Hold the lock of a file in a folder. A file may stand for several names.

    Raises:
        RuntimeError: this thread holds it for the same name, and would wait for itself.
        OSError: the file cannot be opened, or is not a regular file of this user's.
    """
    mine = folder.path / file, os.getpid()
    if mine in _held.names:
        if name == _held.names[mine]:
            raise RuntimeError(f"{name}: asked for while it is being compiled. The file of a recipe's builder is "
                               "imported for that, and calls the kernel again: put the call under "
                               'if __name__ == "__main__"')
        yield
        return
    number = _descriptors.open(file, _OPEN, 0o600, dir_fd=folder.number)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise Untrusted(f"the lock {folder.path / file} is no file of this user's")
        _wait(number, name)
        _held.names[mine] = name
        _write_holder(number, name)
        try:
            yield
        finally:
            del _held.names[mine]
    finally:
        _let_go(number)


def _let_go(number):
    if _descriptors.has(number):  # else this is a process forked inside the block, and the lock is the parent's
        with contextlib.suppress(OSError):  # explicitly: a child forked by C code has the file too
            fcntl.flock(number, fcntl.LOCK_UN)
        _descriptors.close(number)


def _wait(number, name):
    began, logged, pause = time.monotonic(), False, 0.002
    while not _locked(number):
        waited = time.monotonic() - began
        if waited > PATIENCE and not logged:
            logged = True
            _say_that_it_waits(_holder(number), name)
        if waited > LONGEST:
            _log.warning("tkq: waits no longer, and compiles %s itself", name)
            return
        time.sleep(pause)
        pause = min(1.5 * pause, 0.05)


def _locked(number) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in _NO_LOCKS or _raised(error)
    return True


def _raised(error):
    raise error


def _write_holder(number, name):
    with contextlib.suppress(OSError):  # on a full disk the holder is unknown
        if _is_ours(number):
            line = _HEAD + f"{os.getpid()}, {name}".encode()
            os.pwrite(number, line[:_LINE].ljust(_LINE), 0)


def _is_ours(number):
    return os.fstat(number).st_size == 0 or os.pread(number, len(_HEAD), 0) == _HEAD


def _holder(number) -> str:
    with contextlib.suppress(OSError):
        if _is_ours(number):
            return os.pread(number, _LINE, len(_HEAD)).decode(errors="replace").strip() or "unknown"
    return "unknown"


def _say_that_it_waits(holder, name):
    _log.warning("tkq: waits for another process, which compiles (process and kernel: %s); this one wants %s. `python "
                 "-m tkq compile` fills the cache ahead.", holder, name)

"""Compiled kernels on disk: one folder, shared by all processes of a user, and others that are only read.

An entry is one file: the object, a note about it, and a checksum of both. It is written under a temporary name and
renamed, so that a reader sees all of it or nothing; one whose checksum is wrong counts as missing. The entries used
longest ago go when there are too many. Where nothing can be written (a full disk), an entry lies in a folder that goes
with the process. Knows nothing of what the objects hold.
"""
from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import pathlib
import stat
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass

MOST_BYTES = 1 << 30
_MAGIC = b"tkq-entry-1\n"
_TAIL = 8 + 32 + len(_MAGIC)  # length of the note, SHA-256 of object and note, magic
_ABANDONED = 3600  # seconds after which a temporary file belongs to a process that died
_LOCKS = 64
PATIENCE = 5.0  # seconds that a process waits for another one before it says so
_log = logging.getLogger("tkq")


class _Held(threading.local):
    """names: of the locks that this thread holds, by their files and the process: a forked child holds none."""

    def __init__(self):
        self.names = {}


_held = _Held()


@dataclass(frozen=True)
class Entry:
    """A verified entry. path: the file, which a loader of ELF files takes as it is (it does not look behind the end).

    note: what was told about it when it was stored."""

    path: pathlib.Path
    note: dict


@dataclass(frozen=True)
class Cache:
    """The entries of one folder; together at most ``most_bytes``, but for the one just written.

    before: folders that are looked into first and never written. Where nothing is said: those that stand before
        ``folder`` in ``$TKQ_CACHE_DIR``, if it is the one there that is written."""

    folder: pathlib.Path
    most_bytes: int = MOST_BYTES
    before: tuple | None = None

    def __post_init__(self):
        if self.before is None:
            *before, last = folders()
            object.__setattr__(self, "before", tuple(before) if self.folder == last else ())

    def find(self, name: str) -> Entry | None:
        """The entry, verified and marked as used; None where there is none, or a damaged one."""
        for folder in self.before:
            with contextlib.suppress(OSError):  # one that may not be read has nothing
                found = read_entry(folder / name)
                if found is not None:
                    return found
        try:
            found = read_entry(self.folder / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if found is not None:
            with contextlib.suppress(OSError):  # a folder that may only be read serves all the same
                os.utime(found.path)
        return found

    def put(self, name: str, data: bytes, note: dict) -> Entry:
        """Store an object under a name, in one step; then make room. Where the folder cannot take it, a warning says
        so, and it lies in one that goes with the process."""
        try:
            return self._put(name, data, note)
        except OSError as error:
            private = private_folder()
            if self.folder == private:
                raise
            warnings.warn(f"tkq: the cache folder {self.folder} cannot be written ({error}); what is compiled now is "
                          "lost with this process. Make room, or set TKQ_CACHE_DIR to another folder.", stacklevel=2)
            return Cache(private, before=())._put(name, data, note)

    def _put(self, name, data, note):
        self.make()
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(packed(data, note))
            os.replace(temporary, self.folder / name)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        self._make_room(keep=name)
        return Entry(self.folder / name, note)

    @contextlib.contextmanager
    def lock(self, name: str):
        """Held by one process at a time. Some names share a lock, so that the files are few; they are never deleted.
        Who waits for longer than ``PATIENCE`` says so, once, by the logger "tkq".

        Threads of one process must not race for it: that is the caller's business.

        Raises:
            RuntimeError: this thread holds it for the same name, and would wait for itself.
        """
        self.make()
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _LOCKS
        path = self.folder / f".lock-{number}"
        mine = path, os.getpid()
        if mine in _held.names:
            _refuse_itself(name, _held.names[mine])
            yield
            return
        with open(path, "a+") as file:
            _locked(file, name)
            _held.names[mine] = name
            with contextlib.suppress(OSError):  # on a full disk nobody learns who holds it
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"{os.getpid()}, {name}".encode())
            try:
                yield
            finally:  # not by closing alone: a process that was forked meanwhile has the file open too
                del _held.names[mine]
                fcntl.flock(file, fcntl.LOCK_UN)

    def entries(self) -> list[pathlib.Path]:
        """All entries, those used longest ago first. Folders are none."""
        found = []
        for path in self._files():
            if not path.name.startswith(".") and path.is_file():
                with contextlib.suppress(FileNotFoundError):  # another process makes room too
                    found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def bytes(self) -> int:
        """What all entries take."""
        return sum(map(_size, self.entries()))

    def share(self) -> None:
        """Let everybody read it: a folder that a fleet mounts."""
        self.folder.chmod(0o755)
        for path in self.entries():
            path.chmod(0o644)

    def make(self) -> None:
        """See that the folder is there, for this user alone."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_if_anybody_writes(self.folder)

    def _files(self):
        return self.folder.iterdir() if self.folder.is_dir() else ()

    def _make_room(self, keep: str):
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                if path.name.startswith(".new-") and path.stat().st_mtime < time.time() - _ABANDONED:
                    path.unlink()
        entries = self.entries()
        total = sum(map(_size, entries))
        for path in entries:
            if total <= self.most_bytes:
                return
            if path.name != keep:
                total -= _size(path)
                path.unlink(missing_ok=True)


def default_folder() -> pathlib.Path:
    """The folder that is written: the last of ``folders()``."""
    return folders()[-1]


def folders() -> tuple:
    """What ``$TKQ_CACHE_DIR`` lists, apart by colons: the last is written, those before it are only read. An empty one,
    as after a colon at the end, is the user's own: ``tkq`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; of a user without a
    home it is ``private_folder()``."""
    chosen = os.environ.get("TKQ_CACHE_DIR", "").split(os.pathsep)
    return tuple(pathlib.Path(folder).expanduser().absolute() if folder else _own_folder() for folder in chosen)


def _own_folder():
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "tkq"
    except RuntimeError as error:  # no $HOME, and a user of no name, as containers have them
        _say_that_all_is_lost(str(error).rstrip("."))
        return private_folder()


@functools.cache
def _say_that_all_is_lost(why):
    """Once: the folder is asked for many times."""
    warnings.warn(f"tkq: this user has no folder for a cache ({why}); what is compiled now is lost with this process. "
                  "Set HOME, or TKQ_CACHE_DIR to a folder of yours.", stacklevel=4)


def private_folder() -> pathlib.Path:
    """A folder that goes with the process, for what cannot be written elsewhere."""
    return pathlib.Path(_private().name)


@functools.cache
def _private():
    return tempfile.TemporaryDirectory(prefix="tkq-")


def refuse_if_anybody_writes(folder) -> None:
    """RuntimeError for a folder of code that anybody could change."""
    if folder.stat().st_mode & stat.S_IWOTH:
        raise RuntimeError(f"the folder {folder} can be written by everybody, and what lies there is run; take that "
                           "right away (chmod o-w), or let TKQ_CACHE_DIR (TKQ_BUNDLE, for a bundle) name another one")


def _refuse_itself(name, held):
    if name == held:
        raise RuntimeError(f"{name}: asked for while it is being compiled. The file of a recipe's builder is imported "
                           'for that, and calls the kernel again: put the call under if __name__ == "__main__"')


def _locked(file, name):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting = threading.Timer(PATIENCE, _say_that_it_waits, (file.name, name))
        waiting.daemon = True
        waiting.start()
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        finally:
            waiting.cancel()


def _say_that_it_waits(path, name):
    try:
        holder = pathlib.Path(path).read_text() or "unknown"
    except OSError:
        holder = "unknown"
    _log.warning("tkq: waits for another process, which compiles (process and kernel: %s); this one wants %s. `python "
                 "-m tkq compile` fills the cache ahead.", holder, name)


def read_entry(path: pathlib.Path) -> Entry | None:
    """The verified entry in a file; None for a damaged one. OSError where it cannot be read."""
    data = path.read_bytes()
    refuse_if_anybody_writes(path.parent)
    note = _note_of(data)
    return None if note is None else Entry(path, note)


def unpacked(data: bytes) -> tuple[bytes, dict]:
    """(object, note) of an entry's bytes. Of anything else: (all of it, {})."""
    note = _note_of(data)
    if note is None:
        return data, {}
    return data[:-_TAIL - int.from_bytes(data[-_TAIL:][:8], "little")], note


def packed(data: bytes, note: dict) -> bytes:
    """An entry's bytes."""
    text = json.dumps(note).encode()
    return data + text + len(text).to_bytes(8, "little") + hashlib.sha256(data + text).digest() + _MAGIC


def _note_of(data: bytes) -> dict | None:
    tail = data[-_TAIL:]
    if len(tail) < _TAIL or not tail.endswith(_MAGIC):
        return None
    length, digest = int.from_bytes(tail[:8], "little"), tail[8:40]
    body = memoryview(data)[:-_TAIL]  # not copied: a bundle has megabytes, and this is part of a first call
    if length > len(body) or hashlib.sha256(body).digest() != digest:
        return None
    return json.loads(bytes(body[len(body) - length:]))


def _size(path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

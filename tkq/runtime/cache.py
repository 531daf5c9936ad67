"""Compiled kernels on disk: one folder, shared by all processes of a user.

An entry is one file: the object, a note about it, and a checksum of both. It is written under a temporary name and
renamed, so that a reader sees all of it or nothing; one whose checksum is wrong counts as missing. The entries used
longest ago go when there are too many. Knows nothing of what the objects hold.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import stat
import tempfile
import time
from dataclasses import dataclass

MOST_BYTES = 1 << 30
_MAGIC = b"tkq-entry-1\n"
_TAIL = 8 + 32 + len(_MAGIC)  # length of the note, SHA-256 of object and note, magic
_ABANDONED = 3600  # seconds after which a temporary file belongs to a process that died
_LOCKS = 64


@dataclass(frozen=True)
class Entry:
    """A verified entry. path: the file, which a loader of ELF files takes as it is (it does not look behind the end).

    note: what was told about it when it was stored."""

    path: pathlib.Path
    note: dict


@dataclass(frozen=True)
class Cache:
    """The entries of one folder; together at most ``most_bytes``, but for the one just written."""

    folder: pathlib.Path
    most_bytes: int = MOST_BYTES

    def find(self, name: str) -> Entry | None:
        """The entry, verified and marked as used; None where there is none, or a damaged one."""
        path = self.folder / name
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._refuse_if_anybody_writes()
        note = _note_of(data)
        if note is None:
            return None
        with contextlib.suppress(OSError):  # a folder that may only be read serves all the same
            os.utime(path)
        return Entry(path, note)

    def put(self, name: str, data: bytes, note: dict) -> Entry:
        """Store an object under a name, in one step; then make room."""
        self.make()
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_packed(data, note))
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

        Threads of one process must not nest or race for it: that is the caller's business."""
        self.make()
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _LOCKS
        with open(self.folder / f".lock-{number}", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield  # closing the file lets go, as does the end of a process

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

    def make(self) -> None:
        """See that the folder is there, for this user alone."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._refuse_if_anybody_writes()

    def _refuse_if_anybody_writes(self):
        if self.folder.stat().st_mode & stat.S_IWOTH:
            raise RuntimeError(f"the cache folder {self.folder} can be written by everybody, and what lies there is "
                               "run; take that right away (chmod o-w) or set TKQ_CACHE_DIR to another folder")

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
    """``$TKQ_CACHE_DIR``, else ``tkq`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    chosen = os.environ.get("TKQ_CACHE_DIR")
    if chosen:
        return pathlib.Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "tkq"


def unpacked(data: bytes) -> tuple[bytes, dict]:
    """(object, note) of an entry's bytes. Of anything else: (all of it, {})."""
    note = _note_of(data)
    if note is None:
        return data, {}
    return data[:-_TAIL - int.from_bytes(data[-_TAIL:][:8], "little")], note


def _packed(data: bytes, note: dict) -> bytes:
    text = json.dumps(note).encode()
    return data + text + len(text).to_bytes(8, "little") + hashlib.sha256(data + text).digest() + _MAGIC


def _note_of(data: bytes) -> dict | None:
    tail = data[-_TAIL:]
    if len(tail) < _TAIL or not tail.endswith(_MAGIC):
        return None
    length, digest = int.from_bytes(tail[:8], "little"), tail[8:40]
    body = data[:-_TAIL]
    if length > len(body) or hashlib.sha256(body).digest() != digest:
        return None
    return json.loads(body[len(body) - length:])


def _size(path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

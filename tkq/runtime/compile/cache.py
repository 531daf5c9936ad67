"""Compiled kernels on disk: one folder, shared by all processes of a user, and others that are only read.

An entry is one file: the object, a note about it, the note's length, a checksum of all that, and a magic. It is
written under a temporary name and renamed, so that readers see all of it or nothing; an entry with a wrong checksum
counts as missing. The least recently used entries are removed when there are too many. Other files in the folder are
never counted or changed: an entry has an entry's name, its magic, and the right owner. The file that is loaded is the
one that was verified, through its descriptor (see ``trusted``). If the folder cannot be written (a full disk) or is not
trusted, entries go to a temporary folder of the process. Independent of what the objects hold.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import re
import resource
import time
import warnings
from dataclasses import dataclass, field

from ..system import forks, locks, trusted

MOST_BYTES = 1 << 30
_MAGIC = b"tkq-entry-2\n"
_IS_MAGIC = re.compile(rb"tkq-entry-\d\n")  # of all versions: old entries are removed too
_TAIL = 8 + 32 + len(_MAGIC)  # length of the note, SHA-256 of object, note and that length, magic
_IS_NAME = re.compile(r"(?!tkq-kernels\.)\w[\w-]*\.(so|o|obj)")  # a bundle has the same format, and is no entry
_IS_OUR_OTHER_FILE = re.compile(r"\.tkq-.*|\.lock-\d+|tuned")  # locks, those of older versions, tuned configurations
DIGESTS = ".tkq-digests"  # what ``digests`` stores beside the entries
_ABANDONED = 3600  # seconds after which a temporary file belongs to a process that died
# Lock files: kernels whose names share one wait for each other. Of 16 processes that compile at once, one in thirty
# does; with 64 files one in five did.
_LOCKS = 512
_loads = itertools.count(1)
_said: set = set()  # what was warned of
_passed_over: set = set()  # paths of entries that are whole and did not load here; until they are written anew


@dataclass(frozen=True)
class Entry:
    """A verified entry. path: where it was found. note: as given to ``put``. file: the opened file."""

    path: pathlib.Path
    note: dict
    file: trusted.Descriptor = field(compare=False, repr=False)

    def loaded(self, load):
        """load(path) of the file that was verified, whatever its path names now. If that fails (a file system mounted
        noexec), copies in memory and in a temporary folder are tried. Raises the first error of load."""
        try:
            with _path_of(self.file) as path:
                return load(path)
        except Exception as error:  # each loader has its own
            for copied in (_in_memory, _in_private_folder):
                with contextlib.suppress(Exception), copied(self.file.bytes()) as path:
                    found = load(path)
                    say_once(self.path.parent, f"tkq: what lies in {trusted.shown(self.path.parent)} cannot be loaded "
                             f"from there ({error}); it is copied by each process.")
                    return found
            raise

    def object(self) -> bytes:
        """The object, as given to ``put``."""
        return unpacked(self.file.bytes())[0]


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
        """The entry, verified and marked as used. None if it is missing, damaged or not trusted; a folder that is not
        trusted counts as empty, with one warning."""
        for folder in self.before:
            with contextlib.suppress(OSError):  # one that may not be read has nothing
                found = _entry_in(folder, name)
                if found is not None:
                    return found
        try:
            found = _entry_in(self.folder, name)
        except OSError:
            return None
        if found is not None:
            with contextlib.suppress(OSError):  # a folder that may only be read serves all the same
                os.utime(found.file.number)
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
            say_that_it_cannot_be_written(self.folder, error)
            return Cache(private, before=())._put(name, data, note)

    def leave(self, entry: Entry) -> None:
        """Treat an entry that is whole but does not load here (written on a machine with another loader, say) as
        missing from now on. It is removed only from the folder that is written."""
        if entry.path.parent == self.folder:
            with contextlib.suppress(OSError):
                folder = trusted.folder(self.folder)
                if folder.open(entry.path.name).status.st_ino == entry.file.status.st_ino:
                    folder.remove(entry.path.name)
        _passed_over.add(entry.path)

    def lock(self, name: str):
        """A context that one process at a time is in. Names share ``_LOCKS`` lock files, which are never deleted. A
        process that waits for longer than ``locks.PATIENCE`` says so once, by the logger "tkq".

        The caller keeps threads of one process from racing for it.

        Raises:
            RuntimeError: this thread holds it for the same name, and would wait for itself.
            OSError: the folder cannot be written, or is not to be trusted.
        """
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _LOCKS
        return locks.held(self.make(), f".tkq-lock-{number}", name)

    def entries(self) -> list[pathlib.Path]:
        """All entries, those used longest ago first."""
        return [self.folder / name for _, _, name in self._entries()]

    def bytes(self) -> int:
        """What all entries take."""
        return sum(size for _, size, _ in self._entries())

    def share(self) -> list[str]:
        """Make the entries readable by all, and the folder if nothing else is in it: for a fleet. Returns the names of
        other files; their modes stay, and with any of them the folder's."""
        folder = trusted.folder(self.folder)
        ours = {name for _, _, name in self._entries()}
        foreign = sorted(name for name in set(folder.names()) - ours if not _IS_OUR_OTHER_FILE.fullmatch(name))
        for name in (*ours, DIGESTS):
            with contextlib.suppress(OSError):
                file = folder.open(name)
                os.fchmod(file.number, 0o644)
        if not foreign:
            folder.chmod(0o755)
        return foreign

    def make(self) -> trusted.Folder:
        """Open the folder, created with mode 0700 if it is missing."""
        return trusted.folder(self.folder, make=True)

    def _put(self, name, data, note):
        folder = self.make()
        file = folder.put(name, packed(data, note))
        _passed_over.discard(self.folder / name)
        with contextlib.suppress(OSError):  # the folder may be removed meanwhile
            self._make_room(folder, keep=name)
        return Entry(self.folder / name, note, file)

    def _entries(self) -> list:
        """(time of last use, bytes, name), sorted."""
        try:
            folder = trusted.folder(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for name in filter(_IS_NAME.fullmatch, folder.names()):
            with contextlib.suppress(OSError):  # not trusted, or removed by another process meanwhile
                file = folder.open(name)
                if _IS_MAGIC.fullmatch(file.tail(len(_MAGIC))):
                    found.append((file.status.st_mtime_ns, file.status.st_size, name))
        return sorted(found)

    def _make_room(self, folder, keep):
        for name in filter(trusted.IS_TEMPORARY.fullmatch, folder.names()):
            with contextlib.suppress(OSError):
                if folder.open(name).status.st_mtime < time.time() - _ABANDONED:
                    folder.remove(name)
        # At most what files with an entry's name take: known without a look into each, which every compile would pay.
        if sum(_size(folder, name) for name in folder.names() if _IS_NAME.fullmatch(name)) <= self.most_bytes:
            return
        entries = self._entries()
        total = sum(size for _, size, _ in entries)
        for _, size, name in entries:
            if total <= self.most_bytes:
                return
            if name != keep:
                total -= size
                folder.remove(name)


def _size(folder, name):
    with contextlib.suppress(OSError):  # removed by another process meanwhile
        return os.stat(name, dir_fd=folder.number, follow_symlinks=False).st_size
    return 0


def default_folder() -> pathlib.Path:
    """The folder that is written: the last of ``folders()``."""
    return folders()[-1]


def folders() -> tuple:
    """What ``$TKQ_CACHE_DIR`` lists, apart by colons: the last is written, those before it are only read. An empty one,
    as after a colon at the end, is the user's own: ``tkq`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; of a user without a
    home it is ``private_folder()``."""
    chosen = os.environ.get("TKQ_CACHE_DIR", "").split(os.pathsep)
    return tuple(_named_folder(folder) if folder else _own_folder() for folder in chosen)


def _named_folder(folder):
    try:
        return pathlib.Path(folder).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # ~ of no user; a relative one, where the working folder is gone
        _say_that_all_is_lost(f"{trusted.shown(folder)}: {str(error).rstrip('.')}")
        return private_folder()


def _own_folder():
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (pathlib.Path(base) if base and os.path.isabs(base) else pathlib.Path.home() / ".cache") / "tkq"
    except RuntimeError as error:  # no $HOME, and a user of no name, as containers have them
        _say_that_all_is_lost(str(error).rstrip("."))
        return private_folder()


def private_folder() -> pathlib.Path:
    """A temporary folder of this process, for what cannot be written elsewhere."""
    return pathlib.Path(forks.private_folder())


# ---- what is said ---------------------------------------------------------------------------------------------------


def say_once(about, text: str) -> None:
    """Warn once in a process about a folder or a program: each kernel would repeat it. If the size of files is limited
    (RLIMIT_FSIZE), which makes compiler and cache fail alike, only the first warning of all is given."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        about = "file size"
    if about not in _said:
        _said.add(about)
        warnings.warn(text, stacklevel=3)


def say_that_it_cannot_be_written(folder: pathlib.Path, error: OSError) -> None:
    """Or is not trusted."""
    if isinstance(error, trusted.Untrusted):
        say_once(folder, f"tkq: {error}. Until then it is not used; if it is the one to be written, what is compiled "
                 "is lost with each process.")
    else:
        say_once(folder, f"tkq: the cache folder {trusted.shown(folder)} cannot be written ({error}); what is compiled "
                 "now is lost with this process. Make room, or set TKQ_CACHE_DIR to a folder of yours.")


def _say_that_all_is_lost(why):
    say_once(why, f"tkq: this user has no folder for a cache ({why}); what is compiled now is lost with this process. "
             "Set HOME, or TKQ_CACHE_DIR to a folder of yours.")


# ---- a file ---------------------------------------------------------------------------------------------------------


def read_entry(path: pathlib.Path) -> Entry | None:
    """The verified entry in a file; None if it is damaged. OSError if it cannot be read, or file or folder are not
    trusted."""
    file = trusted.file(path)
    note = read_note(file)
    return None if note is None else Entry(path, note, file)


def unpacked(data: bytes) -> tuple[bytes, dict]:
    """(object, note) of an entry's bytes. Of anything else: (all of it, {})."""
    note = _note_of(data)
    if note is None:
        return data, {}
    return data[:-_TAIL - int.from_bytes(data[-_TAIL:][:8], "little")], note


def packed(data: bytes, note: dict) -> bytes:
    """An entry's bytes."""
    text = json.dumps(note).encode()
    body = data + text + len(text).to_bytes(8, "little")
    return body + hashlib.sha256(body).digest() + _MAGIC


def _note_of(data: bytes) -> dict | None:
    if len(data) < _TAIL or not data.endswith(_MAGIC):
        return None
    end = len(data) - _TAIL
    body = memoryview(data)[:end + 8]  # not copied: a bundle has megabytes, and this is part of a first call
    length, digest = int.from_bytes(body[end:], "little"), data[end + 8:end + 40]
    if length > end or hashlib.sha256(body).digest() != digest:
        return None
    return json.loads(bytes(body[end - length:end]))


def _entry_in(path, name):
    """A folder's entry; None if it is damaged. OSError if it is missing or not trusted."""
    try:
        folder = trusted.folder(path)
    except trusted.Untrusted as error:
        say_that_it_cannot_be_written(path, error)
        raise
    if path / name in _passed_over:
        return None
    file = folder.open(name)
    note = read_note(file)
    return None if note is None else Entry(path / name, note, file)


def read_note(file) -> dict | None:
    """A file's verified note. One without the magic is not read: it may be larger than the memory."""
    return _note_of(file.bytes()) if file.tail(len(_MAGIC)) == _MAGIC else None


@contextlib.contextmanager
def _path_of(file):
    """A path of an open file, for a loader: of a second descriptor, which is closed afterwards.

    A loaded object keeps the path that it was loaded by, and those that go over the loaded objects open it again, such
    as tvm-ffi for the backtrace of an error. The second descriptor has a high number, so that the path leads nowhere
    from then on: low numbers go to the next files that the process opens, and one of these cut short while it is read
    ends the process with SIGBUS. Each path is another text, as loaders take two files of the same path for one: a
    counter's bits are written as "./" and "/"."""
    try:
        number = fcntl.fcntl(file.number, fcntl.F_DUPFD_CLOEXEC, _high())
    except OSError:  # no such number is free
        number = os.dup(file.number)
    steps = bin(next(_loads))[2:].replace("0", "/").replace("1", "./")
    try:
        yield f"/proc/self/fd/{steps}{number}"
    finally:
        os.close(number)


def _high() -> int:
    """A number for descriptors that a process hardly reaches by opening files, below what it may have."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(0, min(allowed, 1 << 15) - 64) if allowed > 0 else (1 << 15) - 64  # -1: any number


@contextlib.contextmanager
def _in_memory(data):
    if not hasattr(os, "memfd_create"):
        raise OSError("no files in memory here")
    file = trusted.Descriptor(os.memfd_create("tkq", os.MFD_CLOEXEC))
    trusted.write(file.number, data)
    with _path_of(file) as path:
        yield path


@contextlib.contextmanager
def _in_private_folder(data):
    folder, name = trusted.folder(private_folder()), f"copied-{next(_loads)}.so"
    folder.put(name, data)
    try:
        yield str(folder.path / name)
    finally:
        folder.remove(name)

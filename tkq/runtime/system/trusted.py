"""Folders and files that only the user or root can change, opened so that what was checked is what is used.

Entries of a cache and bundles are machine code that a process loads: owner and mode matter as much as a program's. A
path is opened component by component, each checked by fstat of its descriptor; links are followed only if the user or
root made them. From then on the descriptor stands for the folder (``dir_fd``) and for the file, so that renaming or
replacing anything on the path changes nothing. Independent of what the files hold.
"""
from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import re
import secrets
import stat
from dataclasses import dataclass

_TO_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TO_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO does not block
_TO_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40
_TEMPORARY = ".tkq-new-"
IS_TEMPORARY = re.compile(re.escape(_TEMPORARY) + r"[0-9a-f]{16}")


class Untrusted(PermissionError):
    """A folder or file that another user owns or may write."""


class Descriptor:
    """An open file or folder, closed with its last reference."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self, close=os.close, suppress=contextlib.suppress):  # bound: at the very end globals may be gone
        with suppress(OSError):
            close(self.number)

    @property
    def status(self) -> os.stat_result:
        return os.fstat(self.number)

    def bytes(self) -> bytes:
        """All of the file."""
        size, parts, at = self.status.st_size, [], 0
        while at < size and (part := os.pread(self.number, size - at, at)):
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def tail(self, size: int) -> bytes:
        """The file's last bytes."""
        return os.pread(self.number, size, max(0, self.status.st_size - size))


@dataclass(frozen=True)
class Folder:
    """An opened folder that the user or root owns and that group and others may not write. path: its name."""

    path: pathlib.Path
    descriptor: Descriptor

    def open(self, name: str) -> Descriptor:
        """Open a regular file of the user's or root's for reading. Raises FileNotFoundError; Untrusted for a link, a
        FIFO, another user's file, and a file that group or others may write."""
        try:
            found = Descriptor(os.open(name, _TO_READ, dir_fd=self.number))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                raise Untrusted(f"{self.path / name} is no regular file") from None
            raise
        why = _why_not(found.status, regular=True)
        if why:
            raise Untrusted(f"the file {self.path / name} {why}, and what is in it is run")
        return found

    def names(self) -> list:
        listed = Descriptor(os.open(".", _TO_LIST, dir_fd=self.number))
        return os.listdir(listed.number)

    def put(self, name: str, data: bytes, mode: int = 0o600) -> Descriptor:
        """Write a file under a random temporary name and rename it. Returns it, opened for reading."""
        temporary = _TEMPORARY + secrets.token_hex(8)
        written = os.open(temporary, _TO_MAKE, mode, dir_fd=self.number)
        try:
            try:
                write(written, data)
                os.fchmod(written, mode)  # whatever the umask is
            finally:
                os.close(written)  # a full disk of another machine may say so only here
            found = self.open(temporary)
            os.replace(temporary, name, src_dir_fd=self.number, dst_dir_fd=self.number)
        except BaseException:
            self.remove(temporary)
            raise
        return found

    def remove(self, name: str) -> None:
        """Unlink a file, if that is possible."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.number)

    def chmod(self, mode: int) -> None:
        listed = Descriptor(os.open(".", _TO_LIST, dir_fd=self.number))
        os.fchmod(listed.number, mode)

    @property
    def number(self) -> int:
        return self.descriptor.number


def folder(path: pathlib.Path, make: bool = False) -> Folder:
    """Open a folder. make: create what is missing of its path, the folder itself with mode 0700.

    Raises:
        Untrusted: another user owns the folder or one on its path, or may write it. Sticky folders on the path, as
            /tmp, may be writable: names there can only be changed by their owners.
        OSError: it does not exist, or cannot be created.
    """
    waiting, at, links = list(path.absolute().parts[:0:-1]), Descriptor(os.open("/", _TO_PASS)), 0
    _refuse("/", _why_not_passed(at.status), path)
    while waiting:
        part = waiting.pop()
        found = _entered(at, part, (0o700 if not waiting else 0o755) if make else None)
        if isinstance(found, str):  # where a link leads
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            parts = pathlib.PurePath(found).parts
            waiting += [p for p in reversed(parts) if p != "/"]
            at = Descriptor(os.open("/", _TO_PASS)) if found.startswith("/") else at
            continue
        at = found
        _refuse(part, (_why_not_passed if waiting else _why_not)(at.status), path)
    return Folder(path, at)


def file(path: pathlib.Path) -> Descriptor:
    """Open a file, and its folder before it, as ``folder`` and ``Folder.open`` do; a link in its place is followed
    where it is the user's or root's own. Raises what those do."""
    for _ in range(_MOST_LINKS):
        found = folder(path.parent)
        target = _target(found.descriptor, path.name)
        if target is None:
            return found.open(path.name)
        path = path.parent / target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def write(number: int, data: bytes) -> None:
    """All of the data, to a descriptor."""
    left = memoryview(data)
    while left:
        left = left[os.write(number, left):]


def shown(path) -> str:
    """A path for messages: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _entered(at, part, make):
    """A subfolder, opened, or created first if make is a mode; for a link that the user or root made, its target."""
    try:
        return Descriptor(os.open(part, _TO_PASS, dir_fd=at.number))
    except FileNotFoundError:
        if make is None:
            raise
        with contextlib.suppress(FileExistsError):  # created by another process meanwhile
            os.mkdir(part, make, dir_fd=at.number)
        return _entered(at, part, None)
    except NotADirectoryError:
        target = _target(at, part)
        if target is None:
            raise
        return target


def _target(at, part) -> str | None:
    """The target of a link in a folder; None for anything else."""
    status = os.stat(part, dir_fd=at.number, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        return None
    if status.st_uid not in (0, os.geteuid()):
        raise Untrusted(f"the link {part} belongs to user {status.st_uid}")
    return os.readlink(part, dir_fd=at.number)


def _refuse(part, why, path):
    if why:
        there = f"the folder {shown(path)}" + (f": {part} on its path" if part != path.name else "")
        raise Untrusted(f"{there} {why}, and what lies there is run; take that right away (chmod go-w, chown), or let "
                        "TKQ_CACHE_DIR (TKQ_BUNDLE, for a bundle) name a folder of your own")


def _why_not(status, regular=False) -> str | None:
    """Why a file, or the files in a folder, must not be loaded; None if they may."""
    if regular and not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    return _judged(status.st_uid, status.st_mode)


def _why_not_passed(status) -> str | None:
    """As ``_why_not``, for a folder on the path to another one."""
    mode = status.st_mode
    if mode & stat.S_ISVTX or (not mode & stat.S_IWOTH and mode & stat.S_IWGRP and _is_private(status.st_gid)):
        mode &= ~_BY_OTHERS
    return _judged(0 if status.st_uid == _unmapped() else status.st_uid, mode)


def _judged(owner, mode):
    if owner not in (0, os.geteuid()):
        return f"belongs to user {owner}"
    if mode & _BY_OTHERS:
        return f"can be written by {'everybody' if mode & stat.S_IWOTH else 'a group'} (mode {stat.S_IMODE(mode):o})"
    return None


@functools.cache
def _unmapped() -> int:
    """The user number that stands for all users outside of this user namespace, the machine's root among them; -1 if
    every user is mapped."""
    try:
        lines = pathlib.Path("/proc/self/uid_map").read_text().split()
        known = sum(map(int, lines[2::3])) >= 2**32 - 1
        return -1 if known else int(pathlib.Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return -1


@functools.cache
def _is_private(group: int) -> bool:
    """Is it the user's private group: of the user's name, without other members? Systems with such groups have a umask
    of 002, and folders like ~/.cache are writable by the group."""
    import grp
    import pwd

    try:
        found, name = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


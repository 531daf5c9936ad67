"""Digests of normalised sources, remembered by the digest of the texts: parsing takes many times as long as all
else that a first call looks up.

A file ``.tkq-digests`` in each folder of the kernel cache has them, in the format of an entry: with a checksum, written
under a temporary name and renamed, read where it is trusted (see ``cache``, ``trusted``). A folder that is only read is
not written. What is missing, damaged or not trusted is computed anew. A bundle has those of its kernels in its note.
"""
from __future__ import annotations

import contextlib
import stat

from ..system import trusted
from .cache import DIGESTS, packed, read_note

_MOST = 512  # in a file: a checkout's state has one for each set of files, some fifty
_known: dict = {}  # text's digest -> the normalised one's; one process's
_new: set = set()  # of these the ones to be written
_recalled: set = set()  # folders that were read


def find(key: str) -> str | None:
    return _known.get(key)


def add(key: str, digest: str) -> None:
    """Computed now."""
    _known[key] = digest
    _new.add(key)


def learn(found) -> None:
    """{key: digest}, from a file that is trusted; anything else is passed over."""
    if isinstance(found, dict):
        _known.update((key, of) for key, of in found.items() if isinstance(of, str))


def all_known() -> dict:
    return dict(_known)


def recall(*folders) -> None:
    """Read what folders have, once a process."""
    for folder in folders:
        if folder not in _recalled:
            _recalled.add(folder)
            with contextlib.suppress(OSError):
                learn(_in(trusted.folder(folder))[0])


def keep(folder) -> None:
    """Write what was computed since, beside what the folder's file has; where that cannot be, the next process computes
    it again."""
    if not _new:
        return
    fresh = {key: _known[key] for key in tuple(_new)}
    _new.difference_update(fresh)
    with contextlib.suppress(OSError):
        opened = trusted.folder(folder, make=True)
        before, mode = {}, 0o600
        with contextlib.suppress(OSError):
            before, mode = _in(opened)
        both = {**{key: of for key, of in before.items() if key not in fresh}, **fresh}
        opened.put(DIGESTS, packed(b"", {"digests": dict(list(both.items())[-_MOST:])}), mode)


def clear() -> None:
    """What this process has in memory, for tests."""
    for one in (_known, _new, _recalled):
        one.clear()


def _in(folder) -> tuple:
    """({key: digest}, the file's mode)."""
    file = folder.open(DIGESTS)
    found = (read_note(file) or {}).get("digests")
    return (found if isinstance(found, dict) else {}), stat.S_IMODE(file.status.st_mode)

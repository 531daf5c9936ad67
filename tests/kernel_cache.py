"""Compiled kernels from one machine to another: the kernel cache's entries in one file.

    python -m tests.kernel_cache unpack kernels.tar.xz      # a file that is missing is no error: nothing is unpacked
    ... what compiles and runs kernels ...
    python -m tests.kernel_cache pack kernels.tar.xz

The cache is the one that tkq uses (TKQ_CACHE_DIR says where it is). An entry is found again where its name is the same,
which is made of the kernel's sources and arguments, the toolchain's versions and CUDA's flavour (tkq/runtime/keys.py).
Other kernels are compiled as if theirs were not there, and what nothing finds any more is left out in time: packed are
the entries used last, up to a size. Unpack only files of your own: what is in them is run.
"""
import argparse
import io
import lzma
import os
import pathlib
import sys
import tarfile

from tkq import runtime

MOST_BYTES = 160 << 20  # before compression, which leaves about a tenth


def pack(file: pathlib.Path, most_bytes: int = MOST_BYTES) -> int:
    """Write the entries last used, the latest first; return how many. The file is replaced in one step."""
    temporary = file.with_name(file.name + ".new")
    count, left = 0, most_bytes
    with lzma.open(temporary, "wb", preset=2) as out, tarfile.open(fileobj=out, mode="w|") as tar:
        for path in reversed(runtime.cache().entries()):
            data, member = path.read_bytes(), tarfile.TarInfo(path.name)
            member.size, member.mtime = len(data), int(path.stat().st_mtime)
            left -= len(data)
            if left < 0:
                break
            tar.addfile(member, io.BytesIO(data))
            count += 1
    os.replace(temporary, file)
    return count


def unpack(file: pathlib.Path) -> tuple:
    """Add a file's entries to the cache, as old as they were, but for those that it has. Return how many were added,
    and what was wrong with the file, None for nothing: what came before that is there."""
    store, count = runtime.cache(), 0
    store.make()
    try:
        with lzma.open(file) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
            for member in tar:
                name = member.name
                if not member.isfile() or name != os.path.basename(name) or name.startswith("."):
                    raise ValueError(f"{name!r} is no entry of a kernel cache")
                count += _added(store, member, tar.extractfile(member).read())
    except (lzma.LZMAError, tarfile.TarError, EOFError, ValueError) as problem:
        return count, f"{type(problem).__name__}: {problem}"
    return count, None


def _added(store, member, data) -> bool:
    path = store.folder / member.name
    if path.exists():
        return False
    temporary = store.folder / f".new-{os.getpid()}"  # not by store.put, which looks at all entries each time
    temporary.write_bytes(data)
    os.utime(temporary, (member.mtime, member.mtime))
    os.replace(temporary, path)
    return True


def main(words=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernel_cache", description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("file", type=pathlib.Path)
    chosen = parser.parse_args(words)
    if chosen.action == "pack":
        print(f"{chosen.file}: {pack(chosen.file)} kernels packed")
        return 0
    if not chosen.file.exists():
        print(f"{chosen.file}: not there, nothing unpacked")
        return 0
    count, damaged = unpack(chosen.file)
    print(f"{chosen.file}: {count} kernels unpacked" + (f"; it is damaged: {damaged}" if damaged else ""))
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())

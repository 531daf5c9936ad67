"""Compiled kernels from one machine to another: the kernel cache's entries in one file.

    python -m tests.helpers.process.kernel_cache unpack kernels.tar.xz   # a missing file is no error
    ... what compiles and runs kernels ...
    python -m tests.helpers.process.kernel_cache pack kernels.tar.xz
    python -m tests.helpers.process.kernel_cache refresh kernels.tar.xz -j 8

`refresh` needs no GPU: it unpacks, compiles what the GPU tests asked for in the run that made the file (`pytest
--kernel-cache`) and is not there, its sources being others now, and packs.

The cache is the one that tkq uses (TKQ_CACHE_DIR says where it is). An entry is found again where its name is the same,
which is made of the kernel's sources and arguments, the toolchain's versions and CUDA's flavour
(tkq/runtime/compile/keys.py).
Other kernels are compiled as if theirs were not there, and what nothing finds any more is left out in time: packed are
the entries used last, up to a size. Unpack only files of your own: what is in them is run.
"""
import argparse
import base64
import concurrent.futures
import contextlib
import io
import json
import lzma
import multiprocessing
import os
import pathlib
import pickle
import sys
import tarfile
from typing import NamedTuple, Optional

from tkq import runtime
from tkq.runtime.compile import build
from tkq.warmup import precompile

_RECIPES = "recipes.json"  # the member that has what GPU tests asked for: {test file: recipes, as text}
MOST_BYTES = 160 << 20  # before compression, which leaves about a tenth


def pack(file: pathlib.Path, asked: dict, most_bytes: int = MOST_BYTES) -> int:
    """Write what tests asked for, and the entries last used, the latest first; return how many. The file is replaced in
    one step."""
    temporary = file.with_name(file.name + ".new")
    count, left = 0, most_bytes
    with lzma.open(temporary, "wb", preset=1) as out, tarfile.open(fileobj=out, mode="w|") as tar:
        _add(tar, _RECIPES, json.dumps({name: sorted(recipes) for name, recipes in asked.items()}).encode(), 0)
        for path in reversed(runtime.cache().entries()):
            data = path.read_bytes()
            left -= len(data)
            if left < 0:
                break
            _add(tar, path.name, data, int(path.stat().st_mtime))
            count += 1
    os.replace(temporary, file)
    return count


def _add(tar, name, data, time):
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(data), time
    tar.addfile(member, io.BytesIO(data))


class Unpacked(NamedTuple):
    """count: entries that were added to the cache. asked: what `pack` was given. damaged: what was wrong with the file,
    None for nothing; what came before that is there."""

    count: int
    asked: dict
    damaged: Optional[str]


def unpack(file: pathlib.Path) -> Unpacked:
    """Add a file's entries to the cache, as old as they were, but for those that it has. No file: no entries."""
    store, count, asked = runtime.cache(), 0, {}
    if not file.exists():
        return Unpacked(0, {}, None)
    folder = store.make()
    try:
        with lzma.open(file) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
            for member in tar:
                name, data = member.name, member.isfile() and tar.extractfile(member).read()
                if name == _RECIPES:
                    asked = json.loads(data)
                    continue
                if not member.isfile() or name != os.path.basename(name) or name.startswith("."):
                    raise ValueError(f"{name!r} is no entry of a kernel cache")
                count += _added(folder, member, data)
    except (lzma.LZMAError, tarfile.TarError, EOFError, ValueError) as problem:
        return Unpacked(count, asked, f"{type(problem).__name__}: {problem}")
    return Unpacked(count, asked, None)


def _added(folder, member, data) -> bool:
    if member.name in folder.names():
        return False
    added = folder.put(member.name, data)  # not by store.put, which looks at all entries each time
    os.utime(added.number, (member.mtime, member.mtime))
    return True


def refresh(asked: dict, jobs: int = 1) -> tuple:
    """Compile what tests asked for and the cache has not. Return how many were compiled, and what could not be, in
    words: a recipe of a spec that is no longer so, say; the tests ask for another one then."""
    recipes, failed, compiled = [], [], 0
    for text in sorted(set().union(*asked.values())):
        try:
            recipes.append(pickle.loads(base64.b64decode(text)))
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")
    settings = (runtime.cache().folder, runtime.cache().most_bytes)
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), runtime.configure,
                                                settings) as pool:
        for fresh, error in pool.map(precompile._entry, recipes):
            compiled += bool(fresh and fresh[0])
            failed += [error] if error else []
    return compiled, failed


class Carried:
    """The plugin behind `--kernel-cache`. With pytest-xdist each worker sends, with its tests' reports, what they asked
    for; the main process unpacks before the workers start, and packs when they are through."""

    def __init__(self, file, worker, counts):
        """counts: of a test, whether what it asks for is to be remembered."""
        self.file, self.worker, self.counts = file, worker, counts
        self.known, self.asked, self.before, self.began = set(), {}, {}, False

    def pytest_sessionstart(self, session):
        if not self.worker:
            self.began = True
            found = unpack(self.file)
            self.before = found.asked
            print(_summary(self.file, found))

    def pytest_runtest_teardown(self, item):
        new = [recipe for recipe in build._functions if recipe not in self.known] if self.counts(item) else []
        self.known.update(new)
        texts = []
        for recipe in new:
            with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):  # of a class inside a function
                texts.append(base64.b64encode(pickle.dumps(recipe)).decode())
        item.user_properties.append(("kernels", texts))

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            for texts in (value for name, value in report.user_properties if name == "kernels" and value):
                self.asked.setdefault(report.location[0], set()).update(texts)

    def pytest_unconfigure(self, config):
        if self.began and not config.getoption("--collect-only"):  # `pytest --markers` runs nothing
            count = pack(self.file, {**self.before, **self.asked})  # test files that did not run now: as they were
            print(f"{self.file}: {count} kernels packed", *_table(self.asked), sep="\n")


def _table(asked):
    for name, recipes in sorted(asked.items(), key=lambda item: -len(item[1])):
        yield f"{len(recipes):6} kernels  {name}"


def _summary(file, found):
    return f"{file}: {found.count} kernels unpacked" + (f"; it is damaged: {found.damaged}" if found.damaged else "")


def main(words=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.process.kernel_cache",
                                     description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("pack", "unpack", "refresh"))
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes that compile")
    chosen = parser.parse_args(words)
    found = Unpacked(0, {}, None)
    if chosen.action != "pack":
        found = unpack(chosen.file)
        print(_summary(chosen.file, found))
    if chosen.action == "refresh":
        compiled, failed = refresh(found.asked, chosen.jobs)
        print(f"{compiled} kernels compiled; {len(failed)} are no longer", *failed, sep="\n    ")
    if chosen.action != "unpack":
        print(f"{chosen.file}: {pack(chosen.file, found.asked)} kernels packed")
    return 1 if found.damaged else 0


if __name__ == "__main__":
    sys.exit(main())

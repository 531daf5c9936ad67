"""The machine code of shipped kernels before and after a change that should not change it: a module that moves, a name.

    python -m tests.machine_code snapshot before [NAME ...] [--every 10] [--of-each] [--jobs 2]
    ... the change ...
    python -m tests.machine_code snapshot after --like before
    python -m tests.machine_code compare before after

A snapshot is a file machine_code.json in the folder: of each shipped kernel (those whose names contain a NAME; without
one all) the GPU functions that it consists of, each with a digest of its instructions, constants and relocations, its
registers, stack, shared memory and threads. Names of symbols, which have modules and classes in them, do not count.
Kernels are compiled where the cache has none; that needs no GPU. What was compiled is cached, so that a snapshot that
was ended goes on where it was.

Exit status of compare: 0 where all is equal and both have the same kernels, else 1.
"""
import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import pathlib
import sys

from tkq import runtime
from tkq.runtime.compile import build
from tkq.testing import elf, sass
from tkq.warmup import catalog

FILE = "machine_code.json"


def functions(recipe) -> list[dict]:
    """The GPU functions of a kernel, in an order that their names have no part in."""
    data, dynamic = sass._code(recipe)
    found = []
    for cubin in elf.cubins(data):
        code = elf.code(cubin)
        for name, facts in elf.kernels(cubin).items():
            found.append({"code": hashlib.sha256(code[name]).hexdigest(), "bytes": len(code[name]), **facts,
                          "dynamic_smem": dynamic.get(name)})
    if not found:
        raise ValueError(f"{recipe.builder}: no machine code of a GPU in it")
    return sorted(found, key=repr)


def _one(kernel):
    try:
        return kernel.name, functions(kernel.recipe), None
    except Exception as error:
        return kernel.name, None, f"{type(error).__name__}: {str(error)[:300]}"


def chosen(given) -> list:
    """Of the catalog, as the command line says.

    Raises:
        ValueError: a name that no kernel has.
    """
    kernels = catalog.select(given.names)
    if given.like:
        wanted = read(given.like)
        missing = sorted(set(wanted) - {kernel.name for kernel in kernels})
        if missing:
            raise ValueError(f"{given.like} has kernels that are no longer shipped: {', '.join(missing)}")
        return [kernel for kernel in kernels if kernel.name in wanted]
    if not given.of_each:
        return kernels[::given.every]
    kinds = {}
    for kernel in kernels:
        kinds.setdefault((kernel.recipe.builder, *(type(arg).__name__ for arg in kernel.recipe.args)), kernel)
    picked = {kernel.name for kernel in (*kinds.values(), *(kernels[::given.every] if given.every > 1 else ()))}
    return [kernel for kernel in kernels if kernel.name in picked]


def snapshot(folder: pathlib.Path, kernels, jobs: int) -> int:
    """Write the folder's file; how many kernels could not be compiled. It is written with what there is."""
    settings, found, failed = (runtime.cache().folder, runtime.cache().most_bytes), {}, 0
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), build.configure,
                                                settings) as pool:
        for name, of, problem in pool.map(_one, kernels):
            if problem:
                print(f"PROBLEM {name}: {problem}", flush=True)
                failed += 1
            else:
                found[name] = of
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(found, indent=1))
    print(f"{folder / FILE}: {len(found)} kernels, {sum(map(len, found.values()))} functions")
    return failed


def read(folder: pathlib.Path) -> dict:
    """{kernel: its functions}, of a snapshot."""
    return json.loads((folder / FILE).read_text())


def differences(a: dict, b: dict) -> list[str]:
    """In which kernels two snapshots differ, and in what: a line each."""
    lines = [f"{name}: only in the {'first' if name in a else 'second'}" for name in sorted(set(a) ^ set(b))]
    for name in sorted(set(a) & set(b)):
        if len(a[name]) != len(b[name]):
            lines.append(f"{name}: {len(a[name])} functions, then {len(b[name])}")
        elif a[name] != b[name]:
            rest = [(x, y) for x, y in zip(a[name], b[name]) if x != y]
            facts = [f"{fact} {x[fact]}, then {y[fact]}" for x, y in rest for fact in x
                     if fact != "code" and x[fact] != y.get(fact)]
            lines.append(f"{name}: {', '.join(facts) or 'other instructions'}")
    return lines


def compare(first: pathlib.Path, second: pathlib.Path) -> int:
    """Print what differs; 1 where something does."""
    a, b = read(first), read(second)
    lines = differences(a, b)
    print("\n".join([*lines, f"{len(set(a) | set(b))} kernels: {len(set(a) | set(b)) - len(lines)} equal, "
                             f"{len(lines)} not"]))
    return int(bool(lines))


def parsed(words):
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m tests.machine_code", description=__doc__.partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    taken = actions.add_parser("snapshot", help="of the tree as it is")
    taken.add_argument("folder", type=pathlib.Path)
    taken.add_argument("names", nargs="*", metavar="NAME", help="kernels whose names contain one of these")
    taken.add_argument("--every", type=int, default=1, metavar="N", help="every Nth of them")
    taken.add_argument("--of-each", action="store_true",
                       help="the first of each builder and kind of config, with what --every N takes")
    taken.add_argument("--like", type=pathlib.Path, metavar="DIR", help="the kernels that another snapshot has")
    taken.add_argument("-j", "--jobs", type=int, default=1, help="processes that compile")
    two = actions.add_parser("compare", help="two snapshots")
    two.add_argument("first", type=pathlib.Path)
    two.add_argument("second", type=pathlib.Path)
    given = parser.parse_args(words)
    if given.action == "snapshot" and (given.every < 1 or given.jobs < 1):
        parser.error("--every and --jobs are numbers from 1 on")
    return given


def main(words=None) -> int:
    given = parsed(words)
    if given.action == "compare":
        return compare(given.first, given.second)
    try:
        kernels = chosen(given)
    except (ValueError, OSError) as problem:
        raise SystemExit(f"python -m tests.machine_code: {problem}") from None
    return int(bool(snapshot(given.folder, kernels, given.jobs)))


if __name__ == "__main__":
    sys.exit(main())

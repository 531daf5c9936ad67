"""The CPU tests with other versions of what tkq stands on: `make test-matrix`.

    python -m tests.matrix --list            # the cells, nothing is run
    python -m tests.matrix                   # the CPU suite in each cell that can be had
    python -m tests.matrix --only 3.12 2.13  # cells that have all of these words
    python -m tests.matrix --here --smoke    # the lowest pair, with this Python and torch: `make test-oldest`

A cell is a Python, a torch, and a pair of DSL and tvm-ffi: the lowest that pyproject.toml allows, or those that
constraints.txt pins. Without --every each pair goes with each Python beside the torch of constraints.txt, and with each
torch beside one Python; with it, all goes with all. A cell of this Python and this torch borrows the packages of this
environment and gets the DSL and tvm-ffi alone; any other is an environment of its own. A cell that cannot be had is
named with why, and is no failure: a Python that is not there, versions that pip does not have, and, without --large, a
torch that pip has only with CUDA, of gigabytes.

--smoke runs the demo, which compiles and reads kernels, and the tests of `SMOKE`. --write FILE: the table, in Markdown.
Exit status: 1 where a cell's tests failed.
"""
import argparse
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYTHONS = "3.10", "3.12", "3.14"
TORCHES = "2.9", "2.11", "2.13", "2.15"
MIDDLE = "3.12"  # beside which each torch is tried
SMOKE = "tests/cpu/runtime/test_dispatch.py", "tests/cpu/runtime/test_import.py"
DSL, FFI = "nvidia-cutlass-dsl", "apache-tvm-ffi"
CUDA_ONLY = "nvidia-cudnn"  # what a torch with CUDA requires, by the beginning of its name


class Pair(NamedTuple):
    """A version of the DSL and one of tvm-ffi."""

    dsl: str
    ffi: str


class Cell(NamedTuple):
    python: str
    torch: str
    pair: Pair

    def __str__(self):
        return f"Python {self.python}, torch {self.torch}, DSL {self.pair.dsl}, tvm-ffi {self.pair.ffi}"


class CannotBeHad(Exception):
    """Of a cell: why."""


# ---- which cells there are -------------------------------------------------------------------------------------------


def pairs(pyproject: str, constraints: str) -> list[Pair]:
    """The lowest versions that a pyproject.toml allows, and those that a constraints.txt pins; one where they agree."""
    lowest = Pair(*(re.search(rf'"{name}>=([\w.]+)', pyproject)[1] for name in (DSL, FFI)))
    return list(dict.fromkeys((lowest, Pair(*(pinned(name, constraints) for name in (DSL, FFI))))))


def pinned(name: str, constraints: str) -> str:
    return re.search(rf"^{name}==([\w.]+)$", constraints, re.MULTILINE)[1]


def minor(version: str) -> str:
    """2.13 of 2.13.0+cpu."""
    return ".".join(version.split(".")[:2])


def cells(of_pairs, torch: str, every: bool = False) -> list[Cell]:
    """torch: beside which each Python is tried."""
    if every:
        places = list(itertools.product(PYTHONS, TORCHES))
    else:
        places = [(python, torch) for python in PYTHONS] + [(MIDDLE, each) for each in TORCHES if each != torch]
    return [Cell(*place, pair) for place in places for pair in of_pairs]


def here(pair: Pair) -> Cell:
    """Of the Python that runs and its torch."""
    return Cell("{}.{}".format(*sys.version_info), minor(importlib.metadata.version("torch")), pair)


# ---- an environment for a cell ---------------------------------------------------------------------------------------


def interpreter(version: str) -> str:
    if version == "{}.{}".format(*sys.version_info):
        return sys.executable
    path = shutil.which(f"python{version}")
    if path is None:
        raise CannotBeHad(f"there is no python{version}")
    said = subprocess.run([path, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"], capture_output=True,
                          text=True)
    if said.returncode or said.stdout.strip() != version:
        raise CannotBeHad(f"python{version} does not run: {last(said.stderr)}")
    return path


def borrowed(packages, pair: Pair) -> list[str]:
    """What is installed for a cell that borrows all else: the DSL's packages that are there, and tvm-ffi."""
    found = sorted(name for name in packages if name.startswith(DSL))
    return [f"{name}=={pair.dsl}" for name in found] + [f"{FFI}=={pair.ffi}"]


def environment(cell: Cell, folder: pathlib.Path, large: bool) -> str:
    """The Python of an environment made for a cell."""
    base, own = interpreter(cell.python), folder / "bin" / "python"
    shutil.rmtree(folder, ignore_errors=True)
    if cell == here(cell.pair):
        _made(base, folder, "--without-pip")
        _borrow(own)
        names = [each.metadata["Name"] for each in importlib.metadata.distributions()]
        _pip(own, "install", "--no-deps", "--ignore-installed", *borrowed(names, cell.pair))
        _has(own, cell.pair)
        return str(own)
    _made(base, folder)
    wanted = [f"torch=={cell.torch}.*", f"{DSL}[cu13]=={cell.pair.dsl}", f"{FFI}=={cell.pair.ffi}"]
    if not large:
        refuse_cuda(_report(own, wanted[0]), cell.torch)
    _pip(own, "install", "-e", f"{ROOT}[dev]", *wanted)
    _has(own, cell.pair)
    return str(own)


def _has(own, pair):
    """What is imported is what was installed, not what lies behind it."""
    code = f"import importlib.metadata as m; print(m.version({DSL!r}), m.version({FFI!r}))"
    said = subprocess.run([own, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    if said != list(pair):
        raise RuntimeError(f"the environment {own} has the DSL and tvm-ffi {said}, asked for were {list(pair)}")


def _made(base, folder, *more):
    done = subprocess.run([base, "-m", "venv", *more, str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise CannotBeHad(f"{pathlib.Path(base).name} makes no environment: {last(done.stdout + done.stderr)}")


def _borrow(own):
    """All packages of this environment, behind those of the new one."""
    said = subprocess.run([own, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True,
                          text=True, check=True)
    lines = [f"import site; site.addsitedir({path!r})" for path in sys.path if path.endswith("site-packages")]
    pathlib.Path(said.stdout.strip(), "borrowed.pth").write_text("\n".join(lines))


def _pip(own, *words):
    done = subprocess.run([own, "-m", "pip", "--disable-pip-version-check", *words, "--quiet"], capture_output=True,
                          text=True)
    if done.returncode:
        raise CannotBeHad(f"pip: {last(done.stderr)}")


def _report(own, wanted) -> list[str]:
    """What pip would install, as name==version."""
    report = pathlib.Path(own).parents[1] / "report.json"
    _pip(own, "install", "--dry-run", "--report", str(report), wanted)
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return [f"{each['name']}=={each['version']}" for each in found]


def refuse_cuda(packages, torch: str) -> None:
    """
    Raises:
        CannotBeHad: what comes with a torch is CUDA.
    """
    cuda = [each for each in packages if each.startswith(CUDA_ONLY)]
    if cuda:
        raise CannotBeHad(f"pip has torch {torch} with CUDA ({len(packages)} packages, {cuda[0]} among them); "
                          "--large installs it")


def last(text: str) -> str:
    """The last line that says something of an error; of pip's, the first that is one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no word"])[0 if errors else -1][:300]


# ---- the tests in it -------------------------------------------------------------------------------------------------


def tests(python: str, smoke: bool, jobs: int) -> tuple[bool, str]:
    """(all passed, what the runs' last lines say)"""
    if smoke:
        runs = [["-m", "tkq", "demo"], ["-m", "pytest", "-q", "-p", "no:cacheprovider", *SMOKE]]
    else:
        runs = [["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(jobs), "--dist", "worksteal", "tests/cpu"]]
    good, said = True, []
    for words in runs:
        done = subprocess.run([python, *words], cwd=ROOT, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
        good &= done.returncode == 0
        if done.returncode:
            print(done.stdout[-6000:], done.stderr[-3000:], sep="\n", flush=True)
        lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        if "pytest" in words:
            said.append(re.sub(r" in .*", "", lines[-1].strip("= ")))
        else:
            said.append("demo: " + ("ok" if done.returncode == 0 else "failed"))
    return good, "; ".join(said)


def outcome(cell: Cell, given) -> tuple[str, str]:
    """("passed", "FAILED" or "not run", what there is to say)"""
    folder = pathlib.Path(given.folder).resolve() / re.sub(r"[^\w.]+", "-", str(cell))
    try:
        python = environment(cell, folder, given.large)
    except CannotBeHad as why:
        return "not run", str(why)
    good, said = tests(python, given.smoke, given.jobs)
    return "passed" if good else "FAILED", said


def table(rows) -> str:
    """Markdown, of (cell, outcome, what there is to say)."""
    head = ["| Python | torch | DSL | tvm-ffi | outcome | |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join(head + [f"| {cell.python} | {cell.torch} | {cell.pair.dsl} | {cell.pair.ffi} | {state} | {said} |"
                             for cell, state, said in rows]) + "\n"


def parser():
    made = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.partition("\n")[0])
    made.add_argument("--list", action="store_true", help="print the cells, run nothing")
    made.add_argument("--every", action="store_true", help="every Python with every torch")
    made.add_argument("--here", action="store_true", help="only the lowest pair, in this Python with its torch")
    made.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cells that have all of these words")
    made.add_argument("--smoke", action="store_true", help="the demo and few tests")
    made.add_argument("--large", action="store_true", help="torch with CUDA, too: gigabytes for each cell")
    made.add_argument("--jobs", type=int, default=2, help="processes of the suite (2)")
    made.add_argument("--folder", default=str(ROOT / "build" / "matrix"), help="where environments are made")
    made.add_argument("--write", metavar="FILE", help="the table, in Markdown")
    return made


def chosen(given) -> list[Cell]:
    constraints = (ROOT / "constraints.txt").read_text()
    of_pairs = pairs((ROOT / "pyproject.toml").read_text(), constraints)
    if given.here:
        return [here(of_pairs[0])]
    found = cells(of_pairs, minor(pinned("torch", constraints)), given.every)
    words = lambda cell: [cell.python, cell.torch, *cell.pair]
    return [cell for cell in found if all(word in words(cell) for word in given.only)]


def main(given=None) -> int:
    given = parser().parse_args(given)
    rows = []
    for cell in chosen(given):
        if given.list:
            print(cell)
            continue
        began = time.monotonic()
        rows.append((cell, *outcome(cell, given)))
        print(f"{cell}: {rows[-1][1]}: {rows[-1][2]} ({time.monotonic() - began:.0f} s)", flush=True)
    if given.write:
        pathlib.Path(given.write).write_text(table(rows))
    return int(any(state == "FAILED" for _, state, _ in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Run it: see the package's docstring."""
from __future__ import annotations

import argparse
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

from . import fork
from .every import MUTANTS
from .mutant import Mutant

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPIED = (*fork.PACKAGES, "pyproject.toml")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "results", "plots", ".*_cache")
BASELINE_SECONDS = 240
# What Python or the DSL says of a fault that no longer compiles, and a GPU of one that it cannot run now: a test that
# fails of that has seen no wrong result.
BROKEN = re.compile(r"^(E\s+)?(\w+\.)*(DSL\w*Error|NameError|AttributeError|TypeError|SyntaxError|IndentationError|"
                    r"ImportError|ModuleNotFoundError|OutOfMemoryError)\b|^(E\s+)?RuntimeError: (Cannot re-initialize "
                    r"CUDA|CUDA driver initialization|CUDA error: CUBLAS_STATUS_\w+ when calling `cublasCreate)",
                    re.MULTILINE)
PRESSED = re.compile(r"tests/gpu/testing/test_naps\.py::test_under_pressure\[(\w+)-(\w+)\]")
PYTEST = "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=short"


def program(tests: tuple) -> list[str]:
    """What runs them, a module and its arguments: pytest; or, of one test under pressure, the program that it starts,
    which saves a process."""
    direct = PRESSED.fullmatch(tests[0]) if len(tests) == 1 else None
    if direct:
        return ["tests.helpers.sanitizer.pressed", *direct.groups()]
    slow = ["--slow"] if all(test.endswith("]") for test in tests) else []  # one that is named runs, slow or not
    return [*PYTEST, *slow, *(word for test in tests for word in shlex.split(test))]


class Ran(NamedTuple):
    """status: the program's, negative for a signal, or None beyond the time limit. output: ends, of tests under
    pressure, with "1 passed" where they have."""

    status: int | None
    output: str
    seconds: float

    @property
    def passed(self) -> bool:
        """At least one test ran, and all did."""
        return self.status == 0 and re.search(r"\d+ passed", self.output) is not None

    def verdict(self) -> str:
        """Of a mutant."""
        if self.status is None:
            return "caught (time)"
        if self.status < 0:
            return f"caught (signal {-self.status})"
        if self.status == 1 and re.search(r"\d+ failed|^Traceback", self.output, re.MULTILINE):
            return "NOT JUDGED" if BROKEN.search(self.output) else "caught"
        return "SURVIVED" if self.passed else "NOT JUDGED"

    def why(self) -> str:
        """The line of the output that says most."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("E ") or "Error" in line]
        return re.sub(r"^E\s+", "", (errors or lines or [""])[-1])[:150]


class Runner:
    """Runs tests in copies of the tree, kernels cached in a folder that goes with it, or that has some already."""

    def __init__(self, work: pathlib.Path, timeout: float, kernels: pathlib.Path | None = None):
        self.work, self.timeout, self.kernels = work, timeout, kernels or work / "kernels"

    def copy(self, name: str) -> pathlib.Path:
        """Of the tree as it is."""
        to = self.work / name
        to.mkdir()
        for part in filter(lambda part: (ROOT / part).exists(), COPIED):
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, to / part, ignore=LEFT_OUT)
            else:
                shutil.copy(ROOT / part, to)
        return to

    def tests(self, tests: tuple, root: pathlib.Path, cache: str, timeout: float) -> Ran:
        """Of a copy."""
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "TKQ_CACHE_DIR": cache, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1",
                       "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        began = time.monotonic()
        with tempfile.NamedTemporaryFile(dir=self.work, suffix=".txt") as output:  # several runs may share a copy
            status = fork.run(program(tests), root, environment, pathlib.Path(output.name), timeout)
            printed = output.read().decode(errors="replace")
        return Ran(status, printed, time.monotonic() - began)

    def baseline(self, i: int, tests: tuple, beside: tuple) -> Ran:
        """The i-th: of the tree as it is; or with what a mutant changes beside its fault, and without the fault."""
        if beside:
            return self.mutant(Mutant(f"without-the-fault-{i}", *beside[0], tests, beside[1:]), BASELINE_SECONDS)
        return self.tests(tests, self.work / "as-it-is", str(self.kernels), BASELINE_SECONDS)

    def mutant(self, mutant, timeout: float | None = None) -> Ran:
        """In a copy of its own."""
        root = self.copy(mutant.name)
        mutant.apply(root)
        own = self.work / f"{mutant.name}-kernels"
        try:
            return self.tests(mutant.tests, root, f"{self.kernels}{os.pathsep}{own}", timeout or self.timeout)
        finally:
            shutil.rmtree(root, ignore_errors=True)
            shutil.rmtree(own, ignore_errors=True)


def chosen(names: list[str]) -> list:
    """The mutants of these names, or whose names begin so; all, where there are none.

    Raises:
        SystemExit: a name that no mutant has.
    """
    exact = {m.name for m in MUTANTS}.intersection(names)
    unknown = [name for name in names if not any(m.name.startswith(name) for m in MUTANTS)]
    if unknown:
        raise SystemExit(f"no mutant's name begins with {', '.join(unknown)}; python -m tests.mutants --list has them")
    return [m for m in MUTANTS if not names or m.name in exact
            or any(m.name.startswith(name) for name in names if name not in exact)]


def failing_as_they_are(runner: Runner, pool, mutants) -> set:
    """The selections, (tests, beside), that fail, or run no test, without the mutant's fault."""
    runner.copy("as-it-is")
    selections = list(dict.fromkeys((m.tests, m.beside) for m in mutants))
    failing = set()
    for (tests, beside), ran in zip(selections, pool.map(
            lambda i: runner.baseline(i, *selections[i]), range(len(selections)))):
        if not ran.passed:
            failing.add((tests, beside))
            what = "without the fault" if beside else "as it is"
            print(f"{what}, not passed   {' '.join(tests)} ({ran.seconds:.0f} s) {ran.why()}", flush=True)
    return failing


def on_gpu() -> bool:
    """Is there one that the tests run on?"""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def main(arguments=None) -> int:
    """The exit status: 0 where all were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Faults that tests must find.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants, or how their names begin")
    parser.add_argument("--jobs", type=int, default=12, help="at a time; each compiles on a core of its own")
    parser.add_argument("--timeout", type=float, default=45, help="seconds for the tests of a mutant")
    parser.add_argument("--list", action="store_true", help="say what there is, run nothing")
    parser.add_argument("--no-baseline", action="store_true", help="run the first mutant's tests alone as they are")
    parser.add_argument("--kernels", type=pathlib.Path, metavar="FOLDER",
                        help="a cache with kernels of the tree as it is, as the GPU suite leaves one")
    given = parser.parse_args(arguments)
    mutants = chosen(given.names)
    if given.list:
        for m in mutants:
            print(f"{m.name:45} {m.file:40} {' '.join(m.tests)}")
        return 0
    if any(test.startswith("tests/gpu/") for m in mutants for test in m.tests) and not on_gpu():
        raise SystemExit("python -m tests.mutants needs an sm_90 GPU: elsewhere these tests are skipped")
    counts = {"caught": 0, "SURVIVED": 0, "NOT JUDGED": 0}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tkq-mutants-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        runner = Runner(pathlib.Path(folder), given.timeout, given.kernels)
        failing = failing_as_they_are(runner, pool, mutants[:1] if given.no_baseline else mutants)
        if given.no_baseline and failing:
            raise SystemExit("the tests of the first mutant do not pass as they are: none can be judged")
        print(f"baseline: {len(failing)} selections do not pass ({time.monotonic() - began:.0f} s)", flush=True)
        judged = [m for m in mutants if (m.tests, m.beside) not in failing]
        counts["NOT JUDGED"] += len(mutants) - len(judged)
        running = {pool.submit(runner.mutant, m): m for m in judged}
        for done in as_completed(running):
            m, ran = running[done], done.result()
            verdict = ran.verdict()
            counts[next(word for word in counts if verdict.startswith(word))] += 1
            print(f"{verdict:18} {m.name} ({ran.seconds:.0f} s) {ran.why()}", flush=True)
    found = ", ".join(f"{n} {word.lower()}" for word, n in counts.items())
    print(f"{len(mutants)} mutants: {found} ({time.monotonic() - began:.0f} s)")
    return int(counts["caught"] != len(mutants))


if __name__ == "__main__":
    sys.exit(main())

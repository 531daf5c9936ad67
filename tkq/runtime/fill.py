"""``python -m tkq compile``: fill the disk cache with the shipped kernels."""
from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
import time

from .. import catalog
from .build import cache, configure, ensure


def main(chosen) -> int:
    """chosen: names, list, report, jobs, as the command line has them. 0; 1 where a kernel failed; 2: no such name."""
    if chosen.jobs < 1:
        print(f"tkq compile: --jobs is {chosen.jobs}, allowed are numbers from 1 on", file=sys.stderr)
        return 2
    try:
        kernels = catalog.select(chosen.names)
    except ValueError as error:
        print(f"tkq compile: {error}", file=sys.stderr)
        return 2
    if chosen.list:
        print("\n".join(kernel.name for kernel in kernels))
        return 0
    began, failed, compiled = time.perf_counter(), 0, 0
    for number, (kernel, fresh, error) in enumerate(_filled(kernels, chosen.jobs), 1):
        state = f"FAILED: {error}" if error else "compiled" if fresh else "in the cache"
        print(f"[{number}/{len(kernels)}] {kernel.name}: {state}", flush=True)
        compiled += fresh
        failed += bool(error) or (chosen.report and _reported(kernel))
    seconds = time.perf_counter() - began
    print(f"{len(kernels)} kernels, {compiled} of them compiled now, {failed} wrong, in {seconds:.1f} s; "
          f"{cache().folder} has {cache().bytes() / 1e6:.1f} MB")
    return 1 if failed else 0


def _filled(kernels, jobs):
    """(kernel, compiled now, error or None), as they are done."""
    if jobs == 1:
        for kernel in kernels:
            yield (kernel, *_one(kernel.recipe))
        return
    # Not fork: a child must not inherit the locks and threads of torch or the DSL.
    context = multiprocessing.get_context("spawn")
    settings = (cache().folder, cache().most_bytes)
    with concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=configure, initargs=settings) as pool:
        running = {pool.submit(_one, kernel.recipe): kernel for kernel in kernels}
        for done in concurrent.futures.as_completed(running):
            yield (running[done], *done.result())


def _one(recipe):
    try:
        return ensure(recipe), None
    except Exception as error:  # one kernel's failure is reported and the others go on
        return False, f"{type(error).__name__}: {error}"


def _reported(kernel) -> bool:
    """Print the report; True where it is not as expected."""
    from ..testing import sass

    found = sass.report(kernel.recipe)
    wrong = sass.expect_all(found, kernel.expectation)
    print(sass.text(kernel.name, found), *(f"    WRONG: {text}" for text in wrong), sep="\n", flush=True)
    return bool(wrong)

"""``python -m tkq compile``: fill the disk cache, or make a bundle, with the shipped kernels or those of models."""
from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import pathlib
import shutil
import sys
import tempfile
import time

from ..runtime.compile import bundle, bundling, keys, link, native
from ..runtime.compile.build import cache, configure, ensure
from ..runtime.compile.requirements import why_no_compiling
from ..runtime.system import trusted
from . import catalog, wheel


def parsed(argv) -> argparse.Namespace:
    """The command line behind ``compile``. NAMEs may stand anywhere in it."""
    parser = argparse.ArgumentParser(prog="python -m tkq compile",
                                     description="Fill the disk cache, or make a bundle; needs no GPU.")
    describe(parser)
    return parser.parse_intermixed_args(argv)


def main(chosen) -> int:
    """chosen: as the command line has it (see ``describe``). 0; 1 where a kernel failed; 2: nothing could be
    chosen, or nothing can be compiled, or kept, here."""
    try:
        kernels = _selected(chosen)
    except (ValueError, RuntimeError) as error:
        print(f"tkq compile: {error}", file=sys.stderr)
        return 2
    if chosen.list:
        print(*(kernel.name for kernel in kernels), sep="\n")
        return 0
    if problem := why_no_compiling():
        print(f"tkq compile: {problem}", file=sys.stderr)
        return 2
    if chosen.all:
        print(f"All {len(kernels)} kernels that tkq ships, in {chosen.jobs} process{'es' * (chosen.jobs > 1)}. Faster: "
              "-j N.", flush=True)
    if chosen.output:
        try:
            configure(chosen.output).make()
        except (OSError, ValueError) as error:
            print(f"tkq compile: --output: {error}", file=sys.stderr)
            return 2
    if chosen.bundle or chosen.wheel:
        return into_bundle(kernels, chosen.jobs, chosen.bundle, chosen.wheel)
    status = into_cache(kernels, chosen.jobs, chosen.report)
    if chosen.output:
        _share()
    return status


def _share():
    """Let all users read what was made, and nothing else."""
    try:
        foreign = cache().share()
    except OSError as error:
        print(f"tkq compile: {error}", file=sys.stderr)
        return
    if foreign:
        print(f"{trusted.shown(cache().folder)} has files that are not tkq's ({trusted.shown(foreign[0])}, ...), and "
              "keeps its mode: where others are to read it, say chmod go+rx.")


def into_cache(kernels, jobs: int, report: bool = False) -> int:
    """Fill the disk cache and print progress. report: judge the machine code too, also where nothing can be kept. 0; 1
    where something is wrong; 2 where nothing is kept or judged."""
    try:
        with contextlib.nullcontext() if report else cache().lock("compile"):
            pass
    except (OSError, RuntimeError) as error:  # all would be compiled, and lost with this process
        print(f"tkq compile: the cache cannot be used: {error}; --output or TKQ_CACHE_DIR name another folder",
              file=sys.stderr)
        return 2
    progress = Progress(len(kernels))
    for kernel, made, error in _worked(_entry, kernels, jobs):
        progress.show(kernel.name, made, error, bool(error) or (report and _reported(kernel)))
    if report:
        _left_out()
    for kind in bundle.NATIVE:  # what calls go through, for machines without a compiler
        native.library(kind)
    print(f"{progress.ended()}; {trusted.shown(cache().folder)} {_size()}")
    return 1 if progress.failed else 0


def _size():
    try:
        return f"has {cache().bytes() / 1e6:.1f} MB"
    except OSError as error:
        return f"cannot be used: {error}"


def into_bundle(kernels, jobs: int, folder: pathlib.Path | None = None, wheels: pathlib.Path | None = None) -> int:
    """Make a bundle in one folder, or a wheel of it in another, or both, and print progress. 0; 1 where a kernel fails:
    there is none then; 2 where none can be linked, before anything is compiled."""
    missing = link.why_not()
    if missing:
        print(f"tkq compile: a bundle cannot be linked: {missing}", file=sys.stderr)
        return 2
    progress, objects = Progress(len(kernels)), {}
    for kernel, made, error in _worked(_object, kernels, jobs):
        progress.show(kernel.name, made, error, bool(error))
        objects[kernel.recipe] = made and made[:2]
    print(progress.ended())
    if progress.failed:
        return 1
    try:
        with tempfile.TemporaryDirectory(prefix="tkq-bundle-") as place:
            path = bundling.write(folder or pathlib.Path(place), objects)
            written = wheels and wheel.write(wheels, path, (keys.flavour() or "cu13")[2:])
            size = path.stat().st_size
    except (RuntimeError, ValueError, OSError) as error:
        print(f"tkq compile: {error}", file=sys.stderr)
        return 1
    if folder:
        print(f"{trusted.shown(path)}: {len(objects)} kernels, {size / 1e6:.2f} MB; TKQ_BUNDLE={trusted.shown(folder)} "
              "uses it")
    if wheels:
        print(f"{trusted.shown(written)}: {len(objects)} kernels, {written.stat().st_size / 1e6:.2f} MB; pip "
              "installs it")
    return 0


def describe(parser) -> None:
    """The command line's arguments."""
    names = lambda text: [name for name in text.split(",") if name] or [""]  # which no function and no model is
    parser.add_argument("names", nargs="*", metavar="NAME", help="only kernels whose name contains it; --list prints "
                        "all names")
    parser.add_argument("--all", action="store_true", help="every kernel that tkq ships: many minutes")
    parser.add_argument("--models", type=names, action="extend", default=[], metavar="MODEL[,MODEL]",
                        help="the kernels that training and inference of these models take (llama-8b, say), instead of "
                             "those that tkq ships")
    parser.add_argument("--ops", type=names, action="extend", default=[], metavar="OP[,OP]",
                        help="only kernels of these functions of tkq")
    parser.add_argument("--arch", default=keys.TARGET, choices=(keys.TARGET,), help=f"the GPU ({keys.TARGET})")
    parser.add_argument("--list", action="store_true", help="print the names and compile nothing")
    parser.add_argument("--report", action="store_true", help="print what the machine code shows, and judge it")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="processes that compile (1)")
    parser.add_argument("--output", type=_folder, metavar="DIR",
                        help="the cache folder to fill, for others to read: they name it first in TKQ_CACHE_DIR")
    parser.add_argument("--bundle", type=_folder, metavar="DIR",
                        help="link the kernels into one library there, which runs without the DSL: see TKQ_BUNDLE")
    parser.add_argument("--wheel", type=_folder, metavar="DIR",
                        help="the same as a package, tkq-kernels-cu13 or -cu12, which tkq finds where pip installed it")


def _folder(text) -> pathlib.Path:
    if not text:  # a variable of the shell's that is not set: not the working folder
        raise argparse.ArgumentTypeError("is empty, allowed is a folder")
    return pathlib.Path(text)


def _selected(chosen):
    if chosen.list and (unused := _unused(chosen)):
        raise ValueError(f"--list prints names and makes nothing: leave it out, or leave out {' and '.join(unused)}")
    if chosen.report and (chosen.bundle or chosen.wheel):
        raise ValueError("--report is of the cache's kernels: leave it out, or leave out --bundle and --wheel")
    if chosen.output and (chosen.bundle or chosen.wheel):
        raise ValueError("--output is a cache, which --bundle and --wheel do not fill: name one or the other")
    if chosen.jobs < 1:
        raise ValueError(f"--jobs is {chosen.jobs}, allowed are numbers from 1 on")
    if "" in chosen.names:
        raise ValueError("a NAME is empty, allowed is a part of a kernel's name: --list prints them")
    some = chosen.names or chosen.models or chosen.ops
    if chosen.all and some:
        raise ValueError("--all is every kernel: leave out NAME, --models and --ops, or leave out --all")
    if not (chosen.all or some or chosen.list):
        raise ValueError("say what to compile: part of a kernel's NAME (--list prints them), --ops, --models, or "
                         f"--all for the {len(catalog.shipped())} kernels that tkq ships")
    try:
        return catalog.of_ops(_named(chosen), chosen.ops)
    except ValueError as error:
        raise _where_a_comma_was_meant(chosen) or error from None


def _unused(chosen):
    """What nothing is done with where names are printed."""
    return [f"--{name}" for name in ("report", "output", "bundle", "wheel") if getattr(chosen, name)] \
        + ["--jobs"] * (chosen.jobs > 1)


def _named(chosen):
    if not chosen.models:
        return catalog.select(chosen.names)
    from . import models

    return catalog.named(models.kernels(chosen.models), chosen.names)


def _where_a_comma_was_meant(chosen):
    """The error for a model or an op that stands behind another one; None where that is not what is wrong."""
    from . import models

    for option, given, known in (("--models", chosen.models, models.MODELS), ("--ops", chosen.ops, catalog.ops())):
        behind = [name for name in chosen.names if name in known]
        if given and behind:
            return ValueError(f"{behind[0]!r} stands where a NAME does; several of {option} are joined by commas: "
                              f"{option} {','.join([*given, *behind])}")
    return None


# ---- many kernels ---------------------------------------------------------------------------------------------


def mapped(work, recipes, jobs):
    """(recipe, work(recipe)), as they are done, by ``jobs`` processes. work: a function of a module."""
    if jobs == 1 or len(recipes) < 2:
        for recipe in recipes:
            yield recipe, work(recipe)
        return
    # Not fork: a child must not inherit the locks and threads of torch or the DSL.
    context = multiprocessing.get_context("spawn")
    settings = (cache().folder, cache().most_bytes)
    with concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=configure, initargs=settings) as pool:
        running = {pool.submit(work, recipe): recipe for recipe in recipes}
        for done in concurrent.futures.as_completed(running):
            yield running[done], done.result()


def _worked(work, kernels, jobs):
    """(kernel, what work made of it, what went wrong), as they are done."""
    named = {kernel.recipe: kernel for kernel in kernels}
    for recipe, (made, error) in mapped(work, list(named), jobs):
        yield named[recipe], made, error


def _entry(recipe):
    """((whether it was compiled now,), None), or (None, what went wrong)."""
    return _tried(lambda: (ensure(recipe),))


def _object(recipe):
    """(what ``bundling.compiled`` gives, None), or (None, what went wrong)."""
    return _tried(lambda: bundling.compiled(recipe))


def _tried(work):
    try:
        return work(), None
    except Exception as error:  # one kernel's failure is reported and the others go on
        return None, f"{type(error).__name__}: {error}"


class Progress:
    """Progress: on a terminal a bar, elsewhere a line for each kernel."""

    def __init__(self, total: int, out=None):
        self.total, self.out = total, out or sys.stdout
        self.done = self.compiled = self.failed = 0
        self.began, self.bar = time.perf_counter(), self.out.isatty()

    def show(self, name: str, made, error: str | None, wrong: bool) -> None:
        """made: what ends with whether it was compiled now; None with an error."""
        compiled = bool(made and made[-1])
        state = f"FAILED: {error}" if error else "compiled" if compiled else "in the cache"
        self.done += 1
        self.compiled += compiled
        self.failed += bool(wrong)
        line = f"[{self.done}/{self.total}] {name}: {state}"
        if not self.bar or wrong:
            print("\r\x1b[K" * self.bar + line, file=self.out, flush=True)
        if self.bar:
            filled = 30 * self.done // self.total
            room = shutil.get_terminal_size().columns - 34
            bar = f"[{'#' * filled}{' ' * (30 - filled)}]"
            print(f"\r\x1b[K{bar} {line[:max(room, 20)]}", end="", file=self.out, flush=True)

    def ended(self) -> str:
        if self.bar:
            print(file=self.out)
        seconds = time.perf_counter() - self.began
        return f"{self.done} kernels, {self.compiled} of them compiled now, {self.failed} wrong, in {seconds:.1f} s"


def _left_out() -> None:
    from ..testing import sass

    if sass.missing():
        print(f"note: {sass.missing()}")


def _reported(kernel) -> bool:
    """Print the report; True where it is not as expected."""
    from ..testing import sass

    found = sass.report(kernel.recipe, instructions=sass.missing() is None)
    wrong = sass.expect_all(found, kernel.expectation)
    print(sass.text(kernel.name, found), *(f"    WRONG: {text}" for text in wrong), sep="\n", flush=True)
    return bool(wrong)

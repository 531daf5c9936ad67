"""Shared by the tuning scripts: compiling ahead, interleaved turns with torch, a final against the baselines."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tkq.runtime import cache, ensure
from tkq.runtime.compile import keys

# ---- compiling -------------------------------------------------------------------------------------------------------


def precompile(recipes: Iterable, processes: int | None = None) -> set:
    """Fill the disk cache, many at a time. The recipes that do not compile: each is worth a line, not the run."""
    begin, recipes, broken = time.perf_counter(), list(dict.fromkeys(recipes)), set()
    spawn = multiprocessing.get_context("spawn")
    missing = [recipe for recipe in recipes if not _compiled(recipe)]  # no pool for none
    with concurrent.futures.ProcessPoolExecutor(processes or min(16, os.cpu_count() or 1), spawn) as pool:
        for recipe, done in [(recipe, pool.submit(ensure, recipe)) for recipe in missing]:
            if problem := done.exception():
                print(f"{recipe.args}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
                broken.add(recipe)
    print(f"{len(recipes) - len(broken)} kernels compiled, or in the cache, in {time.perf_counter() - begin:.0f} s",
          flush=True)
    return broken


def _compiled(recipe) -> bool:
    return any(cache().find(keys.entry_name(recipe) + suffix) for suffix in (".so", ".o"))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def add_compiling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precompile", action="store_true", help="compile only; needs no GPU")
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))


# ---- variants in turns beside torch ----------------------------------------------------------------------------------


def add_turns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.01, help="of a variant's turn, after a lead-in as long")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds before each turn, in which the card cools")
    parser.add_argument("--out", type=Path)


def size(text: str) -> tuple[int, int, int]:
    """(M, N, K) of "4096" or "16384x4096x4096"."""
    numbers = [int(x) for x in text.split("x")]
    return tuple(numbers * 3 if len(numbers) == 1 else numbers)


def blocks_of(name: str) -> tuple[str, int | None]:
    """("NAME", blocks) of a variant "NAME on 128", which has 128 blocks instead of the plan's; None without."""
    plain, _, blocks = name.partition(" on ")
    return plain, int(blocks) if blocks else None


class Turns:
    """Each round lets every variant work once, in an order that changes; a round before them warms up.

    options: as of ``add_turns``. Every case is written to the file of --out as soon as it is measured."""

    def __init__(self, options):
        import torch

        from bench.core.harness import Monitor
        from tkq.testing import timing

        self.options, self.gpu, self.monitor = options, timing.Gpu(), Monitor()
        self.report = {"device": torch.cuda.get_device_name(), "driver": self.monitor.driver,
                       "torch": torch.__version__, "cases": []}
        print("{device}, driver {driver}, torch {torch}; ratio: torch's time / ours".format(**self.report))

    def case(self, about: Mapping, calls: Mapping[str, tuple[Callable, list]], error: Callable, rate: Callable) -> None:
        """Measure and show one. about: what it is, for the file. calls: by name, "torch" the first, a function and its
        sets of inputs. error(name, result): how wrong one is. rate(milliseconds): as text."""
        from tkq.testing import timing

        batches, notes = {}, {}
        for name, (f, sets) in calls.items():
            try:
                got, seconds = self.gpu.first_calls(f, sets)
                wrong = error(name, got)
                notes[name] = "" if wrong < 0.02 else f"WRONG by {wrong:.2g}"
                batches[name] = self.gpu.batch(f, sets, timing.calls_per_batch(seconds, len(sets)))
            except Exception as problem:  # one bad variant must not lose the others
                notes[name] = f"{type(problem).__name__}: {str(problem)[:120]}"
        case = {**about, **self._times(batches), "notes": notes}
        batches.clear()
        self.gpu.release()
        print("\n" + " ".join(map(str, about.values())))
        print("\n".join(lines_of(case, rate)), flush=True)
        self.report["cases"].append(case)
        if self.options.out:  # what is measured stays, whatever comes
            self.options.out.write_text(json.dumps(self.report, indent=1))

    def _times(self, batches) -> dict:
        """Milliseconds and clocks of every variant and round."""
        from tkq.testing import timing

        rounds, times, readings = self.options.rounds, {n: [] for n in batches}, {n: [] for n in batches}
        for i in range(-1, rounds):
            for name in timing.turn_order(list(batches), i % max(1, rounds)):
                time.sleep(self.options.pause)
                hook = (lambda name=name: readings[name].append(self.monitor.read())) if self.monitor.live else None
                ms = batches[name].run(self.options.seconds, hook)
                if i >= 0:
                    times[name].append(ms)
        return {"ms": times, "clocks": {n: [[r.sm_mhz, r.watts] for r in found] for n, found in readings.items()}}


def lines_of(case, rate) -> list[str]:
    """The variants of a case of ``Turns``, the quickest beside torch (or the first candidate) first."""
    times, rows = case["ms"], []
    for name, ms in times.items():
        ratios = sorted(p / t for p, t in zip(next(iter(times.values())), ms, strict=True))
        known = [r for r in case["clocks"][name] if None not in r]
        mhz, watts = map(statistics.median, zip(*known, strict=True)) if known else (0, 0)
        clock = f"{mhz:5.0f} MHz {watts:4.0f} W" if known else ""
        middle = statistics.median(ratios)
        rows.append((middle, f"  {name:28s} {middle:6.3f}  ({ratios[0]:.3f}..{ratios[-1]:.3f})  "
                             f"{rate(statistics.median(ms))}  {clock}  {case['notes'][name]}"))
    failed = [f"  {name:28s} {note}" for name, note in case["notes"].items() if name not in times]
    return [line for _, line in sorted(rows, reverse=True)] + failed


# ---- the quickest few, beside peers ----------------------------------------------------------------------------------


class Final(NamedTuple):
    """first: of all variants; second: of the quickest, the planned one, and those they are set beside."""

    first: object
    second: object
    beside: tuple

    def as_dict(self) -> dict:
        found = dict(first={t.name: t.times_ms for t in self.first.timings},
                     second={t.name: t.times_ms for t in self.second.timings})
        between = {t.name: t.between_ms for t in self.second.timings if t.between_ms}
        return {**found, "between": between} if between else found


def final(ours: Mapping[str, Callable], planned: str, beside: Mapping[str, Callable], make_inputs, efforts,
          finalists: int = 3, error=None) -> Final:
    """All variants in short turns (efforts[0]); then the planned one and the quickest few beside others, efforts[1]."""
    from tkq.testing import timing

    first = timing.compare(ours, make_inputs, efforts[0], error=error)
    chosen = dict.fromkeys([planned, *(t.name for t in ranked(first)[:finalists])])
    finals = {name: ours[name] for name in chosen if name in ours}
    second = timing.compare({**beside, **finals}, make_inputs, efforts[1])
    return Final(first, second, tuple(beside))


def ranked(found) -> list:
    """The timings that are there, the quickest first."""
    return sorted((t for t in found.timings if t.ok), key=lambda t: t.median_ms)


def _between(t, found) -> str:
    """The same with another kernel before each call, where that was timed."""
    if not t.between_ms:
        return ""
    others = {name: found.second[name].between_ms for name in found.beside if found.second[name].between_ms}
    against = [f", {statistics.median(b / a for a, b in zip(t.between_ms, other, strict=True)):.3f} of {name}"
               for name, other in others.items()]
    return f"  between {statistics.median(t.between_ms):.4f} ms{''.join(against)}"


def show(found: Final, gigabytes: float, missing: Mapping[str, str]) -> None:
    from tkq.testing import timing

    for t in ranked(found.second):
        against = [f"{timing.ratio(t, found.second[name]):.3f} of {name}" for name in found.beside
                   if found.second[name].ok]
        print(f"  {t.name:36s} {t.median_ms:.4f} ms {gigabytes / t.median_ms * 1e3:6.0f} GB/s  {', '.join(against)}  "
              f"{t.launches} launches [{t.mode}]{_between(t, found)}")
    for t in ranked(found.first):
        error = "" if t.error is None else f"  error {t.error:.1e}"
        print(f"    first round: {t.name:36s} {t.median_ms:.4f} ms{error}")
    for t in (*found.first.timings, *found.second.timings):
        if not t.ok:
            print(f"  {t.name}: FAILED {t.note}")
    print("".join(f"  {name} is not there: {why}\n" for name, why in missing.items()), end="", flush=True)

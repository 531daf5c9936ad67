"""The CPU time of eager calls, of several files of cases, without timing anything else: `tkq bench --calls-only`.

All calls of all files are made before the first is priced: whatever that compiles and imports is then behind them, and
the host is as quiet for one file's calls as for another's.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.core import harness
from bench.core.command import Bench, Run
from bench.core.progress import Progress


def price(files: Sequence[tuple[Bench, Run]], progress: Progress) -> int:
    """Price the calls of these files, one file after the other in this process; how many did not run."""
    for bench, run in files:
        run.warm_calls(bench.calls)
    for bench, run in files:
        progress.step(f"calls of {bench.name}")
        told(bench, run, progress)
    return sum(len(run.report.problems) for _, run in files)


def told(bench: Bench, run: Run, progress: Progress) -> None:
    """Price a file's calls, and say what they cost."""
    run.calls(bench.calls)
    progress.say("\n".join(harness.cost_lines(run.report.costs)))

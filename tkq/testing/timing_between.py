"""Short kernels timed once more with a kernel of another kind before each call. For `tkq.testing.timing`.

A graph that replays one kernel lets a programmatic dependent launch of it begin while its own predecessor ends. In a
program the kernel before is another one, which need not allow that. Here each call follows an elementwise kernel that
was launched in the ordinary way; that kernel alone, timed in the same round, is taken off.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tkq.testing.timing_turns import calls_per_batch, take_turns

FOREIGN_BYTES = 1 << 20  # that the other kernel reads and writes: it stays in the L2 cache and takes microseconds
FOREIGN = "the other kernel"  # its turns, among the candidates'
FOREIGN_SECONDS = 3e-6  # about, for choosing how many calls are queued at once
TURN = 0.01  # seconds: of short calls, hundreds


def times(calls: Mapping[str, Callable], sets: Sequence[tuple], back_to_back: Mapping[str, Sequence[float]], effort,
          gpu) -> dict[str, tuple[float, ...]]:
    """Milliseconds per call between other kernels, for each round, of candidates that all worked.

    back_to_back: their milliseconds per call by rounds. {} where the fastest is no shorter than
    `effort.short_us`; what fails here, or is lost in the noise of the other kernel, is left out."""
    medians = {name: statistics.median(back_to_back[name]) for name in calls}
    if not medians or 1e3 * min(medians.values()) >= effort.short_us:
        return {}
    batches, failed = _batches(calls, sets, medians, effort, gpu)
    if FOREIGN in failed:
        return {}
    turns = replace(effort, round_seconds=min(effort.round_seconds, TURN), warmup_seconds=0.0)
    taken = take_turns(batches, failed, turns, None, gpu.clear_cache)
    if FOREIGN in failed:
        return {}
    found = {name: tuple(ms - other for ms, other in zip(taken[name], taken[FOREIGN]))
             for name in calls if name not in failed}
    return {name: each for name, each in found.items() if min(each) > 0}


def _batches(calls, sets, medians, effort, gpu) -> tuple[dict, dict[str, str]]:
    foreign = gpu.foreign()

    def behind(call):
        def run(*inputs):
            foreign()
            return call(*inputs)

        return run

    mixed = {FOREIGN: lambda *inputs: foreign(), **{name: behind(call) for name, call in calls.items()}}
    batches, failed = {}, {}
    for name, call in mixed.items():
        seconds = FOREIGN_SECONDS + 1e-3 * medians.get(name, 0.0)
        try:
            batches[name] = gpu.batch(call, sets, calls_per_batch(seconds, len(sets), TURN), effort.graphs)
        except Exception as problem:  # its times back to back are known all the same
            failed[name] = f"{type(problem).__name__}: {str(problem)[:300]}"
    return batches, failed

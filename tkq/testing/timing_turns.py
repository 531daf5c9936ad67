"""How candidates take turns. For `tkq.testing.timing`."""

from __future__ import annotations

import time
from collections.abc import Sequence

MOST_CALLS = 256  # in one graph, and in one queue of eager launches: the driver's queue holds about a thousand
BATCH_SECONDS = 0.01  # of calls that are queued at once, where a turn is no shorter


def turn_order(names: Sequence[str], round_: int) -> list[str]:
    """The order of candidates in a round: rotated every round, and of three or more every second round backwards. So
    neighbours change from round to round: at the power limit a turn behind one that draws more power is slower."""
    n = len(names)
    if not n:
        return []
    k, cycle = round_ % n, round_ // n
    backwards = cycle if n == 2 else round_ + (1 - n % 2) * cycle  # all rotations both ways in 2 n rounds
    order = [*names[k:], *names[:k]]
    return order[::-1] if backwards % 2 else order


def calls_per_batch(seconds_per_call: float, sets: int, turn: float = BATCH_SECONDS) -> int:
    """Calls to queue at once: about 10 ms of them, or a turn of less, a multiple of the input sets, at most 256 (or one
    per set)."""
    wanted = min(MOST_CALLS, min(turn, BATCH_SECONDS) / max(seconds_per_call, 1e-9))
    return sets * max(1, int(wanted) // sets)


def take_turns(batches: dict, failed: dict, effort, during, clear_cache) -> dict[str, list[float]]:
    """Warm up by time, then measure the rounds: milliseconds per call, by name. A batch that raises moves to `failed`
    and takes no further turn. effort: a `timing.Effort`."""
    times: dict[str, list[float]] = {name: [] for name in batches}

    def turn(name: str, seconds: float, hook) -> float | None:
        try:
            clear_cache()
            return batches[name].run(seconds, hook)
        except Exception as problem:
            failed[name] = f"{type(problem).__name__}: {str(problem)[:300]}"
            return None

    def alive() -> list[str]:
        return [name for name in batches if name not in failed]

    spent, lap = 0.0, 0
    while alive() and (lap == 0 or spent < effort.warmup_seconds):
        for name in turn_order(alive(), lap):
            turn(name, effort.round_seconds, None)
            spent += effort.round_seconds
        lap += 1
    for round_ in range(effort.rounds):
        for name in turn_order(alive(), round_):
            if effort.idle_seconds:
                time.sleep(effort.idle_seconds)
            ms = turn(name, effort.round_seconds, None if during is None else lambda name=name: during(name))
            if ms is not None:
                times[name].append(ms)
    return times

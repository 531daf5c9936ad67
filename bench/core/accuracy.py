"""Whether a result's error is about what the peers have: by the rule of a case."""
from __future__ import annotations

from collections.abc import Mapping

EQUAL = 1.05  # times the fastest peer's error: speeds are compared at equal accuracy
ROUNDING = 1.66e-3  # the relative error of rounding normal random numbers to bf16
TWICE = "twice the best baseline's"


def accurate(ours: float, peers: Mapping[str, float], fastest: str | None, at_most: float | None) -> bool:
    """at_most: None: our error is at most twice the best peer's, and 0.1 % beyond. A number: it is at most that many
    times the fastest peer's (the best peer's, where the fastest has none), and a tenth of what rounding to bf16 costs
    beyond. A NaN is never accurate."""
    if at_most is None:
        return ours <= 2 * min(peers.values()) + 1e-3
    return ours <= at_most * peers.get(fastest, min(peers.values())) + 0.1 * ROUNDING


def rule(at_most: float | None) -> str:
    """What an error exceeds that is not accurate."""
    return TWICE if at_most is None else f"{at_most:g} times the fastest baseline's"

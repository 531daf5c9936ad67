"""What tests ask of the kernels that this process compiles: delays, and memory that is spoilt before it is loaded.

See `tkq.testing.pressure`. It is part of a kernel's compile key (`keys`), and the tile layer gets it while a kernel is
traced (`build`). Needs no DSL.
"""
from __future__ import annotations

from dataclasses import dataclass

PLACES = ("start", "producer", "consumer", "wait", "arrive", "barrier", "cluster", "load", "store", "leave")
MOST = 100_000  # nanoseconds, a third of what nanosleep takes


@dataclass(frozen=True)
class Pressure:
    """naps: (place, nanoseconds), in order. poison: is what a load will overwrite made NaN first, and are products
    watched? stores, additions: do bulk stores, or bulk additions, leave late? one_group: naps one warpgroup of a block
    alone?"""

    naps: tuple = ()
    poison: bool = False
    stores: bool = False
    additions: bool = False
    one_group: bool = False


_current: Pressure | None = None  # of the process: kernels in memory have it or have it not


def current() -> Pressure | None:
    """What holds; None where nothing was said, as outside of tests."""
    return _current


def ask(pressure: Pressure | None) -> None:
    """From now on, for kernels that are not in memory."""
    global _current
    _current = pressure

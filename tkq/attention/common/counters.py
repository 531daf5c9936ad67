"""Counters in global memory by which blocks wait for each other."""
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

import tkq.tile as tk
from tkq.tile.assembly import ptx

NANOSLEEP_NS = 500  # between two polls of a counter by the helper warps


@cute.jit
def wait_count_backoff(counts, i, wanted):
    """As ``wait_count``, by a warp that is not in a hurry: each look empties L1."""
    found = load_acquire(counts, i)
    while found < wanted:
        nanosleep()
        found = load_acquire(counts, i)


@dsl_user_op
def nanosleep(*, loc=None, ip=None):
    ptx([], f"nanosleep.u32 {NANOSLEEP_NS};", "", loc, ip)


def words_of(g):
    """The tiles', by their number among those of all heads."""
    return g.helper_warps.counters.ready


@cute.jit
def wait_count(counts, i, wanted):
    """A whole warp."""
    found = load_acquire(counts, i)
    while found < wanted:
        found = load_acquire(counts, i)


def load_acquire(counts, i) -> Any:
    return Int32(cute.arch.load(counts.iterator + i, Int32, sem="acquire", scope="gpu"))


@cute.jit
def signal(counts, i):
    """One more, after all that the warp's lanes have done: the release of one lane is for what all did before they
    met."""
    cute.arch.sync_warp()
    if tk.lane_id() == 0:
        cute.arch.red(counts.iterator + i, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def claim(counters, what):
    """The next number that a counter gives out. A whole warp."""
    number = Int32(0)
    if tk.lane_id() == 0:
        number = Int32(cute.arch.atomic_add(counters.iterator + what, Int32(1), sem="relaxed", scope="gpu"))
    return cute.arch.shuffle_sync(number, 0)


@cute.jit
def signal_fenced(counts, i):
    """``signal`` behind a fence of each lane's: two fences, of a microsecond each."""
    cute.arch.fence_acq_rel_gpu()
    signal(counts, i)

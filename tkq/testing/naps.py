"""Races made visible: the kernels of a process with delays in them, and stages that are spoilt before each load.

    from tkq.testing import pressure
    pressure(naps={"consumer": 2000}, poison=True)     # before the first kernel of the process
    ...                                                # results are as ever, or a kernel has a race

A kernel whose roles wait for each other as they should gives the same result, however long one of them takes. One that
lacks a wait, or frees a stage too early, is right as long as the other side happens to be late. Here it is early:

- ``naps``: at places where the order of roles is decided, each warp sleeps a while, 0 to 3 times as long as asked,
  another time at each visit. Places are those of the tile layer, so a kernel of your own has them too:

  - "start": before a block initialises its semaphores;
  - "producer": a stage is free and nothing was loaded into it, or it was written without a signal;
  - "consumer": a stage is full and nothing was read, or it has just been given back;
  - "wait", "arrive": behind each other ``tk.wait`` and ``tk.arrive``;
  - "barrier": before and behind a named barrier, and behind ``tk.sync_block``;
  - "cluster": before the arrival at the cluster's barrier, and behind the wait;
  - "load": before ``tk.load_async`` or ``tk.bulk_load`` is issued, and before ``tk.copy_async_arrive``, where a
    thread's last ``tk.copy_async`` then leaves, and not before: it may be as late as that;
  - "store": before a copy out of shared memory is issued;
  - "leave": before a late store or addition leaves, if there is one.

- ``poison``: what ``tk.load_async`` and ``tk.bulk_load`` are about to overwrite becomes NaN at once, long before the
  data are there. A role that still reads the stage, or a tensor core, reads NaN. Loads for
  several blocks of a cluster are left as they are.
  Products are watched: a word of each shared operand is remembered when a product is issued, and has to be there
  still whenever the warps wait for products, until this one is over. If it is not, the kernel traps: a stage was given
  back too early, however fast the tensor cores were. A nap "consumer" behind the release leaves time for the stage to
  be spoilt.
- ``late_stores``, ``late_additions``: ``tk.bulk_store``, or ``tk.bulk_add``, leave when they are waited for, or before
  the next one. What is announced without a ``tk.store_wait`` is not there. With stores alone, others' additions to what
  is not there yet are early.
- ``one_group``: one warpgroup of each block alone naps, of the next block the next one. Where all are late now and then
  each finds the others late, too: here one role is, and all others are as fast as they can be. Behind barriers this
  holds for every other block alone, so that the blocks between read early.

The setting is part of a kernel's name in the cache. Where nothing was asked for, machine code is the same as if there
were no such places.
"""
from __future__ import annotations

from collections.abc import Mapping

from tkq.runtime.compile import build
from tkq.runtime.compile import pressure as setting


def pressure(naps: Mapping[str, int] | None = None, poison: bool = False, late_stores: bool = False,
             late_additions: bool = False, one_group: bool = False) -> None:
    """From now on this process compiles its kernels so. Once a process, before its first kernel: kernels in memory, and
    calls that are replayed, would stay as they are.

    Args:
        naps: {place: nanoseconds}, 1 to 100,000; see above for the places.
        poison: spoil what is about to be loaded, and watch products.
        late_stores: bulk stores leave when they are waited for.
        late_additions: bulk additions do.
        one_group: naps are those of one warpgroup of a block.

    Raises:
        TypeError, ValueError: an argument is something else.
        RuntimeError: this process has kernels already.
    """
    for name, flag in (("poison", poison), ("late_stores", late_stores), ("late_additions", late_additions),
                       ("one_group", one_group)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {type(flag).__name__}, allowed are True and False")
    if naps is not None and not isinstance(naps, Mapping):
        raise TypeError(f"naps: got {type(naps).__name__}, allowed are None and a dict of places")
    for place, ns in (naps or {}).items():
        if place not in setting.PLACES:
            raise ValueError(f"naps: got the place {place!r}, allowed are {', '.join(setting.PLACES)}")
        if type(ns) is not int or not 1 <= ns <= setting.MOST:
            raise ValueError(f"naps: {place} is {ns!r}, allowed are whole numbers from 1 to {setting.MOST}")
    if one_group and not naps:
        raise ValueError("one_group: got True without naps, allowed is True with naps, which are then those of one "
                         "warpgroup")
    if build._functions:
        raise RuntimeError("pressure: this process has kernels already, which would stay as they are; say it first")
    requested = setting.Pressure(tuple(sorted((naps or {}).items())), poison, late_stores, late_additions, one_group)
    setting.ask(requested if naps or poison or late_stores or late_additions else None)

"""What a trace knows of a kernel that would compile and hang: the launch's block and cluster, which semaphores were
initialised, and the bytes that are loaded into a stage. Nothing of this is in the machine code.

A check raises where the kernel hangs, or is declared otherwise than it is launched. What depends on run-time branches,
or goes by an address of its own (``sem.ptr``), is not judged.
"""
from __future__ import annotations

import contextlib
import contextvars

import cutlass.cute as cute
from cutlass.cutlass_dsl import DSLRuntimeError

from .assembly import traced_block

# The stages announced by the roles that are being traced, to be judged when these end; None outside of `roles`.
_announced = contextvars.ContextVar("announced", default=None)


# ---- the launch --------------------------------------------------------------------------------------------------


def _launch_fact(name):
    """(x, y, z) of the launch that is traced; None where it is not known when compiled."""
    read = getattr(cute, "_get_launch_facts", None)
    if read is None:
        return None
    try:
        return getattr(read(), name)
    except DSLRuntimeError:  # no kernel is traced here
        return None


def _product(sizes):
    return None if sizes is None else sizes[0] * sizes[1] * sizes[2]


def block_threads():
    """Threads of a block; None where the launch has a size that is not known when compiled."""
    return _product(_launch_fact("exact_block_dim"))


def block_is(what, threads, why):
    """The launch has blocks of as many threads."""
    found = block_threads()
    if found is not None and found != threads:
        raise ValueError(f"{what}: the kernel is launched with blocks of {found} threads, allowed are {threads}: {why}")


def block_has(what, name, n, threads):
    """A block has the ``threads`` threads that ``n`` of something take."""
    found = block_threads()
    if found is not None and isinstance(threads, int) and threads > found:
        raise ValueError(f"{what}: {name} is {n}, which are more threads than the {found} of a block")


def cluster_is(what, name, blocks):
    """The launch has clusters of as many blocks, where there is to be one."""
    _cluster(what, name, blocks, lambda found: found == blocks)


def cluster_has(what, name, blocks):
    """The launch has clusters of as many blocks or more."""
    _cluster(what, name, blocks, lambda found: found >= blocks)


def _cluster(what, name, blocks, fits):
    found = _product(_launch_fact("exact_cluster_dim"))
    if found is None and _launch_fact("cluster_launch") is False:
        found = 1
    if found is not None and isinstance(blocks, int) and blocks > 1 and not fits(found):
        raise ValueError(f"{what}: {name} is {blocks}, but the kernel is launched with clusters of {found}")


# ---- semaphores --------------------------------------------------------------------------------------------------


class Made:
    """Semaphores that were made together: by what, and whether ``init`` has been traced for one of them."""

    def __init__(self, by):
        self.by, self.initialised = by, False


def initialised(what, made):
    """``init`` comes before any use, in the order in which a kernel is traced."""
    if made is not None and not made.initialised:
        missing = "tk.init(sem, arrivals)" if made.by == "semaphores" else "its init()"
        raise ValueError(f"{what}: the semaphore of SharedAllocator.{made.by} was not initialised: call {missing} "
                         "inside init_block, before the roles begin")


# ---- bytes of a stage --------------------------------------------------------------------------------------------


class Stage:
    """A stage that ``Pipe.acquire`` has announced ``bytes`` for, and what was loaded into it since."""

    def __init__(self, bytes):
        self.bytes, self.loaded, self.loads = bytes, 0, 0
        self.certain = isinstance(bytes, int)
        self.block = _place()
        stages = _announced.get()
        if stages is not None:
            stages.append(self)

    def load(self, bytes):
        """A load of as many bytes; one in another run-time branch or loop makes the sum uncertain."""
        self.certain = self.certain and self.block is not None and self.block == _place()
        self.loaded, self.loads = self.loaded + bytes, self.loads + 1
        if self.certain and self.loaded > self.bytes:
            raise ValueError(self._said())

    def announce(self, bytes):
        """More bytes are to come, by ``expect_bytes``."""
        self.certain = self.certain and isinstance(bytes, int) and self.block == _place()
        self.bytes = self.bytes + bytes if self.certain else self.bytes

    def end(self):
        """No more is loaded. A stage that nothing was loaded into is filled in another way."""
        if self.certain and self.loads and self.loaded != self.bytes:
            raise ValueError(self._said())

    def _said(self):
        return (f"Pipe.acquire: bytes is {self.bytes} a stage, but {self.loads} loads into the stage bring "
                f"{self.loaded}: pass SharedAllocator.pipe the sum of the tiles' bytes")


def _place():
    """The MLIR block that is being written: a run-time branch or loop has one of its own."""
    try:
        return traced_block()
    except ValueError:
        return None


@contextlib.contextmanager
def roles():
    """Around the tracing of a block's roles: stages that they acquire have all their loads when it ends."""
    token = _announced.set([])
    try:
        yield
        for stage in _announced.get():
            stage.end()
    finally:
        _announced.reset(token)

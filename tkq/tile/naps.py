"""Delays, spoilt stages and late stores for tests, at places of the tile layer: see `tkq.testing.pressure`. Nothing
otherwise."""
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import T, dsl_user_op

from .assembly import ptx

PRODUCTS = 4  # that are watched while they are in flight
_of_trace: ContextVar = ContextVar("tkq_pressure", default=None)  # of the kernel that is being traced
_watch: ContextVar = ContextVar("tkq_watch", default=None)  # likewise, its registers for that


@contextmanager
def traced_under(pressure):
    """What is traced inside has its delays. pressure: a `tkq.runtime.compile.pressure.Pressure`, or None."""
    token, watch = _of_trace.set(pressure), _watch.set(None)
    try:
        yield
    finally:
        _of_trace.reset(token)
        _watch.reset(watch)


def nap(place: str):
    """Where a test has asked for it, the calling warps sleep a while, each visit another time; otherwise there is no
    such instruction. place: one of `tkq.testing.naps`."""
    pressure = _of_trace.get()
    if pressure is not None:
        for where, ns in pressure.naps:
            if where == place:
                _sleep(ns, pressure.one_group, place)


def poisoned() -> bool:
    """Is what is loaded to be made NaN first, and are products to be watched?"""
    pressure = _of_trace.get()
    return pressure is not None and pressure.poison


def late_stores() -> bool:
    """Are bulk stores, or bulk additions, to leave when a warp waits for them, and not before?"""
    pressure = _of_trace.get()
    return pressure is not None and (pressure.stores or pressure.additions)


def late_copies() -> bool:
    """Is a thread's last copy before an arrival to leave with that, and not before? Where loads are delayed."""
    pressure = _of_trace.get()
    return pressure is not None and any(place == "load" for place, _ in pressure.naps)


# ---- a kernel's registers for it ----------------------------------------------------------------------


@dataclass(frozen=True)
class Watch:
    """operands: (place, word that was there; A's and B's) of the last products, the newest first; place 0: none.
    store: (kind, shared address, bytes) of a bulk store that has not left; kind 0: none, 1: a store, 2: an addition.
    to: where it goes. copy: the shared address of a copy that has not left, 0: none. source: where it comes from."""

    operands: Any
    store: Any
    to: Any
    copy: Any
    source: Any


def begin_kernel():
    """At the top of a kernel, in every thread (`SharedAllocator`)."""
    if poisoned() or late_stores() or late_copies():
        watch = Watch(cute.make_rmem_tensor((4, PRODUCTS), Int32), cute.make_rmem_tensor((3,), Int32),
                      cute.make_rmem_tensor((1,), Int64), cute.make_rmem_tensor((1,), Int32),
                      cute.make_rmem_tensor((1,), Int64))
        for registers in (watch.operands, watch.store, watch.to, watch.copy, watch.source):
            registers.fill(0)
        _watch.set(watch)


def product_begins(*addresses):
    """A product of shared operands, at these addresses, was issued: they must stay what they are until it is over."""
    if not poisoned():
        return
    x = _watch.get().operands
    for i in reversed(range(1, PRODUCTS)):
        for j in range(4):
            x[j, i] = x[j, i - 1]
    for j in range(2):
        at = Int32(addresses[j]) if j < len(addresses) else Int32(0)
        x[2 * j, 0] = at
        x[2 * j + 1, 0] = _word(at)


def products_end(but):
    """Before the wait for all products but the last ``but``: all that may be in flight still have their operands, or
    the kernel is ended as if by a fault."""
    if not poisoned():
        return
    x = _watch.get().operands
    for i in range(PRODUCTS):
        for j in range(2):
            _expect(x[2 * j, i], x[2 * j + 1, i])
    for i in range(but, PRODUCTS):
        for j in range(2):
            x[2 * j, i] = Int32(0)


def store_later(kind, dst, src, bytes):
    """A bulk store (1) or addition (2) of this thread: it is made by the next one, or when it is waited for; at once
    where those of its kind are not to be late."""
    store_now()
    watch, pressure = _watch.get(), _of_trace.get()
    if not (pressure.stores if kind == 1 else pressure.additions):
        _store(kind, dst, src, bytes, 0)
        return
    for i, value in enumerate((kind, src, bytes)):
        watch.store[i] = Int32(value)
    watch.to[0] = Int64(dst)


def store_now():
    """What ``store_later`` was given, if anything, behind the nap "leave"."""
    watch = _watch.get()
    _store(watch.store[0], watch.to[0], watch.store[1], watch.store[2], dict(_of_trace.get().naps).get("leave", 0))
    watch.store[0] = Int32(0)


def copy_later(dst, src):
    """A copy of 4 bytes of this thread into shared memory: it is made by the next one, or by the arrival."""
    copy_now()
    watch = _watch.get()
    watch.copy[0], watch.source[0] = Int32(dst), Int64(src)


def copy_now():
    """What ``copy_later`` was given, if anything."""
    watch = _watch.get()
    _copy(watch.copy[0], watch.source[0])
    watch.copy[0] = Int32(0)


# ---- PTX ------------------------------------------------------------------------------------------------


@dsl_user_op
def _sleep(ns, one_group, place, *, loc=None, ip=None):
    """0 to 3 times ns, by the clock's fifth and sixth bit, the warp and the block; at "start" by the block alone, whose
    warps wait for each other there, blocks of a cluster not alike. one_group: 1 to 4 times, by one warpgroup of a block
    alone, of the next block by the next one; at a "barrier" in every other block alone, so that the blocks between go
    on to read what late ones have not written."""
    even_blocks = place == "barrier"
    number = ("mov.u32 c, %cluster_ctarank; mov.u32 x, %clusterid.x; xor.b32 c, c, x; " if place == "start" else
              "mov.u32 c, %clock; shr.u32 c, c, 5; mov.u32 x, %ctaid.x; xor.b32 c, c, x; mov.u32 x, %tid.x; "
              "shr.u32 x, x, 5; xor.b32 c, c, x; ")
    block = ("mov.u32 x, %ctaid.x; and.b32 e, x, 1; setp.eq.u32 q, e, 0; shr.u32 x, x, 1; " if even_blocks else
             "mov.u32 x, %ctaid.x; setp.eq.u32 q, x, x; ")
    alone = (f"add.u32 c, c, $0; mov.u32 n, %ntid.x; add.u32 n, n, 127; shr.u32 n, n, 7; {block}rem.u32 n, x, n; "
             "mov.u32 x, %tid.x; shr.u32 x, x, 7; setp.eq.and.u32 p, x, n, q; @p " if one_group else "")
    ptx([Int32(ns)], f"{{ .reg .b32 c, x, n, e; .reg .pred p, q; {number}and.b32 c, c, 3; mul.lo.u32 c, c, $0; "
         f"{alone}nanosleep.u32 c; }}", "r", loc, ip)


@dsl_user_op
def poison(dst, bytes, *, loc=None, ip=None):
    """NaN, in whatever type, into ``bytes`` bytes of shared memory from the address dst on: a whole warp, and before
    what TMA writes there."""
    ptx([Int32(dst), Int32(bytes)],
         "{ .reg .pred p; .reg .b32 a, e, n; mov.u32 n, %laneid; shl.b32 n, n, 4; add.u32 a, $0, n; add.u32 e, $0, $1; "
         "mov.u32 n, 0xffffffff; POISON: setp.lo.u32 p, a, e; @p st.shared.v4.b32 [a], {n, n, n, n}; "
         "add.u32 a, a, 512; @p bra POISON; fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; }", "r,r", loc, ip)


@dsl_user_op
def poison_alone(dst, bytes, *, loc=None, ip=None):
    """The same, of one thread."""
    ptx([Int32(dst), Int32(bytes)],
         "{ .reg .pred p; .reg .b32 a, e, n; mov.b32 a, $0; add.u32 e, $0, $1; mov.u32 n, 0xffffffff; "
         "POISON: setp.lo.u32 p, a, e; @p st.shared.v4.b32 [a], {n, n, n, n}; add.u32 a, a, 16; @p bra POISON; "
         "fence.proxy.async.shared::cta; }", "r,r", loc, ip)


@dsl_user_op
def _word(address, *, loc=None, ip=None):
    """What is at an address of shared memory; 0 for the address 0."""
    return Int32(ptx([Int32(address)],
                      "{ .reg .pred p; setp.ne.u32 p, $1, 0; mov.u32 $0, 0; @p ld.volatile.shared.u32 $0, [$1]; }",
                      "=&r,r", loc, ip, T.i32()))


@dsl_user_op
def _expect(address, word, *, loc=None, ip=None):
    """Trap where another word is at an address of shared memory, which may be 0."""
    ptx([Int32(address), Int32(word)],
         "{ .reg .pred p, q; .reg .b32 w; setp.ne.u32 p, $0, 0; mov.b32 w, $1; @p ld.volatile.shared.u32 w, [$0]; "
         "setp.ne.u32 q, w, $1; @q trap; }", "r,r", loc, ip)


@dsl_user_op
def _copy(dst, src, *, loc=None, ip=None):
    """An asynchronous copy of 4 bytes, or nothing for the address 0."""
    ptx([Int32(dst), Int64(src)],
         "{ .reg .pred p; setp.ne.u32 p, $0, 0; @p cp.async.ca.shared.global [$0], [$1], 4; }", "r,l", loc, ip)


@dsl_user_op
def _store(kind, dst, src, bytes, ns, *, loc=None, ip=None):
    """A bulk store (1), a bulk addition (2), or nothing (0); and its group. ns: a nap before it, if it is there."""
    ptx([Int32(kind), Int64(dst), Int32(src), Int32(bytes), Int32(ns)],
         "{ .reg .pred p, q, r; setp.eq.s32 p, $0, 1; setp.eq.s32 q, $0, 2; or.pred r, p, q; @r nanosleep.u32 $4; "
         "@p cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3; "
         "@q cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$1], [$2], $3; "
         "@r cp.async.bulk.commit_group; }", "r,l,r,r,r", loc, ip)

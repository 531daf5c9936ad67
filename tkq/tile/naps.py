"""Delays and spoilt stages for tests, at places of the tile layer: see `tkq.testing.pressure`. Nothing otherwise."""
from contextlib import contextmanager
from contextvars import ContextVar

from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from .assembly import _asm

_of_trace: ContextVar = ContextVar("tkq_pressure", default=None)  # of the kernel that is being traced


@contextmanager
def traced_under(pressure):
    """What is traced inside has its delays. pressure: a `tkq.runtime.pressure.Pressure`, or None."""
    token = _of_trace.set(pressure)
    try:
        yield
    finally:
        _of_trace.reset(token)


def nap(place: str):
    """Where a test has asked for it, the calling warps sleep a while, each visit another time; otherwise there is no
    such instruction. place: "start", "producer", "consumer", "wait", "arrive", "barrier", "cluster" or "store"."""
    pressure = _of_trace.get()
    if pressure is not None:
        for asked, ns in pressure.naps:
            if asked == place:
                _sleep(ns)


def poisoned() -> bool:
    """Is what is loaded to be made NaN first?"""
    pressure = _of_trace.get()
    return pressure is not None and pressure.poison


def stores_again(text: str) -> str:
    """PTX that has ``text`` as often as a test has asked for; text itself otherwise."""
    pressure = _of_trace.get()
    if pressure is None or not pressure.stores:
        return text
    return ("{ .reg .pred p; .reg .b32 n; mov.u32 n, 0; AGAIN: " + text +
            f" add.u32 n, n, 1; setp.lo.u32 p, n, {pressure.stores}; @p bra AGAIN; }}")


@dsl_user_op
def _sleep(ns, *, loc=None, ip=None):
    """0 to 3 times ns, by the clock's fifth and sixth bit, the warp and the block."""
    _asm([Int32(ns)], "{ .reg .b32 c, x; mov.u32 c, %clock; shr.u32 c, c, 5; mov.u32 x, %ctaid.x; xor.b32 c, c, x; "
         "mov.u32 x, %tid.x; shr.u32 x, x, 5; xor.b32 c, c, x; and.b32 c, c, 3; mul.lo.u32 c, c, $0; "
         "nanosleep.u32 c; }", "r", loc, ip)


@dsl_user_op
def poison(dst, bytes, *, loc=None, ip=None):
    """NaN, in whatever type, into ``bytes`` bytes of shared memory from the address dst on: a whole warp, and before
    what TMA writes there."""
    _asm([Int32(dst), Int32(bytes)],
         "{ .reg .pred p; .reg .b32 a, e, n; mov.u32 n, %laneid; shl.b32 n, n, 4; add.u32 a, $0, n; add.u32 e, $0, $1; "
         "mov.u32 n, 0xffffffff; POISON: setp.lo.u32 p, a, e; @p st.shared.v4.b32 [a], {n, n, n, n}; "
         "add.u32 a, a, 512; @p bra POISON; fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; }", "r,r", loc, ip)


@dsl_user_op
def poison_alone(dst, bytes, *, loc=None, ip=None):
    """The same, of one thread."""
    _asm([Int32(dst), Int32(bytes)],
         "{ .reg .pred p; .reg .b32 a, e, n; mov.b32 a, $0; add.u32 e, $0, $1; mov.u32 n, 0xffffffff; "
         "POISON: setp.lo.u32 p, a, e; @p st.shared.v4.b32 [a], {n, n, n, n}; add.u32 a, a, 16; @p bra POISON; "
         "fence.proxy.async.shared::cta; }", "r,r", loc, ip)

"""Plain memory in bulk: contiguous copies and reductions without a tensor map, and vector atomics.

Arguments are addresses (``tensor.iterator.toint()``); sizes and addresses are multiples of 16 bytes. One *thread* makes
each call, which nothing here elects: wrap them in ``cute.arch.elect_one()``.
"""
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from .assembly import ptx
from .naps import late_stores, nap, poison_alone, poisoned, store_later


def _size(what, bytes):
    if isinstance(bytes, int) and (bytes <= 0 or bytes % 16):
        raise ValueError(f"{what}: bytes is {bytes}, allowed are positive multiples of 16")


@dsl_user_op
def bulk_load(dst, src, bytes, sem, evict_first=False, *, loc=None, ip=None):
    """shared dst = global src, completing on the semaphore at address ``sem`` (``expect_bytes`` first).

    evict_first: what it brings into L2 is the first to go again; a Python bool."""
    _size("bulk_load", bytes)
    nap("load")
    if poisoned():
        poison_alone(dst, bytes, loc=loc, ip=ip)
    copy, args = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", "[$0], [$1], $2, [$3]"
    if evict_first:
        text = ("{ .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0; "
                f"{copy}.L2::cache_hint {args}, p; }}")
    else:
        text = f"{copy} {args};"
    ptx([Int32(dst), Int64(src), Int32(bytes), Int32(sem)], text, "r,l,r,r", loc, ip)


@dsl_user_op
def bulk_store(dst, src, bytes, *, loc=None, ip=None):
    """global dst = shared src. After ``publish`` and a barrier; then ``bulk_commit``, and ``store_wait``."""
    _size("bulk_store", bytes)
    nap("store")
    if late_stores():
        return store_later(1, dst, src, bytes)
    ptx([Int64(dst), Int32(src), Int32(bytes)],
         "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,r,r", loc, ip)


@dsl_user_op
def bulk_add(dst, src, bytes, *, loc=None, ip=None):
    """global dst += shared src, fp32, each element atomically. Then ``bulk_commit``, and ``store_wait``."""
    _size("bulk_add", bytes)
    nap("store")
    if late_stores():
        return store_later(2, dst, src, bytes)
    ptx([Int64(dst), Int32(src), Int32(bytes)],
         "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;", "l,r,r", loc, ip)


@dsl_user_op
def bulk_send(dst, src, bytes, sem, block, *, loc=None, ip=None):
    """shared dst of the cluster's block ``block`` = shared src, counted in bytes by its semaphore at address ``sem``.

    dst, sem: this block's own addresses of the place and the semaphore, which the other block has at the same offset.
    After ``publish`` by the threads that wrote src. src may be overwritten when the receiver says so."""
    _size("bulk_send", bytes)
    nap("store")
    ptx([Int32(dst), Int32(src), Int32(bytes), Int32(sem), Int32(block)],
         "{ .reg .b32 d, s; mapa.shared::cluster.u32 d, $0, $4; mapa.shared::cluster.u32 s, $3, $4; "
         "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [$1], $2, [s]; }", "r,r,r,r,r",
         loc, ip)


@dsl_user_op
def bulk_commit(*, loc=None, ip=None):
    """Close this thread's group of bulk stores: what ``store_wait`` counts."""
    if not late_stores():  # each is then a group of its own
        ptx([], "cp.async.bulk.commit_group;", "", loc, ip)


@dsl_user_op
def red_add4(dst, a, b, c, d, *, loc=None, ip=None):
    """Four fp32 added to global memory at ``dst`` (16-byte aligned), relaxed; any thread."""
    ptx([Int64(dst), Float32(a), Float32(b), Float32(c), Float32(d)],
         "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f", loc, ip)


@dsl_user_op
def count_up(counter, last, *, loc=None, ip=None):
    """The counter's value at the global address; it moves on by one, and from ``last`` back to 0. Any thread."""
    return Uint32(ptx([Int64(counter), Uint32(last)], "atom.global.inc.u32 $0, [$1], $2;", "=r,l,r", loc, ip, T.i32()))

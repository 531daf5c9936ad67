"""Copies of 16 bytes into shared memory that bring zeros where there is nothing to read; float8 on its way there."""
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import T, dsl_user_op

from tkq.tile.assembly import ptx, ptx_several


@dsl_user_op
def copy16(dst, src, there, *, loc=None, ip=None):
    """16 bytes from the global address ``src`` to the shared address ``dst``, asynchronous, past L1 (cp.async.cg); only
    the first ``there`` of them, 0 or 16, are read, the others become 0. Any thread."""
    ptx([Int32(dst), Int64(src), Int32(there)], "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", "r,l,r", loc,
        ip)


@dsl_user_op
def load16(src, there, *, loc=None, ip=None):
    """Four words from the global address ``src``, past L1; zeros where ``there`` is 0. Any thread. It stays where it is
    written, so that what comes later in the program waits for it later."""
    found = ptx_several(
        [Int64(src), Int32(there)],
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4]; }", "=&r,=&r,=&r,=&r,l,r", loc, ip,
        [T.i32()] * 4)
    return [Int32(word) for word in found]


def address_from(address, lane):
    """What a lane of the warp has as its address of 64 bits. All lanes ask together."""
    mask = Int64(0xFFFFFFFF)
    low, high = Int32(address & mask), Int32(address >> Int64(32))
    return (Int64(cute.arch.shuffle_sync(high, lane)) << Int64(32)) | (Int64(cute.arch.shuffle_sync(low, lane)) & mask)


@dsl_user_op
def store16(dst, words, offset=0, *, loc=None, ip=None):
    """Four words to the shared address ``dst`` and ``offset`` bytes, a number known when compiled. Any thread."""
    ptx([Int32(dst), *(Int32(w) for w in words)], f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};", "r,r,r,r,r",
        loc, ip)


@dsl_user_op
def load_f32x2(address, offset=0, *, loc=None, ip=None):
    """Two fp32 from the shared address and ``offset`` bytes, not before it is their turn: the registers they go to are
    in use until then."""
    found = ptx_several([Int32(address)], f"ld.volatile.shared.v2.f32 {{$0, $1}}, [$2+{offset}];", "=f,=f,r", loc, ip,
                        [T.f32()] * 2)
    return [Float32(x) for x in found]


@dsl_user_op
def pack_f16x2(low, high, *, loc=None, ip=None):
    """Two fp32 as fp16 in a word."""
    return Int32(ptx([Float32(low), Float32(high)], "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", loc, ip, T.i32(),
                     pure=True))


@dsl_user_op
def widen4(word, *, loc=None, ip=None):
    """Four e4m3 as two words of two fp16 each, exactly; NaN stays NaN."""
    found = ptx_several(
        [Int32(word)],
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }", "=r,=r,r", loc,
        ip, [T.i32()] * 2, pure=True)
    return [Int32(x) for x in found]


@dsl_user_op
def prefetch(src, there, *, loc=None, ip=None):
    """The line of the global address ``src`` is brought into L2, unless ``there`` is 0."""
    ptx([Int64(src), Int32(there)], "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0]; }", "l,r", loc,
        ip)

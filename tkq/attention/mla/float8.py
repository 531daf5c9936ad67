"""Rows of 656 bytes: 512 columns of e4m3, a float32 scale for each 128 of them, and 64 rotated columns of bf16."""
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.attention.decode.copies import store16
from tkq.attention.decode.plan import ROWS
from tkq.attention.mla.copies import PANEL, WARP_ROWS
from tkq.attention.mla.tiles import lane_now
from tkq.tile.assembly import ptx, ptx_several

HALF_BYTES, SCALE_BYTES = 256, 16  # half of the columns; the scales
SCALES, ROTATED = 512, 528  # where they begin
STEPS = HALF_BYTES // 2 // 16  # of 16 columns: a lane widens half of half of a row
LOADS_IN_FLIGHT = 2  # of a lane, of 16 columns: as many as 32 registers hold


def row_copied(lane, group):
    """Which of the warp's rows a lane copies, in a group: eight lanes that copy at a time have four vectors each of two
    rows, which lie in banks of their own."""
    return 4 * group + (lane >> 4) * 2 + (lane >> 2 & 1)


def vector(row, chunk):
    """Where in the warp's rows 16 columns of 128 lie as e4m3, and the first 8 of them as bf16, swizzled as TMA would
    write them; the other 8 lie beside them."""
    return (chunk >> 2) * (ROWS * PANEL) + row * PANEL + ((chunk & 3) * 2 ^ (row & 7)) * 16


def rows_in_stage(tile, stage):
    """Where the warp's rows of a tile begin."""
    return Int32(tile.staged.iterator.toint()) + stage * tile.type.bytes + tk.warp_id() % 4 * (WARP_ROWS * PANEL)


def scales_of(smem, stage):
    """Where the scales of the warp's rows of a block lie, four for each."""
    return Int32(smem.scales.iterator.toint()) + (stage * 4 + tk.warp_id() % 4) * (WARP_ROWS * SCALE_BYTES)


def own(lane):
    """(row of the warp's, which of the half's two groups of 128 columns) that a lane widens: eight lanes that read or
    write at a time have banks of their own."""
    return (lane >> 2) + (lane >> 1 & 1) * 8, lane & 1


def own_columns(tile, stage, step):
    """Where the columns of this lane's step lie, the first of four steps."""
    lane = lane_now()
    row, group = own(lane)
    return rows_in_stage(tile, stage) + group * (2 * ROWS * PANEL) + vector(row, lane & 7 ^ step)


def widen_half(scales, half, tile, stage):
    """Half of the columns of the warp's rows become bf16, times their scales, in a stage of a tile. A lane has 128
    columns of a row, and so one scale: 16 at a time, over themselves, when the ones behind have been read."""
    row, group = own(lane_now())
    scale = load_f32(scales + row * SCALE_BYTES + (half * 8 + group * 4))
    begin = {}

    def at(step):
        first = step // 4 * 4
        if first not in begin:
            begin[first] = own_columns(tile, stage, first)
        return begin[first] ^ (step % 4 * 32)

    read = [load16_shared(at(step)) for step in range(LOADS_IN_FLIGHT)]
    for step in range(STEPS):
        found = read.pop(0)
        if step + LOADS_IN_FLIGHT < STEPS:
            read.append(load16_shared(at(step + LOADS_IN_FLIGHT)))
        for i in range(2):
            store16(at(step) ^ (i * 16), scaled4(found[2 * i], scale) + scaled4(found[2 * i + 1], scale))


@dsl_user_op
def load16_shared(src, *, loc=None, ip=None):
    """Four words from the shared address, when it is their turn."""
    found = ptx_several([Int32(src)], "ld.volatile.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", loc, ip,
                        [T.i32()] * 4)
    return [Int32(word) for word in found]


@dsl_user_op
def load_f32(src, *, loc=None, ip=None):
    """From the shared address, when it is its turn."""
    return Float32(ptx([Int32(src)], "ld.volatile.shared.f32 $0, [$1];", "=f,r", loc, ip, T.f32()))


@dsl_user_op
def load8_shared(src, *, loc=None, ip=None):
    """64 bits from the shared address, when it is their turn."""
    return Int64(ptx([Int32(src)], "ld.volatile.shared.b64 $0, [$1];", "=l,r", loc, ip, T.i64()))


@dsl_user_op
def store8_shared(dst, value, *, loc=None, ip=None):
    """64 bits to the shared address."""
    ptx([Int32(dst), Int64(value)], "st.volatile.shared.b64 [$0], $1;", "r,l", loc, ip)


@dsl_user_op
def scaled4(word, scale, *, loc=None, ip=None):
    """Four e4m3 times a scale as two words of two bf16 each, rounded once; NaN stays NaN."""
    found = ptx_several(
        [Int32(word), Float32(scale)],
        "{ .reg .b16 l, h, a, b, c, d; .reg .b32 x, y; .reg .f32 e, f, g, i; mov.b32 {l, h}, $2; "
        "cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h; mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
        "cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 i, d; "
        "mul.f32 e, e, $3; mul.f32 f, f, $3; mul.f32 g, g, $3; mul.f32 i, i, $3; "
        "cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, i, g; }", "=r,=r,r,f", loc, ip, [T.i32()] * 2, pure=True)
    return [Int32(x) for x in found]

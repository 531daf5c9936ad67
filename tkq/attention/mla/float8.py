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
STEPS = WARP_ROWS * HALF_BYTES // 32 // 16  # of a half of the warp's rows, 16 columns to a lane
LOADS_IN_FLIGHT = 2  # of a lane, of 16 columns: as many as 32 registers hold
WAITING = 2 * ROWS * PANEL  # where in a stage rows are as they are: in its last two panels
TOGETHER = 8  # rows of which 64 columns are widened at a time


def row_copied(lane, group):
    """Which of the warp's rows a lane copies, in a group: eight lanes have 128 bytes of one."""
    return 4 * group + (lane >> 3)


def raw_chunk(row, chunk):
    """Where the 16 bytes ``chunk`` of a row of half of the columns lie, from the first row of the stage's third panel:
    in that row of the two last panels, and rows beside each other in other banks."""
    return row * PANEL + (chunk >> 3) * (ROWS * PANEL) + (chunk & 7 ^ (row & 1) * 4) * 16


def rows_in_stage(tile, stage):
    """Where the warp's rows of a tile begin."""
    return Int32(tile.staged.iterator.toint()) + stage * tile.type.bytes + tk.warp_id() % 4 * (WARP_ROWS * PANEL)


def scales_of(smem, stage):
    """Where the scales of the warp's rows of a block lie, four for each."""
    return Int32(smem.scales.iterator.toint()) + (stage * 4 + tk.warp_id() % 4) * (WARP_ROWS * SCALE_BYTES)


def widen_half(scales, half, tile, stage):
    """Half of the columns of the warp's rows become bf16, times their scales, in a stage of a tile. 64 columns of eight
    rows at a time, 16 to a lane: eight lanes that read or write at a time have two rows, and banks of their own. What
    lies in a row's last two panels has been read when columns come to lie there."""
    lane = lane_now()
    row, part = lane >> 2, lane & 3
    base = rows_in_stage(tile, stage) + row * PANEL
    raw, to = base + WAITING + (part ^ (row & 1) * 4) * 16, base + (2 * part ^ row) * 16
    scales, by = scales + row * SCALE_BYTES + half * 8, {}

    def load(step):
        rows, panel = step // 4, step % 4
        if panel % 2 == 0:  # the first 64 of 128 columns that have one scale
            by[step // 2] = load_f32(scales, rows * (TOGETHER * SCALE_BYTES) + panel // 2 * 4)
        return load16_shared(raw ^ (panel % 2 * 64), rows * (TOGETHER * PANEL) + panel // 2 * (ROWS * PANEL))

    read = [load(step) for step in range(LOADS_IN_FLIGHT)]
    for step in range(STEPS):
        found, scale = read.pop(0), by[step // 2]
        if step + LOADS_IN_FLIGHT < STEPS:
            read.append(load(step + LOADS_IN_FLIGHT))
        for i in range(2):
            wide = scaled4(found[2 * i], scale) + scaled4(found[2 * i + 1], scale)
            store16(to ^ (i * 16), wide, step // 4 * (TOGETHER * PANEL) + step % 4 * (ROWS * PANEL))


@dsl_user_op
def load16_shared(src, offset, *, loc=None, ip=None):
    """Four words from the shared address and ``offset`` bytes, a number known when compiled, when it is their turn."""
    found = ptx_several([Int32(src)], f"ld.volatile.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];", "=r,=r,=r,=r,r",
                        loc, ip, [T.i32()] * 4)
    return [Int32(word) for word in found]


@dsl_user_op
def load_f32(src, offset, *, loc=None, ip=None):
    """From the shared address and ``offset`` bytes, a number known when compiled, when it is its turn."""
    return Float32(ptx([Int32(src)], f"ld.volatile.shared.f32 $0, [$1+{offset}];", "=f,r", loc, ip, T.f32()))


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

"""Rows of 656 bytes: 512 columns of e4m3, a float32 scale for each 128 of them, and 64 rotated columns of bf16."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.attention.decode.copies import store16
from tkq.attention.decode.plan import ROWS
from tkq.attention.mla.copies import PANEL, WARP_ROWS
from tkq.attention.mla.tiles import lane_now
from tkq.tile.assembly import ptx, ptx_several

HALF_BYTES, SCALE_BYTES = 256, 16  # half of the columns; the scales
SCALES, ROTATED = 512, 528  # where they begin


def raw_chunk(row, chunk):
    """Where the 16 bytes ``chunk`` of a row of half of the columns lie: rows beside each other in other banks."""
    return row * HALF_BYTES + (chunk ^ (row % 2 * 4)) * 16


@cute.jit
def widen_half(smem, half: cutlass.Constexpr[int], tile, stage):
    """Half of the latent columns of the warp's rows, times their scales, to a tile of bf16. Two rows at a time, 16
    columns to a lane: eight lanes have 64 columns of both, so that no two of them meet in a bank."""
    lane, warp = lane_now(), tk.warp_id() % 4
    upper, part, panel = lane // 4 % 2, lane % 4, lane // 8
    raw = Int32(smem.raw.iterator.toint()) + (half * 4 + warp) * (WARP_ROWS * HALF_BYTES) + (
        raw_chunk(upper, 4 * panel + part))
    scales = Int32(smem.scales.iterator.toint()) + (half * 4 + warp) * (WARP_ROWS * SCALE_BYTES) + (
        upper * SCALE_BYTES + half * 8 + panel // 2 * 4)
    to = Int32(tile.staged.iterator.toint()) + stage * tile.type.bytes + panel * (ROWS * PANEL) + (
        warp * WARP_ROWS + upper) * PANEL + (2 * part ^ upper) * 16
    for step in cutlass.range_constexpr(WARP_ROWS // 2):
        words, scale = load16_shared(raw, step * 2 * HALF_BYTES), load_f32(scales, step * 2 * SCALE_BYTES)
        for i in cutlass.range_constexpr(2):
            wide = scaled4(words[2 * i], scale) + scaled4(words[2 * i + 1], scale)
            place = (2 * step % 8 ^ i) * 16  # rows are swizzled, and lie at multiples of PANEL
            store16(to ^ place, wide, step * 2 * PANEL)


@dsl_user_op
def load16_shared(src, offset, *, loc=None, ip=None):
    """Four words from the shared address and ``offset`` bytes, a number known when compiled."""
    found = ptx_several([Int32(src)], f"ld.volatile.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];", "=r,=r,=r,=r,r",
                        loc, ip, [T.i32()] * 4)
    return [Int32(word) for word in found]


@dsl_user_op
def load_f32(src, offset, *, loc=None, ip=None):
    """From the shared address and ``offset`` bytes, a number known when compiled."""
    return Float32(ptx([Int32(src)], f"ld.volatile.shared.f32 $0, [$1+{offset}];", "=f,r", loc, ip, T.f32()))


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

"""Bias and activation of float8 products in each tile: a column's own bias, and what waits for the next tile."""
from dataclasses import replace

import pytest
import torch

from tests.helpers.gemm.fp8_cases import E4M3, exact, operands
from tkq.gemm.fp8 import ops
from tkq.gemm.fp8.plan import BLOCKS, FAST, PROMOTED, SMALL, configure_epilogue, fit_to_spec
from tkq.gemm.fp8.spec import Fp8Spec
from tkq.granularity import scales_of
from tkq.testing import assert_2x

GELU = Fp8Spec(scale_a="1x128", scale_b="128x128", promote=True, activation="gelu")
PIPELINED = (BLOCKS[0], PROMOTED[1])
WAITING = tuple(dict.fromkeys(("1x128_128x128", configure_epilogue(tile, spec)) for tile in PIPELINED  # as planned
                              for spec in (GELU, replace(GELU, activation="silu"))))
TILES = [("row", tile) for tile in (*FAST, SMALL[0], replace(FAST[0], overlap_epilogue=0))]
TILES += [("1x128_128x128", tile) for tile in (BLOCKS + PROMOTED + SMALL)]
AS_NO_PLAN_HAS_THEM = [(kind, replace(tile, store_per_warp=False)) for kind, tile in WAITING]
AS_NO_PLAN_HAS_THEM += [("1x128_128x128", replace(tile, overlap_epilogue=n, store_per_warp=bool(n % 2)))
                        for tile in PIPELINED for n in (1, tile.n // 32)]
TILES += [*WAITING, *AS_NO_PLAN_HAS_THEM]
TILES += [("1x128_1x128", PROMOTED[1]), ("row", replace(FAST[0], wave_sync=16)),
          ("1x128_128x128", replace(PROMOTED[1], wave_sync=8)),
          ("1x128_128x128", replace(BLOCKS[0], wave_sync=8))]
TILES += [(kind, replace(tile, store_per_warp=True)) for kind, tile in (
    ("row", FAST[0]), ("row", FAST[1]), ("row", replace(FAST[0], overlap_epilogue=0)), ("1x128_128x128", BLOCKS[0]))]
# A curve where its code has another place: beside a tile of its own each way of storing and of waiting, large tiles
# and the smallest. Tiles between these differ in their sums alone, which `test_bias` has.
PLAIN = [("row", tile) for tile in FAST[1:] if not tile.overlap_epilogue]
PLAIN += [("1x128_128x128", tile) for tile in BLOCKS + PROMOTED + SMALL if tile not in (*PIPELINED, SMALL[-1])]
CURVES = [(*each, "gelu") for each in TILES if each not in PLAIN]
CURVES += [(*each, "silu") for each in (*WAITING, ("row", configure_epilogue(FAST[0], Fp8Spec(activation="silu"))))]
CURVES += [(*CURVES[-1][:2], "gelu_tanh"), (*WAITING[0], "gelu_tanh")]
# Each of these kernels takes the compiler seven to ten seconds. Every day: a curve for each number of columns that
# waits as plans have it, gelu, and silu of scales by rows. --slow has each beside each curve, and those that no plan
# has. Of the tiles between the large ones and the smallest, whose sums without an epilogue other tests have, there is
# one with a bias every day. The one of 192 columns that waits as planned has its curve in `test_other_types_as_planned`
# alone; by --slow alone have theirs waves in step, tiles along n and rows that wait for nothing.
OTHERS_WAY = ((*WAITING[0], "silu"), (*WAITING[1], "gelu"),  # to wait: as is planned for the other curve
              (*WAITING[0], "gelu_tanh"), (*WAITING[2], "silu"), CURVES[-2])
NOTHING_WAITS = (("1x128_128x128", PROMOTED[1]), ("1x128_1x128", PROMOTED[1]),
                 *((kind, tile) for kind, tile in TILES if tile.store_per_warp and not tile.overlap_epilogue))
SYNCED = [each for each in TILES if each[1].wave_sync]
STORED_AT_ONCE = [each for each in TILES if each[1].store_per_warp and not each[1].overlap_epilogue]
AS_OTHERS = [("row", FAST[1]), ("row", replace(FAST[0], overlap_epilogue=0))]
ROWS_BY_EACH_WARP = [(kind, tile) for kind, tile in TILES if kind == "row" and tile.store_per_warp]
# One tile and several, that end anywhere; sums of fewer steps than roll, of as many (4 and 8), and of more
SIZES = ((1, 16, 16), (145, 136, 272), (700, 1048, 1168), (513, 776, 512), (300, 528, 1024), (257, 528, 2048))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": E4M3}
POISON = -77.0


def run(kind, tile, size, bias, activation, out="bf16", store="tma"):
    """(what comes out, the truth): between guards, which are checked; of whole numbers and of scales that are powers of
    two, so that every sum is exact. Six blocks take all tiles."""
    m, n, k = size
    promote = "128" in kind
    spec = Fp8Spec(out=out, **scales_of(kind), promote=promote, bias=bias, activation=activation, store=store)
    args = operands(m, n, k, kind, device="cuda", whole=True, powers=True)
    curved, scale = activation not in (None, "relu"), torch.tensor([4.0], device="cuda")
    if curved:  # where they curve
        args = (*args[:2], args[2] * 2.0 ** -exact(args).abs().median().log2().round().item(), *args[3:])
    numbers = (torch.randint(-64, 65, (n,), device="cuda") / (32 if curved else 1)).to(DTYPES[bias])
    buffer = torch.full((m + 2, -(-n // 16) * 16 + 32), POISON, device="cuda").to(DTYPES[out])
    inside = buffer[1:-1, 16:16 + n]
    ops.run(spec, *args, inside, fit_to_spec(tile, spec), 6, bias=numbers, out_scale=scale if out == "e4m3" else None)
    got = inside.clone()
    inside.copy_(torch.full_like(got.float(), POISON))
    assert (buffer.float() == torch.tensor(POISON).to(DTYPES[out]).float().item()).all(), "a guard was written to"
    return got, exact(args, bias=numbers, activation=activation) / (4 if out == "e4m3" else 1)


def check_bits(got, truth, what):
    want = (truth.clamp(-448, 448) if got.dtype is E4M3 else truth).to(torch.float32).to(got.dtype)
    wrong = got.float() != want.float()
    assert not wrong.any(), f"{what}: {int(wrong.sum())} wrong, one at {wrong.nonzero()[0].tolist()}"


def check_curve(got, truth, what):
    assert_2x(got, truth, truth.to(got.dtype), ulps=0.05, what=what)


def name(x):
    return x if isinstance(x, str) else x.name


@pytest.mark.parametrize("kind, tile", TILES, ids=name)
@pytest.mark.sampled(when=lambda kind, tile: (kind, tile) not in (
    *AS_NO_PLAN_HAS_THEM, *WAITING, *SYNCED[:2], *ROWS_BY_EACH_WARP, *PLAIN[1:], *STORED_AT_ONCE, AS_OTHERS[0]))
def test_bias(kind, tile):
    """To the bit: a sum, its column's bias and relu are whole numbers, rounded once. Each type of a bias with and
    without relu, and both in the tiles that are planned most."""
    at = TILES.index((kind, tile))
    dtype, activations = ("bf16", "fp32", "fp16")[at % 3], (None, "relu")[at // 3 % 2:][:1]
    for activation in (None, "relu") if tile in (FAST[0], *PIPELINED) else activations:
        for size in SIZES:
            check_bits(*run(kind, tile, size, dtype, activation), f"{kind} {tile.name} {size}")


def everyday(kind, tile, activation):
    """Without what --slow alone has: what no plan has, waves in step, rows stored by each warp; and
    without what `test_bias` has where nothing waits."""
    left_out = (*AS_NO_PLAN_HAS_THEM, *SYNCED, *NOTHING_WAITS, *ROWS_BY_EACH_WARP, *AS_OTHERS, ("row", SMALL[0]),
                *WAITING[1:])
    return (kind, tile) not in left_out and (kind, tile, activation) not in OTHERS_WAY


@pytest.mark.parametrize("kind, tile, activation", CURVES, ids=name)
@pytest.mark.sampled(when=everyday)
def test_activations(kind, tile, activation):
    for size in SIZES[2:5]:
        check_curve(*run(kind, tile, size, "bf16", activation), f"{kind} {tile.name} {size}")


@pytest.mark.parametrize("out, activation", (("fp16", "gelu"), ("fp32", "gelu"), ("fp16", "silu")))
@pytest.mark.parametrize("tile", PIPELINED, ids=name)
@pytest.mark.sampled(when=lambda tile, out, activation: tile == PIPELINED[1] and out + activation == "fp32gelu")
def test_other_types_as_planned(tile, out, activation):
    """Subtiles of 16 columns in fp32; the exact silu in fp16."""
    check_types(configure_epilogue(tile, replace(GELU, out=out, activation=activation)), activation, out)


@pytest.mark.slow
def test_an_exact_silu_that_waits():
    """As no plan has it: of fp16, where bf16 has another."""
    check_types(replace(BLOCKS[0], overlap_epilogue=6, store_per_warp=True), "silu", "fp16")


def check_types(tile, activation, out):
    for size in SIZES[2:5]:
        check_curve(*run("1x128_128x128", tile, size, "bf16", activation, out), f"{tile.name} {size}")


@pytest.mark.parametrize("tile", (*PIPELINED, replace(BLOCKS[0], store_per_warp=True)), ids=name)
@pytest.mark.sampled(when=lambda tile: tile != PIPELINED[1])
def test_results_that_do_not_wait(tile):
    """In e4m3, and in rows that TMA cannot store."""
    for m, n, k in SIZES[2:5]:
        check_bits(*run("1x128_128x128", tile, (m, n // 16 * 16, k), "bf16", None, "e4m3"), f"{tile.name} {m, n, k}")
        check_bits(*run("1x128_128x128", tile, (m, n - 3, k), "fp32", "relu", store="direct"),
                   f"{tile.name} {m, n - 3, k}")

"""Bias and activation of float8 products in each tile: a column's own bias, and what waits for the next tile."""
from dataclasses import replace

import pytest
import torch

from tests.fp8_cases import exact, operands
from tkq.gemm import fp8_ops
from tkq.gemm.fp8_plan import BLOCKS, FAST, PROMOTED, SMALL, fitted
from tkq.gemm.fp8_spec import Fp8Spec
from tkq.gemm.paced_config import PacedFp8Config
from tkq.testing import assert_2x

ROLLING = (BLOCKS[0], PROMOTED[1])
# (kind, tile): each kind's, with as many panels waiting for the next tile as there may, and with none
TILES = [("row", tile) for tile in (*FAST, SMALL[0], replace(FAST[0], spread=0))]
TILES += [("block", tile) for tile in (BLOCKS + PROMOTED + SMALL)]
TILES += [("block", replace(tile, spread=n)) for tile in ROLLING for n in (1, tile.n // 48, tile.n // 32)]
TILES += [("line", PROMOTED[1]), ("row", PacedFp8Config.of(FAST[0])), ("block", PacedFp8Config.of(PROMOTED[1], 8)),
          ("block", PacedFp8Config.of(BLOCKS[0], 8))]
# One tile and several, that end anywhere; sums of fewer steps than roll, of as many, and of more
SIZES = ((1, 16, 16), (129, 136, 272), (700, 1048, 1168), (513, 776, 512), (300, 528, 640), (257, 528, 2048))
POISON = -77.0


def run(kind, tile, size, bias, activation, blocks=6):
    """(what comes out, the truth): between guards, which are checked; of whole numbers and of scales that are powers of
    two, so that every sum is exact."""
    m, n, k = size
    promote = kind in ("block", "line")
    spec = Fp8Spec(scales=kind, promote=promote, bias=bias, activation=activation)
    args = operands(m, n, k, kind, device="cuda", whole=True, powers=True)
    if activation not in (None, "relu"):  # where they curve
        args = (*args[:2], args[2] * 2.0 ** -exact(args).abs().median().log2().round().item(), *args[3:])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[bias]
    numbers = (torch.randint(-64, 65, (n,), device="cuda") / (1 if activation in (None, "relu") else 32)).to(dtype)
    buffer = torch.full((m + 2, n + 16), POISON, dtype=torch.bfloat16, device="cuda")
    fp8_ops.run(spec, *args, buffer[1:-1, 8:-8], fitted(tile, spec), blocks, bias=numbers)
    got = buffer[1:-1, 8:-8].clone()
    buffer[1:-1, 8:-8] = POISON
    assert (buffer == POISON).all(), "a guard was written to"
    return got, exact(args, bias=numbers, activation=activation)


@pytest.mark.parametrize("kind, tile", TILES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_bias(kind, tile):
    """To the bit: a sum, its column's bias and relu are whole numbers, rounded once."""
    for i, size in enumerate(SIZES):
        got, truth = run(kind, tile, size, ("bf16", "fp32", "fp16")[i % 3], (None, "relu")[i % 2])
        wrong = got != truth.bfloat16()
        assert not wrong.any(), f"{size}: {int(wrong.sum())} wrong, one at {wrong.nonzero()[0].tolist()}"


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "silu"))
@pytest.mark.parametrize("kind, tile", TILES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_activations(kind, tile, activation):
    for size in SIZES[2:5]:
        got, truth = run(kind, tile, size, "bf16", activation)
        assert_2x(got, truth, truth.bfloat16(), ulps=0.05, what=f"{kind} {tile.name} {size}")

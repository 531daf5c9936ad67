"""The copy that brings rows of any pitch and offset to where TMA takes them: its own code, run on a CPU."""
import itertools
import math

import pytest
import torch

from tests.helpers.emulation import realign
from tkq.gemm.dense.realign_config import RealignSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EACH = {name: 16 // dtype.itemsize for name, dtype in DTYPES.items()}  # elements of a unit
SHAPES = ((1, 1, 1), (1, 3, 7), (2, 2, 8), (1, 5, 9), (3, 4, 31), (1, 2, 64), (2, 3, 203))


def view(shape, dtype, first, more, fill):
    """Rows within a buffer full of `fill`, from element `first` on, `more` elements apart beyond their own."""
    batches, rows, cols = shape
    pitch, size = cols + more, batches * rows * (cols + more) + 3
    buffer = torch.full((first + size + 16,), fill, dtype=dtype)
    return buffer, buffer.as_strided(shape, (rows * pitch + 3, pitch, 1), first)


@pytest.mark.parametrize("dtype, units", [("bf16", 1), ("bf16", 2), ("fp16", 2), ("fp32", 2)])
def test_into_whole_units(monkeypatch, dtype, units):
    """What lies past the rows is NaN, and zero in the copy up to the unit's end; nothing behind it is written."""
    copy, each = realign.function(RealignSpec(dtype, False, 32, units), monkeypatch), EACH[dtype]
    for shape, first, more in itertools.product(SHAPES, range(each), (0, 1, 2, 3, each)):
        batches, rows, cols = shape
        _, src = view(shape, DTYPES[dtype], first, more, math.nan)
        src.copy_(torch.arange(1, 1 + src.numel()).view(shape).remainder(200))
        wide = -(-cols // each) * each
        room = torch.full((batches, rows, wide + each), -7.0, dtype=DTYPES[dtype])
        copy(src, room[..., :wide], None, None)
        want = torch.full_like(room, -7.0)
        want[..., :wide] = 0
        want[..., :cols] = src
        assert torch.equal(room, want), (shape, first, more)

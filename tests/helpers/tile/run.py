"""Run a test kernel of the tile layer on the GPU; inputs that make results exact; poisoned outputs."""
import math

import torch

from tests.helpers.tile.cases import recipe
from tkq import runtime

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn,
          "e5m2": torch.float8_e5m2, "int32": torch.int32}


def run(builder, args, *call):
    """Call the kernel and wait for it. call: its arguments; of a `OneBlock` all its tensors, as a tuple."""
    if isinstance(call[0], tuple):
        (first, *others), = call
        call = first, tuple(others) or None
    runtime.function(recipe(builder, args))(*call)
    torch.cuda.synchronize()


def bits(x):
    """x as integers, so that NaN compares equal to itself."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(got, expected, what=""):
    """Equal to the last bit, NaNs as well."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, f"{what}: {got.shape} {got.dtype}"
    wrong = bits(got) != bits(expected)
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first {wrong.nonzero()[0].tolist()}"


def poisoned(dtype, *shape):
    """NaN everywhere; -77 in integers."""
    t = DTYPES[dtype]
    if t.itemsize == 1:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device="cuda").view(t)
    return torch.full(shape, -77 if t is torch.int32 else math.nan, dtype=t, device="cuda")


def small_ints(dtype, *shape, most=4, seed=0):
    """Whole numbers from -most to most: sums and products of a few hundred are exact in fp32, up to 4 exact in fp8."""
    g = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randint(-most, most + 1, shape, device="cuda", generator=g).float().to(DTYPES[dtype])


def normal(dtype, *shape, seed=0):
    g = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, device="cuda", generator=g).to(DTYPES[dtype])

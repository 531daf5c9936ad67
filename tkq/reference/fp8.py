"""Float8 in plain PyTorch: scaled products, quantisation. The path of CPU tensors, and the oracle of the tests.

Scales are float32 and multiply to dequantise.
"""
from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from tkq.runtime.call import autocast

GROUP = 128
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SMALLEST_SCALE = 2.0**-126
ACTIVATION = {None: lambda x: x, "relu": torch.relu, "silu": F.silu, "gelu": F.gelu,
              "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def spread(scale: Tensor, shape: tuple) -> Tensor:
    """A scale for each element: a dimension of 1 repeats, another that is shorter has GROUP elements to a scale."""
    for dim, size in enumerate(shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(GROUP, dim).narrow(dim, 0, size)
    return scale.expand(shape)


def dequantise(q: Tensor, scale: Tensor, dtype=torch.float32) -> Tensor:
    """q * scale, for q (R, C) and a scale for all, for rows or columns, or for 128 of either dimension."""
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale
    return q.to(dtype) * spread(scale, q.shape).to(dtype)


@autocast.apart
def fp8_gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Optional[Tensor] = None,
             activation: Optional[str] = None, out_dtype: torch.dtype = torch.bfloat16,
             out_scale: Optional[Tensor] = None, wide: torch.dtype = torch.float32) -> Tensor:
    """activation((a * scale_a) @ (b * scale_b) + bias), computed in ``wide`` and rounded once.

    float8 results are divided by out_scale, and saturated: what is beyond the largest number becomes it."""
    y = dequantise(a, scale_a, wide) @ dequantise(b, scale_b, wide)
    y = ACTIVATION[activation](y if bias is None else y + bias.to(wide))
    return y.to(out_dtype) if out_dtype not in LARGEST else narrowed(y / out_scale.to(wide).reshape(()), out_dtype)


def narrowed(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in float8, saturated; NaN stays NaN."""
    return y.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def scales_of(x: Tensor, block: tuple, dtype: torch.dtype) -> Tensor:
    """max(amax / largest, 2^-126) of each block of (rows, columns), 0 standing for all. NaN where amax is."""
    rows, cols = (b or max(size, 1) for b, size in zip(block, x.shape))
    down, right = (-(-size // b) if b else 1 for b, size in zip(block, x.shape))
    wide = x if x.dtype == torch.float64 else x.float()
    if x.numel():
        padded = F.pad(wide.abs(), (0, right * cols - x.shape[1], 0, down * rows - x.shape[0]))
        amax = padded.view(down, rows, right, cols).amax((1, 3))
    else:  # torch 2.9 pads nothing that is empty
        amax = wide.new_zeros(down, right)
    return (amax.float() * (1.0 / LARGEST[dtype])).clamp_min(SMALLEST_SCALE)


def quantize_fp8(x: Tensor, block: tuple, dtype: torch.dtype = torch.float8_e4m3fn):
    """(q, scale): x ~ q * scale, with a scale for each block of (rows, columns), 0 standing for all of them."""
    scale = scales_of(x, block, dtype)
    wide = x.float()
    return narrowed(wide / _expanded_blocks(scale, block, x.shape), dtype), scale


def _expanded_blocks(scale, block, shape):
    for dim, (size, length) in enumerate(zip(block, shape)):
        scale = scale.repeat_interleave(size or max(length, 1), dim).narrow(dim, 0, length)
    return scale

"""The float8 products of others, for bench/fp8_gemm.py and bench/tune_fp8.py."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn


def torch_mm(kind: str) -> Callable:
    """torch's own (cuBLASLt, CUTLASS): f(a, b, scale_a, scale_b), to bf16, fast accumulation but for blocks."""
    if kind in ("tensor", "row"):
        return lambda a, b, sa, sb: torch._scaled_mm(a, b, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True)
    wide = F.ScalingType.BlockWise128x128 if kind == "block" else F.ScalingType.BlockWise1x128
    one = F.ScalingType.BlockWise1x128

    def run(a, b, sa, sb):
        return F.scaled_mm(a, b, sa, one, sb, wide, output_dtype=torch.bfloat16)

    return run


def torch_scales(kind: str, scale_a, scale_b):
    """The same scales in the order of memory that torch takes them: the first that it does not refuse."""
    if kind not in ("block", "line"):
        return [(scale_a, scale_b)]
    tall = scale_a.t().contiguous().t()
    down, across = scale_b.t().contiguous().t(), scale_b.contiguous()
    padded = F.pad(scale_b, (0, 0, 0, -scale_b.shape[0] % 4)).t().contiguous().t()
    return [(tall, down), (tall, across), (tall, padded)]


def operands(m: int, n: int, k: int, kind: str, seed: int) -> tuple:
    """randn, quantised by torch: (a, b, scale_a, scale_b)."""
    g = torch.Generator("cuda").manual_seed(seed)

    def quantised(rows, block):
        x = torch.randn(rows, k, device="cuda", generator=g)
        down, right = (b or size for b, size in zip(block, x.shape))
        x = x.view(rows // down, down, k // right, right)
        scale = x.abs().amax((1, 3), keepdim=True) / 448
        return (x / scale).to(FP8).view(rows, k), scale.view(rows // down, k // right)

    of_a, of_b = {"tensor": ((0, 0),) * 2, "row": ((1, 0),) * 2, "block": ((1, 128), (128, 128)),
                  "line": ((1, 128),) * 2}[kind]
    (a, sa), (b, sb) = quantised(m, of_a), quantised(n, of_b)
    if kind == "tensor":
        return a, b.t(), sa.view(()), sb.view(())
    return a, b.t(), sa.t().contiguous().t(), sb.t() if kind == "row" else sb.t().contiguous()

"""Grouped products in plain PyTorch: what they mean. The path of CPU tensors, and the oracle of the tests."""
import itertools
from typing import Optional

import torch
from torch import Tensor

from ..runtime.call import autocast
from .fp8 import dequantise


def bounds(offsets: Tensor, limit: int) -> list:
    """(begin, end) of each group: it ends at its offset, or where one before ends that is larger, and begins where the
    one before ends; none goes past ``limit``."""
    ends = list(itertools.accumulate((min(max(end, 0), limit) for end in offsets.tolist()), max))
    return list(zip([0, *ends], ends))


@autocast.apart
def grouped_gemm(a: Tensor, b: Tensor, offsets: Tensor, scale_a: Optional[Tensor] = None,
                 scale_b: Optional[Tensor] = None, out_dtype: Optional[torch.dtype] = None,
                 wide: torch.dtype = torch.float32) -> Tensor:
    """b (G, K, N): c[i] = a[i] @ b[g] for the rows of each group, others 0; b (K, N): c[g] = a[:, g] @ b[g].

    Computed in ``wide``, rounded once."""
    out_dtype = out_dtype or (torch.bfloat16 if scale_a is not None else a.dtype)
    if b.dim() == 2:
        if scale_a is not None and scale_a.dim() == 2:
            a, b, scale_a = dequantise(a, scale_a, wide), dequantise(b, scale_b, wide), None
        return torch.stack([_of_group(a[:, i:j], b[i:j], scale_a, scale_b, g, wide)
                            for g, (i, j) in enumerate(bounds(offsets, a.shape[1]))]).to(out_dtype)
    if scale_a is not None:
        a = dequantise(a, scale_a, wide)
        b = torch.stack([dequantise(x, s, wide) for x, s in zip(b, scale_b)]) if len(b) else b
    a, b = a.to(wide), b.to(wide)
    c = a.new_zeros(a.shape[0], b.shape[2])
    for g, (i, j) in enumerate(bounds(offsets, a.shape[0])):
        c[i:j] = a[i:j] @ b[g]
    return c.to(out_dtype)


def _of_group(a, b, scale_a, scale_b, group, wide):
    """a @ b; scales: each group's own, or None."""
    if scale_a is None:
        return a.to(wide) @ b.to(wide)
    return dequantise(a, scale_a[group], wide) @ dequantise(b, scale_b[group], wide)

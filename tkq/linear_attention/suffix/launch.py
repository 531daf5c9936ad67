"""Sums from each token to the last, of torch tensors."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention.segments import segments
from tkq.linear_attention.spec import SuffixSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # (device, what is there beside x) -> the kernel's function


def recipe(spec: SuffixSpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.suffix.kernel:SuffixSums", (spec,))


def suffix_sums(x: Tensor, less: Tensor | None = None, factor: Tensor | None = None,
                end: Tensor | None = None, cu: Tensor | None = None) -> Tensor:
    """(B, S, H): of each token the sum of x - factor * less over it and those behind it, and end (B, H). x, less and
    factor are (B, S, H), factor goes with less. cu: (N + 1,), where packed sequences begin and end, as `edges` has it:
    sums end with a sequence, end is (N, H); tokens of no sequence have 0, whatever is there.

    float32 on a GPU: in float64 within, by one launch, in an order that S alone decides. (torch.cumsum adds in one that
    varies where B and H are 1, and is refused or takes S^2 memory where deterministic algorithms are asked for.) Others
    by torch.cumsum, in their own type."""
    if x.is_cuda and x.dtype == torch.float32:
        return _launched(x, less, factor, end, cu)
    if less is not None:
        x = x - (less if factor is None else factor * less)
    if cu is not None:
        of = segments(cu, x.shape[1])
        y = of.suffix_sums(x)
        return y if end is None else y + of.of_tokens(end)
    y = x.flip(1).cumsum(1).flip(1)
    return y if end is None else y + end[:, None]


def _launched(x, less, factor, end, cu):
    y = torch.empty(x.shape, device=x.device, dtype=torch.float32)
    end = end if end is None or len(end) else None  # of no sequences
    packed = None if cu is None else dtypes.name_of(cu.dtype)
    key = x.get_device(), less is not None, factor is not None, end is not None, packed
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(recipe(SuffixSpec(*key[1:])))
    if x.numel():
        _launchers[key](x, (less, factor, end, y, cu))
    return y

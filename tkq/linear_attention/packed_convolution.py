"""`causal_conv1d` of packed sequences, in plain PyTorch: the row as a whole, and once more the first tokens of each
sequence, whose taps reach over its beginning."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tkq.reference.linear_attention import edges


def packed_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu: Tensor) -> Tensor:
    """x (1, S, C), S above 0, state (N, C, W - 1), ahead of each sequence -> (1, C, S), without activation. Tokens of
    no sequence count as zeros, whatever is there, and give 0. Nothing waits for cu (N + 1,), which mean what `edges`
    says."""
    (_, S, C), ahead = x.shape, weight.shape[1] - 1
    bounds, place = edges(cu, S), torch.arange(S, device=x.device)
    inside = (place >= bounds[0]) & (place < bounds[-1])
    row = torch.where(inside[:, None], x[0], x.new_zeros(()))
    y = F.conv1d(F.pad(row.mT, (ahead, 0))[None], weight[:, None], bias, groups=C)[0]
    y = torch.where(inside, y, y.new_zeros(()))  # taps reach behind the last sequence, and a bias everywhere
    if not ahead or not state.shape[0]:
        return y[None]
    rows, there = _first(bounds, ahead)
    heads = torch.where(there[..., None], row[rows.clamp(max=S - 1)], row.new_zeros(()))  # (N, W - 1, C)
    first = F.conv1d(torch.cat((state, heads.mT), 2), weight[:, None], bias, groups=C)  # (N, C, W - 1)
    rows = torch.where(there, rows, S)  # behind the last token: a place that is cut off again
    y = F.pad(y, (0, 1)).index_copy(1, rows.flatten(), first.transpose(0, 1).flatten(1))
    return y[None, :, :S]


def _first(bounds, ahead):
    """The first W - 1 tokens of each sequence, (N, W - 1), and whether it has them."""
    rows = bounds[:-1, None] + torch.arange(ahead, device=bounds.device)
    return rows, rows < bounds[1:, None]

"""The pointwise ops in plain PyTorch: what they mean, the path of CPU tensors, the oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Gradients are written out, not left to autograd.
"""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq.runtime.call import autocast

from .precision import _upcast


def pair(gate: Tensor, up: Optional[Tensor], packing: str) -> tuple[Tensor, Tensor]:
    """gate and up; from one tensor (..., 2 N) where up is None, "split" in halves or "interleaved" by column."""
    if up is not None:
        return gate, up
    if packing == "interleaved":
        return gate[..., ::2], gate[..., 1::2]
    return gate.chunk(2, -1)


def packed(gate: Tensor, up: Tensor, packing: str) -> Tensor:
    """The one tensor that `pair` takes apart."""
    return torch.stack((gate, up), -1).flatten(-2) if packing == "interleaved" else torch.cat((gate, up), -1)


def weight_and_slope(kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """(w, d(x w)/dx) of the activation x w(x): w is sigmoid(x) in silu, and Phi(x) or its tanh form in gelu."""
    if kind == "swiglu":
        w = torch.sigmoid(x)
        return w, w * (1 + x * (1 - w))
    if kind == "geglu":
        w = torch.special.ndtr(x)
        return w, w + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    a = math.sqrt(2 / math.pi)
    w = torch.sigmoid(2 * a * x * (1 + 0.044715 * x * x))
    return w, w + x * w * (1 - w) * 2 * a * (1 + 3 * 0.044715 * x * x)


def gated(kind: str, gate: Tensor, up: Optional[Tensor] = None, packing: str = "split") -> Tensor:
    """act(gate) * up: act is silu for kind "swiglu" (Shazeer, 2020), gelu for "geglu", gelu's tanh form for
    "geglu_tanh" (Hendrycks and Gimpel, 2016)."""
    gate, up = pair(gate, up, packing)
    g = _upcast(gate)
    return (g * weight_and_slope(kind, g)[0] * _upcast(up)).to(gate.dtype)


def gated_backward(kind: str, dy: Tensor, gate: Tensor, up: Optional[Tensor] = None,
                   packing: str = "split") -> tuple[Tensor, Optional[Tensor]]:
    """(dgate, dup), or (the packed gradient, None) where up is None."""
    alone = up is None
    gate, up = pair(gate, up, packing)
    g, d = _upcast(gate), _upcast(dy)
    w, slope = weight_and_slope(kind, g)
    dgate, dup = (d * _upcast(up) * slope).to(gate.dtype), (d * g * w).to(gate.dtype)
    return (packed(dgate, dup, packing), None) if alone else (dgate, dup)


def rope_rows(shape, table_rows: int, offset: int = 0, offsets: Optional[Tensor] = None,
              position_ids: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None, device=None):
    """(row of the table, does it rotate?) of every token, both of x's shape without heads and columns: (B, S) or
    (total,). With cu_seqlens a token's position counts from its sequence's first one; tokens of no sequence do not
    rotate."""
    if position_ids is not None:
        rows = position_ids.long().expand(shape)
        return rows, torch.ones(shape, dtype=torch.bool, device=device)
    places = torch.arange(shape[-1], device=device)
    rotates = torch.ones(shape, dtype=torch.bool, device=device)
    if cu_seqlens is None:
        shift = offset if offsets is None else offset + offsets.long()[:, None]
        return (places + shift).expand(shape), rotates
    starts = cu_seqlens.long()
    sequence = last_begun(starts, places)
    rotates = (places >= starts[sequence]) & (places < starts[sequence + 1])
    rows = places - starts[sequence] + offset
    rows = rows if offsets is None else rows + offsets.long()[sequence]
    return rows.masked_fill(~rotates, 0), rotates


def last_begun(starts: Tensor, places: Tensor) -> Tensor:
    """The last sequence that begins at or before each place, the first one if none does. By bisection, as on the GPU:
    where starts do not rise, the same sequences are found."""
    low, high = torch.zeros_like(places), torch.full_like(places, len(starts) - 1)
    for _ in range(len(starts).bit_length()):
        middle, open_ = (low + high) // 2, high - low > 1
        begun = starts[middle] <= places
        low, high = torch.where(open_ & begun, middle, low), torch.where(open_ & ~begun, middle, high)
    return low


def _taken(table, rows):
    """The rows of a table (S, R / 2), with a dimension for the heads; NaN for a row that it does not have."""
    inside = (rows >= 0) & (rows < table.shape[0])
    taken = _upcast(table)[rows.clamp(0, max(table.shape[0] - 1, 0))]
    return taken.masked_fill(~inside[..., None], math.nan)[..., None, :]


@autocast.apart
def rope(x: Tensor, cos: Tensor, sin: Tensor, offset: int = 0, offsets: Optional[Tensor] = None,
         position_ids: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None, interleaved: bool = False,
         inverse: bool = False) -> Tensor:
    """x (B, S, H, D) or (total, H, D) with its first R columns rotated, pair by pair, by the angle of the token's row
    of cos and sin (Su et al., 2021): (a, b) becomes (a cos - b sin, b cos + a sin).

    cos, sin: (rows, R / 2), or (B or 1, S, R / 2): a row for each token. interleaved: columns 2 i and 2 i + 1 are a
    pair, instead of i and i + R / 2. inverse: by the negative angle, which is also the gradient."""
    half = cos.shape[-1]
    if cos.dim() == 3:
        rotates = None
        c, s = (_upcast(t if x.dim() == 4 else t.flatten(0, 1))[..., None, :] for t in (cos, sin))
    else:
        rows, rotates = rope_rows(x.shape[:-2], cos.shape[0], offset, offsets, position_ids, cu_seqlens, x.device)
        c, s = _taken(cos, rows), _taken(sin, rows)
    s = -s if inverse else s
    front, rest = _upcast(x[..., :2 * half]), x[..., 2 * half:]
    a, b = (front[..., ::2], front[..., 1::2]) if interleaved else front.chunk(2, -1)
    rotated = a * c.to(a.dtype) - b * s.to(a.dtype), b * c.to(a.dtype) + a * s.to(a.dtype)
    rotated = (torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)).to(x.dtype)
    if rotates is not None:
        rotated = torch.where(rotates[..., None, None], rotated, x[..., :2 * half])
    return torch.cat((rotated, rest), -1)

"""What is before sequences and at their ends, of tensors of either kind of device, in plain PyTorch: W - 1 tokens of
each sequence."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tkq.reference.convolution import normed_gradient
from tkq.reference.linear_attention import edges


def final_state(x: Tensor, state: Tensor | None, cu: Tensor | None, width: int) -> Tensor:
    """The last W - 1 inputs of each sequence, the oldest first, (N, C, W - 1), contiguous, of the state's dtype, or of
    x's. Those of a shorter sequence begin with its state's last. Nothing waits for cu."""
    (B, S, C), ahead = x.shape, width - 1
    if state is None:
        state = x.new_zeros(()).expand(B if cu is None else cu.shape[0] - 1, C, ahead)
    if cu is None:
        taken = min(S, ahead)
        last = x[:, S - taken:].mT.to(state.dtype)
        if taken < ahead:
            return torch.cat((state[..., taken:], last), 2)
        return last.clone(memory_format=torch.contiguous_format)
    if not state.shape[0] or not S:
        return state.clone(memory_format=torch.contiguous_format)
    rows, inside, columns = _ends(cu, S, ahead)
    from_x = x[0][rows.clamp(0)].mT.to(state.dtype)
    from_state = state.gather(2, columns[:, None].expand(-1, C, -1))
    return torch.where(inside[:, None], from_x, from_state).contiguous()


def _ends(cu, tokens, ahead):
    """(N, W - 1) each: the tokens at a sequence's end, which of them are its own, the columns of its state that stand
    in the place of the others."""
    bounds, column = edges(cu, tokens), torch.arange(ahead, device=cu.device)
    rows = bounds[1:, None] - ahead + column
    columns = ((bounds[1:] - bounds[:-1])[:, None] + column).clamp(max=ahead - 1)
    return rows, rows >= bounds[:-1, None], columns


def add_final_gradient(dx: Tensor | None, dstate: Tensor | None, dfinal: Tensor, cu: Tensor | None, tokens: int):
    """Adds what the final states' gradient dfinal (N, C, W - 1) is of x and of the initial states, in place; dfinal is
    not rounded to x's type before."""
    ahead = dfinal.shape[2]
    if cu is None:
        taken = min(tokens, ahead)
        if dx is not None:
            dx[:, tokens - taken:] += dfinal[..., ahead - taken:].mT
        if dstate is not None:
            dstate[..., taken:] += dfinal[..., :ahead - taken].to(dstate.dtype)
        return
    if not dfinal.shape[0]:
        return
    if not tokens:
        if dstate is not None:
            dstate += dfinal.to(dstate.dtype)
        return
    rows, inside, columns = _ends(cu, tokens, ahead)
    if dx is not None:
        taken = rows.clamp(0).flatten()
        # a row that several sequences' places name is written more than once, with one value
        dx[0, taken] = (dx[0, taken] + _of_rows(dfinal, taken, edges(cu, tokens))).to(dx.dtype)
    if dstate is not None:
        of_state = torch.where(inside[:, None], 0, dfinal).to(dstate.dtype)
        dstate.scatter_add_(2, columns[:, None].expand_as(of_state), of_state)


def _of_rows(dfinal: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
    """(rows, C): what dfinal has of tokens, 0 of those that no final state has."""
    ahead, ends = dfinal.shape[2], bounds[1:].contiguous()
    n = torch.searchsorted(ends, rows, right=True).clamp(max=ends.shape[0] - 1)
    column = rows - ends[n] + ahead
    there = (rows >= bounds[n]) & (column >= 0) & (column < ahead)
    return torch.where(there[:, None], dfinal[n, :, column.clamp(0, ahead - 1)], 0)


def initial_gradient(dy: Tensor, given) -> Tensor:
    """What the initial states' gradient has of y, (N, C, W - 1), fp32: of the first W - 1 tokens of each sequence.
    given: as `launch.Given`."""
    x, weight, bias, silu, state, cu, heads, head = given
    S, ahead = x.shape[1], state.shape[2]
    result = torch.zeros(state.shape, device=x.device, dtype=torch.float32)
    if not S or not state.shape[0]:
        return result
    x, dy = (_heads(t, cu, ahead) for t in (x, dy))  # (N, C, tokens)
    length = x.shape[2]
    if silu or heads:
        padded = torch.cat((state.float(), x), 2)
        z = sum(weight[:, i, None].float() * padded[..., i:i + length] for i in range(ahead + 1))
        z = z if bias is None else z + bias[:, None].float()
    if heads:
        dy = torch.where(dy == 0, 0, normed_gradient(F.silu(z) if silu else z, dy, heads, head))
    if silu:
        gate = z.sigmoid()
        slope = gate * (1 + z * (1 - gate))
        dy = torch.where(dy == 0, 0, dy * slope)  # of what a shorter sequence does not have, whatever z is
    for token in range(length):
        for i in range(ahead - token):
            result[..., token + i] += weight[:, i].float() * dy[..., token]
    return result


def _heads(x, cu, ahead):
    """The first W - 1 tokens of each sequence, (N, C, W - 1) or fewer, fp32; zeros for those that it does not have."""
    if cu is None:
        return x[:, :ahead].mT.float()
    bounds = edges(cu, x.shape[1])
    rows = bounds[:-1, None] + torch.arange(ahead, device=x.device)
    found = x[0][rows.clamp(max=x.shape[1] - 1)].float()
    return torch.where((rows < bounds[1:, None])[..., None], found, 0).mT

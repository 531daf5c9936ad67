"""Sequences packed into one row of a transformers model, found by the positions of its tokens.

transformers looks for them when it makes a mask, but not in a call with a cache, which a call has that does not say
use_cache=False, in training too. So the layers look, as those of "flash_attention_2" do: once for each call of a model.
"""
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Caches that hold nothing alive. The positions of a call -> (the call, their version, where sequences begin); and the
# masks made of a call without a padding mask, of which positions may say more.
_begins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_calls = 0  # of models, counted at their masks: tensors of inference mode have no version


def next_call() -> None:
    """A model's mask is made: positions may have changed since."""
    global _calls
    _calls += 1


def remember_mask(mask: Tensor) -> None:
    """A 4-D mask of a call without padding."""
    _masks[mask] = True


def is_own(mask) -> bool:
    """Was it made here, rather than given to the model, which then knows what it wants?"""
    return mask in _masks


def begins(position_ids, batch: int, tokens: int) -> Optional[Tensor]:
    """cu_seqlens of (batch, tokens) whose rows have more than one sequence by their positions; None where none has, and
    where positions are not of that shape: (B, S) or (1, S). As in transformers, a sequence begins where a position is
    not one more than the one before. Waits for the GPU, once for each call of a model."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or tokens < 2:
        return None
    if position_ids.shape[1] != tokens or position_ids.shape[0] not in (1, batch):
        return None
    now = _calls, None if position_ids.is_inference() else position_ids._version, batch
    found = _begins.get(position_ids)
    if found is None or found[0] != now:
        found = _begins[position_ids] = now, _found(position_ids, batch)
    return found[1]


def _found(places, batch):
    apart = F.pad((places[:, 1:] - places[:, :-1]) != 1, (1, 0))
    return starts(apart.cumsum(-1).expand(batch, -1)) if bool(apart.any()) else None


def starts(numbers: Tensor) -> Tensor:
    """cu_seqlens of tokens (B, S) of which those of a sequence have one number. Waits for the GPU."""
    first = torch.ones_like(numbers[:, :1], dtype=torch.bool)
    begin = torch.cat((first, numbers[:, 1:] != numbers[:, :-1]), 1).flatten().nonzero().flatten()
    return torch.cat((begin, begin.new_tensor([numbers.numel()]))).int()


def within(mask: Optional[Tensor], cu: Tensor, batch: int, tokens: int) -> Tensor:
    """The 4-D mask, or the causal one, less what lies across sequences."""
    place = torch.arange(batch * tokens, device=cu.device)
    number = torch.searchsorted(cu.long(), place, right=True).view(batch, tokens)
    same = number[:, None, :, None] == number[:, None, None, :]
    if mask is None:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=cu.device).tril()
    return same & mask if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)

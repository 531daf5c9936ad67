"""Which packed sequence each token is of, and sums within sequences: on the device, without a look at the numbers."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.reference.linear_attention import edges


class TokenSequences(NamedTuple):
    """Of S tokens in N sequences. of: (S,), each token's sequence; N where it has none. end: (S,), behind the last
    token of its sequence. inside: (S,), has it one?"""

    of: Tensor
    end: Tensor
    inside: Tensor

    def only_inside(self, x: Tensor) -> Tensor:
        """x (B, S, ..) with zeros for tokens of no sequence, whatever is there."""
        return torch.where(self.inside.view(1, -1, *(1,) * (x.dim() - 2)), x, x.new_zeros(()))

    def of_tokens(self, x: Tensor) -> Tensor:
        """x (N, ..), of sequences -> (S, ..), of their tokens; 0 for those of none."""
        return torch.cat((x, x.new_zeros(1, *x.shape[1:])))[self.of]

    def suffix_sums(self, x: Tensor) -> Tensor:
        """x (B, S, H) -> the sums of each token's and those behind it in its sequence; 0 for tokens of
        none, whatever is there. By doubling, in an order that S alone decides: no sum has a part of another sequence,
        which would not vanish from it (NaN), or leave errors of its own size."""
        x, step, tokens = self.only_inside(x), 1, x.shape[1]
        behind, zero = (self.end - torch.arange(tokens, device=x.device))[:, None], x.new_zeros(())
        while step < tokens:
            x[:, :-step] += torch.where(behind[:-step] > step, x[:, step:], zero)
            step *= 2
        return self.only_inside(x)


def token_sequences(cu: Tensor | None, tokens: int) -> TokenSequences | None:
    """Of cu_seqlens (N + 1,), which mean what `edges` says: the kernel's rule, in `engine.packed`. None without."""
    if cu is None:
        return None
    bounds, place = edges(cu, tokens), torch.arange(tokens, device=cu.device)
    count = cu.shape[0] - 1
    of = torch.searchsorted(bounds[1:], place, right=True)
    of.masked_fill_(place < bounds[0], count)
    end = torch.cat((bounds[1:], bounds.new_full((1,), tokens)))[of]
    return TokenSequences(of, end, of < count)

"""Based's mixer: a module around `tkq.based`."""
from __future__ import annotations

from torch import Tensor, nn

from tkq.linear_attention.based.ops import based
from tkq.linear_attention.based.spec import FEATURE_DIM, VALUE_DIMS
from tkq.runtime.call import check


class BasedAttention(nn.Module):
    """The linear attention of Based (Arora et al., 2024), in the place of attention, on `tkq.based`:

        y = based(x Wq, x Wk, x Wv) Wo        heads of feature_dim columns for q and k, of head_dim for v

    bfloat16 and float16; or float32 parameters under torch.autocast. Parameters have the names of
    flash-linear-attention's BasedLinearAttention, q_proj, k_proj, v_proj and o_proj, and the shapes that they have
    there where num_key_value_heads is num_heads; its Taylor feature map takes q k / sqrt(feature_dim), as scale does.

    Args:
        hidden_size: of x and y.
        num_heads: of q, k and v.
        head_dim: columns of a head of v, a multiple of 16 from 32 to 128; hidden_size / num_heads where not given.
        feature_dim: columns of a head of q and k, 16.
        use_norm: outputs are divided by the sum of weights.
        device, dtype: of the parameters.

    Raises:
        TypeError: a size that is no int; use_norm is no bool.
        ValueError: a size below 1; without head_dim, a hidden_size that is no multiple of num_heads.
        NotImplementedError: a head_dim or feature_dim that is not supported."""

    def __init__(self, hidden_size: int, *, num_heads: int, head_dim: int | None = None,
                 feature_dim: int = FEATURE_DIM, use_norm: bool = True, device=None, dtype=None):
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads), ("feature_dim", feature_dim),
                           *((("head_dim", head_dim),) if head_dim is not None else ())):
            check.size(f"BasedAttention: {name}", size)
        check.flag("BasedAttention: use_norm", use_norm)
        self.hidden_size, self.num_heads, self.use_norm = hidden_size, num_heads, use_norm
        self.head_dim, self.feature_dim = _head_dim(hidden_size, num_heads, head_dim), feature_dim
        _check_columns(self.head_dim, feature_dim)
        new = dict(bias=False, device=device, dtype=dtype)
        self.q_proj, self.k_proj = (nn.Linear(hidden_size, num_heads * feature_dim, **new) for _ in range(2))
        self.v_proj = nn.Linear(hidden_size, num_heads * self.head_dim, **new)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, **new)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, hidden_size) -> y (B, S, hidden_size). A token sees itself and those before it."""
        check.tensor("x", x)
        check.shape("x", x, (None, None, self.hidden_size))
        check.as_parameters("x", x, self.q_proj.weight)
        q, k, v = (project(x).unflatten(-1, (self.num_heads, -1)) for project in (
            self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(based(q, k, v, use_norm=self.use_norm).flatten(-2))

    def extra_repr(self) -> str:
        return (f"{self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}"
                f"{'' if self.use_norm else ', use_norm=False'}")


def _head_dim(hidden_size, num_heads, head_dim):
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"BasedAttention: hidden_size is {hidden_size}, allowed without head_dim are multiples of "
                         f"num_heads, which is {num_heads}")
    return hidden_size // num_heads if head_dim is None else head_dim


def _check_columns(head_dim, feature_dim):
    if feature_dim != FEATURE_DIM:
        raise NotImplementedError(f"BasedAttention: feature_dim is {feature_dim}, supported is {FEATURE_DIM}")
    if head_dim not in VALUE_DIMS:
        raise NotImplementedError(f"BasedAttention: head_dim is {head_dim}, supported are multiples of 16 from "
                                  f"{VALUE_DIMS[0]} to {VALUE_DIMS[-1]}")

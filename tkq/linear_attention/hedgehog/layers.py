"""The layer around Hedgehog's attention."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from tkq.linear_attention.hedgehog.ops import hedgehog
from tkq.linear_attention.hedgehog.spec import FEATURES, HEAD_DIMS
from tkq.runtime import arguments
from tkq.runtime.arguments.tables import number
from tkq.runtime.call import check

_factor = arguments.checker_of("HedgehogAttention", number("init_window_factor", 0.0))


class HedgehogAttention(nn.Module):
    """LoLCATS' attention (Zhang et al., 2024), in the place of softmax attention, on `tkq.hedgehog`:

        q, k, v = x Wq, x Wk, x Wv          q and k rotated, where there is a rotary
        window = sigmoid(window_factors), linear = 1, or 1 - window with affine_factors
        y = hedgehog(q, k, v, feature_map_q, feature_map_k, linear, window) Wo

    bfloat16 and float16; or float32 parameters under torch.autocast. Parameters: q_proj, k_proj, v_proj and o_proj, as
    those of a Llama; feature_map_q and feature_map_k, (num_heads, head_dim, feature_dim); window_factors, (1,
    num_heads, 1, 1), as LoLCATS' are. Heads that share keys and values have maps of their own.

    Args:
        hidden_size: of x and y.
        num_heads: of q and o. num_kv_heads: of k and v, of which num_heads is a multiple; num_heads where not given.
        head_dim: columns of a head, 64 or 128.
        feature_dim: columns of the maps, 32 or 64: a token has twice as many features.
        affine_factors: the parts' factors add up to 1.
        init_window_factor: of window_factors, before the sigmoid.
        rotary: called with q (B, S, num_heads, head_dim) and k, gives both, as `tkq.nn.RotaryEmbedding` does; None:
            they are not rotated.
        bias: of the projections of q, k and v.
        device, dtype: of the parameters.

    Raises:
        TypeError: a size that is no int; a flag that is no bool; an init_window_factor that is no number; a rotary that
            cannot be called.
        ValueError: a size below 1; an init_window_factor that is not finite in float32; num_heads that is no multiple
            of num_kv_heads.
        NotImplementedError: a head_dim or feature_dim that is not supported."""

    def __init__(self, hidden_size: int, *, num_heads: int, head_dim: int, num_kv_heads: int | None = None,
                 feature_dim: int = 64, affine_factors: bool = False, init_window_factor: float = 0.0,
                 rotary: nn.Module | None = None, bias: bool = False, device=None, dtype=None):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads),
                           ("head_dim", head_dim), ("feature_dim", feature_dim)):
            check.size(f"HedgehogAttention: {name}", size)
        for name, flag in (("affine_factors", affine_factors), ("bias", bias)):
            check.flag(f"HedgehogAttention: {name}", flag)
        if rotary is not None and not callable(rotary):
            raise TypeError(f"HedgehogAttention: rotary is {rotary!r}, allowed are None and a module that is called "
                            "with q and k")
        _check_heads(num_heads, num_kv_heads, head_dim, feature_dim)
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim, self.feature_dim, self.affine_factors = head_dim, feature_dim, affine_factors
        self.init_window_factor, self.rotary = _factor(init_window_factor), rotary
        new = dict(device=device, dtype=dtype)
        for name, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, heads * head_dim, bias=bias, **new))
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False, **new)
        self.feature_map_q, self.feature_map_k = (
            nn.Parameter(torch.empty(num_heads, head_dim, feature_dim, **new)) for _ in range(2))
        self.window_factors = nn.Parameter(torch.empty(1, num_heads, 1, 1, **new))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The maps and window_factors anew, as FSDP asks of modules that come from the meta device; the others are
        modules."""
        with torch.no_grad():
            for x in (self.feature_map_q, self.feature_map_k):
                x.normal_(std=self.head_dim**-0.5)
            self.window_factors.fill_(self.init_window_factor)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, hidden_size) -> y (B, S, hidden_size)."""
        check.tensor("x", x)
        check.shape("x", x, (None, None, self.hidden_size))
        check.as_parameters("x", x, self.q_proj.weight)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.rotary is not None:
            q, k = self.rotary(q, k)
        if self.num_kv_heads != self.num_heads:
            k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, 2) for t in (k, v))
        window = self.window_factors.float().sigmoid().flatten()
        linear = 1 - window if self.affine_factors else torch.ones_like(window)
        return self.o_proj(hedgehog(q, k, v, self.feature_map_q, self.feature_map_k, linear, window).flatten(-2))

    def extra_repr(self) -> str:
        affine = ", affine_factors=True" * self.affine_factors
        return (f"{self.hidden_size}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
                f"head_dim={self.head_dim}, feature_dim={self.feature_dim}{affine}")


def _check_heads(num_heads, num_kv_heads, head_dim, feature_dim):
    if num_heads % num_kv_heads:
        raise ValueError(f"HedgehogAttention: num_heads is {num_heads}, allowed are multiples of num_kv_heads, which "
                         f"is {num_kv_heads}")
    for name, size, allowed in (("head_dim", head_dim, HEAD_DIMS), ("feature_dim", feature_dim, FEATURES)):
        if size not in allowed:
            raise NotImplementedError(f"HedgehogAttention: {name} is {size}, supported are {allowed[0]} and "
                                      f"{allowed[1]}")

"""Mixers of transformers' models around Mamba-2's state space (Mamba-2, Bamba, Granite 4, Nemotron-H), which have one
code: their forward on tkq."""
import torch

from .. import mamba2_ssd, ssd_step
from ..linear_attention.check import for_tma
from ..linear_attention.mamba2_layer import NO_LIMIT, grouped_rmsnorm
from ..linear_attention.spec import HEAD_DIMS, VALUE_DIMS
from .linears import changed
from .transformers_hybrid import (
    cache_argument,
    cached_state,
    convolved,
    is_16_bit,
    is_plain,
    masked,
    must_be_alone,
    put_state,
)

_SILU = "silu", "swish"


def refuses(module):
    """Why a mixer stays as it is; None: it need not."""
    if module.activation not in _SILU:
        return f"activation {module.activation}"
    if module.time_step_limit is None:
        return "no time_step_limit"
    if module.head_dim not in VALUE_DIMS or module.ssm_state_size not in HEAD_DIMS:
        return f"heads of {module.head_dim} columns and states of {module.ssm_state_size}"
    return None


def mixer_forward(family, cls):
    """Prefill and training by `tkq.mamba2_ssd`, with the cache's state; a token behind a cache, where gradients are
    off, by `tkq.ssd_step`, which updates that state in place. Such a token's step size has no limits, as in the class.
    Sequences packed into one row are kept apart by `cu_seq_lens_q`. Other types, rows packed otherwise and convolutions
    with hooks go to the class's own forward."""
    cache_name = cache_argument(cls)

    def forward(self, hidden_states, cache=None, attention_mask=None, cache_params=None, **kwargs):
        """cache: cache_params, as its name is from transformers 5.24 on."""
        cache = cache_params if cache is None else cache
        state = cached_state(cache, self.layer_idx)  # ahead of `convolved`, with which a cache begins
        one = state is not None and hidden_states.shape[1] == 1
        limit = NO_LIMIT if one else tuple(map(float, self.time_step_limit))
        alone, cu = must_be_alone(hidden_states, state, attention_mask, kwargs), kwargs.get("cu_seq_lens_q")
        if alone or not is_16_bit(hidden_states) or changed(self.conv1d):
            return cls.forward(self, hidden_states, attention_mask=attention_mask, **{cache_name: cache}, **kwargs)
        z, mixed, dt = self.in_proj(masked(hidden_states, attention_mask)).split(
            [self.intermediate_size, self.conv_dim, self.num_heads], -1)
        mixed = masked(convolved(self, mixed, cache, cu), attention_mask)  # the convolution has a bias
        shared = self.n_groups * self.ssm_state_size
        x, B, C = mixed.split([self.intermediate_size, shared, shared], -1)
        B, C = (t.unflatten(-1, (self.n_groups, -1)) for t in (B, C))
        fused = is_plain(self.norm, "RMSNormGated")  # which gates first and then norms
        gate = for_tma(z.unflatten(-1, (self.num_heads, -1)), first=True) if fused else None
        given = (x.unflatten(-1, (self.num_heads, -1)), dt, -self.A_log.float().exp(), B, C, self.D, gate, self.dt_bias)
        if one and not torch.is_grad_enabled():
            y, last = ssd_step(state, *given, True), state
        else:
            y = mamba2_ssd(*given, state, True, limit, cache is not None, cu_seqlens=cu)
            y, last = (y, None) if cache is None else (y[0], y[1] if cu is None else y[1][-1:])
        put_state(cache, self.layer_idx, last)
        y = _normed(self.norm, y.flatten(-2)) if fused else self.norm(y.flatten(-2), z)
        return self.out_proj(y.to(hidden_states.dtype))

    return forward


def _normed(norm, y):
    """Its result of what is gated already. Before transformers 5.24 groups have one norm in most models."""
    groups = y.shape[-1] // getattr(norm, "group_size", y.shape[-1])
    return grouped_rmsnorm(y, norm.weight, norm.variance_epsilon, groups)

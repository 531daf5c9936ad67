"""Layers of Kimi Linear in transformers whose mixer is Kimi Delta Attention: their forward on tkq."""
import torch

from .. import gated_delta_rule, gated_delta_rule_step, rmsnorm
from ..linear_attention.channels.decays import column_decays
from ..linear_attention.spec import COLUMN_DIMS
from .linears import changed, together
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


def refuses(module):
    """Why a mixer stays as it is; None: it need not."""
    if module.activation not in ("silu", "swish"):
        return f"activation {module.activation}"
    return None if module.head_dim in COLUMN_DIMS else f"heads of {module.head_dim} columns"


def delta_forward(family, cls):
    """Prefill and training by `tkq.gated_delta_rule` with gates for each column, with the cache's state; a token behind
    a cache, where gradients are off, by `tkq.gated_delta_rule_step`, which updates that state in place.
    Sequences packed into one row are kept apart by `cu_seq_lens_q`. Other types, rows packed otherwise and convolutions
    with hooks go to the class's own forward."""
    cache_name = cache_argument(cls)

    def forward(self, hidden_states, cache=None, attention_mask=None, cache_params=None, **kwargs):
        """cache: cache_params, as its name is from transformers 5.24 on."""
        cache = cache_params if cache is None else cache
        state = cached_state(cache, self.layer_idx)  # ahead of `convolved`, with which a cache begins
        alone, cu = must_be_alone(hidden_states, state, attention_mask, kwargs), kwargs.get("cu_seq_lens_q")
        if alone or not is_16_bit(hidden_states) or changed(self.conv1d):
            return cls.forward(self, hidden_states, attention_mask=attention_mask, **{cache_name: cache}, **kwargs)
        x = masked(hidden_states, attention_mask)
        heads = self.num_heads, self.head_dim
        q, k, v, b = together(x, self.q_proj, self.k_proj, self.v_proj, self.b_proj)
        mixed = convolved(self, torch.cat((q, k, v), -1), cache, cu)
        q, k, v = (t.unflatten(-1, heads) for t in mixed.chunk(3, -1))
        g, beta = _decays(self.forget_gate, x, heads), b.float().sigmoid()
        if state is not None and q.shape[1] == 1 and not torch.is_grad_enabled():
            o, last = gated_delta_rule_step(q, k, v, g, beta, state, None, True), state
        else:
            o = gated_delta_rule(q, k, v, g, beta, None, state, cache is not None, True, cu_seqlens=cu)
            o, last = (o, None) if cache is None else (o[0], o[1] if cu is None else o[1][-1:])
        put_state(cache, self.layer_idx, last)
        o = _normed(self.o_norm, o, self.g_b_proj(self.g_a_proj(x)).view(o.shape))
        return self.o_proj(o.flatten(-2))

    return forward


def _decays(gate, x, heads):
    """What the gate gives, with a softplus that also very negative numbers do not vanish from."""
    if not is_plain(gate, "ForgetGate"):
        return gate(x)
    return column_decays(gate.f_b_proj(gate.f_a_proj(x)).unflatten(-1, heads), gate.A_log, gate.dt_bias)


def _normed(norm, o, gate):
    if not is_plain(norm, "RMSNormGated"):
        return norm(o, gate)
    return rmsnorm(o, norm.weight, eps=norm.variance_epsilon) * gate.sigmoid()

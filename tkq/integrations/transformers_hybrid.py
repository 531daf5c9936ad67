"""Layers of transformers' hybrid models whose mixer is the gated delta rule (Qwen3-Next): their forwards on tkq."""
import inspect

import torch
from torch import Tensor

from .. import gated_delta_rule, gated_delta_rule_step, rmsnorm, swiglu
from ..linear_attention.delta.inputs import log_decays
from ..linear_attention.short_convolution import causal_conv1d
from ..linear_attention.spec import HEAD_DIMS, VALUE_DIMS
from ..runtime.call.check import under_autocast
from .linears import changed, together

_HALF = torch.bfloat16, torch.float16


def gated_norm_forward(family, cls):
    def forward(self, hidden_states, gate):
        if gate.dtype != hidden_states.dtype:
            return cls.forward(self, hidden_states, gate)
        return swiglu(gate, rmsnorm(hidden_states, self.weight, eps=self.variance_epsilon))

    return forward


def delta_refuses(module):
    """Why a mixer stays as it is; None: it need not."""
    if module.activation not in ("silu", "swish"):
        return f"activation {module.activation}"
    if module.head_k_dim not in HEAD_DIMS or module.head_v_dim not in VALUE_DIMS:
        return f"heads of {module.head_k_dim} and {module.head_v_dim} columns"
    return None


def delta_forward(family, cls):
    """Prefill and training by `tkq.gated_delta_rule`, with the cache's state; a token behind a cache, where gradients
    are off, by `tkq.gated_delta_rule_step`, which updates that state in place. Other types, sequences packed into one
    row and convolutions with hooks go to the class's own forward."""
    cache_name = cache_argument(cls)

    def forward(self, hidden_states, cache=None, attention_mask=None, cache_params=None, **kwargs):
        """cache: cache_params, as its name is from transformers 5.24 on."""
        cache = cache_params if cache is None else cache
        packed = any(kwargs.get(name) is not None for name in ("cu_seq_lens_q", "seq_idx"))
        if packed or not _is_16_bit(hidden_states) or changed(self.conv1d):
            return cls.forward(self, hidden_states, attention_mask=attention_mask, **{cache_name: cache}, **kwargs)
        if attention_mask is not None:  # (B, S): what is padding is zeros
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        projected = together(hidden_states, self.in_proj_qkvz, self.in_proj_ba)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(*projected)
        state = _state(cache, self.layer_idx)  # ahead of `_convolved`, with which a cache begins
        q, k, v = _convolved(self, torch.cat([x.flatten(2) for x in (q, k, v)], -1), cache)
        beta = b.float().sigmoid()
        if state is not None and q.shape[1] == 1 and not torch.is_grad_enabled():
            g = log_decays(a, self.A_log, self.dt_bias)
            o, last = gated_delta_rule_step(q, k, v, g, beta, state, None, True), state
        else:
            o = gated_delta_rule(q, k, v, a, beta, None, state, cache is not None, True, A_log=self.A_log,
                                 dt_bias=self.dt_bias, use_gate_in_kernel=True)
            o, last = (o, None) if cache is None else o
        if cache is not None and last is not cache.layers[self.layer_idx].recurrent_states[0]:
            cache.update_recurrent_state(last, self.layer_idx)
        o = self.norm(o.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        return self.out_proj(o.view(*hidden_states.shape[:2], -1))

    return forward


def cache_argument(cls) -> str:
    """What the forward of a class calls the cache, which depends on the version."""
    return "cache" if "cache" in inspect.signature(cls.forward).parameters else "cache_params"


def _is_16_bit(x: Tensor) -> bool:
    kind = x.device.type
    return (torch.get_autocast_dtype(kind) if under_autocast(kind) else x.dtype) in _HALF


def _state(cache, layer):
    """Of the tokens before, (B, HV, K, V) float32; None where there are none."""
    if cache is None or not cache.has_previous_state(layer):
        return None
    return cache.layers[layer].recurrent_states[0].float()


def _convolved(mixer, mixed, cache):
    """q, k and v by heads. mixed: all three, (B, S, channels)."""
    tokens = mixed.shape[1]
    if cache is not None:
        mixed = cache.update_conv_state(mixed.mT, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size).mT
    mixed = causal_conv1d(mixed, mixer.conv1d.weight[:, 0], mixer.conv1d.bias, "silu")[:, -tokens:]
    sizes = mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim
    parts = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    return [x.unflatten(-1, (-1, size)) for x, size in zip(parts, sizes)]

"""Layers of transformers' hybrid models whose mixer is the gated delta rule (Qwen3-Next): their forwards on tkq; and
what other mixers' forwards have in common with them: caches, convolutions, packed rows."""
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
    are off, by `tkq.gated_delta_rule_step`, which updates that state in place. Sequences packed into one row are kept
    apart by `cu_seq_lens_q`. Other types, rows packed otherwise and convolutions with hooks go to the class's own
    forward."""
    cache_name = cache_argument(cls)

    def forward(self, hidden_states, cache=None, attention_mask=None, cache_params=None, **kwargs):
        """cache: cache_params, as its name is from transformers 5.24 on."""
        cache = cache_params if cache is None else cache
        state = cached_state(cache, self.layer_idx)  # ahead of `convolved`, with which a cache begins
        alone, cu = must_be_alone(hidden_states, state, attention_mask, kwargs), kwargs.get("cu_seq_lens_q")
        if alone or not is_16_bit(hidden_states) or changed(self.conv1d):
            return cls.forward(self, hidden_states, attention_mask=attention_mask, **{cache_name: cache}, **kwargs)
        hidden_states = masked(hidden_states, attention_mask)
        projected = together(hidden_states, self.in_proj_qkvz, self.in_proj_ba)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(*projected)
        q, k, v = _convolved(self, torch.cat([x.flatten(2) for x in (q, k, v)], -1), cache, cu)
        beta = b.float().sigmoid()
        if state is not None and q.shape[1] == 1 and not torch.is_grad_enabled():
            g = log_decays(a, self.A_log, self.dt_bias)
            o, last = gated_delta_rule_step(q, k, v, g, beta, state, None, True), state
        else:
            o = gated_delta_rule(q, k, v, a, beta, None, state, cache is not None, True, A_log=self.A_log,
                                 dt_bias=self.dt_bias, use_gate_in_kernel=True, cu_seqlens=cu)
            o, last = (o, None) if cache is None else (o[0], o[1] if cu is None else o[1][-1:])
        put_state(cache, self.layer_idx, last)
        o = self.norm(o.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        return self.out_proj(o.view(*hidden_states.shape[:2], -1))

    return forward


def cache_argument(cls) -> str:
    """What the forward of a class calls the cache, which depends on the version."""
    return "cache" if "cache" in inspect.signature(cls.forward).parameters else "cache_params"


def is_plain(module, ending) -> bool:
    """Is it a module of transformers' own, of a class whose name ends so, whose call runs its forward and no more?"""
    cls = type(module)
    return cls.__module__.startswith("transformers.") and cls.__name__.endswith(ending) and not changed(module)


def must_be_alone(x: Tensor, state, attention_mask, kwargs) -> bool:
    """Are sequences packed into one row in a way that is left to the class: by `seq_idx` alone, behind a cache, with
    padding?"""
    cu = kwargs.get("cu_seq_lens_q")
    if cu is None:
        return kwargs.get("seq_idx") is not None
    return len(x) != 1 or state is not None or attention_mask is not None


def masked(x: Tensor, attention_mask) -> Tensor:
    """x (B, S, ..), zeros where a mask (B, S) has padding."""
    return x if attention_mask is None else (x * attention_mask[:, :, None]).to(x.dtype)


def is_16_bit(x: Tensor) -> bool:
    kind = x.device.type
    return (torch.get_autocast_dtype(kind) if under_autocast(kind) else x.dtype) in _HALF


def cached_state(cache, layer):
    """Of the tokens before, float32: the cache's own tensor, where that is float32; None where there are none."""
    if cache is None or not cache.has_previous_state(layer):
        return None
    return cache.layers[layer].recurrent_states[0].float()


def put_state(cache, layer, state):
    """The state behind the last token, that of the last sequence of a row, where a step has not written it already."""
    if cache is not None and state is not cache.layers[layer].recurrent_states[0]:
        cache.update_recurrent_state(state, layer)


def convolved(mixer, mixed, cache, cu=None):
    """mixed (B, S, channels) by a mixer's convolution with silu, behind what the cache has, which gets the last ones.
    cu: cu_seqlens of packed sequences, which begin with nothing."""
    tokens, row = mixed.shape[1], mixed
    if cache is not None:
        last = mixed if cu is None else _of_last(mixed, cu)
        row = cache.update_conv_state(last.mT, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size).mT
    return causal_conv1d(row if cu is None else mixed, mixer.conv1d.weight[:, 0], mixer.conv1d.bias, "silu",
                         cu_seqlens=cu)[:, -tokens:]


def _of_last(x, cu):
    """x (1, S, channels) with zeros for tokens of other sequences than the last one, which the next token follows."""
    place = torch.arange(x.shape[1], device=x.device)
    return torch.where(((place >= cu[-2]) & (place < cu[-1]))[:, None], x, x.new_zeros(()))


def _convolved(mixer, mixed, cache, cu):
    """q, k and v by heads. mixed: all three, (B, S, channels)."""
    mixed = convolved(mixer, mixed, cache, cu)
    sizes = mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim
    parts = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    return [x.unflatten(-1, (-1, size)) for x, size in zip(parts, sizes)]

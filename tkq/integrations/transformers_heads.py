"""Attention layers of transformers' models: their forwards on tkq, from the hidden states to what `o_proj` gives. How
attention itself is computed is the model's attn_implementation."""
import sys

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from .. import rope, rope_qk
from .linears import together

IS_CACHE = "cache" in CausalLMOutputWithPast.__dataclass_fields__  # past_key_values has that name from 5.24 on


def attention_forward(family, cls):
    models = sys.modules[cls.__module__]

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, past_key_values=None,
                **kwargs):
        """cache: past_key_values, as its name is from transformers 5.24 on."""
        shape = *hidden_states.shape[:-1], -1, self.head_dim
        q, k, v = _projected(self, hidden_states)
        gate = None
        if family.hybrid:  # each head has its gate behind its query
            q, gate = q.view(*shape[:-1], 2 * self.head_dim).chunk(2, -1)
        if family.head_norms == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.view(shape) for x in (q, k, v))
        if family.head_norms == "each":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotated(q, k, position_embeddings, family.rotary)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = _cached(self, k, v, cache, past_key_values, kwargs)
        o, weights = _attended(self, family, models, (q, k, v), attention_mask, kwargs)
        return self.o_proj(o if gate is None else o * gate.reshape(o.shape).sigmoid()), weights

    return forward


def latent_forward(family, cls):
    """Of DeepSeek-V3: keys and values from a latent vector, which the cache holds, and one rotated head of keys."""
    models = sys.modules[cls.__module__]

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, past_key_values=None,
                **kwargs):
        low = self.q_lora_rank is not None
        q, latent = together(hidden_states, self.q_a_proj if low else self.q_proj, self.kv_a_proj_with_mqa)
        if low:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.view(*hidden_states.shape[:-1], -1, self.qk_head_dim)
        q, q_rotated = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, k_rotated = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        k_rotated = k_rotated[:, :, None]
        if self.config.rope_interleave:  # what comes of it lies in halves, in the cache too
            q_rotated, k_rotated = _in_halves(q_rotated), _in_halves(k_rotated)
        q_rotated, k_rotated = _rotated(q_rotated, k_rotated, position_embeddings, family.rotary)
        latent, k_rotated = _cached(self, self.kv_a_layernorm(latent)[:, None], k_rotated.transpose(1, 2), cache,
                                    past_key_values, kwargs)
        q = torch.cat((q, q_rotated), -1).transpose(1, 2)
        k, v = self.expand_kv(latent, k_rotated)
        o, weights = _attended(self, family, models, (q, k, v), attention_mask, kwargs)
        return self.o_proj(o), weights

    return forward


def shared_forward(family, cls):
    """Of Gemma 4: some layers take keys and values of an earlier one; values may be keys, and are normalised."""
    models = sys.modules[cls.__module__]

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, shared_kv_states=None, cache=None,
                past_key_values=None, **kwargs):
        shape = *hidden_states.shape[:-1], -1, self.head_dim
        if self.is_kv_shared_layer:
            q = self.q_norm(self.q_proj(hidden_states).view(shape))
            q = rope(q, *_halves(position_embeddings)).transpose(1, 2)
            k, v = (x.to(q.device) for x in shared_kv_states[self.layer_type])
        else:
            layers = [self.q_proj, self.k_proj] + ([] if self.v_proj is None else [self.v_proj])
            q, k, *v = (x.view(shape) for x in together(hidden_states, *layers))
            v = self.v_norm(v[0] if v else k)
            q, k = rope_qk(self.q_norm(q), self.k_norm(k), *_halves(position_embeddings))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            k, v = _cached(self, k, v, cache, past_key_values, kwargs)
        if self.store_full_length_kv:
            shared_kv_states[self.layer_type] = k, v
        o, weights = _attended(self, family, models, (q, k, v), attention_mask, kwargs)
        return self.o_proj(o), weights

    return forward


def _projected(module, x):
    """(B, S, heads * D) of queries, keys and values."""
    if not hasattr(module, "qkv_proj"):
        return together(x, module.q_proj, module.k_proj, module.v_proj)
    keys = module.num_key_value_heads * module.head_dim
    return module.qkv_proj(x).split([module.config.num_attention_heads * module.head_dim, keys, keys], -1)


def _rotated(q, k, tables, rotary):
    if rotary == "one half":
        cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in tables)
    else:
        cos, sin = _halves(tables)
    return rope_qk(q, k, cos, sin, interleaved=rotary == "interleaved")


def _halves(tables):
    return tuple(table[..., :table.shape[-1] // 2] for table in tables)


def _in_halves(x):
    """The pairs of neighbours, first ones before all second ones."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _cached(module, k, v, cache, past_key_values, kwargs):
    if cache is not None and IS_CACHE:
        return cache.update(k, v, module.layer_idx, kwargs=kwargs)
    if cache is not None:  # of continuous batching, whose attention takes it
        kwargs["cache"] = cache
    return (k, v) if past_key_values is None else past_key_values.update(k, v, module.layer_idx)


def _attended(module, family, models, qkv, mask, kwargs):
    """(attention (B, S, H * Dv), its weights where the implementation has them)"""
    call = models.ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, models.eager_attention_forward)
    options = {name: _attribute(module, path) for name, path in family.options.items()}
    o, weights = call(module, *qkv, mask, dropout=module.attention_dropout if module.training else 0.0,
                      scaling=module.scaling, **options, **kwargs)
    return o.reshape(qkv[0].shape[0], qkv[0].shape[2], -1).contiguous(), weights


def _attribute(module, path):
    """Of a module, by a name that may have dots. None where there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def clips(module):
    """Why an attention of OLMo stays as it is."""
    return None if module.config.clip_qkv is None else f"clip_qkv {module.config.clip_qkv}"

"""torchtitan's models on tkq, by its overrides (torchtitan 0.3): norms, SwiGLU, rotary embeddings, attention.

    torchtitan_train ... --override.imports tkq.integrations.torchtitan.rmsnorm tkq.integrations.torchtitan.swiglu \\
        tkq.integrations.torchtitan.complex_rope tkq.integrations.torchtitan.varlen_attention

Each function here is one override: `rmsnorm`, `swiglu`, `complex_rope` (Llama), `cos_sin_rope` (Qwen, gpt-oss),
`varlen_attention`. What it replaces computes the same with the same parameters under the same names: checkpoints,
initialisation and sharding are unaffected. Only the classes themselves are replaced, no subclasses of theirs.
`varlen_attention` makes tkq the flash attention of torch's varlen_attn, in the whole process: see
`tkq.integrations.sdpa`.
"""
from dataclasses import dataclass

import torch
from torchtitan.config import derive, override
from torchtitan.models.common import attention as attentions
from torchtitan.models.common import feed_forward, nn_modules, rope

from .. import rmsnorm as tkq_rmsnorm
from .. import rope_qk
from .. import swiglu as tkq_swiglu
from . import sdpa


class RMSNorm(nn_modules.RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.RMSNorm.Config):
        pass

    def forward(self, x):
        if self.weight is not None and self.weight.dtype != x.dtype:
            return super().forward(x)  # its result is of another type than x
        return tkq_rmsnorm(x, self.weight, eps=self.eps)


class FeedForward(feed_forward.FeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(feed_forward.FeedForward.Config):
        pass

    def forward(self, x):
        return self.w2(tkq_swiglu(self.w1(x), self.w3(x)))


class CosSinRoPE(rope.CosSinRoPE):
    """Queries and keys in one launch. DTensors go through the class's own code."""

    @dataclass(kw_only=True, slots=True)
    class Config(rope.CosSinRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(query, key, rope_cache):
        """rope_cache: (B or 1, S, 1, 2 D), cosines of both halves, then sines."""
        if not _plain(query, key, rope_cache):
            return rope.CosSinRoPE.apply_rotary_emb(query, key, rope_cache)
        D, table = query.shape[-1], rope_cache[:, :, 0]
        return rope_qk(query, key, table[..., :D // 2], table[..., D:D + D // 2])


class ComplexRoPE(rope.ComplexRoPE):
    """Pairs of neighbours, by complex numbers. DTensors go through the class's own code."""

    @dataclass(kw_only=True, slots=True)
    class Config(rope.ComplexRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(query, key, rope_cache):
        """rope_cache: (B or 1, S, 1, D / 2), complex."""
        if not _plain(query, key, rope_cache):
            return rope.ComplexRoPE.apply_rotary_emb(query, key, rope_cache)
        cos, sin = (part[:, :, 0].contiguous() for part in (rope_cache.real, rope_cache.imag))
        return rope_qk(query, key, cos, sin, interleaved=True)


class VarlenAttention(attentions.VarlenAttention):
    """By torch's varlen_attn, whose implementation tkq then is, in the place of the one that torchtitan chooses."""

    @dataclass(kw_only=True, slots=True)
    class Config(attentions.VarlenAttention.Config):
        pass

    def __init__(self, config):
        super(attentions.VarlenAttention, self).__init__()  # that class's own activates another one
        self.window_size = config.window_size
        sdpa.enable()


def _plain(*tensors):
    return all(type(x) is torch.Tensor for x in tensors)


@override(target=nn_modules.RMSNorm.Config, exact=True, description="tkq.rmsnorm")
def rmsnorm(config):
    return derive(config, RMSNorm.Config)


@override(target=feed_forward.FeedForward.Config, exact=True, description="tkq.swiglu")
def swiglu(config):
    return derive(config, FeedForward.Config)


@override(target=rope.CosSinRoPE.Config, exact=True, description="tkq.rope_qk")
def cos_sin_rope(config):
    return derive(config, CosSinRoPE.Config)


@override(target=rope.ComplexRoPE.Config, exact=True, description="tkq.rope_qk")
def complex_rope(config):
    return derive(config, ComplexRoPE.Config)


@override(target=attentions.VarlenAttention.Config, exact=True, description="tkq by torch's varlen_attn")
def varlen_attention(config):
    return derive(config, VarlenAttention.Config)

"""As much of torchtitan 0.3's interface as `tkq.integrations.torchtitan` uses, without torchtitan."""
import dataclasses
import sys
import types
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self):
            return getattr(sys.modules[type(self).__module__], type(self).__qualname__.split(".")[-2])(self)


class Module(nn.Module, Configurable):
    pass


class Linear(nn.Linear, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int
        bias: bool = False

    def __init__(self, config):
        super().__init__(config.in_features, config.out_features, config.bias)


class RMSNorm(nn.RMSNorm, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        normalized_shape: int
        eps: float = 1e-5
        elementwise_affine: bool = True

    def __init__(self, config):
        super().__init__(config.normalized_shape, eps=config.eps, elementwise_affine=config.elementwise_affine)


class FeedForward(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w1: Linear.Config
        w2: Linear.Config
        w3: Linear.Config

    def __init__(self, config):
        super().__init__()
        self.w1, self.w2, self.w3 = config.w1.build(), config.w2.build(), config.w3.build()

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class _RoPE(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        max_seq_len: int
        theta: float = 10000.0

    def __init__(self, config):
        super().__init__()
        angles = torch.arange(config.max_seq_len)[:, None] / config.theta ** (
            torch.arange(0, config.dim, 2)[None] / config.dim)
        self.cache = self.made(angles)

    def forward(self, query, key, positions=None):
        rows = self.cache[:query.shape[1]][None] if positions is None else self.cache[positions]
        return self.apply_rotary_emb(query, key, rows[:, :, None])


class CosSinRoPE(_RoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(_RoPE.Config):
        pass

    def made(self, angles):
        return torch.cat((angles.cos(), angles.cos(), angles.sin(), angles.sin()), -1)

    @staticmethod
    def apply_rotary_emb(query, key, rope_cache):
        cos, sin = rope_cache.chunk(2, -1)
        turned = [torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) for x in (query.float(), key.float())]
        return tuple((x.float() * cos + y * sin).type_as(x) for x, y in zip((query, key), turned))


class ComplexRoPE(_RoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(_RoPE.Config):
        pass

    def made(self, angles):
        return torch.polar(torch.ones_like(angles), angles)

    @staticmethod
    def apply_rotary_emb(query, key, rope_cache):
        pairs = (torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rope_cache for x in (query, key))
        return tuple(torch.view_as_real(x).flatten(-2).type_as(query) for x in pairs)


class VarlenAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple = (-1, 0)

    def __init__(self, config):
        raise AssertionError("activates an implementation of its own")


REGISTERED: dict = {}  # of `override`: what a factory is for


def override(*, target, fqns=None, description="", exact=False):
    def register(factory):
        REGISTERED[factory.__name__] = target, exact
        return factory

    return register


def derive(source, target_cls, **deltas):
    shared = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    return target_cls(**{**shared, **deltas})


def modules() -> dict:
    """{name: module}"""
    here = sys.modules[__name__]
    common = types.SimpleNamespace(attention=here, feed_forward=here, nn_modules=here, rope=here, linear=here)
    return {"torchtitan": here, "torchtitan.config": here, "torchtitan.models": here,
            "torchtitan.models.common": common, "torchtitan.models.common.linear": here}

"""Norms with options: torch's way, and inputs."""
import pytest
import torch
import torch.nn.functional as F

from tests.poison import poisoned

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS = ["rmsnorm", "layernorm"]
E4M3 = torch.float8_e4m3fn
EPS = 1e-5


@pytest.fixture(autouse=True)
def poison():
    """Whatever a call allocates is NaN before it is written."""
    with poisoned():
        yield


def torch_norm(kind, x, weight=None, bias=None, residual=None, offset=0.0):
    """(y, h): float64 inputs give the truth, float32 ones what a good kernel gives."""
    h = x if residual is None else x + residual
    N = h.shape[-1:]
    y = F.layer_norm(h, N, None, None, EPS) if kind == "layernorm" else F.rms_norm(h, N, None, EPS)
    y = y if weight is None else y * (weight + offset)
    return y if bias is None else y + bias, h


def make(shape, x, scale=1.0, mean=0.0, seed=0, **vectors):
    """x, and by name what else is asked for: residual by its type, weight and bias by type or (shape, type)."""
    g = torch.Generator("cuda").manual_seed(seed)

    def randn(shape, dtype):
        return torch.randn(shape, device="cuda", generator=g).to(DTYPES[dtype])

    made = {}
    for name, what in vectors.items():
        own = what if isinstance(what, tuple) else (shape if name == "residual" else shape[-1:], what)
        made[name] = randn(*own)
    return (torch.randn(shape, device="cuda", generator=g) * scale + mean).to(DTYPES[x]), made

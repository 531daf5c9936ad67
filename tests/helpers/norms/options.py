"""Norms with options: in torch's ops, and inputs."""
import pytest
import torch
import torch.nn.functional as F

from tests.helpers.sanitizer.nan_fill import poisoned

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


# Sums of x and a residual whose backward pass shows with which mean and rstd it has joined them: in 16 bits they are
# rounded by as much as such rows vary, or more.
HARD = ("constant", "nearly constant", "huge mean", "large", "small", "cancelling", "outlier", "zeros")


def harden(how, x, residual):
    """Both (..., N), changed in place, so that each row is as hard as that."""
    with torch.no_grad():
        if how == "constant":
            x.copy_(10 * x[..., :1].clone().expand_as(x))
            residual.copy_(residual[..., :1].clone().expand_as(residual))
        elif how == "nearly constant":  # by an ulp of bf16 here and there
            noise = residual.sign() * (x.abs() > 1)
            x.copy_(10 * x[..., :1].clone().expand_as(x))
            residual.copy_(residual[..., :1].float() * (1 + noise.float() * 2.0**-7))
        elif how == "huge mean":
            x.add_(300.0 if x.dtype == residual.dtype == torch.float32 else 3000.0)
        elif how in ("large", "small"):
            for t in (x, residual):
                t.mul_(1e4 if how == "large" else 1e-4)
        elif how == "cancelling":
            residual.copy_(residual.float() * 2.0**-6 - x.float())
        elif how == "outlier":
            x[..., x.shape[-1] // 3] = 1e4
        elif how == "zeros":
            x.zero_(), residual.zero_()
        else:
            raise ValueError(how)


def torch_norm_of_stored(kind, stored, x, weight=None, bias=None, residual=None, offset=0.0):
    """`torch_norm` of the sum as it is saved: ``stored`` has its values, and its gradient is that of x + residual."""
    h = x + residual
    return torch_norm(kind, h + (stored.to(h.dtype) - h).detach(), weight, bias, None, offset)

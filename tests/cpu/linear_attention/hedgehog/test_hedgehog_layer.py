"""tkq.nn.HedgehogAttention on the CPU."""
import numpy
import pytest
import torch

import tkq
from tkq.reference import hedgehog as reference

BF16 = torch.bfloat16


def make(dtype=BF16, **options):
    torch.manual_seed(0)
    return tkq.nn.HedgehogAttention(48, **dict(num_heads=4, num_kv_heads=2, head_dim=64, feature_dim=32) | options
                                    ).to(dtype)


def exactly(layer, x):
    """In float64, by the parameters."""
    p = {name: w.detach().double() for name, w in layer.named_parameters()}
    q, k, v = ((x.double() @ p[f"{name}_proj.weight"].mT).unflatten(-1, (-1, 64)) for name in "qkv")
    if layer.rotary is not None:
        q, k = layer.rotary(q.float(), k.float())
    k, v = (t.repeat_interleave(2, 2) for t in (k, v))
    window = p["window_factors"].sigmoid().flatten()
    linear = 1 - window if layer.affine_factors else torch.ones_like(window)
    o = reference.hedgehog(q.double(), k.double(), v, p["feature_map_q"], p["feature_map_k"], linear, window)
    return o.flatten(-2) @ p["o_proj.weight"].mT


@pytest.mark.parametrize("options", [dict(), dict(affine_factors=True, init_window_factor=-2.0),
                                     dict(rotary=tkq.nn.RotaryEmbedding(64, 200))])
def test_results_and_gradients(options):
    layer, x = make(**options), torch.randn(2, 150, 48).to(BF16).requires_grad_()
    y, want = layer(x), exactly(make(**options), x.detach())
    assert y.shape == x.shape and (y.double() - want).norm() <= 2**-7 * want.norm()
    y.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in (x, *layer.parameters()))


def test_numbers_of_numpy():
    layer = make(init_window_factor=numpy.float32(-2.0))
    assert type(layer.init_window_factor) is float and (layer.window_factors == -2.0).all()


def test_float32_under_autocast():
    layer, x = make(torch.float32), torch.randn(1, 70, 48)
    with torch.autocast("cpu", BF16):
        y = layer(x)
    assert y.dtype is BF16
    with pytest.raises(TypeError, match="hedgehog: q: dtype is torch.float32"):
        layer(x)


def test_from_the_meta_device():
    layer = make(device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.feature_map_q.isfinite().all() and not layer.window_factors.any()


@pytest.mark.parametrize("options, error, words", [
    (dict(num_kv_heads=3), ValueError, "num_heads is 4, allowed are multiples of num_kv_heads, which is 3"),
    (dict(head_dim=96), NotImplementedError, "head_dim is 96, supported are 64 and 128"),
    (dict(feature_dim=16), NotImplementedError, "feature_dim is 16, supported are 32 and 64"),
    (dict(num_heads=0), ValueError, "num_heads"), (dict(head_dim=64.0), TypeError, "head_dim"),
    (dict(affine_factors=1), TypeError, "affine_factors"), (dict(bias=0), TypeError, "bias"),
    (dict(init_window_factor="0"), TypeError, "init_window_factor"),
    *((dict(init_window_factor=wrong), ValueError, "init_window_factor: got .*, allowed are finite numbers")
      for wrong in (float("nan"), -float("inf"), 10**400)),
    (dict(rotary=64), TypeError, "rotary is 64, allowed are None and a module")])
def test_what_is_refused(options, error, words):
    with pytest.raises(error, match=f"HedgehogAttention: {words}"):
        make(**options)

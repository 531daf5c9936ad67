"""tkq.nn.BasedAttention on the CPU, against float64."""
import pytest
import torch

import tkq.nn
from tests.helpers import based_launches

BF16 = torch.bfloat16


@pytest.mark.parametrize("norm", [True, False])
def test_results_and_gradients(norm):
    torch.manual_seed(0)
    based_launches.check_layer(tkq.nn.BasedAttention(96, num_heads=3, use_norm=norm, dtype=BF16),
                               torch.randn(2, 9, 96).to(BF16))


def test_parameters_are_flas():
    layer = tkq.nn.BasedAttention(128, num_heads=2, device="meta")
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "q_proj.weight": (32, 128), "k_proj.weight": (32, 128), "v_proj.weight": (128, 128),
        "o_proj.weight": (128, 128)}
    assert "head_dim=64" in repr(layer)


def test_under_autocast():
    layer, x = tkq.nn.BasedAttention(64, num_heads=2), torch.randn(1, 5, 64)
    with pytest.raises(TypeError, match="based: q: dtype is torch.float32"):
        layer(x)
    with torch.autocast("cpu", BF16):
        assert layer(x).dtype == BF16


@pytest.mark.parametrize("given, error, words", [
    (dict(num_heads=3), ValueError, "hidden_size is 64, allowed without head_dim are multiples of num_heads, which"),
    (dict(num_heads=0), ValueError, "num_heads"), (dict(num_heads=1.0), TypeError, "num_heads"),
    (dict(num_heads=1, use_norm=1), TypeError, "use_norm"),
    (dict(num_heads=1, feature_dim=32), NotImplementedError, "feature_dim is 32, supported is 16"),
    (dict(num_heads=1, head_dim=144), NotImplementedError, "head_dim is 144, supported are multiples of 16 from 32")])
def test_what_is_refused(given, error, words):
    with pytest.raises(error, match=f"BasedAttention: {words}"):
        tkq.nn.BasedAttention(64, **given)

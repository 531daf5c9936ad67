"""torchtitan's modules on tkq against its own: on a stub of its interface, and on torchtitan where it is installed."""
import importlib
import sys

import pytest
import torch

from tests.helpers import torchtitan_stub
from tkq.integrations import sdpa

NAME = "tkq.integrations.torchtitan"


@pytest.fixture(params=["stub", "torchtitan"])
def titan(request, monkeypatch):
    """tkq's overrides."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    if request.param == "stub":
        for name, module in torchtitan_stub.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    else:
        pytest.importorskip("torchtitan", minversion="0.3", reason="torchtitan is not installed")
        importlib.import_module("torchtitan.config.override").clear_overrides()
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def both(override, config):
    """(torchtitan's module, tkq's) with the same parameters."""
    theirs, ours = config.build(), override(config).build()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, type(theirs)) and type(ours) is not type(theirs)
    return theirs, ours


def same(theirs, ours, *inputs, **more):
    """Results, and gradients of inputs and parameters."""
    found = []
    for module in (theirs, ours):
        given = [x.detach().clone().requires_grad_() for x in inputs]
        y = module(*given, **more)
        y = y if isinstance(y, tuple) else (y,)
        sum((part * torch.linspace(-1, 1, part.numel()).view_as(part)).sum() for part in y).backward()
        found.append([*y, *(x.grad for x in given), *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("affine", [True, False])
def test_norm(titan, affine):
    config = titan.nn_modules.RMSNorm.Config(normalized_shape=64, eps=1e-3, elementwise_affine=affine)
    same(*both(titan.rmsnorm, config), torch.randn(2, 5, 64))


def test_a_norm_of_two_types_is_torchs(titan):
    theirs, ours = both(titan.rmsnorm, titan.nn_modules.RMSNorm.Config(normalized_shape=64))
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(ours(x), theirs(x)) and ours(x).dtype == theirs(x).dtype


def test_swiglu(titan):
    Linear = importlib.import_module("torchtitan.models.common.linear").Linear.Config
    w1, w3, w2 = (Linear(in_features=a, out_features=b, bias=False) for a, b in ((32, 48), (32, 48), (48, 32)))
    config = titan.feed_forward.FeedForward.Config(w1=w1, w2=w2, w3=w3)
    same(*both(titan.swiglu, config), torch.randn(2, 5, 32))


@pytest.mark.parametrize("kind", ["cos_sin_rope", "complex_rope"])
@pytest.mark.parametrize("positions", [None, torch.tensor([[3, 1, 0, 7, 2]]).expand(2, -1)])
def test_rope(titan, kind, positions):
    target = titan.rope.CosSinRoPE if kind == "cos_sin_rope" else titan.rope.ComplexRoPE
    theirs, ours = both(getattr(titan, kind), target.Config(dim=16, max_seq_len=32, theta=100.0))
    same(theirs, ours, torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), positions=positions)


def test_attention_is_torchs_with_tkq_behind_it(titan):
    registry = pytest.importorskip("torch.nn.attention", reason="torch.nn.attention")
    if not hasattr(registry, "current_flash_attention_impl"):
        pytest.skip("torch before 2.11 has no registry of implementations")
    before = registry.current_flash_attention_impl()
    try:
        module = titan.varlen_attention(titan.attentions.VarlenAttention.Config(window_size=(7, 0))).build()
        assert module.window_size == (7, 0) and isinstance(module, titan.attentions.VarlenAttention)
        assert registry.current_flash_attention_impl() == "tkq"
    finally:
        sdpa.disable()
    assert registry.current_flash_attention_impl() == before


def test_targets(titan):
    """Subclasses may compute more: none is replaced. In torchtitan, by its own functions, on a Llama's config."""
    names = ["rmsnorm", "swiglu", "cos_sin_rope", "complex_rope", "varlen_attention"]
    if sys.modules["torchtitan"] is torchtitan_stub:
        assert list(torchtitan_stub.REGISTERED) == names
        assert all(exact for _, exact in torchtitan_stub.REGISTERED.values())
        return
    overrides, llama = (importlib.import_module(f"torchtitan.{name}") for name in ("config.override", "models.llama3"))
    config = llama._debugmodel("varlen")
    lines = overrides.apply_overrides(overrides.OverrideConfig(imports=[f"{NAME}.{name}" for name in names]), config)
    assert len(lines) == 13 + 6 * 3

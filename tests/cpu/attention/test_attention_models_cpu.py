"""The kernels that a training step of a model asks for are shipped: their machine code is looked at."""
import pytest
import torch

import tkq
from tkq.attention import ops, varlen_ops
from tkq.attention.backward import catalog
from tkq.attention.backward import ops as backward_ops
from tkq.attention.backward import varlen_ops as backward_varlen_ops
from tkq.attention.forward import catalog as shipped
from tkq.runtime.call.ops import LaunchCache

LEFT = {"near": 127, "long_window": 4095, None: None}
LAYERS = [(name, left) for name, model in shipped.MODELS.items() for left in dict.fromkeys((None, model.left))]
RECIPES = {kernel.recipe for module in (shipped, catalog) for kernel in module.shipped()}


@pytest.fixture
def asked(monkeypatch):
    """CPU tensors take the route of GPU tensors, and nothing is computed. The recipes that were asked for."""
    recipes = []
    for module in (ops, backward_ops):
        monkeypatch.setattr(module, "function", lambda recipe: recipes.append(recipe) or (lambda *a: None))
        monkeypatch.setattr(module.arch, "require_hopper", lambda device: None)
        monkeypatch.setattr(module.arch, "num_sms", lambda device: 132)
    for module, name in ((ops, "forward"), (varlen_ops, "forward"), (backward_ops, "_cuda"),
                         (backward_varlen_ops, "_cuda")):
        monkeypatch.setattr(module, "_cpu", getattr(module, name))
        monkeypatch.setattr(module, "_launchers", {})
    for module in (ops, varlen_ops):
        monkeypatch.setattr(module, "_launch_cache", LaunchCache())
    monkeypatch.setattr(ops.counters, "counter", lambda index: None)
    monkeypatch.setattr(ops.alloc, "empty", lambda index, shape, strides, dtype: torch.empty(shape, dtype=dtype))
    return recipes


@pytest.mark.parametrize("kv_heads", (2, 1))
@pytest.mark.parametrize("name, left", LAYERS)
def test_a_step_takes_shipped_kernels(name, left, kv_heads, asked):
    model = shipped.MODELS[name]
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}
    for n in (1024, 4096, 16384):
        new = lambda heads, dim, n=n: torch.empty(n, heads, dim, dtype=torch.bfloat16, requires_grad=True)
        q, k, v = new(2, model.dims[0]), new(kv_heads, model.dims[0]), new(kv_heads, model.dims[1])
        options = dict(causal=True, window_size=(LEFT[left], None), softcap=50.0 * model.softcap)
        if model.sinks:
            options["sinks"] = torch.empty(2, dtype=kind[model.sinks])
        cu = torch.tensor([0, n], dtype=torch.int32)
        for o in (tkq.flash_attn(*(x[None] for x in (q, k, v)), **options),
                  tkq.flash_attn_varlen(q, k, v, cu, cu, n, n, **options)):
            torch.autograd.grad(o, (q, k, v), torch.empty_like(o))
    missing = [recipe for recipe in asked if recipe not in RECIPES]
    assert len(asked) >= 4 and not missing, missing[0]

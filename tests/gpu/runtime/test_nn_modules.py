"""tkq.nn's drop-ins on the GPU beside torch.nn in float64: results, and gradients of inputs and parameters."""
import copy

import pytest
import torch
from torch import nn

import tkq.nn
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.testing import assert_2x


def judge(ours, theirs, x, wide_x, *rest, ulps=4):
    """theirs: torch's, run in float64 and in float32. wide_x: x as torch takes it."""
    exact, single = copy.deepcopy(theirs).double(), copy.deepcopy(theirs).float()
    results = []
    for module, given in ((ours, x), (exact, wide_x.double()), (single, wide_x.float())):
        module.zero_grad()
        leaf = given.detach().requires_grad_()
        with poisoned():
            y = module(leaf, *rest)
            dy = torch.linspace(-1, 2, y.numel(), device="cuda").view(y.shape).to(x.dtype)
            y.backward(dy.to(y.dtype))
        results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    for i, (mine, truth, single) in enumerate(zip(*results, strict=True)):
        assert_2x(mine, truth, single.to(mine.dtype), ulps=ulps, bias_ulps=ulps / 2, what=f"result {i}")


def parameters_of(ours, theirs):
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("shape", [(129, 1000), (3, 43, 10, 100)])
def test_norms(name, shape):
    of = shape[-1:] if len(shape) == 2 else shape[-2:]
    pair = (getattr(where, name)(of, eps=1e-5, device="cuda", dtype=torch.bfloat16) for where in (tkq.nn, nn))
    ours, theirs = parameters_of(*pair)
    x = torch.randn(*shape, 2, device="cuda").bfloat16()
    judge(ours, theirs, x[..., 0].contiguous(), x[..., 0])
    judge(ours, theirs, x[..., 1], x[..., 1])  # not contiguous


@pytest.mark.parametrize("options", [{}, dict(reduction="none"), dict(ignore_index=7)])
def test_cross_entropy(options):
    ours, theirs = tkq.nn.CrossEntropyLoss(**options), nn.CrossEntropyLoss(**options)
    for shape in ((37, 1000), (3, 1000, 4, 5)):
        x = torch.randn(shape, device="cuda").bfloat16()
        target = torch.randint(1000, shape[:1] + shape[2:], device="cuda")
        target.view(-1)[1::5] = options.get("ignore_index", -100)
        judge(ours, theirs, x, x, target)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax(name):
    x = torch.randn(37, 1000, device="cuda").bfloat16()
    judge(getattr(tkq.nn, name)(-1), getattr(nn, name)(-1), x, x)
    judge(getattr(tkq.nn, name)(0), getattr(nn, name)(0), x.t(), x.t())


@pytest.mark.parametrize("granularity", ["row", "1x128"])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norms_that_quantise(name, granularity):
    """The function's bits, a sum too, into a product in float8."""
    ours = getattr(tkq.nn, f"{name}Quant")(1024, eps=1e-5, granularity=granularity, device="cuda").requires_grad_(False)
    torch.nn.init.normal_(ours.weight)
    x, residual = torch.randn(2, 3, 40, 1024, device="cuda").bfloat16().unbind()
    function = getattr(tkq, f"{name.lower()}_quant")
    bias = dict(bias=ours.bias) if name == "LayerNorm" else {}
    for added in (None, residual):
        wanted = function(x, ours.weight, eps=1e-5, residual=added, prenorm=added is not None, granularity=granularity,
                          **bias)
        with poisoned():
            found = ours(x, added)
        assert len(found) == len(wanted)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, wanted))
    q, scale = ours(x)
    weight, of_weight = tkq.quantize_fp8(torch.randn(256, 1024, device="cuda").bfloat16(),
                                         "row" if granularity == "row" else "128x128")
    y = tkq.fp8_gemm(q.flatten(0, -2), weight.t(), scale, of_weight.t())
    plain = getattr(nn, name)(1024, eps=1e-5, device="cuda", dtype=torch.float64)
    plain.load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
    scales = of_weight if granularity == "row" else of_weight.repeat_interleave(128, 0).repeat_interleave(128, 1)
    wanted = plain(x.double()).flatten(0, -2) @ (weight.double() * scales.double()).t()
    assert (y.double() - wanted).norm() < 0.05 * wanted.norm()


def test_tables_go_with_the_module_and_stay_float32():
    module = tkq.nn.RotaryEmbedding(64, 50).to("cuda", torch.bfloat16)
    wanted = tkq.rope_cos_sin(50, 64, device="cpu")
    for mine, truth in zip((module.cos, module.sin), wanted):
        assert mine.device == torch.empty(0, device="cuda").device and mine.dtype == torch.float32
        assert torch.allclose(mine.cpu(), truth, atol=1e-6)

"""Norms of a sum with a residual stored in 16 bits, where no GPU is needed: the gradient is that at the sum as stored,
on rows that vary by less than it was rounded by; which kernels have statistics of both sums."""
import pytest
import torch

import tkq
from tests.helpers.norms.options import EPS, HARD, KINDS, harden, torch_norm_of_stored
from tkq.norms import ops  # noqa: F401  registers torch.ops.tkq's
from tkq.norms.config import smem_bytes
from tkq.norms.plan import plan
from tkq.norms.spec import NormSpec
from tkq.testing import assert_2x

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def make(shape, dtype, how, weight):
    torch.manual_seed(4)
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    harden(how, x, residual)
    return dict(x=x, weight=torch.randn(weight).to(dtype), residual=residual)


def gradients(kind, tensors, stored, dtype, dy):
    own = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
    y, _ = torch_norm_of_stored(kind, stored, own["x"], own["weight"], None, own["residual"])
    return torch.autograd.grad(y, list(own.values()), dy.to(dtype))


def run(route, kind, tensors, total):
    x, weight, residual = tensors.values()
    if route == "op":
        return getattr(torch.ops.tkq, kind)(x, weight, None, EPS, residual, 0.0, None, total, True)[:2]
    norm = getattr(tkq, kind)
    if route == "compiled":
        torch._dynamo.reset()
        norm = torch.compile(norm, backend="aot_eager", fullgraph=True)
    return norm(x, weight, residual=residual, eps=EPS, prenorm=True, residual_dtype=total)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route, dtype, total", [("eager", BF16, BF16), ("eager", FP16, FP16), ("eager", FP32, BF16),
                                                 ("op", BF16, BF16), ("compiled", BF16, BF16)])
@pytest.mark.parametrize("shape, weight", [((12, 256), 256), ((12, 3, 64), (3, 64))])
def test_gradients_are_those_at_the_sum_as_it_is_stored(kind, route, dtype, total, shape, weight):
    for how in HARD if route == "eager" else ("constant", "nearly constant"):
        if (how, dtype) == ("large", FP16):  # that would be infinite
            continue
        tensors = make(shape, dtype, how, weight)
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        y, h = run(route, kind, leaves, total)
        assert torch.equal(h, (tensors["x"].float() + tensors["residual"].float()).to(total))
        dy = torch.randn(shape).to(y.dtype)
        found = torch.autograd.grad(y, list(leaves.values()), dy)
        truth, same = (gradients(kind, tensors, h.detach(), wide, dy) for wide in (torch.float64, torch.float32))
        for name, ours, wanted, theirs in zip(tensors, found, truth, same, strict=True):
            assert_2x(ours, wanted, theirs.to(ours.dtype), ulps=3, bias_ulps=0.25, what=f"{how} {name}")


def test_a_constant_row_gives_the_weight_no_gradient():
    tensors = make((16, 1024), BF16, "constant", 1024)
    weight = tensors["weight"].requires_grad_()
    y = tkq.layernorm(tensors["x"], weight, residual=tensors["residual"])
    y.backward(torch.randn_like(y))
    assert (weight.grad == 0).all()


def spec(kind, **options):
    return NormSpec(kind, 4096, "bf16", "bf16", None, 4, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounded, options", [
    (True, dict(residual="bf16", total="bf16", stats=True)), (True, dict(residual="fp32", total="fp16", stats=True)),
    (False, dict(residual="bf16", total="fp32", stats=True)), (False, dict(residual="bf16", total="bf16")),
    (False, dict(total="fp16", stats=True)),  # the backward pass reads x
    (False, dict(stats=True)), (False, dict(residual="bf16", total="bf16", out="e4m3", scale="row"))])
def test_which_kernels_have_statistics_of_both_sums(kind, rounded, options):
    s = spec(kind, **options)
    assert s.rounded == rounded
    assert s.exchanges == (2 if s.scale == "row" or (rounded and kind == "layernorm") else 1)


def test_the_second_exchange_has_room():
    config = plan(spec("layernorm", residual="bf16", total="bf16", stats=True))
    with_both, with_one = (smem_bytes(spec("layernorm", residual="bf16", total=total, stats=True), config)
                           for total in ("bf16", "fp32"))
    assert with_both == with_one + config.threads // 32 * 8 + 16

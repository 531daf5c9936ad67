"""The norms' options on the GPU: gradients, of residuals, of weights of heads, compiled."""
import pytest
import torch

import tkq
from tests.helpers.norms.options import (  # noqa: F401  a fixture
    EPS,
    HARD,
    KINDS,
    harden,
    make,
    poison,
    torch_norm,
    torch_norm_of_stored,
)
from tkq.testing import assert_2x


@pytest.fixture
def backward():
    """The kernels of rows with one weight: another module's."""
    return pytest.importorskip("tkq.norms.backward.ops")


def gradients(kind, leaves, dtype, grads, stored, offset=0.0):
    """Of torch's own, the inputs in dtype; of the sum as it is stored, where there is a residual."""
    own = {n: t.detach().to(dtype).requires_grad_(t.requires_grad) for n, t in leaves.items()}
    given = [own.get(n) for n in ("x", "weight", "bias", "residual")]
    y, h = torch_norm(kind, *given, offset) if stored is None else torch_norm_of_stored(kind, stored, *given, offset)
    used = [(r, g) for r, g in zip((y, h), grads) if g is not None and r.requires_grad]
    wanted = {n: t for n, t in own.items() if t.requires_grad}
    found = torch.autograd.grad([r for r, _ in used], list(wanted.values()), [g.to(dtype) for _, g in used])
    return dict(zip(wanted, found))


def stored_sum(leaves, h):
    """The sum with the residual as the backward pass reads it: the result, or in the wider of both types."""
    if "residual" not in leaves:
        return None
    x, residual = leaves["x"].detach(), leaves["residual"].detach()
    dtype = torch.promote_types(x.dtype, residual.dtype) if h is None else h.dtype
    stored = (x.float() + residual.float()).to(dtype)
    assert h is None or torch.equal(h.detach(), stored), "the sum is rounded once"
    return stored


def check_gradients(kind, leaves, with_sum=True, offset=0.0, dy=None, ulps=3, what="", **options):
    """options: of the call, beside the rest."""
    found = getattr(tkq, kind)(**leaves, eps=EPS, prenorm=with_sum, weight_offset=offset, **options)
    y, h = found if with_sum else (found, None)
    g = torch.Generator("cuda").manual_seed(7)
    dy = torch.randn(y.shape, device="cuda", generator=g).to(y.dtype) if dy is None else dy
    dh = torch.randn(y.shape, device="cuda", generator=g).to(h.dtype) if with_sum else None
    both = with_sum and h.requires_grad
    torch.autograd.backward([y, h] if both else [y], [dy, dh] if both else [dy])
    stored = stored_sum(leaves, h)
    truth, same = (gradients(kind, leaves, dtype, (dy, dh), stored, offset) for dtype in (torch.float64, torch.float32))
    for name, leaf in leaves.items():
        if not leaf.requires_grad:
            assert leaf.grad is None
            continue
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape
        # The mean of many roundings to 16 bits is not 0, but some hundredth of one: 0.0028 for 129000 of them.
        assert_2x(leaf.grad, truth[name], same[name].to(leaf.dtype), ulps=ulps, bias_ulps=max(0.05, ulps / 300),
                  what=f"{what} {name}")


def leaves_of(shape, x="bf16", frozen=(), how=None, **vectors):
    inputs, extra = make(shape, x, **vectors)
    if how is not None:
        harden(how, inputs, extra["residual"])
    return {n: t.requires_grad_(n not in frozen) for n, t in dict(x=inputs, **extra).items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [1000, 4096])
@pytest.mark.sampled(each_value=True)
def test_gradients_of_a_plain_call(backward, kind, N):
    for frozen in ((), ("weight",), ("x",)) if N == 1000 else ((),):
        check_gradients(kind, leaves_of((129, N), weight="bf16", frozen=frozen), with_sum=False)


@pytest.mark.parametrize("kind, x, residual", [("rmsnorm", "bf16", "fp32"), ("layernorm", "bf16", "fp32"),
                                               ("layernorm", "fp32", "fp32"), ("layernorm", "fp32", "bf16")])
def test_gradients_with_a_residual(backward, kind, x, residual):
    for vectors, how in ((dict(weight="fp32", bias="fp32", residual=residual), how) for how in (None, *HARD)):
        check_gradients(kind, leaves_of((129, 1000), x, how=how, **vectors), offset=1.0, what=how)
        if x == "bf16":
            leaves = leaves_of((129, 1000), x, how=how, frozen=("residual", "bias"), **vectors)
            check_gradients(kind, leaves, offset=1.0, what=how)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_the_sum_alone(backward, kind):
    leaves = leaves_of((33, 1000), "bf16", how="nearly constant", residual="fp32", weight="bf16")
    _, h = getattr(tkq, kind)(leaves["x"], leaves["weight"], residual=leaves["residual"], prenorm=True)
    dh = torch.randn_like(h)
    h.backward(dh)
    assert torch.equal(leaves["residual"].grad, dh) and torch.equal(leaves["x"].grad, dh.bfloat16())
    assert leaves["weight"].grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_not_contiguous(backward, kind):
    leaves = leaves_of((64, 1000), "fp32", weight="fp32")
    for dy in (torch.randn(1000, 64, device="cuda").t(), torch.randn(64, 1200, device="cuda")[:, 100:1100],
               torch.ones((), device="cuda").expand(64, 1000)):
        for leaf in leaves.values():
            leaf.grad = None
        check_gradients(kind, leaves, with_sum=False, dy=dy)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_leading_dimensions(backward, kind):
    leaves = leaves_of((3, 7, 5, 256), "bf16", weight="bf16", residual="bf16")
    flat = {n: t.detach().reshape(-1, 256).clone().requires_grad_() if t.dim() > 1 else t.detach().clone()
            .requires_grad_() for n, t in leaves.items()}
    for tensors in (leaves, flat):
        rest = {n: t for n, t in tensors.items() if n != "x"}
        y, h = getattr(tkq, kind)(tensors["x"], **rest, prenorm=True)
        (y.float().square().sum() + h.float().square().sum()).backward()
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad.view(flat[name].shape), flat[name].grad), name


@pytest.mark.parametrize("kind, D", [pytest.param(k, D, marks=[pytest.mark.slow] * (k != KINDS[i % 2]))
                                     for k in KINDS for i, D in enumerate((64, 128, 100, 33, 1024))])
@pytest.mark.parametrize("H", [1, 5, 32])
@pytest.mark.sampled(each_value=True)
def test_gradients_of_weights_of_heads(kind, D, H):
    for R in (1, 61):
        leaves = leaves_of((R, H, D), "bf16", weight=((H, D), "bf16"))
        check_gradients(kind, leaves, with_sum=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(when=lambda kind: kind == "rmsnorm")
def test_gradients_of_heads_with_every_option(kind):
    vectors = dict(weight=((6, 128), "fp32"), bias=((6, 128), "fp32"), residual="fp32")
    for how in (None, *HARD):
        check_gradients(kind, leaves_of((2, 300, 6, 128), "bf16", how=how, **vectors), offset=1.0, what=how)
    for frozen in (("weight", "bias"), ("x", "residual"), ("x", "bias", "weight")):
        check_gradients(kind, leaves_of((2, 50, 6, 128), "bf16", frozen=frozen, **vectors), offset=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_heads_in_a_packed_qkv(kind):
    """x is a slice, and so is the gradient that comes in; neither is copied."""
    qkv = torch.randn(2, 150, 3, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dqkv = torch.randn_like(qkv)
    norm = getattr(tkq, kind)
    norm(qkv[:, :, 1], w, eps=EPS).backward(dqkv[:, :, 2])
    x = qkv[:, :, 1].detach().contiguous().requires_grad_()
    v = w.detach().clone().requires_grad_()
    norm(x, v, eps=EPS).backward(dqkv[:, :, 2].contiguous())
    assert torch.equal(qkv.grad[:, :, 1], x.grad) and torch.equal(w.grad, v.grad)
    assert (qkv.grad[:, :, 0] == 0).all()


def test_gradients_of_heads_are_the_same_bits_every_time_in_two_launches():
    from torch.profiler import ProfilerActivity, profile

    leaves = leaves_of((4096, 32, 128), "bf16", weight=((32, 128), "bf16"))
    dy = torch.randn_like(leaves["x"])

    def run():
        y = tkq.rmsnorm(leaves["x"], leaves["weight"])
        return torch.autograd.grad(y, list(leaves.values()), dy)

    once = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(once, run()))
    y = tkq.rmsnorm(leaves["x"], leaves["weight"])
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        torch.autograd.grad(y, list(leaves.values()), dy)
        torch.cuda.synchronize()
    names = [e.name for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("PerHeadBackward" in name for name in names) == 2, names


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_hard_heads(kind):
    for scale in (1e4, 1e-2):
        x, extra = make((300, 8, 128), "fp32", scale, weight=((8, 128), "fp32"))
        x[7, 3, 5] = 1e4 * scale
        check_gradients(kind, dict(x=x.requires_grad_(), weight=extra["weight"].requires_grad_()), with_sum=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_in_the_last_row_of_heads_stays_with_its_head(kind):
    """Threads whose rows are past the end hold numbers of the last one, of another head perhaps."""
    x, extra = make((5, 3, 128), "fp32", weight=((3, 128), "fp32"), bias=((3, 128), "fp32"))
    x[-1, -1, 7] = float("nan")
    leaves = dict(x=x, **extra)
    for t in leaves.values():
        t.requires_grad_()
    getattr(tkq, kind)(**leaves).sum().backward()
    assert torch.isnan(leaves["weight"].grad[2]).any() and torch.isnan(x.grad[-1, -1]).all()
    assert torch.isfinite(leaves["weight"].grad[:2]).all() and torch.isfinite(leaves["bias"].grad).all()
    assert torch.isfinite(x.grad[:-1]).all() and torch.isfinite(x.grad[-1, :2]).all()


@pytest.mark.parametrize("kind", ["rmsnorm", pytest.param("layernorm", marks=pytest.mark.slow)])
def test_compiled(backward, kind):
    """By inductor, forward and backward, in one piece; the same bits as eager."""
    torch._dynamo.reset()

    def step(x, w, r):
        y, h = getattr(tkq, kind)(x, w, residual=r, prenorm=True, residual_dtype=torch.float32)
        return y.float().square().mean() + h.mean()

    found = []
    for run in (step, torch.compile(step, fullgraph=True)):
        leaves = leaves_of((64, 1024), "bf16", weight="bf16", residual="bf16")
        run(*leaves.values()).backward()
        found.append([t.grad for t in leaves.values()])
    for eager, compiled in zip(*found, strict=True):
        assert torch.allclose(eager.float(), compiled.float(), rtol=2e-2, atol=1e-6)

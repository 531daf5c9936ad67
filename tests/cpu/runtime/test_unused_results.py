"""Unused results, and those that have no gradient: autograd makes no zeros for them, and formulas bear it."""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tkq


class Fills(TorchDispatchMode):
    """How many elements every tensor of zeros that was made has."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.zeros, torch.ops.aten.zeros_like, torch.ops.aten.new_zeros):
            self.elements.append(found.numel())
        return found


class Swallows(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def through_the_op(call):
    """Past the route of plain eager mode: what a compiler or a dispatch mode sees."""
    def run(*args, **options):
        with Fills():
            return call(*args, **options)
    return run


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


WAYS = pytest.mark.parametrize("route", ["recorded", "op"])


def linear(route):
    x, w, target = normal(6, 16, dtype=torch.bfloat16), normal(40, 16, dtype=torch.bfloat16), torch.arange(6)
    loss = (through_the_op(tkq.linear_cross_entropy) if route == "op" else tkq.linear_cross_entropy)(x, w, target)
    return (x, w), (loss,)


def cross_entropy(route):
    x = normal(6, 40)
    return (x,), ((through_the_op(tkq.cross_entropy) if route == "op" else tkq.cross_entropy)(x, torch.arange(6)),)


def prenorm(kind, residual):
    def made(route):
        x, w, r = normal(6, 32), normal(32), normal(5, 6, 32)[0].detach().requires_grad_()
        call = getattr(tkq, kind)
        found = (through_the_op(call) if route == "op" else call)(x, w, residual=r if residual else None, prenorm=True)
        return (x, w, r) if residual else (x, w), found
    return made


def rope_qk(route):
    q, k, table = normal(2, 8, 3, 16), normal(2, 8, 1, 16), tkq.rope_cos_sin(8, 16, device="cpu")
    return (q, k), (through_the_op(tkq.rope_qk) if route == "op" else tkq.rope_qk)(q, k, *table)


def attention(route):
    q, k, v = (normal(1, rows, heads, 64, dtype=torch.bfloat16) for rows, heads in ((7, 2), (8, 1), (8, 1)))
    return (q, k, v), (through_the_op(tkq.flash_attn) if route == "op" else tkq.flash_attn)(q, k, v, return_lse=True)


CALLS = {"linear_cross_entropy": linear, "cross_entropy": cross_entropy, "rope_qk": rope_qk, "attention": attention}
CALLS |= {f"{kind}{' with residual' * r}": prenorm(kind, r) for kind in ("rmsnorm", "layernorm") for r in (False, True)}


@WAYS
@pytest.mark.parametrize("name", CALLS)
def test_no_zeros_as_large_as_a_result(name, route):
    """linear_cross_entropy's dx and dweight leave its forward as results, which have no gradient."""
    inputs, results = CALLS[name](route)
    with Fills() as seen:
        torch.autograd.grad(results, inputs, [torch.ones_like(r) for r in results])
    assert max(seen.elements, default=0) <= 1, seen.elements


@WAYS
@pytest.mark.parametrize("name", [name for name in CALLS if "entropy" not in name])
def test_one_result_alone(name, route):
    """The same gradients as where the other result's gradient is zeros."""
    for used in (0, 1):
        inputs, results = CALLS[name](route)
        given = [torch.ones_like(r) if i == used else torch.zeros_like(r) for i, r in enumerate(results)]
        whole = torch.autograd.grad(results, inputs, given, retain_graph=True)
        alone = torch.autograd.grad(results[used], inputs, given[used], allow_unused=True)
        for a, b in zip(alone, whole):
            assert (a is None and not b.any()) or torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-6)


@WAYS
@pytest.mark.parametrize("name", CALLS)
def test_nothing_came_back(name, route):
    """What used the results has no gradient for them."""
    inputs, results = CALLS[name](route)
    swallowed = [Swallows.apply(r).sum() for r in results]
    found = torch.autograd.grad(sum(swallowed), inputs, allow_unused=True)
    assert all(g is None or not g.any() for g in found)

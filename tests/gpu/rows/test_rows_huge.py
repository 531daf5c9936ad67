"""More than 2^31 elements, where offsets in 32 bits would wrap: heads, quantising norms, persistent norms, gates.

A few rows, the first and last ones and some beyond 2^31, are looked at: they come out as on their own."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.testing import assert_2x

pytestmark = [pytest.mark.slow, pytest.mark.alone]
BF16, EPS = torch.bfloat16, 1e-5
KINDS = ["rmsnorm", "layernorm"]


def places(M):
    """Rows to look at, of M."""
    return [0, 1, M // 4, M // 2 - 1, M // 2 + 1, M - 2, M - 1]


def huge(M, *rest, fill=1.0, seed=0):
    """(M, *rest) of one number, but for the rows that are looked at; and those."""
    g = torch.Generator("cuda").manual_seed(seed)
    sample = torch.randn(len(places(M)), *rest, device="cuda", generator=g).to(BF16)
    x = torch.full((M, *rest), fill, device="cuda", dtype=BF16)
    for row, values in zip(places(M), sample):
        x[row] = values
    return x, sample


def rows_of(x, M):
    return torch.stack([x[row] for row in places(M)])


def vector(*shape, dtype=BF16, seed=9):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_their_gradients(kind):
    """dy is 0 but in those rows, so that the weight's gradient is theirs."""
    H, D = 32, 128
    M = (1 << 31) // (H * D) + 5
    (x, some), (dy, some_dy), norm = huge(M, H, D), huge(M, H, D, fill=0.0, seed=1), getattr(tkq, kind)
    found = []
    for given, gradient in ((x, dy), (some, some_dy)):
        leaf, weight = given.requires_grad_(), vector(H, D).requires_grad_()
        with poisoned():
            y = norm(leaf, weight, eps=EPS)
            dx, dweight = torch.autograd.grad(y, (leaf, weight), gradient)
        found.append((y.detach(), dx, dweight))
    (y, dx, dweight), (some_y, some_dx, some_dweight) = found
    assert torch.equal(rows_of(y, M), some_y) and torch.equal(rows_of(dx, M), some_dx)
    assert torch.allclose(dweight.float(), some_dweight.float(), rtol=2.0**-7, atol=1e-3)
    assert torch.isfinite(y[::997]).all() and torch.count_nonzero(dx) == torch.count_nonzero(some_dx)


@pytest.mark.parametrize("kind, granularity, N, heavy", [
    ("rmsnorm", "row", 4096, False), ("rmsnorm", "1x128", 4096, False), ("layernorm", "row", 131072, False),
    ("layernorm", "row", 262144, True), ("layernorm", "1x128", 262144, True)])
def test_quantised(kind, granularity, N, heavy):
    """heavy: float32 weight and bias, for which blocks stay (`tkq.norms.forward.fp8_persistent`)."""
    M = (1 << 31) // N + 5
    x, some = huge(M, N)
    op, weight = getattr(tkq, kind + "_quant"), vector(N, dtype=torch.float32 if heavy else BF16)
    options = dict(eps=EPS, granularity=granularity, bias=vector(N, dtype=torch.float32, seed=10) if heavy else None)
    with poisoned():
        q, scale = op(x, weight, **options)
        some_q, some_scale = op(some, weight, **options)
    assert torch.equal(rows_of(q.view(torch.uint8), M), some_q.view(torch.uint8))
    assert torch.equal(rows_of(scale, M), some_scale)
    assert torch.isfinite(scale).all() and torch.isfinite(q[::997].float()).all()


@pytest.mark.parametrize("N", [65536, 262144])
def test_persistent_rows(N):
    """layernorm of the longest rows, with float32 vectors: `tkq.norms.forward.layernorm_persistent`."""
    M = (1 << 31) // N + 5
    x, some = huge(M, N)
    weight, bias = vector(N, dtype=torch.float32), vector(N, dtype=torch.float32, seed=10)
    with poisoned():
        y = tkq.layernorm(x, weight, bias, eps=EPS)
    truth = F.layer_norm(some.double(), (N,), weight.double(), bias.double(), EPS)
    peer = F.layer_norm(some.float(), (N,), weight, bias, EPS).to(BF16)
    assert_2x(rows_of(y, M), truth, peer, ulps=1)
    assert torch.isfinite(y).all()


def test_gradients_of_a_gate():
    N = 8192
    M = (1 << 31) // N + 5
    (gate, some_gate), (up, some_up), (dy, some_dy) = (huge(M, N, seed=i) for i in range(3))
    with poisoned():
        found = torch.autograd.grad(tkq.swiglu(gate.requires_grad_(), up.requires_grad_()), (gate, up), dy)
        wanted = torch.autograd.grad(tkq.swiglu(some_gate.requires_grad_(), some_up.requires_grad_()),
                                     (some_gate, some_up), some_dy)
    for mine, theirs in zip(found, wanted):
        assert torch.equal(rows_of(mine, M), theirs) and torch.isfinite(mine[::997]).all()

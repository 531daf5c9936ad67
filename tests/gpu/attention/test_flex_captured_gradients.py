"""Gradients of captured tensors of tkq.flex_attention on the GPU against float64: by all combinations of indices, groups
of heads, indices that lie, NaN behind every end."""
import math

import pytest
import torch

import tkq
from tests.gpu.attention.test_flex_attention import B, H, make, mask_of
from tests.helpers.attention import flex_captures
from tests.helpers.attention import flex_gallery as gallery
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.testing import assert_2x

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention. score_mod. the gradient of a captured tensor")
S, FEW = 300, 64
CASES = {"shared": ((B, H, H), gallery.causal, 128), "tables": ((B, H, 2), gallery.document, 64)}


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


def case(name):
    """(heads, mask_mod, its block mask)"""
    heads, mask_mod, size = CASES[name]
    if mask_mod is gallery.document:
        mask_mod = gallery.document(torch.arange(S, device="cuda") // 70)
    return heads, mask_mod, mask_of(mask_mod, S, S, None, None, size)


def framed(x):
    """The same, in the midst of NaN."""
    around = torch.full([n + 16 for n in x.shape], math.nan, dtype=x.dtype, device=x.device)
    inside = around[tuple(slice(8, 8 + n) for n in x.shape)]
    with torch.no_grad():
        inside.copy_(x)
    return inside.detach().requires_grad_(x.requires_grad)


def judge(function, ours, given, mask_mod, do, what):
    """ours: the gradients of the captured tensors. Of few elements they are judged as bf16: PyTorch's may be right by
    chance."""
    q, k, v = given
    seen = gallery.visible(mask_mod, q.shape[0], q.shape[1], S, S, "cuda")
    true, low = (flex_captures.gradients(*(x.to(dtype) for x in given), function, seen, do, dtype)
                 for dtype in (torch.float64, q.dtype))
    for i, (x, a, b, c) in enumerate(zip(function[1], ours, true, low)):
        assert a.dtype == x.dtype and a.shape == x.shape
        few = x.numel() < FEW
        a, b, c = (y.flatten().contiguous() if few else y for y in (a.to(q.dtype) if few else a, b, c))
        assert_2x(a, b, c, 1, f"{what} {i}", block=None if few else 128)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    """Also of captured tensors alone, and with NaN around everything."""
    heads, mask_mod, mask = case(name)
    of, learned = flex_captures.functions(H, S, "cuda")[name]
    q, k, v = (x.requires_grad_() for x in make(S, S, heads=heads))
    do = torch.randn(B, H, S, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).bfloat16()
    o = tkq.flex_attention(q, k, v, of(*learned), mask, enable_gqa=True)
    ours = torch.autograd.grad(o, (*learned, q, k, v), do)
    judge((of, learned), ours[:len(learned)], (q, k, v), mask_mod, do, name)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    dense, _ = gallery.dense(*leaves, of(*(x.detach() for x in learned)), gallery.visible(mask_mod, B, H, S, S, "cuda"))
    for a, b in zip(ours[len(learned):], torch.autograd.grad(dense, leaves, do.double())):
        assert (a.double() - b).norm() < 1e-2 * b.norm()
    framed_learned, framed_qkv = [framed(x) for x in learned], [framed(x.detach()) for x in (q, k, v)]
    o = tkq.flex_attention(*framed_qkv, of(*framed_learned), mask, enable_gqa=True)
    for a, b in zip(torch.autograd.grad(o, framed_learned, framed(do)), ours):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4 * b.abs().max().item())


def test_indices_that_lie():
    """Where the element was read, its gradient is added; nothing else is touched."""
    heads, mask_mod, mask = case("tables")
    lying = torch.tensor([5, -3, 1 << 40, -(1 << 40)], device="cuda").repeat(75)
    q, k, v = make(S, S, heads=heads)
    do = torch.randn_like(q)
    _, learned = flex_captures.functions(H, S, "cuda")["tables"]
    o = tkq.flex_attention(q, k, v, flex_captures.tables(lying)(*learned), mask, enable_gqa=True)

    def told(bias, table):
        first = lying.clamp(-10, 10)  # - 6 and wrapped, then inside
        first = torch.where(first - 6 < 0, first, first - 6).clamp(0, 5)

        def score_mod(score, b, h, q, kv):
            score = 5 * torch.tanh((score + bias[h, q, kv]) / 5)
            return score + table[first[q], h] * table[2:][lying[kv] % 4, -1 - h]
        return score_mod

    judge((told, learned), torch.autograd.grad(o, learned, do), (q, k, v), mask_mod, do, "indices that lie")


def test_expanded():
    """A tensor that is expanded, a second backward."""
    heads, mask_mod, mask = case("shared")
    of, learned = flex_captures.functions(H, S, "cuda")["shared"]
    row = learned[0].detach()[:1].requires_grad_()
    q, k, v = make(S, S, heads=heads)
    do = torch.randn_like(q)
    wide = row.expand(H, S)
    given = (wide, *learned[1:])
    o = tkq.flex_attention(q, k, v, of(*given), mask)
    ours = torch.autograd.grad(o, given, do, retain_graph=True)
    judge((of, given), ours, (q, k, v), mask_mod, do, "expanded")
    torch.testing.assert_close(torch.autograd.grad(o, row, do)[0], ours[0].sum(0, keepdim=True), rtol=1e-3, atol=1e-3)


def test_lse():
    """The gradient of the log-sum-exp reaches captured tensors, rows that see nothing give none."""
    heads, _, _ = case("shared")
    of, learned = flex_captures.functions(H, S, "cuda")["shared"]
    mask_mod = lambda b, h, q, kv: (q >= kv) & (q > 40)
    q, k, v = make(S, S, heads=heads)
    _, lse = tkq.flex_attention(q, k, v, of(*learned), mask_of(mask_mod, S, S), return_lse=True)
    lse = lse.masked_fill(lse == -math.inf, 0)
    weight = torch.randn(lse.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    ours = torch.autograd.grad(lse, learned, weight)
    double = [x.detach().double().requires_grad_() for x in learned]
    _, true = gallery.dense(q, k, v, of(*double), gallery.visible(mask_mod, B, H, S, S, "cuda"))
    for a, b in zip(ours, torch.autograd.grad(true.masked_fill(true == -math.inf, 0), double, weight.double())):
        assert (a.double() - b).norm() < 1e-4 * b.norm()
        assert a.isfinite().all()


def test_deterministic_algorithms_are_refused():
    of, learned = flex_captures.functions(H, S, "cuda")["shared"]
    q, k, v = make(S, S)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(NotImplementedError, match="captured tensor is added up in any order"):
        tkq.flex_attention(q, k, v, of(*learned))

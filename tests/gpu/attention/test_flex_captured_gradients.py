"""Gradients of captured tensors of tkq.flex_attention on the GPU against float64: by all combinations of indices,
groups of heads, indices that lie, NaN behind every end."""
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


def late(b, h, q, kv):
    """Rows that see nothing, then a causal mask."""
    return (q >= kv) & (q > 40)


def same_document(ids):
    """Keys behind the last one would be seen, whose documents are read as the last one's."""
    return lambda b, h, q, kv: ids[q] == ids[kv]


# heads, block size of the mask, is there a gradient of lse: each a kernel of its own
CASES = {"shared": ((B, H, 2), 128, True), "tables": ((B, H, H), 64, False)}


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


def case(name, D=128):
    """(q, k, v, do, dlse or None), mask_mod"""
    heads, _, with_lse = CASES[name]
    mask_mod = late if with_lse else same_document(torch.arange(S, device="cuda") // 70)
    g, (q, k, v) = torch.Generator("cuda").manual_seed(3), make(S, S, D, heads=heads)
    do = torch.randn(q.shape, device="cuda", generator=g).bfloat16()
    return (q, k, v, do, torch.randn(q.shape[:3], device="cuda", generator=g) if with_lse else None), mask_mod


def gradients(name, given, score_mod, mask_mod, leaves):
    q, k, v, do, dlse = given
    mask = mask_of(mask_mod, S, S, None, None, CASES[name][1])
    o, lse = tkq.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)
    return flex_captures.gradients_of((o, lse), leaves, do, dlse)


def framed(x):
    """The same, in the midst of NaN."""
    if x is None:
        return None
    around = torch.full([n + 16 for n in x.shape], math.nan, dtype=x.dtype, device=x.device)
    inside = around[tuple(slice(8, 8 + n) for n in x.shape)]
    with torch.no_grad():
        inside.copy_(x)
    return inside.detach().requires_grad_(x.requires_grad)


def judge(function, ours, given, mask_mod, what):
    """ours: the gradients of the captured tensors. Of few elements they are judged as bf16: PyTorch's may be right by
    chance."""
    q, seen = given[0], gallery.visible(mask_mod, *given[0].shape[:2], S, S, "cuda")
    true, low = (flex_captures.gradients(given, function, seen, dtype) for dtype in (torch.float64, q.dtype))
    for i, (x, a, b, c) in enumerate(zip(function[1], ours, true, low)):
        assert a.dtype == x.dtype and a.shape == x.shape
        few = x.numel() < FEW
        a, b, c = (y.flatten() if few else y for y in (a.to(q.dtype) if few else a, b, c))
        assert_2x(a, b, c, 1, f"{what} {i}", block=None if few else 128)


@pytest.mark.parametrize("D", (128, pytest.param(256, marks=pytest.mark.slow)))
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, D):
    """Beside those of q, k and v; then with NaN around everything, of captured tensors alone."""
    given, mask_mod = case(name, D)
    of, learned = flex_captures.functions(H, S, "cuda")[name]
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    ours = gradients(name, (q, k, v, *given[3:]), of(*learned), mask_mod, (*learned, q, k, v))
    judge((of, learned), ours[:len(learned)], given, mask_mod, name)
    leaves, seen = [x.detach().double().requires_grad_() for x in (q, k, v)], gallery.visible(
        mask_mod, B, H, S, S, "cuda")
    dense = gallery.dense(*leaves, of(*(x.detach() for x in learned)), seen)
    for a, b in zip(ours[len(learned):], flex_captures.gradients_of(dense, leaves, *given[3:])):
        assert (a.double() - b).norm() < 1e-2 * b.norm()
    inside = [framed(x) for x in learned]
    again = gradients(name, [framed(x) for x in given], of(*inside), mask_mod, inside)
    for a, b in zip(again, ours):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4 * b.abs().max().item())


def test_indices_that_lie():
    """Where the element was read its gradient is added, and nowhere else."""
    given, mask_mod = case("tables")
    lying = torch.tensor([5, -3, 1 << 40, -(1 << 40)], device="cuda").repeat(75)
    _, learned = flex_captures.functions(H, S, "cuda")["tables"]
    ours = gradients("tables", given, flex_captures.tables(lying)(*learned), mask_mod, learned)

    def told(bias, table):
        near = lying.clamp(-20, 20)  # - 6, wrapped, then inside
        first = torch.where(near < 6, near, near - 6).clamp(0, 5)

        def score_mod(score, b, h, q, kv):
            score = 5 * torch.tanh((score + bias[h, q, kv]) / 5)
            return score + table[first[q], h] * table[lying[kv] % 4 + 2, -1 - h]
        return score_mod

    judge((told, learned), ours, given, mask_mod, "indices that lie")


def test_expanded():
    given, mask_mod = case("shared")
    of, learned = flex_captures.functions(H, S, "cuda")["shared"]
    row = learned[0].detach()[:1].requires_grad_()
    tensors = (row.expand(H, S), *learned[1:])
    found = gradients("shared", given, of(*tensors), mask_mod, (*tensors, row))
    judge((of, tensors), found[:-1], given, mask_mod, "expanded")
    torch.testing.assert_close(found[-1], found[0].sum(0, keepdim=True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(when=lambda name: name == "tables")
def test_compiled(name, backend):
    """In one graph, functions and all: results and gradients are those of a plain call."""
    given, mask_mod = case(name)
    of, learned = flex_captures.functions(H, S, "cuda")[name]
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    mask = mask_of(mask_mod, S, S, None, None, CASES[name][1])

    def block(q, k, v, learned, mask):
        o, lse = tkq.flex_attention(q, k, v, of(*learned), mask, enable_gqa=True, return_lse=True)
        return o, lse

    torch._dynamo.reset()
    wanted, found = (call(q, k, v, learned, mask) for call in (block, torch.compile(
        block, fullgraph=True, backend=backend)))
    for a, b in zip(found, wanted):
        assert torch.equal(a, b)
    leaves = q, k, v, *learned
    for a, b in zip(*(flex_captures.gradients_of(x, leaves, *given[3:]) for x in (found, wanted))):
        assert a.dtype == b.dtype and (a.double() - b.double()).norm() < 1e-3 * b.double().norm()


def test_deterministic_algorithms_are_refused():
    of, learned = flex_captures.functions(H, S, "cuda")["shared"]
    q, k, v = make(S, S)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(NotImplementedError, match="captured tensor is added up in any order"):
        tkq.flex_attention(q, k, v, of(*learned))

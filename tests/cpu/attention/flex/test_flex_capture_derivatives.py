"""Derivatives of score functions by captured tensors: graphs against autograd in float64, what is refused, the CPU
path."""
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import tkq
from tests.helpers.attention import flex_captures
from tests.helpers.attention import flex_gallery as gallery
from tkq.attention.flex.backward.capture_launch import refuse_if_deterministic
from tkq.attention.flex.backward.sums import Sums
from tkq.attention.flex.functions.derive import capture_slopes_of
from tkq.attention.flex.functions.trace import trace
from tkq.reference.flex import places
from tkq.reference.graphs import evaluate

B, H, S = 2, 3, 24


def by_graph(slopes, shapes, ds, score):
    """Gradients of captured tensors from the derivatives' graph, with ds of each score, by index_put."""
    shape, (derivatives, taken) = ds.shape, slopes
    at = {**places(*shape, "cpu"), "score": score}
    value = lambda i: evaluate(replace(derivatives.graph, nodes=derivatives.graph.nodes[:i + 1]), *taken[1:], at,
                               torch.float64).expand(shape)
    found = [torch.zeros(x, dtype=torch.float64) for x in shapes]
    for load in derivatives.loads:
        into, place = found[load.gradient], []
        for index, size in zip(load.at, into.shape):
            index = value(index).long()
            place.append(torch.where(index < 0, index + size, index).clamp(0, size - 1))
        into.index_put_(tuple(place), ds * value(load.factor), accumulate=True) if place else into.add_(
            (ds * value(load.factor)).sum())
    return found


@pytest.mark.parametrize("name", flex_captures.functions(H, S, "cpu"))
def test_derivatives(name):
    of, learned = flex_captures.functions(H, S, "cpu")[name]
    learned = [x.detach().double().requires_grad_() for x in learned]
    g = torch.Generator().manual_seed(0)
    score, ds = torch.randn(2, B, H, S, S, dtype=torch.float64, generator=g)
    traced = trace("score_mod", of(*(x.detach().float() for x in learned)))
    slots = tuple(i for i, x in enumerate(traced.tensors) if x.is_floating_point())
    slopes = capture_slopes_of(traced, slots)
    slopes = slopes._replace(traced=slopes.traced._replace(tensors=tuple(
        x.double() if x.is_floating_point() else x for x in slopes.traced.tensors)))
    with torch.no_grad():
        found = by_graph(slopes, [traced.tensors[i].shape for i in slots], ds, score)
    value = gallery.over_all(of(*learned), gallery.grid(B, H, S, S, "cpu"), score)
    wanted = torch.autograd.grad(value, learned, ds.expand(value.shape))
    shapes = [traced.tensors[i].shape for i in slots]
    for x, true in zip(learned, wanted):
        torch.testing.assert_close(found[shapes.index(x.shape)], true, rtol=1e-6, atol=1e-6)


KINDS = {"head": lambda x: lambda s, b, h, q, kv: s * x[h], "key": lambda x: lambda s, b, h, q, kv: s + x[kv // 3],
         "query": lambda x: lambda s, b, h, q, kv: s + x[q - b], "each": lambda x: lambda s, b, h, q, kv: s + x[q + kv],
         "diagonal": lambda x: lambda s, b, h, q, kv: s + x[((kv - q).abs().float().sqrt() * 2).long() + h]}


@pytest.mark.parametrize("kind", KINDS)
def test_how_it_is_added_up(kind):
    slopes = capture_slopes_of(trace("score_mod", KINDS[kind](torch.ones(9))), (0,)).derivatives
    assert [Sums(slopes.graph, load).kind for load in slopes.loads] == [kind]


def test_clamped_indices_count_where_they_were_read():
    table = torch.randn(5, requires_grad=True)
    q, k, v = torch.randn(3, 1, 1, 8, 64).bfloat16()
    o = tkq.flex_attention(q, k, v, lambda s, b, h, q, kv: s + table[kv])
    o.float().square().sum().backward()
    assert table.grad[:4].ne(0).all() and table.grad[4] != 0
    inside = table.detach().clone().requires_grad_()
    o = tkq.flex_attention(q, k, v, lambda s, b, h, q, kv: s + inside[kv.clamp(0, 4)])
    o.float().square().sum().backward()
    torch.testing.assert_close(table.grad, inside.grad)


@pytest.mark.parametrize("name", flex_captures.functions(H, S, "cpu"))
def test_cpu_path(name):
    """Through tkq.flex_attention, against float64."""
    of, learned = flex_captures.functions(H, S, "cpu")[name]
    q, k, v, do = (torch.randn(B, H, S, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4))
    mask = create_block_mask(gallery.causal, None, None, S, S, "cpu", 64)
    ours = torch.autograd.grad(tkq.flex_attention(q, k, v, of(*learned), mask), learned, do)
    seen = gallery.visible(gallery.causal, B, H, S, S, "cpu")
    true = flex_captures.gradients((q, k, v, do, None), (of, learned), seen)
    for x, a, b in zip(learned, ours, true):
        assert a.dtype == x.dtype
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-3)


def test_masks_have_no_gradients():
    """A captured tensor of a mask may require one, and gets none."""
    limit = torch.tensor([3.0, 5.0], requires_grad=True)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 8, 64).bfloat16())
    mask = tkq.create_block_mask(lambda b, h, q, kv: (q - kv).abs() < limit[h], None, 2, 8, 8, "cpu", 64)
    tkq.flex_attention(q, k, v, None, mask).sum().backward()
    assert limit.grad is None and q.grad is not None


def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NotImplementedError, match="captured tensor is added up in any order"):
            refuse_if_deterministic()
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="captured tensor"):
            refuse_if_deterministic()
    finally:
        torch.use_deterministic_algorithms(False)
    refuse_if_deterministic()


def test_no_derivative_is_refused():
    step = torch.ones(H, requires_grad=True)
    with pytest.raises(NotImplementedError, match="mod by what depends on"):
        traced = trace("score_mod", lambda s, b, h, q, kv: s + (q - kv) % step[h])
        capture_slopes_of(traced, (0,))


def test_what_has_no_effect_has_no_loads():
    """A floor is flat; a tensor that is compared has no derivative."""
    x = torch.ones(H, requires_grad=True)
    for score_mod in (lambda s, b, h, q, kv: s + x[h].floor(), lambda s, b, h, q, kv: torch.where(x[h] > 0, s, -s)):
        assert capture_slopes_of(trace("score_mod", score_mod), (0,)).derivatives.loads == ()


def test_rows_that_see_nothing_have_no_gradient():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 9, 64).bfloat16())
    mask = create_block_mask(lambda b, h, q, kv: (q > 3) & (q >= kv), None, None, 9, 9, "cpu", 64)
    o, lse = tkq.flex_attention(q, k, v, None, mask, return_lse=True)
    found = torch.autograd.grad((o.float().sum() + lse[:, :, 4:].sum()), (q, k, v))
    assert all(x.isfinite().all() for x in found) and (found[0][:, :, :4] == 0).all() and found[2].ne(0).any()

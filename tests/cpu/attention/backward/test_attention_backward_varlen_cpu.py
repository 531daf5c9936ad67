"""The gradients of flash_attn_varlen without a GPU: beside those of each sequence, traced and not; slots of rows."""
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tkq
from tkq.attention import autograd
from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward import varlen_ops
from tkq.attention.backward.varlen_ops import attention_varlen_backward

LENGTHS = ((3, 5), (0, 0), (7, 2), (0, 4), (6, 0), (5, 9), (1, 1))
MORE = dict(softcap=3.0, softmax_scale=0.2, window_size=(5, 3))


def cumulated(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def given_tensors(dim=16, dim_v=8, heads=4, kv_heads=2, spare=3):
    """q, k, v, sinks that require a gradient; cu_q, cu_k"""
    cu_q, cu_k = (cumulated(n) for n in zip(*LENGTHS))
    new = lambda cu, h, d: torch.randn(int(cu[-1]) + spare, h, d).bfloat16().requires_grad_()
    return (new(cu_q, heads, dim), new(cu_k, kv_heads, dim), new(cu_k, kv_heads, dim_v),
            torch.randn(heads, requires_grad=True)), cu_q, cu_k


def loss_of(o, lse):
    return o.float().square().sum() + torch.where(torch.isfinite(lse), lse, 0.0).square().sum()


def one_by_one(leaves, cu_q, cu_k, used=None, **options):
    """The loss, of flash_attn of each sequence."""
    q, k, v, sinks = leaves
    total = torch.zeros(())
    for s in range(len(LENGTHS)):
        a, b, c, d = (int(cu[i]) for cu in (cu_q, cu_k) for i in (s, s + 1))
        if used is not None:
            b, d = a + int(used[0][s]), c + int(used[1][s])
        total = total + loss_of(*tkq.flash_attn(q[None, a:b], k[None, c:d], v[None, c:d], sinks=sinks, return_lse=True,
                                                **options))
    return total


@pytest.mark.parametrize("traced", (False, True))
@pytest.mark.parametrize("in_use, options", ((False, {}), (False, dict(causal=True)), (True, MORE)))
def test_gradients_are_those_of_each_sequence(traced, in_use, options):
    leaves, cu_q, cu_k = given_tensors()
    used = [torch.tensor([n - n // 3 for n in lengths], dtype=torch.int32) for lengths in zip(*LENGTHS)]

    def loss(q, k, v, sinks):
        more = dict(seqused_q=used[0], seqused_k=used[1]) if in_use else {}
        o, lse = tkq.flash_attn_varlen(q, k, v, cu_q, cu_k, 9, 9, sinks=sinks, return_lse=True, **more, **options)
        if in_use:  # a row that is not in use has the sink for an lse: here it has no part in the loss
            inside = torch.zeros(len(lse[0]), dtype=torch.bool)
            for s, n in enumerate(used[0].tolist()):
                inside[int(cu_q[s]):int(cu_q[s]) + n] = True
        else:
            inside = torch.arange(len(lse[0])) < int(cu_q[-1])
        return o.float().square().sum() + torch.where(inside & torch.isfinite(lse), lse, 0.0).square().sum()

    call = torch.compile(loss, backend="aot_eager") if traced else loss
    found = torch.autograd.grad(call(*leaves), leaves)
    want = torch.autograd.grad(one_by_one(leaves, cu_q, cu_k, used if in_use else None, **options), leaves)
    for name, a, b, x in zip(("dq", "dk", "dv", "dsinks"), found, want, leaves):
        assert a.dtype == x.dtype and torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2), name


@pytest.mark.parametrize("needs", [n for n in itertools.product((0, 1), repeat=4) if any(n)])
def test_exactly_the_gradients_that_are_needed(needs, monkeypatch):
    asked, real = [], autograd.attention_varlen_backward
    monkeypatch.setattr(autograd, "attention_varlen_backward",
                        lambda *a, **kw: asked.append(kw["needs"]) or real(*a, **kw))
    leaves, cu_q, cu_k = given_tensors()
    x = [t.detach().requires_grad_(bool(n)) for t, n in zip(leaves, needs)]
    tkq.flash_attn_varlen(*x[:3], cu_q, cu_k, 9, 9, sinks=x[3]).float().sum().backward()
    assert asked == [tuple(map(bool, needs))]
    assert [t.grad is not None for t in x] == list(map(bool, needs))


def backward_arguments():
    leaves, cu_q, cu_k = given_tensors()
    q, k, v, sinks = (x.detach() for x in leaves)
    o, lse = tkq.flash_attn_varlen(q, k, v, cu_q, cu_k, 9, 9, sinks=sinks, return_lse=True)
    return (torch.randn_like(o), q, k, v, o, lse, None), sinks, Lengths(cu_q, cu_k, None, None, 9, 9), Options()


@pytest.mark.parametrize("place, change, error, words", [
    (0, lambda x: x.float(), TypeError, ("do", "float32")),
    (0, lambda x: x[:, :1], ValueError, ("do", "(25, 4, 8)")),
    (5, lambda x: x.double(), TypeError, ("lse", "float64")),
    (5, lambda x: x[:, :5], ValueError, ("lse", "(4, 25)")),
    (1, lambda x: x.requires_grad_(), NotImplementedError, ("attention_varlen_backward", "q", "grad")),
    (2, lambda x: x[:, :1, :8], ValueError, ("k", "D = 16")),
])
def test_bad_input_is_named(place, change, error, words):
    tensors, *rest = backward_arguments()
    tensors = list(tensors)
    tensors[place] = change(tensors[place].clone())
    with pytest.raises(error) as caught:
        attention_varlen_backward(tuple(tensors), *rest)
    assert all(w in str(caught.value) for w in words), str(caught.value)


def test_opcheck():
    tensors, sinks, lengths, options = backward_arguments()
    for needs in ((True, True, True, True), (False, True, True, False)):
        torch.library.opcheck(torch.ops.tkq.flash_attn_varlen_backward.default,
                              (*tensors, sinks, *lengths, *options, True, *needs))


def test_the_gradient_of_the_sinks_from_what_the_kernel_knows():
    lse, of_rows, sinks = torch.randn(3, 40), torch.randn(3, 40), torch.randn(3)
    lse[:, 7] = float("inf")  # -lse is -inf: no row
    want = (torch.exp(sinks[:, None] - lse) * of_rows).sum(1)
    minus = (-lse / torch.log(torch.tensor(2.0))).reshape(3, 5, 8)
    found = varlen_ops.sinks_gradient(sinks, minus, of_rows.reshape(3, 5, 8))
    assert torch.allclose(found, want, rtol=1e-5)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from((64, 128)))
def test_slots_hold_each_sequence(lengths, size):
    """What ``common.sequences`` relies on: sequence s has the slots from cu[s] // size + s on, enough for its rows,
    and all of them are fewer than total // size + sequences + 1."""
    cu = [0, *itertools.accumulate(lengths)]
    first = [c // size + s for s, c in enumerate(cu)]
    assert all(b - a >= max(-(-n // size), 1) for a, b, n in zip(first, first[1:], lengths))
    assert first[-1] + 1 == cu[-1] // size + len(lengths) + 1


@pytest.mark.parametrize("in_use", (False, True))
def test_a_sink_has_a_gradient_without_keys(in_use):
    """Where nothing is launched on a GPU: of the rows that are a sequence's and in use."""
    (q, _, _, sinks), cu_q, _ = given_tensors()
    k, v = torch.zeros(0, 2, 16).bfloat16(), torch.zeros(0, 2, 8).bfloat16()
    used = [torch.tensor([n - n // 3 for n in lengths], dtype=torch.int32) for lengths in zip(*LENGTHS)]
    lengths = Lengths(cu_q, torch.zeros_like(cu_q), *(used if in_use else (None, None)), 9, 9)
    o, lse, sinks = torch.zeros(len(q), 4, 8).bfloat16(), sinks.detach()[:, None].expand(4, len(q)), sinks.detach()
    tensors = torch.randn(o.shape).bfloat16(), q.detach(), k, v, o, lse, torch.randn(4, len(q))
    want = attention_varlen_backward(tensors, sinks, lengths)
    found = varlen_ops._empty(tensors, sinks, lengths, (True,) * 4)
    assert want[3].abs().min() > 0
    for a, b in zip(found, want):
        assert a.dtype == b.dtype and torch.allclose(a, b, atol=1e-5)
    assert varlen_ops._empty(tensors, sinks, lengths, (False,) * 4) == (None,) * 4

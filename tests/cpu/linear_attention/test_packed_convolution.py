"""The short convolution of packed sequences on the CPU, in float64: each sequence as if it were alone."""
import itertools

import pytest
import torch

from tkq.linear_attention.short_convolution import causal_conv1d

CUTS = {"whole": [0, 9], "short": [0, 1, 1, 3, 9], "around": [2, 5, 8], "falling": [-3, 4, 2, 99], "none": [9, 9],
        "no": [4]}
BOUNDS = {"falling": [0, 4, 4, 9]}


def alone(x, weight, bias, states, cuts):
    y, last = torch.zeros_like(x), states.clone()
    for n, (a, e) in enumerate(itertools.pairwise(cuts)):
        y[:, a:e], last[n:n + 1] = causal_conv1d(x[:, a:e], weight, bias, "silu", states[n:n + 1], True)
    return y, last


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_each_is_as_alone(cuts, width, bias):
    torch.manual_seed(0)
    cu, bounds = torch.tensor(CUTS[cuts]), BOUNDS.get(cuts, CUTS[cuts])
    x, weight, b, states = (torch.randn(s, dtype=torch.float64) for s in (
        (1, 9, 6), (6, width), (6,), (len(cu) - 1, 6, width - 1)))
    leaves = [t.requires_grad_() for t in (x, weight, b, states)]
    b = b if bias else None
    found, last = causal_conv1d(x, weight, b, "silu", states, True, cu)
    want, wanted = alone(x.clone(), weight, b, states, bounds)
    inside = slice(bounds[0], bounds[-1])
    torch.testing.assert_close(found[:, inside], want[:, inside])
    assert torch.equal(last, wanted) and found.is_contiguous()
    dy, dlast = torch.randn_like(found), torch.randn_like(last)
    dy[:, :bounds[0]], dy[:, bounds[-1]:] = 0, 0
    got, right = (torch.autograd.grad((y * dy).sum() + (s * dlast).sum(), leaves, allow_unused=True)
                  for y, s in ((found, last), (want, wanted)))
    for a, e in zip(got, right):
        assert (a is None or not a.any()) if e is None else a is not None or not e.any()
        if a is not None and e is not None:
            torch.testing.assert_close(a, e)
    zeros = torch.zeros_like(states)
    assert torch.equal(causal_conv1d(x, weight, b, "silu", cu_seqlens=cu),
                       causal_conv1d(x, weight, b, "silu", zeros, cu_seqlens=cu))


def test_what_no_sequence_has_reaches_nothing():
    x, weight = torch.randn(1, 9, 6), torch.randn(6, 4, requires_grad=True)
    x[:, :2], x[:, 7:] = torch.nan, torch.inf
    x.requires_grad_()
    y = causal_conv1d(x, weight, None, "silu", cu_seqlens=torch.tensor([2, 5, 7]))
    y[:, 2:7].sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and weight.grad.isfinite().all() and x.grad[:, 2:7].all()


def test_a_sequences_nan_stays_in_it():
    x = torch.randn(1, 9, 6)
    x[:, 4] = torch.nan
    y, last = causal_conv1d(x, torch.randn(6, 4), None, "silu", None, True, torch.tensor([0, 5, 9]))
    assert y[:, 5:].isfinite().all() and last[1].isfinite().all() and y[:, 4].isnan().all()


@pytest.mark.parametrize("changed, error, words", [
    (dict(cu_seqlens=[0, 7]), TypeError, "cu_seqlens: got list"),
    (dict(cu_seqlens=torch.zeros(1, 2)), ValueError, "cu_seqlens: has 2 dimensions"),
    (dict(cu_seqlens=torch.zeros(0)), ValueError, "cu_seqlens: has 0 numbers"),
    (dict(x=torch.zeros(2, 7, 6)), ValueError, "cu_seqlens: has 2 numbers, .* x has 2 rows, allowed .* is 1"),
    (dict(initial_state=torch.zeros(2, 6, 3)), ValueError, r"initial_state: .* expected \(1, 6, 3\)"),
])
def test_what_is_refused(changed, error, words):
    given = dict(x=torch.zeros(1, 7, 6), weight=torch.zeros(6, 4), cu_seqlens=torch.tensor([0, 7])) | changed
    with pytest.raises(error, match=f"causal_conv1d: {words}"):
        causal_conv1d(**given)

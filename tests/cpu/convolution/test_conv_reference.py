"""The reference of the convolution: its gradients against autograd's of its forward, packed sequences as if alone."""
import itertools

import pytest
import torch

import tkq
from tkq.reference import convolution as reference

NUMBERS = torch.zeros(1, 9, dtype=torch.int32)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("cuts", [None, [0, 1, 1, 5, 9], [2, 4, 8], [9, 9]])
def test_gradients_are_autograds(activation, cuts):
    torch.manual_seed(0)
    cu = None if cuts is None else torch.tensor(cuts)
    B, N = (2, 2) if cuts is None else (1, len(cuts) - 1)
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((B, 9, 5), (5, 4), (5,), (N, 5, 3))]
    y, final = reference.causal_conv1d(*given[:3], activation, given[3], cu)
    dy, dfinal = torch.randn_like(y), torch.randn_like(final)
    wanted = torch.autograd.grad((y * dy).sum() + (final * dfinal).sum(), given)
    found = reference.causal_conv1d_backward(dy, dfinal, *given[:3], activation, given[3], cu)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b)


def test_gradients_of_normed_heads_are_autograds():
    torch.manual_seed(0)
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 9, 14), (14, 4), (14,), (2, 14, 3))]
    y, _ = reference.causal_conv1d(*given[:3], "silu", given[3], None, 3, 4)
    plain, _ = reference.causal_conv1d(*given[:3], "silu", given[3])
    torch.testing.assert_close(y[..., :12].unflatten(-1, (3, 4)).norm(dim=-1), torch.ones(2, 9, 3, dtype=torch.float64),
                               rtol=1e-3, atol=1e-3)
    assert torch.equal(y[..., 12:], plain[..., 12:])
    dy = torch.randn_like(y)
    found = reference.causal_conv1d_backward(dy, None, *given[:3], "silu", given[3], None, 3, 4)
    for a, b in zip(found, torch.autograd.grad((y * dy).sum(), given)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("error, words, more", [
    (NotImplementedError, "head_dim: is 32, supported are 64 and 128", dict(norm_heads=1, head_dim=32)),
    (ValueError, "norm_heads: 3 heads of 64 channels", dict(norm_heads=3, head_dim=64)),
    (ValueError, "seq_idx is given, allowed is cu_seqlens None", dict(
        cu_seqlens=torch.tensor([0, 9]), seq_idx=NUMBERS)),
    (ValueError, "seq_idx is given, allowed are initial_state None", dict(output_final_state=True, seq_idx=NUMBERS)),
    (ValueError, "causal_conv1d: seq_idx:", dict(seq_idx=NUMBERS[:, :8])),
    (ValueError, "seq_idx", dict(seq_idx=NUMBERS.to("meta"))),
    (ValueError, "causal_conv1d: cu_seqlens: has 2 dimensions", dict(cu_seqlens=NUMBERS))])
def test_refused_by_name(error, words, more):
    with pytest.raises(error, match=words):
        tkq.causal_conv1d(torch.zeros(1, 9, 128), torch.zeros(128, 4), **more)


def test_it_is_torchs():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((2, 9, 5), (5, 4), (5,)))
    y, final = reference.causal_conv1d(x, weight, bias)
    padded = torch.nn.functional.pad(x.mT, (3, 0))
    torch.testing.assert_close(y, torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=5).mT)
    assert torch.equal(final, x[:, 6:].mT)


def test_sequences_are_as_alone():
    torch.manual_seed(0)
    x, weight, states = torch.randn(1, 9, 5), torch.randn(5, 4), torch.randn(3, 5, 3)
    cuts = [0, 2, 2, 8]
    y, last = reference.causal_conv1d(x, weight, None, "silu", states, torch.tensor(cuts))
    for n, (a, e) in enumerate(itertools.pairwise(cuts)):
        one, state = reference.causal_conv1d(x[:, a:e], weight, None, "silu", states[n:n + 1])
        assert torch.equal(y[:, a:e], one) and torch.equal(last[n:n + 1], state)
    assert not y[:, 8:].any()

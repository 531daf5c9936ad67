"""causal_conv1d on the GPU: numerics by the 2x rule, layouts, states, packed sequences, the same bits in every run."""
import math

import pytest
import torch

import tkq
from tests.helpers.convolution import check, gradient, make
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.integrations.causal_conv1d import causal_conv1d_fn

CUTS = {"ragged": [0, 1, 1, 3, 64, 65, 200], "around": [5, 90, 150], "falling": [-3, 70, 20, 999],
        "ones": list(range(201)), "none": [200, 200]}


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


@pytest.mark.parametrize("S, C", [(203, 264), (1, 8), (3, 512), (2048, 256)])
def test_numerics(S, C):
    check(*make(2, S, C))


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_scales(scale):
    check(*make(2, 200, 264, scale=scale))


@pytest.mark.parametrize("W, dtype, weight, bias, activation", [
    (2, "fp16", None, False, None), (8, "fp32", None, True, "silu"), (3, "bf16", "fp32", True, "silu")])
def test_widths_and_dtypes(W, dtype, weight, bias, activation):
    check(*make(2, 150, 88, W, dtype, weight=weight, bias=bias), activation=activation)


@pytest.mark.parametrize("S, C, W", [(512, 5, 4), (37, 5, 4), pytest.param(36, 3, 8, marks=pytest.mark.slow)])
def test_contiguous_tokens(S, C, W):
    x, *others = make(2, S, C, W, time=True)
    y, _, found = check(x, *others)
    assert y.stride() == x.stride() == found[0].stride()


def test_long_runs_along_time():
    """Several vectors a lane, several runs, the last one short."""
    check(*make(1, 8 * 1030, 3, time=True))


def test_numbers_of_sequences():
    """causal-conv1d's seq_idx: as each run of a number alone."""
    x, weight, bias, _ = make(2, 90, 264)
    seq_idx = (torch.arange(90, device="cuda") // 25 * torch.tensor([[1], [0]], device="cuda")).int()
    with torch.no_grad():
        y = causal_conv1d_fn(x.mT, weight, bias, seq_idx, activation="silu")
        parts = [causal_conv1d_fn(x[:1, a:a + 25].mT, weight, bias, activation="swish") for a in range(0, 90, 25)]
        whole = causal_conv1d_fn(x[1:].mT, weight, bias, activation="silu")
    assert torch.equal(y, torch.cat((torch.cat(parts, 2), whole)))


def test_odd_channels_and_strides():
    check(*make(2, 37, 7))
    x, *others = make(2, 100, 264)
    wide = torch.full((2, 100, 800), math.nan, device="cuda", dtype=torch.bfloat16)
    wide[..., 8:272] = x.detach()
    y, _, found = check(wide[..., 8:272].requires_grad_(), *others)
    again = tkq.causal_conv1d(x, *others[:2], "silu")
    assert torch.equal(y, again)
    assert torch.equal(found[0], torch.autograd.grad(again, x, gradient(x))[0])


@pytest.mark.parametrize("S", [1, 2, 3, 200])
def test_states(S):
    x, *others = make(2, S, 264, states=2)
    check(x, *others, dfinal=True)


def test_states_chain():
    x, weight, bias, _ = make(2, 200, 264)
    with torch.no_grad():
        whole, last = tkq.causal_conv1d(x, weight, bias, "silu", None, True)
        first, middle = tkq.causal_conv1d(x[:, :77], weight, bias, "silu", None, True)
        second, end = tkq.causal_conv1d(x[:, 77:], weight, bias, "silu", middle, True)
    assert torch.equal(torch.cat((first, second), 1), whole) and torch.equal(last, end)


@pytest.mark.parametrize("cuts", CUTS)
def test_packed_sequences(cuts):
    cu = torch.tensor(CUTS[cuts], device="cuda", dtype=torch.int32)
    x, weight, bias, state = make(1, 200, 264, states=len(cu) - 1)
    outside = torch.ones(200, dtype=torch.bool)
    outside[max(0, CUTS[cuts][0]):min(200, CUTS[cuts][-1])] = False
    with torch.no_grad():
        x[0, outside] = math.nan  # what no sequence has reaches nothing
    y, final = tkq.causal_conv1d(x, weight, bias, "silu", state, True, cu)
    found = torch.autograd.grad(y, (x, weight, bias, state), gradient(x))
    assert all(t.isfinite().all() for t in (y, final, *found)) and not y[0, outside].any()
    with torch.no_grad():
        x[0, outside] = 0
    check(x, weight, bias, state, cu=cu, dfinal=True)


def test_packed_without_states_and_long_indices():
    cu = torch.tensor([0, 100, 101, 700], device="cuda")
    x, weight, bias, _ = make(1, 700, 264)
    check(x, weight, bias, cu=cu)
    for a, e in ((0, 100), (100, 101), (101, 700)):
        whole, part = (tkq.causal_conv1d(t, weight, bias, "silu", cu_seqlens=c) for t, c in (
            (x, cu), (x[:, a:e], None)))
        assert torch.equal(whole[:, a:e], part)


def test_the_same_bits():
    x, weight, bias, _ = make(2, 2048, 256)
    found = [torch.autograd.grad(tkq.causal_conv1d(x, weight, bias, "silu"), (x, weight, bias), gradient(x))
             for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_nan_and_infinities_stay_in_their_channel_and_reach():
    x, weight, bias, _ = make(1, 200, 264)
    with torch.no_grad():
        x[0, 100, 8], x[0, 50, 9] = math.nan, math.inf
        y = tkq.causal_conv1d(x, weight, bias, "silu")
    bad = ~y.isfinite()
    assert bad[0, 100:104, 8].all() and bad[0].sum(0)[torch.arange(264, device="cuda") != 9].sum() == 4
    assert not bad[0, :50, 9].any() and not bad[0, 54:, 9].any()


def test_numbers_are_the_sequences_that_they_make():
    """Forward and gradients, bit for bit. Some begin just before a warp's run of tokens, whatever power of 2 it has."""
    cuts = [0, 1, 3, 14, 30, 47, 62, 64, 65, 79, 94, 111, 126, 127, 142, 159, 175, 190, 191, 200]
    cu = torch.tensor(cuts, device="cuda", dtype=torch.int32)
    x, weight, bias, _ = make(1, 200, 264)
    seq_idx = torch.searchsorted(cu, torch.arange(200, device="cuda"), right=True)[None].int()
    found = []
    for packed in (dict(cu_seqlens=cu), dict(seq_idx=seq_idx)):
        y = tkq.causal_conv1d(x, weight, bias, "silu", **packed)
        found.append((y, *torch.autograd.grad(y, (x, weight, bias), gradient(x))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("heads, C, dtype, scale", [((2, 128), 320, "bf16", 1), ((3, 64), 264, "bf16", 1),
                                                    pytest.param((3, 64), 192, "bf16", 1e-4, marks=pytest.mark.slow),
                                                    ((1, 128), 132, "fp32", 1e3)])
def test_normed_heads(heads, C, dtype, scale):
    """Whole warps, half of one, heads that end with the channels; sums of squares below and far above what is added."""
    check(*make(2, 70, C, dtype=dtype, scale=scale), heads=heads)


def test_normed_heads_of_packed_sequences_with_states():
    cu = torch.tensor(CUTS["ragged"], device="cuda", dtype=torch.int32)
    x, weight, bias, state = make(1, 200, 264, states=len(cu) - 1)
    check(x, weight, bias, state, cu=cu, dfinal=True, heads=(2, 128))
    wide = torch.full((1, 264, 208), math.nan, device="cuda", dtype=torch.bfloat16)  # a copy of what lies otherwise
    wide[..., :200] = x.detach().mT
    with torch.no_grad():
        wanted, found = (tkq.causal_conv1d(t, weight, bias, "silu", norm_heads=2) for t in (x, wide[..., :200].mT))
    assert torch.equal(wanted, found)

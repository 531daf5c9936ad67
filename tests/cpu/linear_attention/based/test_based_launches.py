"""Based's launches in plain PyTorch: the features, the chunked forward, and the gradients' assembly, in float64."""
import itertools

import pytest
import torch

from tests.helpers import based_launches
from tkq.linear_attention.based import gradients
from tkq.linear_attention.based.gradients import Saved, backward
from tkq.linear_attention.based.launch import Given
from tkq.linear_attention.based.layout import BLOCKS, COLUMNS, FIRST, MOMENTS, ONE, blocks, columns
from tkq.linear_attention.based.plan import SHORTEST, segments
from tkq.reference.based import based

F64 = torch.float64


def test_every_product_once():
    found = [tuple(sorted(x)) for x in columns() if x is not None]
    want = [(), *((i,) for i in range(16)), *itertools.combinations_with_replacement(range(16), 2)]
    assert len(columns()) == COLUMNS and sorted(found) == sorted(want) and len(found) == 153


def test_blocks_say_what_columns_are():
    kinds = {"linear": lambda x: len(x) == 1, "square": lambda x: len(x) == 2 and x[0] == x[1],
             "pair": lambda x: len(x) == 2 and x[0] != x[1], "one": lambda x: x == ()}
    assert len(blocks()) == BLOCKS
    for i, places in enumerate(columns()):
        assert places is None or kinds[blocks()[i // 8]](places)
    assert columns()[ONE] == () and sum(x is None for x in columns()) == 7
    # the moments' columns are linear ones and the one, all in the first of the two tiles
    assert all(len(x) == 1 for x in columns()[:16]) and ONE < MOMENTS <= FIRST


def make(S, H=2, HV=2, V=32, dtype=F64):
    torch.manual_seed(S)
    return *torch.randn(2, 2, S, H, 16, dtype=dtype), torch.randn(2, S, HV, V, dtype=dtype)


@pytest.mark.parametrize("S", [1, 64, 65, 200])
@pytest.mark.parametrize("norm", [True, False])
def test_forward(S, norm):
    q, k, v = make(S, 1)
    o, sums = based_launches.launched(Given(q, k, v, norm), 0.3)
    want, of_weights = based(q, k, v, 0.3, norm)
    torch.testing.assert_close(o, want)
    assert not norm or torch.allclose(sums, of_weights)


@pytest.fixture
def in_torch(monkeypatch):
    monkeypatch.setattr(gradients, "launch", based_launches.launched)
    monkeypatch.setattr(gradients, "prepare", based_launches.prepared)
    monkeypatch.setattr(gradients, "launch_gradient", based_launches.launched_gradient)


@pytest.mark.parametrize("S", [1, 130])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_gradients(S, norm, heads, in_torch):
    given = [x.requires_grad_() for x in make(S, heads)]
    o, sums = based(*given, 0.3, norm)
    do = torch.randn_like(o)
    want = torch.autograd.grad(o, given, do)
    saved = Saved(*(x.detach() for x in given), *((o.detach(), sums.detach()) if norm else (None, None)))
    for found, exact in zip(backward(saved, 0.3, do), want):
        torch.testing.assert_close(found, exact)


def test_gradients_of_float16_are_scaled_back(in_torch):
    given = [x.requires_grad_() for x in make(300, dtype=torch.float16)]
    o, sums = based(*given)
    do = torch.randn_like(o).half()
    want = torch.autograd.grad(o, given, do.float())
    assert gradients.times(torch.float16, 300) == 16.0
    saved = Saved(*(x.detach() for x in given), o.detach().half(), sums.detach())
    for found, exact in zip(backward(saved, 0.25, do), want):
        torch.testing.assert_close(found.float(), exact.float(), rtol=0, atol=2**-7 * exact.abs().max().item())


def test_only_what_is_wanted(in_torch):
    q, k, v = make(65)
    o, sums = based(q, k, v)
    for needs in itertools.product((True, False), repeat=3):
        found = backward(Saved(q, k, v, o, sums), 0.25, torch.randn_like(v), needs)
        assert [x is not None for x in found] == list(needs)


@pytest.mark.parametrize("blocks, tokens, want", [
    (256, 4096, 1), (67, 1 << 20, 1), (66, 1 << 20, 2), (32, 8192, 4), (16, 32768, 8), (16, 1024, 2), (16, 512, 1),
    (1, 64, 1), (0, 8192, 1), (1, 1 << 20, 132)])
def test_segments(blocks, tokens, want):
    assert segments(blocks, tokens, 132) == want
    assert want == 1 or -(-tokens // 64) // want >= SHORTEST

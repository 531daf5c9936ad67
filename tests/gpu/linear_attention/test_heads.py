"""Two heads of a block that share q and k, against the same in float64, beside one head a block."""
import pytest
import torch

from tests.gpu.linear_attention.test_linear_forward import make
from tests.gpu.linear_attention.test_split import check as check_segments
from tests.gpu.linear_attention.test_split import state_of, wide
from tests.gpu.linear_attention.test_ssd_forward import make as make_ssd
from tests.helpers.linear_launches import launched
from tests.helpers.one_sign import bias_of_one_sign
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.launch import Given, launch
from tkq.linear_attention.ssd.forward import forward
from tkq.testing import assert_2x

F32 = torch.float32


def check(given, scale=0.125):
    """Heads differ in their values, gates and states: none has what is another's."""
    one = launch(given, scale)
    with poisoned():
        two = launch(given._replace(heads=2), scale)
    exact, peer = launched(wide(given), scale), launched(given, scale)
    assert two.dots is None and (two.state is None) == (given.final is None)
    ulps = 1 + given.q.shape[1] / 16  # tensor cores cut off what they add to a sum of fp32
    for other in (one, peer):
        assert_2x(two.o, exact.o, other.o, what="o")
        if two.state is not None:
            mine, want, theirs = (x.state.flatten(0, -2) for x in (two, exact, other))
            assert_2x(mine, want, theirs, ulps=ulps, bias_ulps=bias_of_one_sign(want, theirs, ulps), what="state")


@pytest.mark.parametrize("S, gate, reverse, K", [
    (1, "token", False, 64), (65, "token", True, 128), (310, "token", False, 64),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (310, "head", False, 112), (65, "token", True, 64), (130, "none", True, 64)))])
def test_linear_attention(S, gate, reverse, K):
    q, k, v, g = make(2, S, 2, 8, K, 64, gate)
    check(Given(q, k, v, g, initial=state_of(v, K), final=F32, reverse=reverse))


@pytest.mark.parametrize("N, P, S, without", [
    (64, 64, 1, ()), (128, 64, 310, ()), pytest.param(64, 64, 310, ("z", "initial"), marks=pytest.mark.slow),
    pytest.param(48, 32, 130, ("dt_bias",), marks=pytest.mark.slow)])
def test_mamba2(N, P, S, without):
    """An odd number of pairs of heads shares one of B and C; D of each column."""
    check(forward(make_ssd(2, S, H=12, G=2, P=P, N=N, without=without, D_dims=2), F32), 1.0)


@pytest.mark.parametrize("S, count, gate, reverse, K", [
    (129, 2, "token", True, 128), (1000, 5, "token", False, 64), (130, 8, "none", False, 64),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (1000, 3, "head", True, 64), (64 * 19, 19, "token", False, 112)))])
def test_segments(S, count, gate, reverse, K):
    """States of two heads a block, too, but without gates. Also segments without a chunk. Each head has decays of its
    own, of which something is left behind a segment."""
    q, k, v, g = make(2, S, 2, 8, K, 64, gate)
    g = None if g is None else g * torch.linspace(0.02, 0.3, 8, device="cuda")
    check_segments(Given(q, k, v, g, initial=state_of(v, K), final=F32, reverse=reverse), count, groups=2, heads=2)


@pytest.mark.parametrize("N, P, S, without", [
    (128, 64, 1000, ()), pytest.param(64, 64, 310, ("z", "initial"), marks=pytest.mark.slow)])
def test_segments_of_mamba2(N, P, S, without):
    given = forward(make_ssd(2, S, H=12, G=2, P=P, N=N, without=without, D_dims=2), F32)
    check_segments(given, 4, 1.0, groups=2, heads=2)


def test_gradients_of_x():
    """Where no others are asked for, there are no sums of o times x."""
    saved = make_ssd(2, 200, H=8, P=64, N=64, without=("z", "initial"))
    dy = torch.randn_like(saved.x)
    check(Given(saved.B, saved.C, dy, reverse=True, state_v_first=True,
                steps=saved.steps._replace(skip=saved.D, skip_gradient=False)), 1.0)

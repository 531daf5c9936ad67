"""Mamba-2's gradients, where no GPU is needed: made of the engine's launches in float64, chunk by chunk, against
autograd of the recurrence, on the cases that break kernels."""
import math

import pytest
import torch

from tests.helpers.linear_launches import launched
from tkq.linear_attention.ssd import gradients as ssd_gradients
from tkq.linear_attention.ssd.forward import SsdSaved, forward
from tkq.linear_attention.ssd.gradients import ALL, SsdGradients, SsdNeeds, backward
from tkq.reference.ssd import mamba2_ssd, mamba2_ssd_backward

NAMES = SsdGradients._fields


def make(S=130, P=48, D_dims=1, bias=0.0, without=(), soft=True, limit=(0.0, math.inf)):
    """Two heads share one of B and C. bias: dt is about softplus of it."""
    torch.manual_seed(0)
    H, G, N = 4, 2, 32

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    given = dict(x=randn(2, S, H, P), dt=randn(2, S, H), A=-randn(H).exp(), B=randn(2, S, G, N) / 6,
                 C=randn(2, S, G, N) / 6, D=randn(*(H, P)[:D_dims]), z=randn(2, S, H, P), dt_bias=randn(H) + bias,
                 initial=randn(2, H, P, N))
    return SsdSaved(**{name: None if name in without else x for name, x in given.items()}, softplus=soft, limit=limit)


def by_autograd(saved, dy, dfinal):
    leaves = [None if x is None else x.clone().requires_grad_() for x in saved[:9]]
    results = mamba2_ssd(*leaves, *saved[9:])
    pairs = [(y, d) for y, d in zip(results, (dy, dfinal)) if d is not None]
    found = iter(torch.autograd.grad([y for y, _ in pairs], [x for x in leaves if x is not None],
                                     [d for _, d in pairs]))
    return [None if x is None else next(found) for x in leaves]


def check(saved, needs=ALL, of_state=True):
    B, _, H, P = saved.x.shape
    dy = torch.randn_like(saved.x)
    dfinal = torch.randn(B, H, P, saved.B.shape[3], dtype=torch.float64) if of_state else None
    want = by_autograd(saved, dy, dfinal)
    for name, mine, exact, needed in zip(NAMES, backward(saved, dy, dfinal, needs), want, needs):
        assert (mine is None) == (exact is None or not needed), name
        if mine is not None:
            assert mine.shape == exact.shape, name
            torch.testing.assert_close(mine, exact, rtol=1e-8, atol=1e-8 * exact.abs().max().item(), msg=name)
    return want, (dy, dfinal)


@pytest.fixture(autouse=True)
def exactly(monkeypatch):
    monkeypatch.setattr(ssd_gradients, "launch", launched)


@pytest.mark.parametrize("S", [1, 63, 64, 65, 200])
def test_lengths(S):
    check(make(S))


@pytest.mark.parametrize("without", [("D",), ("z",), ("dt_bias",), ("initial",), ("D", "z", "dt_bias", "initial")])
def test_what_there_is_not(without):
    check(make(70, without=without), of_state="initial" not in without)


@pytest.mark.parametrize("D_dims, soft, limit", [(2, True, (0.0, math.inf)), (1, True, (0.3, 1.0)),
                                                 (1, False, (0.0, 0.5)), (1, False, (0.0, math.inf))])
def test_options(D_dims, soft, limit):
    check(make(70, D_dims=D_dims, soft=soft, limit=limit))


@pytest.mark.parametrize("bias", [-20.0, 3.0, 30.0])
def test_steps(bias):
    """Those of which nothing decays, and those of which nothing is left."""
    check(make(bias=bias))


def test_no_steps():
    """dt 0: the state stays, and its gradient is that of all tokens."""
    saved = make(soft=False, without=("dt_bias",))
    saved.dt[:, ::3] = 0.0
    check(saved)


@pytest.mark.parametrize("P", [144, 256])
def test_more_columns_than_an_operand_has(P):
    check(make(70, P=P))


@pytest.mark.parametrize("i", range(9))
def test_one_gradient(i):
    check(make(70), needs=SsdNeeds(*(i == j for j in range(9))))


def test_the_reference_of_the_gradients():
    saved = make(9)
    want, (dy, dfinal) = check(saved)
    for mine, exact in zip(mamba2_ssd_backward(dy, dfinal, *saved), want):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("bias", [-3.0, 3.0])
def test_16_bits_are_enough(bias):
    """The launches rounded as the kernels round them: errors are those of a few roundings to 8 bits."""
    saved = make(200, bias=bias)
    narrow = {name: x.bfloat16() for name, x in saved._asdict().items() if name in ("x", "dt", "B", "C", "z")}
    wide = {name: getattr(saved, name).float() for name in ("A", "D", "dt_bias", "initial")}
    saved = saved._replace(**narrow, **wide)
    exact = SsdSaved(*(x.double() for x in saved[:9]), *saved[9:])
    dy, dfinal = torch.randn_like(saved.x), torch.randn_like(saved.initial)
    y, state = launched(forward(saved, torch.float32), 1.0)[:2]
    for mine, want in zip((y, state), mamba2_ssd(*exact)):
        assert (mine.double() - want).norm() < 2**-7 * want.norm()
    found = backward(saved, dy, dfinal)
    for name, mine, want in zip(NAMES, found, mamba2_ssd_backward(dy.double(), dfinal.double(), *exact)):
        assert (mine.double() - want).norm() < 2**-6 * want.norm(), name


def test_gradients_of_steps_are_not_rounding():
    """Where little is left of a token in the next: what it has from itself is in no difference."""
    saved = make(130, bias=4.0, without=("z", "initial"))._replace(A=-torch.linspace(1, 3, 4, dtype=torch.float64))
    narrow = {name: getattr(saved, name).bfloat16() for name in ("x", "B", "C")}
    saved = saved._replace(**narrow, **{name: getattr(saved, name).float() for name in ("dt", "A", "D", "dt_bias")})
    dy = torch.randn_like(saved.x)
    want = mamba2_ssd_backward(dy.double(), None, *(x if x is None else x.double() for x in saved[:9]), *saved[9:])
    for name, mine, exact in zip(NAMES, backward(saved, dy), want):
        if name in ("dt", "A", "dt_bias"):
            assert (mine.double() - exact).norm() < 2**-8 * exact.norm(), name

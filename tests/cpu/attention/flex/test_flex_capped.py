"""Scores under a softcap, by their steps in float32, against float64; which biases are of even steps."""
from types import SimpleNamespace

import numpy
import pytest
import torch

from tkq.attention.flex import capped
from tkq.attention.flex.catalog import alibi, softcap
from tkq.attention.flex.emit import terms_of
from tkq.attention.flex.functions.trace import trace
from tkq.attention.flex.linear_scores import slopes_of

F32, F64 = numpy.float32, numpy.float64
LOG2E = F64(numpy.log2(numpy.e))


@pytest.fixture
def exponents(monkeypatch):
    """(cap, scale of the scores) to what is made of these, of numpy's numbers."""
    def exactly(of):
        def rounded(*x):
            with numpy.errstate(over="ignore", divide="ignore"):
                return of(*(F64(v) for v in x)).astype(F32)
        return rounded

    cute = SimpleNamespace(math=SimpleNamespace(fma=exactly(lambda a, b, c: a * b + c), absf=numpy.abs),
                           arch=SimpleNamespace(rcp_approx=exactly(numpy.reciprocal)))
    for name, value in dict(cute=cute, Float32=F32, select=numpy.where).items():
        monkeypatch.setattr(capped, name, value)

    def of(cap, scale):
        g = SimpleNamespace(score=(None, (F32(cap),)), score_scale=F32(scale))
        with numpy.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return capped.CappedScores(softcap()).numbers(g, {})
    return of


@pytest.mark.parametrize("cap, scale", [(5.0, 128**-0.5), (50.0, 0.3), (1e-3, 7.0), (-20.0, 1.0), (3e4, 1e-4)])
def test_as_exact_as_the_log_sum_exp_needs(exponents, cap, scale):
    numbers = exponents(cap, scale)
    assert abs(numbers.limit * abs(scale / cap) - 1) < 1e-6
    s = numpy.concatenate([numpy.geomspace(1e-12, 1, 100001), -numpy.linspace(1e-3, 1, 10001)]) * F64(numbers.limit)
    s = s.astype(F32)
    found = capped.Exponents(numbers.square, numbers.by, numbers.plus).of(0, s)
    wanted = cap * numpy.tanh(F64(s) * F64(F32(scale)) / F64(F32(cap))) * LOG2E
    assert found.dtype == F32 and (numpy.abs(found - wanted) <= 1.6e-5 * numpy.abs(wanted)).all()
    hidden = capped.Exponents(numbers.square, numbers.by, numbers.plus).of(0, F32(-numpy.inf))
    assert hidden == -numpy.inf


@pytest.mark.parametrize("cap, scale", [
    (0.0, 1.0), (-5.0, -1.0), (5.0, -1.0), (5.0, 0.0), (numpy.inf, 1.0), (numpy.nan, 1.0), (5.0, numpy.nan),
    (1e-30, 1.0), (1e8, 1e-8)])
def test_numbers_that_nothing_is_made_of(exponents, cap, scale):
    """All scores are far then; what is multiplied by 0 is a number."""
    numbers = exponents(cap, scale)
    assert numbers.limit == -1 and numbers.square == 1


def test_which_are_softcaps():
    slopes = torch.zeros(9)
    of = lambda score_mod: capped.softcap_of(trace("score_mod", score_mod).graph)
    assert capped.softcap_of(softcap()) and of(lambda s, b, h, q, kv: torch.tanh(s * 0.2) * slopes[h])
    assert of(lambda s, b, h, q, kv: 7 * torch.tanh(s)).factor is None
    assert of(lambda s, b, h, q, kv: 7 * torch.tanh(s / slopes[b])).over
    for other in (lambda s, b, h, q, kv: 7 * torch.tanh(slopes[h] / s), lambda s, b, h, q, kv: s * torch.tanh(s),
                  lambda s, b, h, q, kv: slopes[kv] * torch.tanh(s), lambda s, b, h, q, kv: torch.tanh(s),
                  lambda s, b, h, q, kv: 7 * torch.tanh(s * slopes[q]), lambda s, b, h, q, kv: 7 * torch.tanh(s) + 1):
        assert not of(other)


def test_terms():
    """Products that nothing but the result's sums takes."""
    bias = torch.zeros(9)
    of = lambda score_mod: len(terms_of(trace("score_mod", score_mod).graph))
    assert len(terms_of(alibi())) == 1
    assert of(lambda s, b, h, q, kv: s - 0.5 * (q - kv) + bias[h] * q) == 2
    assert of(lambda s, b, h, q, kv: torch.floor(0.1 * kv) + s) == 0
    assert of(lambda s, b, h, q, kv: s + torch.where(0.1 * kv > q, 0.1 * kv, 0.0)) == 0


def test_slopes():
    """Biases that grow evenly with the key, by numbers that a head's scores share."""
    bias, ids = torch.zeros(9), torch.zeros(9, dtype=torch.int32)
    of = lambda score_mod: slopes_of(trace("score_mod", score_mod).graph)
    assert [times for _, times in slopes_of(alibi())] == [1]
    assert {times for _, times in of(lambda s, b, h, q, kv: bias[q] + s - bias[h] * (q - kv) - kv * 0.25)} == {1, -1}
    assert [times for _, times in of(lambda s, b, h, q, kv: s + 0.5 * (q - kv) - bias[h] * q)] == [-1]
    for other in (lambda s, b, h, q, kv: s + bias[kv], lambda s, b, h, q, kv: s + bias[q],
                  lambda s, b, h, q, kv: bias[h] * (q - kv) - s, lambda s, b, h, q, kv: s + s + 0.5 * kv,
                  lambda s, b, h, q, kv: s * 2 + 0.5 * kv, lambda s, b, h, q, kv: s + bias[q] * kv,
                  lambda s, b, h, q, kv: s + bias[h] * (q - kv).abs(), lambda s, b, h, q, kv: s + bias[h] * ids[kv],
                  lambda s, b, h, q, kv: 0.5 * kv + bias[h]):
        assert not of(other)

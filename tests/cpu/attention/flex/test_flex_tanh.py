"""The tanh of score functions, by its steps in float32, against float64."""
from types import SimpleNamespace

import numpy
import pytest

from tkq.attention.flex import emit
from tkq.attention.flex.backward import tanh
from tkq.attention.flex.emit import near_arguments
from tkq.attention.flex.functions.derivative import joint
from tkq.attention.flex.functions.trace import trace

F32, F64 = numpy.float32, numpy.float64


@pytest.fixture
def steps(monkeypatch):
    """emit, of numpy's arrays."""
    def exactly(of):
        def rounded(*x, **_):
            with numpy.errstate(over="ignore"):
                return of(*(F64(v) for v in x)).astype(F32)
        return rounded

    math = SimpleNamespace(fma=exactly(lambda a, b, c: a * b + c), exp2=exactly(numpy.exp2))
    arch = SimpleNamespace(rcp_approx=exactly(numpy.reciprocal))
    for name, value in dict(cute=SimpleNamespace(math=math, arch=arch), Float32=F32, select=numpy.where).items():
        for module in (emit, tanh):
            monkeypatch.setattr(module, name, value, raising=module is emit)
    return emit


def relative(found, x):
    wanted = numpy.tanh(F64(x))
    return numpy.abs(found - wanted) / numpy.abs(wanted)


def test_of_any_number(steps):
    x = numpy.concatenate([numpy.geomspace(1e-30, 80, 300001), -numpy.geomspace(1e-30, 80, 1001)]).astype(F32)
    found = steps._tanh(x)
    assert found.dtype == F32 and relative(found, x).max() < 5e-6
    assert numpy.abs(found - numpy.tanh(F64(x))).max() < 3e-7


def test_of_numbers_to_one(steps):
    x = numpy.concatenate([numpy.geomspace(1e-18, 1, 300001), -numpy.linspace(1e-3, 1, 1001)]).astype(F32)
    for factor in (F32(1), F32(20), F32(-0.37)):
        found = steps._polynomial(x, [factor * F32(c) for c in steps.NEAR_TANH])
        assert found.dtype == F32 and relative(found / F64(factor), x).max() < 9e-7


def test_of_the_backward(steps):
    x = numpy.concatenate([numpy.geomspace(1e-18, 1, 300001), -numpy.linspace(1e-3, 1, 1001)]).astype(F32)
    found = tanh.near_tanh(x)
    assert found.dtype == F32 and relative(found, x).max() < 1.6e-5


def test_which_stand_in_the_place_of_a_score():
    import torch

    bias = torch.zeros(9)

    def of(score_mod):
        """Does it, and is it the graph's tanh?"""
        found, *_ = joint(trace("score_mod", score_mod).graph)
        node = tanh.sole_tanh(found)
        assert node is None or found.graph.nodes[node].op == "tanh"
        return node is not None

    assert of(lambda s, b, h, q, kv: 5 * torch.tanh(s / 5)) and of(lambda s, b, h, q, kv: torch.tanh(s))
    assert of(lambda s, b, h, q, kv: torch.tanh(s * bias[h]) + bias[q - kv])
    assert of(lambda s, b, h, q, kv: torch.tanh(s + bias[h]).exp() * torch.tanh(bias[kv]))
    assert not of(lambda s, b, h, q, kv: torch.tanh(s + bias[kv]))
    assert not of(lambda s, b, h, q, kv: s + torch.tanh(s)) and not of(lambda s, b, h, q, kv: torch.tanh(s) * s)
    assert not of(lambda s, b, h, q, kv: torch.tanh(torch.tanh(s))) and not of(lambda s, b, h, q, kv: s * 2)


def test_which_are_near():
    """Those of the score and of what all scores share: they are made twice."""
    import torch

    bias = torch.zeros(9)
    of = lambda score_mod: near_arguments(trace("score_mod", score_mod).graph)
    assert len(of(lambda s, b, h, q, kv: 5 * torch.tanh(s / 5) + torch.tanh(s * bias[h]))) == 2
    assert not of(lambda s, b, h, q, kv: torch.tanh(s + bias[kv]))
    assert not of(lambda s, b, h, q, kv: s * torch.tanh(bias[h]))
    assert not of(lambda s, b, h, q, kv: torch.tanh(s).exp())
    assert not of(lambda s, b, h, q, kv: s)

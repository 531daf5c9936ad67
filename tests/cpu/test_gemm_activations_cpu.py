"""The GEMM's activations as the device computes them, in fp32 here with exact exp2 and reciprocal, beside float64."""
import types

import pytest
import torch
import torch.nn.functional as F
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32

from bench import gemm_activations as others
from tkq.gemm import epilogue_tile as ep
from tkq.gemm.epilogue import ACTIVATIONS, GATED, Epilogue

TRUTH = {"gelu": F.gelu, "silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
INF, NAN = float("inf"), float("nan")
SPECIAL = {0.0: 0.0, 1e-30: 5e-31, 1e4: 1e4, 1e30: 1e30, 3e38: 3e38, INF: INF, NAN: NAN, -1e4: 0.0, -3e38: 0.0,
           -INF: NAN}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    def fmax(a, b, nan=False):
        return (torch.maximum if nan else torch.fmax)(a, b)

    arch = types.SimpleNamespace(rcp_approx=torch.reciprocal, fmax=fmax, fmin=torch.fmin)
    math = types.SimpleNamespace(exp2=lambda x, fastmath: torch.exp2(x), tanh=lambda x, fastmath: torch.tanh(x))
    for module in (ep, others):
        monkeypatch.setattr(module, "cute", types.SimpleNamespace(arch=arch, math=math))
        monkeypatch.setattr(module, "Float32", lambda value: torch.tensor(value, dtype=torch.float32))
    monkeypatch.setattr(others, "_saturated", lambda a, b, c: (a * b + c).clamp(0, 1))


def x_and_error(f, name):
    x = torch.linspace(-12, 12, 400001)
    return x.double(), (f(x).double() - TRUTH[name](x.double())).abs()


@pytest.mark.parametrize("f, name, bounds", (
    (ep.gelu_in_8_bits, "gelu", (5e-5, 3e-4, 8e-4)), (ep.gelu_tanh_in_8_bits, "gelu_tanh", (5e-4, 3e-3, 8e-3))))
def test_gelu_is_exact_enough_for_bf16(f, name, bounds):
    x, error = x_and_error(f, name)
    y = TRUTH[name](x).abs()
    for least, most in zip((0, -3, -5.5), bounds, strict=True):
        assert (error <= most * y)[x >= least].all(), (least, (error / y)[x >= least].max())
    assert (error <= 1e-10 * x.abs())[x < -5.5].all()


@pytest.mark.parametrize("name, relative", (("gelu", 3e-7), ("gelu_tanh", 3e-7)))
def test_the_exact_ones(name, relative):
    x, error = x_and_error(ep.activation(name, Float32), name)
    assert (error <= relative * x.abs() + 3e-7 * TRUTH[name](x).abs()).all()


@pytest.mark.parametrize("f", (ep.gelu, ep.gelu_in_8_bits, ep.gelu_tanh, ep.gelu_tanh_in_8_bits, others.gelu_series))
def test_special_values(f):
    """As torch's on a GPU."""
    got, want = f(torch.tensor(list(SPECIAL))), torch.tensor(list(SPECIAL.values()))
    assert torch.allclose(got, want, equal_nan=True, rtol=1e-6, atol=0)


def test_which_gelu_a_result_gets():
    assert ep.activation("gelu", BFloat16) is ep.activation("gelu", Float8E4M3FN) is ep.gelu_in_8_bits
    assert ep.activation("gelu_tanh", BFloat16) is ep.gelu_tanh_in_8_bits
    assert ep.activation("gelu_tanh", Float16) is ep.activation("gelu_tanh", Float32) is ep.gelu_tanh
    assert ep.activation("gelu", Float16) is ep.activation("gelu", Float32) is ep.gelu
    x, up = torch.tensor([0.5]), torch.tensor([2.0])
    gate = ep.function(Epilogue("geglu_interleaved"), BFloat16)
    assert torch.equal(gate(x, up), ep.gelu_in_8_bits(x) * up)
    assert torch.equal(ep.function(Epilogue("geglu"), Float32)(x, up), ep.gelu(x) * up)
    assert all(callable(ep.function(Epilogue(name), BFloat16)) for name in (*ACTIVATIONS, *GATED))


@pytest.mark.parametrize("f, absolute, relative", ((others.gelu_series, 1.9e-4, 0), (others.gelu_by_tanh, 5e-4, 0),
                                                   (others.gelu_odds, 1e-9, 5e-3), (others.silu_of_one, 0, 3.1e-4)))
def test_the_others(f, absolute, relative):
    name = others.MEANS[f.__name__]
    x, error = x_and_error(f, name)
    assert (error <= absolute + relative * TRUTH[name](x).abs()).all()

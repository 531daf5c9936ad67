"""The GEMM's activations as the device computes them, in fp32 here with exact exp2 and reciprocal, beside float64."""
import inspect
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32

from bench.tune import gemm_activations as others
from tkq.gemm.epilogue import registers as ep
from tkq.gemm.epilogue.spec import ACTIVATIONS, GATED, Epilogue, name_of
from tkq.gemm.fp8 import epilogue
from tkq.gemm.fp8.config import few_special_functions
from tkq.gemm.fp8.plan import BLOCKS, PROMOTED
from tkq.gemm.fp8.spec import Fp8Spec
from tkq.pointwise import activations
from tkq.testing import assert_2x

TRUTH = {"gelu": F.gelu, "silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
IN_8_BITS = {"gelu": ep.gelu_in_8_bits, "gelu_tanh": ep.gelu_tanh_in_8_bits, "silu": epilogue.silu_in_8_bits}
INF, NAN = float("inf"), float("nan")
SPECIAL = {0.0: 0.0, 1e-30: 5e-31, 1e4: 1e4, 1e30: 1e30, 3e38: 3e38, INF: INF, NAN: NAN, -1e4: 0.0, -3e38: 0.0,
           -INF: NAN}


def nothing(x):
    return None


def twice(x, row, column):
    return x, x


def constant(x):
    return 1.0


@pytest.mark.parametrize("function, words", [(nothing, "nothing gave None, a NoneType"),
                                             (twice, r"twice gave \(1.0, 1.0\), a tuple")])
def test_a_function_that_gives_no_number_is_named(function, words):
    """While its kernel is compiled, before the DSL makes a number of what it gave."""
    given = len(inspect.signature(function).parameters)
    with pytest.raises(TypeError, match=f"gemm: activation: .*:{words}; allowed is a number"):
        ep.function(Epilogue(name_of(function)), Float32)(*[1.0] * given)


def test_a_function_may_give_a_number_of_python():
    assert ep.function(Epilogue(name_of(constant)), Float32)(2.0) == 1.0


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    def fmax(a, b, nan=False):
        return (torch.maximum if nan else torch.fmax)(a, b)

    arch = types.SimpleNamespace(rcp_approx=torch.reciprocal, fmax=fmax, fmin=torch.fmin)
    math = types.SimpleNamespace(abs=torch.abs, exp2=lambda x, fastmath: torch.exp2(x),
                                 tanh=lambda x, fastmath: torch.tanh(x))
    for module in (ep, epilogue, others):
        monkeypatch.setattr(module, "cute", types.SimpleNamespace(arch=arch, math=math))
        monkeypatch.setattr(module, "Float32", lambda value: torch.as_tensor(value, dtype=torch.float32))
    monkeypatch.setattr(epilogue, "cutlass", types.SimpleNamespace(select_=torch.where))
    monkeypatch.setattr(others, "_saturated", lambda a, b, c: (a * b + c).clamp(0, 1))


def x_and_error(f, name):
    x = torch.linspace(-100, 40, 700001)
    return x.double(), (f(x).double() - TRUTH[name](x.double())).abs()


@pytest.mark.parametrize("f, name, bounds, far", (
    (ep.gelu_in_8_bits, "gelu", {0: 4e-4, -3: 4e-3, -5.5: 9e-3}, 1e-9),
    (ep.gelu_tanh_in_8_bits, "gelu_tanh", {0: 5e-4, -3: 3e-3, -5.5: 8e-3}, 1e-10),
    (epilogue.silu_in_8_bits, "silu", {0: 9e-4, -3: 2.2e-3, -87: 3.7e-3}, 1e-37)))
def test_those_for_8_bits(f, name, bounds, far):
    x, error = x_and_error(f, name)
    y = TRUTH[name](x).abs()
    for least, most in bounds.items():
        assert (error <= most * y)[x >= least].all(), (least, (error / y)[x >= least].max())
    assert (error <= far * x.abs())[x < min(bounds)].all()


@pytest.mark.parametrize("scale", (0.02, 0.3, 1.0, 4.0, 50.0))
@pytest.mark.parametrize("name", IN_8_BITS)
def test_results_in_bf16(name, scale):
    """Error and mean signed error by the library's rule."""
    x = scale * torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    check_results(x, name)


@pytest.mark.parametrize("least, most", ((0, 0.01), (-1, 0), (-3, -2), (-4, -3)))
@pytest.mark.parametrize("name, bias", (("gelu", 0.2), ("gelu_tanh", 0.2), ("silu", 1 / 3)))
def test_results_in_bf16_of_a_range(name, bias, least, most):
    """Where an approximation is off in one direction, by up to so much of a unit in the last place; beside two calls,
    which round the product as well."""
    check_range(name, bias, least, most)


@pytest.mark.parametrize("bias, least, most", (
    (1 / 3, -1.8, -1.5), (1 / 3, -2, -1.9), (2 / 3, -5, -4), (2 / 3, -12, -8)))
def test_silu_in_bf16_where_it_is_off_most(bias, least, most):
    check_range("silu", bias, least, most)


def check_range(name, bias, least, most):
    x = torch.empty(200, 1000).uniform_(least, most, generator=torch.Generator().manual_seed(0))
    check_results(x, name, lambda x: TRUTH[name](x.bfloat16().double()).bfloat16(), bias_ulps=bias)


def check_results(x, name, peer=None, bias_ulps=0.0):
    truth = TRUTH[name](x.double())
    assert_2x(IN_8_BITS[name](x).bfloat16(), truth, peer(x) if peer else truth.bfloat16(), ulps=0.05,
              bias_ulps=bias_ulps, what=name)


@pytest.mark.parametrize("name, relative", (("gelu", 3e-7), ("gelu_tanh", 3e-7)))
def test_the_exact_ones(name, relative):
    x, error = x_and_error(ep.activation(name, Float32), name)
    assert (error <= relative * x.abs() + 3e-7 * TRUTH[name](x).abs()).all()


@pytest.mark.parametrize("f, rtol", ((ep.gelu, 1e-6), (ep.gelu_tanh, 1e-6), (others.gelu_series, 1e-6),
                                     (epilogue.silu_in_8_bits, 4e-3)))
def test_special_values(f, rtol):
    """As torch's on a GPU."""
    check_special(f, SPECIAL, rtol)


@pytest.mark.parametrize("f", (ep.gelu_in_8_bits, ep.gelu_tanh_in_8_bits))
def test_special_values_in_8_bits(f):
    """The same, but for the limit at -inf."""
    check_special(f, {**SPECIAL, -INF: 0.0}, 2e-3)


def check_special(f, values, rtol=1e-6):
    got, want = f(torch.tensor(list(values))), torch.tensor(list(values.values()))
    assert torch.allclose(got, want, equal_nan=True, rtol=rtol, atol=0)


@pytest.mark.parametrize("out, few_special, exact",
                         ((BFloat16, True, False), (BFloat16, False, True), (Float16, True, True)))
def test_which_silu_a_float8_result_gets(monkeypatch, out, few_special, exact):
    used = []
    monkeypatch.setattr(epilogue.tk, "apply", lambda dst, f, x: used.append(f))
    epilogue.activate(None, "silu", out, few_special)
    assert used == [activations.silu if exact else epilogue.silu_in_8_bits]


def test_which_kernels_are_crowded():
    """Of the kernels that are planned: quarters that wait."""
    for out, config, few_special in (("bf16", replace(BLOCKS[0], overlap_epilogue=6), True), ("fp16", BLOCKS[0], False),
                                     ("bf16", replace(PROMOTED[1], overlap_epilogue=4), False)):
        spec = Fp8Spec(out=out, scale_a="1x128", scale_b="128x128", promote=True, activation="silu")
        assert few_special_functions(spec, config) is few_special


def test_which_gelu_a_result_gets():
    assert ep.activation("gelu", BFloat16) is ep.activation("gelu", Float8E4M3FN) is ep.gelu_in_8_bits
    assert ep.activation("gelu_tanh", BFloat16) is ep.gelu_tanh_in_8_bits
    assert ep.activation("silu", BFloat16) is ep.activation("silu", Float32) is activations.silu
    assert ep.activation("gelu_tanh", Float16) is ep.activation("gelu_tanh", Float32) is ep.gelu_tanh
    assert ep.activation("gelu", Float16) is ep.activation("gelu", Float32) is ep.gelu
    x, up = torch.tensor([0.5]), torch.tensor([2.0])
    gate = ep.function(Epilogue("geglu_interleaved"), BFloat16)
    assert torch.equal(gate(x, up), ep.gelu_in_8_bits(x) * up)
    assert torch.equal(ep.function(Epilogue("geglu"), Float32)(x, up), ep.gelu(x) * up)
    assert torch.equal(ep.function(Epilogue("geglu_tanh"), BFloat16)(x, up), ep.gelu_tanh_in_8_bits(x) * up)
    assert all(callable(ep.function(Epilogue(name), BFloat16)) for name in (*ACTIVATIONS, *GATED))


@pytest.mark.parametrize("f, absolute, relative", ((others.gelu_series, 1.9e-4, 0), (others.gelu_by_tanh, 5e-4, 0),
                                                   (others.gelu_odds, 1e-9, 5e-3), (others.silu_of_one, 0, 3.1e-4)))
def test_the_others(f, absolute, relative):
    name = others.MEANS[f.__name__]
    x, error = x_and_error(f, name)
    assert (error <= absolute + relative * TRUTH[name](x).abs())[x >= -87].all()

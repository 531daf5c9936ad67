"""rmsnorm and layernorm where no GPU is needed: what they mean, what they refuse, what the compiler is given."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tkq.norms import alignment, launch, ops
from tkq.norms.spec import NormSpec
from tkq.testing import assert_2x

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPS = [tkq.rmsnorm, tkq.layernorm]
NO_OPTIONS = None, 0.0, None, None, True  # of the custom ops


def torch_norm(op, x, weight=None, bias=None, eps=1e-5):
    N = x.shape[-1:]
    if op is tkq.layernorm:
        return F.layer_norm(x, N, weight, bias, eps)
    y = F.rms_norm(x, N, weight, eps)
    return y if bias is None else y + bias


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (5, 1), (3, 33), (2, 3, 128), (0, 16), (2, 0, 16)])
@pytest.mark.parametrize("affine", [(False, False), (True, False), (True, True), (False, True)])
def test_cpu_tensors_take_the_reference(op, dtype, shape, affine):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    w, b = (torch.randn(shape[-1:]).to(dtype) if given else None for given in affine)
    y = op(x, w, bias=b, eps=1e-5)
    assert y.shape == x.shape and y.dtype == dtype and y.is_contiguous()
    wide = [None if t is None else t.double() for t in (x, w, b)]
    assert_2x(y, torch_norm(op, *wide), torch_norm(op, x, w, b), ulps=1)


@pytest.mark.parametrize("op", OPS)
def test_weight_and_bias_may_have_types_of_their_own(op):
    x = torch.randn(4, 64).bfloat16()
    w, b = torch.randn(64), torch.randn(64).half()
    want = torch_norm(op, x.double(), w.double(), b.double())
    y = op(x, w, bias=b, eps=1e-5)
    assert y.dtype == torch.bfloat16
    assert (y.double() - want).abs().max() <= 2**-8 * want.abs().max()


def test_default_eps():
    x = torch.full((1, 4), 1e-3)
    assert torch.allclose(tkq.rmsnorm(x), F.rms_norm(x, (4,), eps=1e-6))
    x = torch.tensor([[1e-3, -1e-3]])
    assert torch.allclose(tkq.layernorm(x), F.layer_norm(x, (2,), eps=1e-5))


def test_a_view_and_its_copy_agree():
    x = torch.randn(6, 80)[:, 3:67]
    assert torch.equal(tkq.layernorm(x), tkq.layernorm(x.contiguous()))
    x = torch.randn(5, 4, 64).transpose(0, 1)
    assert torch.equal(tkq.rmsnorm(x), tkq.rmsnorm(x.contiguous()))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("error, says, call", [
    (TypeError, "x: got str", lambda op: op("x")),
    (TypeError, "x: dtype is torch.float64", lambda op: op(torch.ones(2, 4, dtype=torch.float64))),
    (TypeError, "x: dtype is torch.int32", lambda op: op(torch.ones(2, 4, dtype=torch.int32))),
    (TypeError, "residual: dtype is torch.float8_e4m3fn",
     lambda op: op(torch.ones(2, 4, requires_grad=True), residual=torch.ones(2, 4).to(torch.float8_e4m3fn))),
    (TypeError, "weight: got list", lambda op: op(torch.ones(2, 4), [1.0] * 4)),
    (TypeError, "weight: dtype is torch.int64", lambda op: op(torch.ones(2, 4), torch.ones(4, dtype=torch.int64))),
    (TypeError, "bias: dtype is torch.float64", lambda op: op(torch.ones(2, 4), bias=torch.ones(4).double())),
    (ValueError, r"x: got shape \(\)", lambda op: op(torch.tensor(1.0))),
    (ValueError, r"x: got shape \(3, 0\)", lambda op: op(torch.ones(3, 0))),
    (ValueError, r"weight: shape is \(5,\).*\(4\)", lambda op: op(torch.ones(2, 4), torch.ones(5))),
    (ValueError, r"weight: shape is \(1, 4\)", lambda op: op(torch.ones(2, 4), torch.ones(1, 4))),
    (ValueError, r"bias: shape is \(2,\)", lambda op: op(torch.ones(2, 4), bias=torch.ones(2))),
    (ValueError, r"weight: strides are \(2,\)", lambda op: op(torch.ones(2, 4), torch.ones(8)[::2])),
    (ValueError, r"x: strides are \(1, 2\).*contiguous", lambda op: op(torch.ones(4, 2).t())),
    (ValueError, "weight: is on meta", lambda op: op(torch.ones(2, 4), torch.ones(4, device="meta"))),
    (TypeError, "eps: got str", lambda op: op(torch.ones(2, 4), eps="a")),
    (TypeError, "eps: got NoneType", lambda op: op(torch.ones(2, 4), prenorm=True, eps=None)),
    (ValueError, "eps: got -5.0, allowed are finite numbers from 0 on", lambda op: op(torch.ones(2, 4), eps=-5.0)),
    (ValueError, "eps: got nan", lambda op: op(torch.ones(2, 4, requires_grad=True), eps=float("nan"))),
    (NotImplementedError, "N = 262145.*262144", lambda op: op(torch.ones(1, 262145)))])
def test_bad_input_is_named(op, error, says, call):
    with pytest.raises(error, match=says):
        call(op)


def test_a_parameter_is_fine_without_gradients():
    weight = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        assert tkq.rmsnorm(torch.ones(2, 4), weight).shape == (2, 4)
        assert tkq.rmsnorm(torch.ones(2, 4, requires_grad=True)).shape == (2, 4)


@pytest.mark.parametrize("op", [torch.ops.tkq.rmsnorm, torch.ops.tkq.layernorm])
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16), (16,), (0, 16)])
def test_opcheck(op, shape):
    x, w = torch.randn(shape), torch.randn(16)
    for given in ((x, w, None), (x.bfloat16(), w, w.half())):
        torch.library.opcheck(op, (*given, 1e-5, *NO_OPTIONS), test_utils=("test_schema", "test_faketensor"))


def test_the_fake_has_the_strides_of_the_result():
    x = torch.randn(5, 4, 64).transpose(0, 1)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.tkq.rmsnorm(mode.from_tensor(x), None, None, 1e-5, *NO_OPTIONS)[0]
    real = tkq.rmsnorm(x)
    assert fake.shape == real.shape and fake.stride() == real.stride() and fake.dtype == real.dtype


@pytest.mark.parametrize("op", OPS)
def test_torch_compile_keeps_it_whole(op):
    compiled = torch.compile(lambda x, w: op(x * 2, w), backend="eager", fullgraph=True)
    x, w = torch.randn(4, 32), torch.randn(32)
    assert torch.equal(compiled(x, w), op(x * 2, w))


@pytest.mark.parametrize("x, weight, vector", [
    (torch.zeros(4, 64).bfloat16(), None, 8), (torch.zeros(4, 64), None, 4), (torch.zeros(4, 63).bfloat16(), None, 1),
    (torch.zeros(4, 60).bfloat16(), None, 4), (torch.zeros(4, 72).bfloat16()[:, :64], None, 8),
    (torch.zeros(4, 70).bfloat16()[:, :64], None, 2), (torch.zeros(4, 72).bfloat16()[:, 1:65], None, 1),
    (torch.zeros(4, 72).bfloat16()[:, 4:68], None, 4), (torch.zeros(4, 64).bfloat16(), torch.zeros(65)[1:], 1),
    (torch.zeros(4, 64).bfloat16(), torch.zeros(68)[4:], 8),
    (torch.zeros(4, 64).bfloat16(), torch.zeros(66).half()[2:], 2)])
def test_the_access_fits_every_address(x, weight, vector):
    assert alignment.vector([x], (weight, None)) == vector
    base = [t.data_ptr() % 16 for t in (x, weight) if t is not None]  # torch aligns what it allocates to 64 bytes here
    assert base[0] % (vector * x.element_size()) == 0


def test_keys_differ_where_the_kernel_does():
    def key(kind, x, weight, bias):
        return launch._key(launch.Call(kind, 1e-5), x, weight, bias, None, None), alignment.vector([x], (weight, bias))

    x = torch.zeros(4, 64).bfloat16()
    w = torch.zeros(64)
    different = [
        ("rmsnorm", x, None, None), ("layernorm", x, None, None), ("rmsnorm", x, w, None), ("rmsnorm", x, None, w),
        ("rmsnorm", x, w.half(), None), ("rmsnorm", x.half(), None, None), ("rmsnorm", x[:, :32], None, None),
        ("rmsnorm", torch.zeros(4, 68).bfloat16()[:, :64], None, None),
        ("rmsnorm", torch.zeros(4, 72).bfloat16()[:, 1:65], None, None), ("rmsnorm", x, torch.zeros(65)[1:], None)]
    assert len({key(*call) for call in different}) == len(different)
    assert key("rmsnorm", x, w, None) == key("rmsnorm", torch.zeros(9, 64).bfloat16(), torch.ones(64), None)


def test_a_recipe_says_everything_in_its_repr():
    one, other = (ops.recipe(NormSpec("rmsnorm", 64, "bf16", "bf16", None, v)) for v in (8, 4))
    assert repr(one) != repr(other) and repr(one) == repr(ops.recipe(NormSpec("rmsnorm", 64, "bf16", "bf16", None, 8)))

"""The checks that public functions make of their arguments, and how PyTorch sees the ops."""
import pathlib

import pytest
import torch
import torch.utils.flop_counter
from torch.autograd import forward_ad

from tkq.runtime.call import check, dtypes, ops

X = torch.zeros(2, 3, 4)
PACKAGE = str(pathlib.Path(ops.__file__).parents[1])


def test_dtype():
    check.dtype("q", X.bfloat16(), ("bf16", "fp16"))
    with pytest.raises(TypeError, match=r"q: dtype is torch.float32, allowed are torch.bfloat16 \(bf16\), "):
        check.dtype("q", X, ("bf16", "fp16"))
    with pytest.raises(TypeError, match=r"q: dtype is torch.float64"):
        check.dtype("q", X.double(), ("fp32",))
    with pytest.raises(TypeError, match=r"q: got list, expected a torch.Tensor"):
        check.dtype("q", [1.0], ("fp32",))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_not_dense_is_named_where_strides_are_asked_for():
    for x, says in ((X.to_sparse(), "torch.sparse_coo"), (torch.nested.nested_tensor([X[0], X[1]]), "nested")):
        with pytest.raises(TypeError, match=f"q: got a {says} tensor, expected a dense one"):
            check.last_dim_contiguous("q", x)


def test_rank():
    check.rank("q", X, 3)
    check.rank("q", X, 2, 3)
    with pytest.raises(ValueError, match=r"q: has 3 dimensions, shape \(2, 3, 4\); allowed: 2 or 4"):
        check.rank("q", X, 2, 4)


def test_shape():
    check.shape("w", X, (2, None, 4))
    with pytest.raises(ValueError, match=r"w: shape is \(2, 3, 4\), expected \(2, any, 5\)"):
        check.shape("w", X, (2, None, 5))
    with pytest.raises(ValueError, match="w"):
        check.shape("w", X, (2, 3))


def test_last_dim_contiguous():
    check.last_dim_contiguous("x", X)
    check.last_dim_contiguous("x", X[..., :1])
    check.last_dim_contiguous("x", X[:, 1:])
    with pytest.raises(ValueError, match=r"x: strides are \(12, 1, 4\).*contiguous"):
        check.last_dim_contiguous("x", X.transpose(1, 2))


@pytest.mark.parametrize("lines", (1, 2, 3))
def test_rows_of_16_bytes(lines):
    """The distance of lines counts from two on, and an address always."""
    x = torch.zeros(lines * 12).as_strided((lines, 4), (9, 1))
    if lines == 1:
        check.rows_of_16_bytes("op", x=x)
    else:
        with pytest.raises(ValueError, match=r"op: x: strides are \(9, 1\); stride 0 must be a multiple of 4 elements"):
            check.rows_of_16_bytes("op", x=x)
    check.rows_of_16_bytes("op", x=x[:, :0], y=None)
    with pytest.raises(ValueError, match="op: x: begins at an address that is not a multiple of 16 bytes"):
        check.rows_of_16_bytes("op", x=torch.zeros(lines * 8 + 1)[1:].view(lines, 8))


def test_same_device():
    check.same_device(q=X, k=None, v=X)
    with pytest.raises(TypeError, match="k: got list, expected a torch.Tensor"):
        check.same_device(q=X, k=[1.0])
    with pytest.raises(ValueError, match="v: is on meta, but k is on cpu"):
        check.same_device(q=None, k=X, v=X.to("meta"))


def test_refuse_gradient():
    wants = X.clone().requires_grad_()
    check.refuse_gradient("gemm", a=X, b=None, c=3)
    with torch.no_grad():
        check.refuse_gradient("gemm", a=wants)
    with torch.inference_mode():
        check.refuse_gradient("gemm", a=wants)
    with pytest.raises(NotImplementedError, match="gemm: b requires a gradient"):
        check.refuse_gradient("gemm", a=X, b=wants)


def test_refuse_tangents():
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        assert not ops.direct(dual)
        check.refuse_gradient("gemm", a=X, b=None)
        with pytest.raises(NotImplementedError, match="gemm: b carries a tangent"):
            check.refuse_gradient("gemm", a=X, b=dual)
    assert ops.direct(X)


def test_dtype_names():
    for name in ("bf16", "fp16", "fp32", "e4m3", "e5m2", "int32"):
        assert dtypes.name_of(dtypes.torch_type(name)) == name
    assert dtypes.name_of(torch.float64) == "float64"
    with pytest.raises(ValueError, match="fp99"):
        dtypes.torch_type("fp99")


def _double_cuda(x: torch.Tensor, times: int) -> torch.Tensor:
    raise AssertionError("no CUDA tensor in this test")


def _double_cpu(x: torch.Tensor, times: int) -> torch.Tensor:
    return x * times


double = ops.torch_op("test_double", cuda=_double_cuda, cpu=_double_cpu, fake=lambda x, times: torch.empty_like(x))


def test_torch_op():
    assert double(X + 1, 2).tolist() == (X + 2).tolist()
    torch.library.opcheck(double, (X, 2), test_utils=("test_schema", "test_faketensor"))
    with torch._subclasses.FakeTensorMode() as mode:
        assert double(mode.from_tensor(X), 2).shape == X.shape


def test_an_op_without_a_formula_refuses_gradients():
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert not double(x, 2).requires_grad
    with pytest.raises(RuntimeError, match="autograd formula"):
        double(x, 2).sum().backward()


@pytest.mark.parametrize("grad", (False, True))
def test_a_compiler_that_watches_does_not_see_into_an_op(grad):
    from torch._C._dynamo.eval_frame import set_eval_frame
    from torch._dynamo.types import ConvertFrameReturn

    seen = []

    def watch(frame, *_):
        seen.append(frame.f_code)
        return ConvertFrameReturn()

    x = X.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        before = set_eval_frame(watch)
        try:
            found = double(x, 2)
        finally:
            set_eval_frame(before)
    assert found.tolist() == (X + X).tolist()
    assert not [code.co_name for code in seen if code.co_filename.startswith((__file__, PACKAGE))]


def test_direct_in_plain_eager_mode():
    parameter = torch.nn.Parameter(X)
    assert ops.direct() and ops.direct(X, None) and ops.direct(parameter.detach())
    with torch.no_grad():
        assert ops.direct(X, parameter)
    with torch.inference_mode():
        assert ops.direct(X, parameter)


def test_not_direct_where_something_would_be_lost():
    class Subclass(torch.Tensor):
        pass

    assert not ops.direct(X, torch.nn.Parameter(X))  # autograd would have to record it
    assert not ops.direct(X.as_subclass(Subclass))
    with torch._subclasses.FakeTensorMode():
        assert not ops.direct(X)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not ops.direct(X)
    seen = []

    def under_vmap(x):
        seen.append(ops.direct(X))
        return x

    torch.func.vmap(under_vmap)(X)
    torch.func.grad(lambda x: under_vmap(x).sum())(X)
    assert seen == [False, False]


@pytest.mark.parametrize("grad", (False, True))
def test_not_direct_where_memory_does_not_say_what_a_tensor_is(grad):
    """Also where the way in C is not there."""
    x = torch.ones(3)
    with torch.set_grad_enabled(grad):
        for other in (torch._neg_view(x), torch._efficientzerotensor((3,))):
            assert ops._route((x, None, other)) == ops.route(x, None, other) == "op"
        assert ops._route((x, None)) == "direct"


def test_not_direct_while_dynamo_traces():
    def call(x):
        return x + 1 if ops.direct(x) else x - 1

    assert torch.compile(call, backend="eager", fullgraph=True)(X).tolist() == (X - 1).tolist()
    assert call(X).tolist() == (X + 1).tolist()

"""gemm without a GPU: the reference path, what it refuses, its fake."""
import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.process import fresh
from tkq import reference
from tkq.gemm.dense import ops

NO_EPILOGUE = None, "", None, 1.0, 0.0  # as the op takes them: bias, activation, c, alpha, beta


def operands(m=5, n=7, k=16, dtype=torch.bfloat16):
    return torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("out_dtype", (None, torch.bfloat16, torch.float16, torch.float32))
def test_public_function_on_cpu(dtype, out_dtype):
    a, b = operands(dtype=dtype)
    c = tkq.gemm(a, b, out_dtype=out_dtype)
    assert c.dtype == (out_dtype or dtype) and c.is_contiguous()
    assert torch.equal(c, (a.float() @ b.float()).to(c.dtype))


def assert_runs(code):
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before",
                         ("from tkq.gemm.dense import plan", "import tkq.gemm.dense.ops", "import tkq; tkq.gemm"))
def test_the_name_is_the_function(before):
    """tkq.gemm is the function, whatever of the package of that name was imported before."""
    code = (f"{before}; import tkq; from tkq.gemm.dense import spec; "
            "assert type(tkq.gemm).__name__ == 'function', tkq.gemm")
    assert_runs(code)


def test_the_name_survives_pickling_and_reloading():
    code = """
import importlib, pickle, sys
import tkq
gemm = tkq.gemm
assert pickle.loads(pickle.dumps(gemm)) is gemm
importlib.reload(tkq)
importlib.reload(sys.modules["tkq.gemm"])
importlib.import_module("tkq.gemm.dense.spec")
from tkq import gemm as again
assert tkq.gemm is again is gemm
"""
    assert_runs(code)


def test_reference_sums_in_float32():
    a = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    assert reference.gemm(a, a.t()).item() == 4096  # in bf16 the sum would stay at 256
    assert reference.gemm(a.double(), a.t().double()).dtype == torch.float64


def test_a_gradient_in_a_loss_is_not_dropped():
    """A penalty for the gradient, which depends on w: refused, where the loss's own gradient would be a wrong number.
    As a constant it is taken."""
    y, w = (t.requires_grad_() for t in operands(8, 16, 16))
    loss = tkq.gemm(y, w).float().pow(2).sum()
    gradient, = torch.autograd.grad(loss, y, create_graph=True)
    with pytest.raises(NotImplementedError, match="gemm: second derivatives"):
        torch.autograd.grad(loss + gradient.float().pow(2).sum(), w, retain_graph=True)
    alone, = torch.autograd.grad(loss, w, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss + gradient.detach().float().pow(2).sum(), w)[0], alone)


@pytest.mark.parametrize("m, n, k", ((0, 8, 8), (8, 0, 8), (5, 7, 0), (0, 0, 0)))
def test_empty(m, n, k):
    c = tkq.gemm(*operands(m, n, k))
    assert c.shape == (m, n) and not c.any()


def test_views():
    a, b = operands(16, 16, 16)
    for x, y in ((a.t(), b), (a, b.t()), (a[::2], b), (a[:1].expand(3, -1), b), (a[:, :8], b[8:]), (a[:1], b[:, :1])):
        assert torch.equal(tkq.gemm(x, y), (x.float() @ y.float()).to(a.dtype))


BAD_INPUT = (
    (lambda a, b: (a.float(), b), TypeError, ("a", "float32", "bfloat16")),
    (lambda a, b: (a, b.half()), TypeError, ("b", "float16", "bfloat16")),
    (lambda a, b: (a, b.int()), TypeError, ("b", "int32")),
    (lambda a, b: ([1], b), TypeError, ("a", "list")),
    (lambda a, b: (a[None], b), ValueError, ("(1, 5, 16)", "(16, 7)", "(B, M, K)")),
    (lambda a, b: (a[None].expand(2, -1, -1), b[None]), ValueError, ("(2, 5, 16)", "(1, 16, 7)")),
    (lambda a, b: (a[None, None], b), ValueError, ("a", "4", "2 or 3")),
    (lambda a, b: (a, b[:, 0]), ValueError, ("b", "1", "2")),
    (lambda a, b: (a, b[:8]), ValueError, ("(5, 16)", "(8, 7)", "(K, N)")),
    (lambda a, b: (a[:, :12], b[:12]), ValueError, ("K is 12", "multiples of 8")),
    (lambda a, b: (a.t().contiguous().t()[:, :12], b[:12]), ValueError, ("K is 12", "multiples of 8")),
    (lambda a, b: (a.repeat(1, 2)[:, ::2], b), ValueError, ("a", "(32, 2)", ".contiguous()")),
    (lambda a, b: (a, b.repeat(1, 2)[:, ::2]), ValueError, ("b", "(14, 2)", ".contiguous()")),
    (lambda a, b: (a, b.to("meta")), ValueError, ("b", "meta")),
)


@pytest.mark.parametrize("change, error, words", BAD_INPUT)
def test_bad_input_is_named(change, error, words):
    args = change(*operands())
    with pytest.raises(error) as caught:
        tkq.gemm(*args)
    assert all(w in str(caught.value) for w in words), str(caught.value)


@pytest.mark.parametrize("change, error, words", BAD_INPUT)
def test_what_a_launch_refuses_is_named(change, error, words):
    """Whichever route to a launch fails: the message is the same."""
    with pytest.raises(error) as caught:
        ops._launch(*change(*operands()), *NO_EPILOGUE, None, False)
    assert all(w in str(caught.value) for w in words), str(caught.value)


def test_an_error_that_is_not_the_callers_comes_through():
    with pytest.raises(ValueError, match="device: got cpu"):
        ops._cuda(*operands(), *NO_EPILOGUE, None)


@pytest.mark.parametrize("out_dtype", (torch.float64, torch.int32, "bf16"))
def test_bad_out_dtype_is_named(out_dtype):
    with pytest.raises(TypeError, match="out_dtype"):
        tkq.gemm(*operands(), out_dtype=out_dtype)


def test_gradient_is_fine_where_it_is_off():
    a, b = operands()
    with torch.no_grad():
        assert tkq.gemm(a.requires_grad_(), b).shape == (5, 7)


@pytest.mark.parametrize("out_dtype", (None, torch.float32))
def test_opcheck(out_dtype):
    torch.library.opcheck(torch.ops.tkq.gemm.default, (*operands(), *NO_EPILOGUE, out_dtype))


def test_traces_under_compile():
    a, b = operands()
    f = torch.compile(lambda a, b: tkq.gemm(a, b, out_dtype=torch.float32) * 2, fullgraph=True, backend="eager")
    assert torch.equal(f(a, b), tkq.gemm(a, b, out_dtype=torch.float32) * 2)


@pytest.mark.parametrize("out_dtype", (None, torch.float32))
def test_fake_shapes(out_dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a, b = torch.empty(30, 64, dtype=torch.float16), torch.empty(64, 11, dtype=torch.float16)
        c = tkq.gemm(a, b, out_dtype=out_dtype)
    assert c.shape == (30, 11) and c.dtype == (out_dtype or torch.float16) and c.stride() == (11, 1)


def test_another_address_of_b_is_another_call():
    memory, a = torch.zeros(128 * 256 + 8, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)
    b, odd = memory[:-8].view(128, 256), memory[1:-7].view(128, 256)
    with fake_gpu.launches() as seen, torch.no_grad():
        for x in (b, b, odd):
            tkq.gemm(a, x)
    assert seen[1][0] == seen[0][0] and any(recipe != seen[0][0] for recipe, _ in seen[2:])

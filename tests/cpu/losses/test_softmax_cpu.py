"""softmax where no GPU is needed: what it means, its gradients, what it refuses, how its plans cover each row."""
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tkq
from tkq.reduction import geometry
from tkq.reference import losses as reference
from tkq.rows.one_pass import plan as row_plan
from tkq.softmax import ops, plan
from tkq.softmax.spec import MAX_N, SoftmaxSpec
from tkq.testing import assert_2x

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPS = {False: tkq.softmax, True: tkq.log_softmax}
TORCH = {False: torch.softmax, True: torch.log_softmax}
LOGS = pytest.mark.parametrize("log", [False, True])


# ---- what it means -------------------------------------------------------------------------------------------------


@LOGS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (5, 1), (3, 33), (2, 3, 128), (0, 16), (2, 0, 16)])
def test_cpu_tensors_take_the_reference(log, dtype, shape):
    torch.manual_seed(0)
    x = (3 * torch.randn(shape)).to(dtype)
    y = OPS[log](x, scale=0.7)
    assert y.shape == x.shape and y.dtype == dtype and y.is_contiguous()
    assert_2x(y, TORCH[log](x.double() * 0.7, -1), TORCH[log](x.float() * 0.7, -1).to(dtype), ulps=1)


@LOGS
def test_any_dimension(log):
    x = torch.randn(3, 4, 5, 6)
    for dim in range(-4, 4):
        assert torch.allclose(OPS[log](x, dim=dim), TORCH[log](x, dim), atol=1e-6)


@LOGS
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_gradients_are_torchs(log, dim):
    x = torch.randn(6, 7, 5, requires_grad=True)
    g = torch.randn(6, 7, 5)
    OPS[log](x, dim=dim, scale=1.7).backward(g)
    mine, x.grad = x.grad, None
    TORCH[log](1.7 * x, dim).backward(g)
    assert torch.allclose(mine, x.grad, atol=1e-5)


@LOGS
def test_the_formula_in_double_precision(log):
    """The reference's backward beside torch's own derivative of the reference, for values of every size."""
    for size in (1e-4, 1.0, 30.0):
        x = (size * torch.randn(8, 33, dtype=torch.float64)).requires_grad_()
        y, g = reference.softmax(x, 0.3, log), torch.randn(8, 33, dtype=torch.float64)
        wanted, = torch.autograd.grad(y, x, g)
        assert torch.allclose(reference.softmax_backward(y.detach(), g, 0.3, log), wanted, rtol=1e-12, atol=1e-14)


@LOGS
def test_the_gradient_of_a_sum_and_of_a_view(log):
    """Gradients that are expanded scalars or transposed come in as they are."""
    x = torch.randn(5, 9, requires_grad=True)
    OPS[log](x).sum().backward()
    mine, x.grad = x.grad, None
    TORCH[log](x, -1).sum().backward()
    assert torch.allclose(mine, x.grad, atol=1e-6)
    x.grad = None
    OPS[log](x).t().contiguous().square().sum().backward()
    mine, x.grad = x.grad, None
    TORCH[log](x, -1).square().sum().backward()
    assert torch.allclose(mine, x.grad, atol=1e-5)


def test_a_second_derivative_is_refused():
    x = torch.randn(3, 4, requires_grad=True)
    first, = torch.autograd.grad(tkq.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="softmax.*: second derivatives"):
        first.sum().backward()


def test_views_agree_with_their_copies():
    x = torch.randn(6, 80)[:, 3:67]
    assert torch.equal(tkq.softmax(x), tkq.softmax(x.contiguous()))
    x = torch.randn(80, 6).t()
    assert torch.equal(tkq.softmax(x), tkq.softmax(x.contiguous()))


@LOGS
def test_the_last_dimension_by_any_integer(log):
    x = torch.randn(3, 4)
    for dim in (-1, int("-1"), 1, np.int64(-1), np.int32(1)):
        assert torch.equal(OPS[log](x, dim=dim), OPS[log](x))


@LOGS
@pytest.mark.parametrize("error, says, call", [
    (TypeError, "x: got str", lambda op: op("x")),
    (TypeError, "x: dtype is torch.float64", lambda op: op(torch.ones(2, 4, dtype=torch.float64))),
    (TypeError, "x: dtype is torch.int32", lambda op: op(torch.ones(2, 4, dtype=torch.int32))),
    (TypeError, "dim: got str", lambda op: op(torch.ones(2, 4), dim="a")),
    (TypeError, "scale: got str", lambda op: op(torch.ones(2, 4), scale="a")),
    (TypeError, "scale: got a Tensor", lambda op: op(torch.ones(2, 4), scale=torch.ones(3))),
    (TypeError, "dim: got float", lambda op: op(torch.ones(2, 4), dim=-1.0)),
    (TypeError, "dim: got a Tensor", lambda op: op(torch.ones(2, 4), dim=torch.tensor([-1, 1]))),
    (IndexError, "dim: got 2 for x of 2 dimensions", lambda op: op(torch.ones(2, 4), dim=2)),
    (IndexError, "dim: got -3", lambda op: op(torch.ones(2, 4), dim=-3)),
    (ValueError, r"x: got shape \(\)", lambda op: op(torch.tensor(1.0))),
    (ValueError, r"x: got shape \(3, 0\)", lambda op: op(torch.ones(3, 0))),
    (NotImplementedError, "N = 262145.*262144", lambda op: op(torch.ones(1, 262145)))])
def test_bad_input_is_named(log, error, says, call):
    with pytest.raises(error, match=says):
        call(OPS[log])


@LOGS
def test_opcheck(log):
    for x in (torch.randn(3, 16), torch.randn(2, 3, 16).bfloat16(), torch.randn(0, 16)):
        torch.library.opcheck(torch.ops.tkq.softmax, (x.requires_grad_(), 0.5, log))
    torch.library.opcheck(torch.ops.tkq.softmax_backward, (torch.rand(3, 16), torch.randn(3, 16), 0.5, log))


@LOGS
def test_torch_compile_keeps_it_whole(log):
    compiled = torch.compile(lambda x: OPS[log](x * 2, scale=0.5), backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 32, requires_grad=True)
    y = compiled(x)
    assert torch.equal(y, OPS[log](x * 2, scale=0.5))
    mine, = torch.autograd.grad(y.square().sum(), x)
    wanted, = torch.autograd.grad(OPS[log](x * 2, scale=0.5).square().sum(), x)
    assert torch.allclose(mine, wanted)


# ---- plans ---------------------------------------------------------------------------------------------------------

COLUMNS = st.one_of(
    st.integers(1, MAX_N), st.integers(1, 4096), st.integers(1, MAX_N // 8).map(lambda n: 8 * n),
    st.integers(0, 18).flatmap(lambda e: st.sampled_from([2**e, max(1, 2**e - 1), min(MAX_N, 2**e + 1)])))


@st.composite
def specs(draw):
    x, N = draw(st.sampled_from(["bf16", "fp16", "fp32"])), draw(COLUMNS)
    whole = 128 // row_plan.WIDTH[x]
    if whole <= N and draw(st.booleans()):
        return SoftmaxSpec(N, x, whole, draw(st.booleans()), draw(st.booleans()), True)
    widest = geometry.vector(N, row_plan.WIDTH[x])
    vector = draw(st.sampled_from([v for v in (1, 2, 4, 8) if widest % v == 0]))
    return SoftmaxSpec(N, x, vector, draw(st.booleans()), draw(st.booleans()))


def held(t, N, shift):
    """How often each column of a row is held, for a row that begins `shift` elements into its first vector."""
    count = torch.zeros(N, dtype=torch.int64)
    rank, j, thread, i = torch.meshgrid(*map(torch.arange, (t.cluster, t.blocks, t.threads_per_row, t.vector)),
                                        indexing="ij")
    columns = (rank * t.cols + (j * t.threads_per_row + thread) * t.vector + i - shift).flatten()
    columns = columns[(columns >= 0) & (columns < N)]
    return count.index_add(0, columns, torch.ones_like(columns))


@settings(max_examples=40)
@given(specs())
def test_every_spec_has_a_config_that_holds_each_column_once(spec):
    config = plan.plan(spec)
    plan.check(spec, config)
    t = row_plan.tile(spec, config)
    assert t.threads == config.threads <= 1024
    for shift in {0, 1, spec.vector - 1} if spec.shifted else {0}:
        assert torch.equal(held(t, spec.N, min(shift, spec.vector - 1)), torch.ones(spec.N, dtype=torch.int64))


@pytest.mark.parametrize("N", [1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144])
@pytest.mark.parametrize("backward", [False, True])
def test_variants_are_valid_and_begin_with_the_plan(N, backward):
    spec = SoftmaxSpec(N, "bf16", 8, backward=backward)
    found = plan.variants(spec)
    assert found[0] == plan.plan(spec) and len(found) == len(set(found)) >= (1 if N > 131072 else 3)
    for config in found:
        plan.check(spec, config)


@pytest.mark.parametrize("change, says", [
    (dict(load="tma"), "load"), (dict(threads_per_row=16), "elements|bf16 a thread"), (dict(threads=100), "threads"),
    (dict(cluster=3), "cluster"), (dict(cluster=32, threads_per_row=8), "cluster")])
def test_a_config_that_cannot_serve_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        plan.check(SoftmaxSpec(4096, "bf16", 8), replace(row_plan.RowConfig(128, 128), **change))


def test_backward_keeps_registers():
    with pytest.raises(ValueError, match="load"):
        plan.check(SoftmaxSpec(4096, "bf16", 8, backward=True), row_plan.RowConfig(256, 256, load="shared"))


@pytest.mark.parametrize("error, bad", [
    (ValueError, dict(vector=3)), (ValueError, dict(vector=16)), (ValueError, dict(vector=4, shifted=True)),
    (NotImplementedError, dict(N=MAX_N + 1)), (NotImplementedError, dict(N=0)), (TypeError, dict(x="e4m3"))])
def test_a_spec_that_is_not_supported_says_so(error, bad):
    with pytest.raises(error):
        SoftmaxSpec(**{**dict(N=64, x="bf16", vector=8), **bad})


# ---- accesses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N, size, rows, expected", [
    (64, 2, [(0, 128), (256, 128)], (8, False)),  # whole
    (63, 2, [(0, 126), (256, 126)], (8, True)),  # rows begin anywhere, in both alike
    (64, 2, [(2, 128), (18, 128)], (8, True)),  # not at 16 bytes, alike
    (64, 2, [(2, 128), (0, 128)], (1, False)),  # not alike
    (64, 2, [(8, 144), (0, 128)], (4, False)),
    (63, 2, [(0, 128), (0, 126)], (1, False)),
    (64, 4, [(0, 256), (0, 256)], (4, False)),
    (33, 4, [(4, 132), (20, 132)], (4, True)),
    (3, 4, [(0, 12), (0, 12)], (1, False)),  # a row shorter than an access
    (7, 2, [(0, 14), (0, 14)], (1, False)),
    (60, 2, [(0, 1024), (0, 120)], (4, False)),  # out is contiguous: 8 bytes
    (60, 2, [(0, 1024), (0, 1024)], (8, True)),  # 7.5 accesses a row
    (64, 2, [(0, 0), (0, 128)], (8, False))])  # expanded rows
def test_the_access_fits_every_row(N, size, rows, expected):
    assert row_plan.access(N, size, rows) == expected


@given(st.integers(1, 300), st.sampled_from([2, 4]),
       st.lists(st.tuples(st.integers(0, 40), st.integers(0, 400)), min_size=1, max_size=3))
def test_no_access_leaves_its_row_by_more_than_its_own_16_bytes(N, size, rows):
    rows = [(address * size, step * size) for address, step in rows]
    vector, shifted = row_plan.access(N, size, rows)
    unit = vector * size
    assert unit <= 16
    if shifted:
        assert unit == 16 and len({(address % 16, step % 16) for address, step in rows}) == 1
    else:
        assert N % vector == 0 and all(address % unit == step % unit == 0 for address, step in rows)


def test_recipes_differ_where_kernels_do():
    specs = [SoftmaxSpec(64, "bf16", 8), SoftmaxSpec(64, "bf16", 4), SoftmaxSpec(64, "bf16", 8, True),
             SoftmaxSpec(64, "bf16", 8, backward=True), SoftmaxSpec(64, "bf16", 8, shifted=True),
             SoftmaxSpec(64, "fp16", 8)]
    assert len({repr(ops.recipe(s)) for s in specs}) == len(specs)

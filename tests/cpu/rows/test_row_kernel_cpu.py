"""RowKernel where no GPU is needed: what a call is read as, what is refused, and that every kind compiles cleanly."""
import pytest
import torch

from tests.helpers.rows import row_kernels as kernels
from tkq.norms.backward.kernel import LayerNormBackward, RMSNormBackward
from tkq.rows.persistent import launch
from tkq.rows.persistent.plan import plan
from tkq.rows.persistent.spec import RowSpec, Stream

BF16 = torch.bfloat16


def calls(N):
    """A call of each test kernel."""
    x, vector, rows = torch.zeros(4, N, dtype=BF16), torch.zeros(N), torch.zeros(4)
    yield kernels.Softmax, dict(x=x, y=x.float(), lse=rows, scale=1.0)
    yield kernels.LogSumExp, dict(x=x, lse=rows)
    yield kernels.ExactLayerNorm, dict(x=x, y=x, weight=vector, mean=rows, rstd=rows, eps=1e-5)
    yield kernels.ThreeExchanges, dict(x=x, y=x)
    yield kernels.Moments, dict(x=x, y=x, total=vector, m0=rows, m1=rows, m2=rows, m3=rows, m4=rows)
    yield kernels.BiasGradient, dict(dy=x, dbias=vector)
    yield kernels.Residual, dict(x=x, residual=x.float(), y=x, total=x.float(), weight=vector, rstd=rows, eps=1e-5,
                                 offset=1.0)


def recipe(cls, arguments):
    return cls.recipe(**arguments)


@pytest.mark.parametrize("N", [1024, 7])
@pytest.mark.parametrize("i", range(7))
# rows without a ring: of one stream, of the most numbers, of the most streams
@pytest.mark.sampled(when=lambda N, i: N != 7 or i in (0, 4, 6))
@pytest.mark.machine_code(recipe=lambda N, i: recipe(*list(calls(N))[i]))
def test_every_kind_compiles(N, i, machine_code):
    cls, arguments = list(calls(N))[i]
    for kernel in machine_code:
        assert not kernel.spill_loads and not kernel.stack, cls
        ring = N != 7 and cls is not kernels.LogSumExp
        assert kernel.count("UBLKCP") == 2 * ring * len([n for n in cls.loads if n in arguments])


@pytest.mark.parametrize("i", range(7))
@pytest.mark.machine_code(recipe=lambda i: recipe(*list(calls(32768))[i]))
def test_every_kind_compiles_for_a_cluster(i, machine_code):
    cls, _ = list(calls(32768))[i]
    for kernel in machine_code:
        assert not kernel.spill_loads and not kernel.stack, cls
        assert bool(kernel.count("STAS")) == (cls is not kernels.BiasGradient)


def numbers_alone(N, i):
    x, rows = torch.zeros(4, N, dtype=BF16), torch.zeros(4)
    return (
        (kernels.LogSumExp, dict(x=x, lse=rows)), (kernels.LogSumExp, dict(x=x.float(), lse=rows)),
        (kernels.ExactLayerNorm, dict(x=x, mean=rows, rstd=rows, eps=1e-5)),
        (kernels.Moments, dict(x=x, m0=rows, m1=rows, m2=rows, m3=rows, m4=rows)),
        (kernels.Residual, dict(x=x, residual=x.float(), weight=torch.zeros(N), rstd=rows, eps=1e-5, offset=1.0)))[i]


@pytest.mark.parametrize("N", [96, 1001, 4096, 8192])
@pytest.mark.parametrize("i", range(5))
# every kernel at the widest that is held; at an odd size those with the most loads and outputs, of which the one that
# writes the most has the other sizes
@pytest.mark.sampled(when=lambda N, i: N == 8192 or i == 3 or (N, i) == (1001, 4))
@pytest.mark.machine_code(recipe=lambda N, i: recipe(*numbers_alone(N, i)))
def test_kernels_that_write_numbers_alone_hold_their_rows_without_spills(N, i, machine_code):
    """Whatever their exchanges, loads and types: the plan leaves them registers, though many blocks share them."""
    cls, arguments = numbers_alone(N, i)
    p = plan(launch.spec_of(cls, arguments).shape)
    (kernel,) = machine_code
    assert p.held and p.min_blocks_per_sm > 1 and kernel.registers <= p.launch_registers
    assert not kernel.spill_loads and not kernel.stack, (cls, p)


def spec(**changes):
    x, rows = torch.zeros(4, 64, dtype=BF16), torch.zeros(4)
    given = dict(dy=x, x=x, dx=x, weight=torch.zeros(64), rstd=rows, dweight=torch.zeros(64))
    return launch.spec_of(RMSNormBackward, {k: v for k, v in {**given, **changes}.items() if v is not None})


def test_what_a_call_is_read_as():
    assert spec() == RowSpec(
        "tkq.norms.backward.kernel", "RMSNormBackward", 64, (Stream("dy", "bf16"), Stream("x", "bf16")),
        (Stream("dx", "bf16"),), (Stream("weight", "fp32"),), ("rstd",), (), (Stream("dweight", "fp32"),))
    assert spec(dx=None).sums == (), "column sums alone need no exchange"
    assert spec(weight_offset=1.0).options == (("weight_offset", 1.0),)
    assert spec(weight=torch.zeros(65)[1:]).vectors[0].align == 4
    assert spec(x=torch.zeros(4, 64)).vector == 4, "as many elements of each as the widest type has in 16 bytes"


def bf16(columns, rows=4):
    return torch.zeros(rows, columns, dtype=BF16)


@pytest.mark.parametrize("make, vector, bulk", [
    (lambda: bf16(64), 8, True), (lambda: bf16(72)[:, :64], 8, True), (lambda: bf16(72)[:, 8:], 8, True),
    (lambda: bf16(72)[:, 4:68], 4, False), (lambda: bf16(66)[:, :64], 2, False), (lambda: bf16(65)[:, 1:], 1, False),
    (lambda: bf16(65, 1)[:, :64], 8, True), (lambda: torch.zeros(1, 64).expand(4, 64), 4, True)])
def test_which_rows_bulk_copies_take(make, vector, bulk):
    x = make()
    found = spec(x=x, dy=torch.zeros(x.shape), rstd=torch.zeros(len(x)), dx=torch.zeros(x.shape, dtype=BF16))
    assert (found.vector, found.bulk) == (min(4, vector), bulk)
    assert plan(found.shape).direct is not bulk


@pytest.mark.parametrize("error, says, changes", [
    (TypeError, "got an argument bias", dict(bias=torch.zeros(64))),
    (TypeError, "x: dtype is torch.float64", dict(x=torch.zeros(4, 64).double())),
    (TypeError, "dy: got str", dict(dy="dy")), (TypeError, "rstd: dtype", dict(rstd=torch.zeros(4, dtype=BF16))),
    (ValueError, "x: shape is", dict(x=torch.zeros(4, 63))), (ValueError, "rstd: shape is", dict(rstd=torch.zeros(5))),
    (ValueError, "weight: shape is", dict(weight=torch.zeros(4))),
    (ValueError, "x: strides are", dict(x=torch.zeros(64, 4).t())),
    (ValueError, "dweight: begins at", dict(dweight=torch.zeros(65)[1:])),
    (ValueError, "dx: rows are", dict(dx=torch.zeros(1, 64, dtype=BF16).expand(4, 64))),
    (ValueError, "has 1 dimensions", dict(dy=torch.zeros(64))),
    (ValueError, "none of its loads", dict(dy=None, x=None))])
def test_bad_arguments_are_named(error, says, changes):
    with pytest.raises(error, match=says):
        spec(**changes)


def test_launch_names_what_it_cannot_take():
    x = torch.zeros(4, 64)
    with pytest.raises(ValueError, match="allowed are CUDA tensors"):
        kernels.LogSumExp.launch(x=x, lse=torch.zeros(4))
    with pytest.raises(NotImplementedError, match="x requires a gradient"):
        kernels.LogSumExp.launch(x=x.clone().requires_grad_(), lse=torch.zeros(4))
    with pytest.raises(TypeError, match="eps: got NoneType"):
        launch.parameters(kernels.ExactLayerNorm, dict(x=x))


def test_exchanges_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="LayerNormBackward: sums"):
        s = spec()
        LayerNormBackward(s, plan(s.shape))


@pytest.mark.machine_code(recipe=lambda: launch.recipe_of(spec(dx=None)))
def test_column_sums_alone_compile(machine_code):
    """What `norm_backward` asks for where x needs no gradient."""
    (kernel,) = machine_code
    assert not kernel.spill_loads and kernel.count("MEMBAR.ALL.GPU")

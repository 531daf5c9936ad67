"""norm_backward where no GPU is needed: the formula against autograd, what a kernel is asked for, what is refused."""
import pytest
import torch
import torch.nn.functional as F

from tkq.norms.backward import catalog, ops
from tkq.norms.backward.ops import norm_backward
from tkq.rows.persistent.plan import plan

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KINDS = ["rmsnorm", "layernorm"]


def inputs(kind, M=5, N=24, dy=FP64, x=FP64, weight=FP64):
    torch.manual_seed(M + N)
    dy, x = torch.randn(M, N).to(dy), (torch.randn(M, N) + 1).to(x)
    wide = x.double()
    mean = wide.mean(-1) if kind == "layernorm" else None
    centred = wide if mean is None else wide - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(-1) + 1e-5)
    numbers = [None if t is None else t.to(FP64 if x.dtype == FP64 else FP32) for t in (rstd, mean)]
    return dy, x, None if weight is None else torch.randn(N).to(weight), *numbers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_formula_is_autograds(kind, offset):
    dy, x, weight, rstd, mean = inputs(kind)
    leaves = [t.clone().requires_grad_() for t in (x, weight, torch.zeros(24, dtype=FP64))]
    if kind == "layernorm":
        y = F.layer_norm(leaves[0], (24,), leaves[1] + offset, leaves[2], 1e-5)
    else:
        y = F.rms_norm(leaves[0], (24,), leaves[1] + offset, 1e-5) + leaves[2]
    want = torch.autograd.grad(y, leaves, dy)
    got = norm_backward(kind, dy, x, weight, rstd, mean, weight_offset=offset, needs=(True, True, True))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(got, want)) and got[3] is None


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_and_types(kind):
    dy, x, weight, rstd, mean = inputs(kind, dy=BF16, x=FP32, weight=FP16)
    more = torch.randn(5, 24)
    plain = norm_backward(kind, dy, x, weight, rstd, mean, needs=(True, False, False))
    assert plain[0].dtype == FP32 and plain[1] is plain[2] is plain[3] is None
    got = norm_backward(kind, dy, x, weight, rstd, mean, dresidual_out=more, dx_dtype=BF16, dresidual_dtype=FP32,
                        needs=(True, True, True))
    assert torch.allclose(got[3], plain[0] + more) and torch.equal(got[0], got[3].bfloat16())
    assert got[1].dtype == got[2].dtype == FP16
    one = norm_backward(kind, dy, x, weight, rstd, mean, dresidual_dtype=FP32)
    assert one[3] is one[0]
    only = norm_backward(kind, dy, x, weight, rstd, mean, dresidual_dtype=BF16, needs=(False, False, False))
    assert only[0] is only[1] is only[2] is None and only[3].dtype == BF16
    assert norm_backward(kind, dy, x, None, rstd, mean, needs=(True, True, True))[2].dtype == FP32


class Recorder:
    """In the place of a compiled kernel: keeps what it was asked for and called with."""

    def __init__(self):
        self.specs, self.calls = [], []

    def __call__(self, spec, device):
        self.specs.append(spec)
        return lambda *args: self.calls.append(args)


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(ops.launch, "launcher", recorder)
    monkeypatch.setattr(ops, "_calls", {})
    return recorder


def ask(kind, N=64, M=5, dresidual_out=None, offset=0.0, needs=(True, True, False), dx=None, dresidual=None, **types):
    dy, x, weight, rstd, mean = inputs(kind, M, N, **{"dy": BF16, "x": BF16, "weight": BF16, **types})
    args = (kind, dy, x, weight, rstd, mean, dresidual_out, offset, needs, dx, dresidual, None)
    return ops._launch(*args), (dy, x, weight, rstd, mean)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_kernels_are_those_that_are_asked_for(recorder, kind):
    more = torch.randn(5, 4096)
    ask(kind, 4096, needs=(True, True, kind == "layernorm"))
    ask(kind, 4096, weight=None, needs=(True, False, True))
    ask(kind, 4096, needs=(True, False, False))
    ask(kind, 4096, dresidual_out=more, dresidual=FP32, needs=(True, True, kind == "layernorm"))
    ask(kind, 1001, needs=(True, True, kind == "layernorm"))
    wanted = [dict(), dict(weight=None, columns=0), dict(columns=0), dict(dresidual_out="fp32", dresidual="fp32")]
    for found, options in zip(recorder.specs, wanted):
        if options.get("weight", 0) is None:  # dbias alone
            assert [s.name for s in found.columns] == ["dbias"] and found.columns[0].dtype == "fp32"
            continue
        assert found == catalog.spec(kind, 4096, **options)
    assert recorder.specs[4] == catalog.spec(kind, 1001, vector=1, bulk=False)


def test_what_a_kernel_is_called_with(recorder):
    (dx, dweight, dbias, dresidual), (dy, x, weight, rstd, mean) = ask("layernorm", needs=(True, True, True),
                                                                       dresidual=FP32)
    (loads, stores, vectors, scalars, results, columns), = recorder.calls
    assert loads == (dy, x) and vectors == (weight,) and scalars == (rstd, mean) and results is None
    assert stores == (dx, dresidual) and columns == (dweight, dbias)
    assert dresidual.dtype == FP32 and dx.is_contiguous()
    ask("layernorm", needs=(True, True, True), dresidual=FP32)
    assert len(recorder.specs) == 1 and len(recorder.calls) == 2, "the second call is looked up"


def test_column_sums_alone_need_no_exchange(recorder):
    got, _ = ask("rmsnorm", needs=(False, True, True))
    assert got[0] is None and recorder.specs[0].sums == () and recorder.specs[0].stores == ()
    assert plan(recorder.specs[0].shape).stages and recorder.calls[0][1] is None


def test_nothing_to_do_launches_nothing(recorder):
    assert ask("rmsnorm", needs=(False, False, False))[0] == (None, None, None, None)
    (dx, dweight, _, _), _ = ask("rmsnorm", M=0)
    assert dx.shape == (0, 64) and not dweight.any() and not recorder.calls


def test_strides_decide_the_way():
    wide = torch.zeros(6, 80, dtype=BF16)
    for view, vector, bulk in ((wide[:, :64], 8, True), (wide[:, 8:72], 8, True), (wide[:, 4:68], 4, False),
                               (wide[:, 1:65], 1, False)):
        s = ops.spec_of("rmsnorm", view, wide[:, :64], None, None, 0.0, BF16, None, False, None)
        assert (s.vector, s.bulk) == (vector, bulk)
    s = ops.spec_of("rmsnorm", wide, wide, None, None, 0.0, BF16, FP32, False, None)
    assert s.vector == 4, "the widest of the outputs counts too"
    assert ops.spec_of("rmsnorm", wide, wide, None, None, 1.0, BF16, None, False, None).options == (
        ("weight_offset", 1.0),)


@pytest.mark.parametrize("error, says, change", [
    (ValueError, "kind: got", dict(kind="batchnorm")), (ValueError, "dy: shape is", dict(dy=torch.zeros(4, 24))),
    (TypeError, "x: dtype is torch.float64", dict(x=torch.zeros(5, 24).double())),
    (ValueError, "x: has 3 dimensions", dict(x=torch.zeros(1, 5, 24))),
    (ValueError, "x: strides are", dict(x=torch.zeros(24, 5).t())),
    (TypeError, "rstd: dtype", dict(rstd=torch.zeros(5).double())),
    (ValueError, "rstd: shape", dict(rstd=torch.zeros(4))),
    (TypeError, "mean: got NoneType", dict(mean=None)), (ValueError, "mean: shape", dict(mean=torch.zeros(1))),
    (ValueError, "rmsnorm has none", dict(kind="rmsnorm")), (ValueError, "weight: shape", dict(weight=torch.zeros(23))),
    (ValueError, "weight: strides", dict(weight=torch.zeros(48)[::2])),
    (TypeError, "dresidual_out: dtype", dict(dresidual_out=torch.zeros(5, 24).double())),
    (ValueError, "weight: is on meta", dict(weight=torch.zeros(24, device="meta"))),
    (NotImplementedError, r"\(5, 262145\)", dict(x=torch.zeros(1, 262145).expand(5, -1)))])
def test_bad_input_is_named(recorder, error, says, change):
    given = dict(kind="layernorm", dy=torch.zeros(5, 24), x=torch.zeros(5, 24), weight=torch.zeros(24),
                 rstd=torch.zeros(5), mean=torch.zeros(5), dresidual_out=None)
    with pytest.raises(error, match=says):
        ops._launch(*{**given, **change}.values(), 0.0, (True, True, True), None, None, None)
    assert not recorder.specs

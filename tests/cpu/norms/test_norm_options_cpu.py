"""The norms' options and gradients where no GPU is needed: what they mean, what is refused, what autograd sees."""
import pytest
import torch

import tkq
from tests.helpers.norms.options import EPS, KINDS, torch_norm
from tests.helpers.ops import every_op_checks as checks
from tests.helpers.ops.every_op import Case
from tkq.norms import ops, quant_ops  # noqa: F401  register torch.ops.tkq's
from tkq.reference import norms
from tkq.testing import assert_2x

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make(shape, dtype=torch.float32, **shapes_and_dtypes):
    """x, and the tensors asked for by name as (shape, dtype)."""
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype), {name: torch.randn(s).to(d) for name, (s, d) in shapes_and_dtypes.items()}


def wide(tensors):
    return {name: t.double() for name, t in tensors.items()}


# ---- what they mean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_a_residual_is_added_in_float32(kind, dtype, other):
    x, extra = make((6, 40), dtype, residual=((6, 40), other), weight=((40,), torch.float32))
    y, h = getattr(tkq, kind)(x, **extra, eps=EPS, prenorm=True)
    truth, total = torch_norm(kind, x.double(), **wide(extra))
    same, same_total = torch_norm(kind, x.float(), **{n: t.float() for n, t in extra.items()})
    assert y.dtype == dtype and h.dtype == other
    assert_2x(y, truth, same.to(dtype), ulps=1)
    assert_2x(h, total, same_total.to(other), ulps=1)
    assert torch.equal(getattr(tkq, kind)(x, **extra, eps=EPS), y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("total", [None, *DTYPES])
def test_results_have_the_types_asked_for(kind, out, total):
    x, extra = make((6, 40), torch.bfloat16, residual=((6, 40), torch.bfloat16), weight=((40,), torch.bfloat16))
    y, h = getattr(tkq, kind)(x, **extra, eps=EPS, prenorm=True, out_dtype=out, residual_dtype=total)
    truth, sum_ = torch_norm(kind, x.double(), **wide(extra))
    assert y.dtype == out and h.dtype == (total or torch.bfloat16)
    assert_2x(y, truth, truth.float().to(out), ulps=1)
    assert torch.equal(h, (x.float() + extra["residual"].float()).to(h.dtype)) and sum_.shape == h.shape


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_residual_the_sum_is_x(kind):
    x = torch.randn(3, 8).bfloat16()
    _, h = getattr(tkq, kind)(x, prenorm=True)
    assert h is x
    assert getattr(tkq, kind)(x, prenorm=True, residual_dtype=torch.bfloat16)[1] is x
    _, h = getattr(tkq, kind)(x, prenorm=True, residual_dtype=torch.float32)
    assert h.dtype == torch.float32 and torch.equal(h, x.float())


@pytest.mark.parametrize("kind", KINDS)
def test_weight_offset_is_added_to_the_weight(kind):
    x, extra = make((6, 40), torch.bfloat16, weight=((40,), torch.bfloat16))
    y = getattr(tkq, kind)(x, **extra, weight_offset=1.0, eps=EPS)
    truth = torch_norm(kind, x.double(), offset=1.0, **wide(extra))[0]
    assert_2x(y, truth, truth.float().bfloat16(), ulps=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape, heads", [((2, 5, 3, 16), 3), ((4, 16), 4), ((7, 4, 16), 4), ((0, 4, 16), 4)])
def test_each_head_may_have_a_weight(kind, shape, heads):
    x, extra = make(shape, torch.bfloat16, weight=((heads, 16), torch.float32), bias=((heads, 16), torch.bfloat16),
                    residual=(shape, torch.float32))
    y, h = getattr(tkq, kind)(x, **extra, eps=EPS, prenorm=True)
    truth, total = torch_norm(kind, x.double(), **wide(extra))
    assert_2x(y, truth, truth.float().bfloat16(), ulps=1)
    assert_2x(h, total, total.float(), ulps=1)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_heads_and_their_copy_agree(kind):
    qkv = torch.randn(2, 5, 3, 4, 16)
    for view in (qkv[:, :, 1], qkv[:, 1:3, 0], qkv[:, :, 0].transpose(1, 2)):
        assert torch.equal(getattr(tkq, kind)(view), getattr(tkq, kind)(view.contiguous()))


# ---- what is refused ---------------------------------------------------------------------------------------------

X = torch.ones(2, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error, says, options", [
    (TypeError, "residual: got list", dict(residual=[1.0])),
    (TypeError, "residual: dtype is torch.float64", dict(residual=X.double())),
    (ValueError, r"residual: shape is \(2, 5\), expected \(2, 4\)", dict(residual=torch.ones(2, 5))),
    (ValueError, r"residual: shape is \(4,\)", dict(residual=torch.ones(4))),
    (ValueError, "residual: strides are", dict(residual=torch.ones(4, 2).t())),
    (ValueError, "residual: is on meta", dict(residual=torch.ones(2, 4, device="meta"))),
    (TypeError, "out_dtype: got torch.float64", dict(out_dtype=torch.float64)),
    (TypeError, "out_dtype: got torch.float8_e4m3fn", dict(out_dtype=torch.float8_e4m3fn)),
    (TypeError, "out_dtype: got 'bf16', which is no torch.dtype", dict(out_dtype="bf16")),
    (TypeError, "residual_dtype: got torch.int32", dict(residual_dtype=torch.int32, prenorm=True)),
    (ValueError, "residual_dtype is torch.float32.*prenorm", dict(residual_dtype=torch.float32)),
    (ValueError, "weight_offset is 1.0.*no weight", dict(weight_offset=1.0)),
    (TypeError, "weight_offset: got str", dict(weight_offset="1", weight=torch.ones(4))),
    (TypeError, r"weight_offset: got a Tensor of shape \(4,\), expected a float",
     dict(weight_offset=torch.ones(4), weight=torch.ones(4))),
    (TypeError, "weight_offset: got a Tensor",
     dict(weight_offset=torch.ones(4), weight=torch.ones(4), residual=X, prenorm=True)),
    (TypeError, "prenorm: got a Tensor", dict(prenorm=torch.tensor([1, 2]))),
    (TypeError, "prenorm: got a Tensor", dict(prenorm=torch.tensor([1, 2]), residual=X))])
def test_a_bad_option_is_named(kind, error, says, options):
    for call in (getattr(tkq, kind), getattr(tkq, kind + "_quant")):
        if call is tkq.rmsnorm_quant or call is tkq.layernorm_quant:
            if "out_dtype" in options:
                continue
        with pytest.raises(error, match=says):
            call(X, **options)


@pytest.mark.parametrize("error, says, call", [
    (ValueError, r"weight: shape is \(3, 4\), expected \(2, 4\)", lambda: tkq.rmsnorm(X, torch.ones(3, 4))),
    (ValueError, r"bias: shape is \(4,\), expected \(2, 4\)",
     lambda: tkq.rmsnorm(X, torch.ones(2, 4), bias=torch.ones(4))),
    (ValueError, "weight: strides are", lambda: tkq.rmsnorm(X, torch.ones(4, 2).t())),
    (ValueError, r"weight: shape is \(3, 4\), expected \(2, 4\)", lambda: tkq.layernorm(X, torch.ones(3, 4))),
    (ValueError, r"bias: shape is \(4,\), expected \(2, 4\)",
     lambda: tkq.layernorm(X, torch.ones(2, 4), torch.ones(4))),
    (ValueError, "granularity: got 'tensor', allowed are 'row', '1x128'",
     lambda: tkq.rmsnorm_quant(X, granularity="tensor")),
    (NotImplementedError, "rmsnorm_quant: x requires a gradient",
     lambda: tkq.rmsnorm_quant(torch.ones(2, 4, requires_grad=True))),
    (NotImplementedError, "layernorm_quant: residual requires a gradient",
     lambda: tkq.layernorm_quant(X, residual=torch.ones(2, 4, requires_grad=True)))])
def test_a_bad_call_is_named(error, says, call):
    with pytest.raises(error, match=says):
        call()


def test_tangents_are_refused():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X)
        with pytest.raises(NotImplementedError, match="x carries a tangent"):
            tkq.rmsnorm(dual)


# ---- gradients: the formula, in float64 ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind, weight, bias", [
    ("rmsnorm", None, False), ("rmsnorm", (33,), True), ("rmsnorm", (5, 33), True), ("layernorm", None, False),
    ("layernorm", (33,), True), ("layernorm", None, True)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_sum", [False, True])
def test_the_formula_is_autograds(kind, weight, bias, offset, with_sum):
    torch.manual_seed(1)
    x = torch.randn(3, 5, 33, dtype=torch.float64, requires_grad=True)
    w = None if weight is None else torch.randn(weight, dtype=torch.float64, requires_grad=True)
    b = torch.randn(weight or (33,), dtype=torch.float64, requires_grad=True) if bias else None
    dy, dsum = torch.randn_like(x), torch.randn_like(x)
    y, h, rstd, mean = norms.norm(kind, x, w, b, eps=EPS, weight_offset=offset)
    leaves = [t for t in (x, w, b) if t is not None]
    wanted = torch.autograd.grad((y * dy).sum() + ((h * dsum).sum() if with_sum else 0), leaves)
    theirs = torch.autograd.grad((torch_norm(kind, x, w, b, None, offset)[0] * dy).sum(), leaves)
    with torch.no_grad():
        found = norms.norm_backward(
            kind, dy, x, w, rstd, mean, dresidual_out=dsum if with_sum else None, weight_offset=offset,
            needs=(True, w is not None, b is not None), dresidual_dtype=torch.float32)
    assert torch.equal(found[3], found[0].float())
    for mine, autograds in zip([t for t in found[:3] if t is not None], wanted, strict=True):
        assert torch.allclose(mine, autograds, rtol=1e-10, atol=1e-10)
    if not with_sum:
        assert all(torch.allclose(a, c, rtol=1e-10, atol=1e-10) for a, c in zip(wanted, theirs))


def test_the_formula_computes_what_is_needed():
    x, w = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    _, _, rstd, mean = norms.norm("layernorm", x, w, eps=EPS)
    for needs in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        found = norms.norm_backward("layernorm", x, x, w, rstd, mean, needs=needs)
        assert [t is not None for t in found] == [*needs, False]
    found = norms.norm_backward("layernorm", x, x, w, rstd, mean, needs=(True, True, True),
                                          dx_dtype=torch.float32, dbias_dtype=torch.bfloat16)
    assert [t.dtype for t in found[:3]] == [torch.float32, torch.float64, torch.bfloat16]


# ---- gradients: the public functions ------------------------------------------------------------------------------


def call(kind, inputs, route, **options):
    """kind's results by one of three ways to it; all return (y, h)."""
    inputs = dict(inputs)
    x = inputs.pop("x")
    norm = getattr(tkq, kind)
    if route == "compiled":
        torch._dynamo.reset()
        norm = torch.compile(norm, backend="aot_eager", fullgraph=True)
    if route == "op":
        o = dict(dict(prenorm=False, weight_offset=0.0), **options)
        y, h, *_ = getattr(torch.ops.tkq, kind)(x, inputs.get("weight"), inputs.get("bias"), EPS,
                                                inputs.get("residual"), o["weight_offset"], None, torch.float32, True)
        return y, h
    return norm(x, **inputs, eps=EPS, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ["eager", "op", "compiled"])
@pytest.mark.parametrize("names", ["x", "x weight", "x weight bias", "x residual", "x weight bias residual"])
def test_gradients(kind, route, names):
    torch.manual_seed(2)
    shapes = dict(x=(6, 40), weight=(40,), bias=(40,), residual=(6, 40))
    leaves = {name: torch.randn(shapes[name], requires_grad=True) for name in names.split()}
    dy, dh = torch.randn(6, 40), torch.randn(6, 40)
    offset = 1.0 if "weight" in leaves else 0.0
    y, h = call(kind, leaves, route, prenorm=True, weight_offset=offset)
    found = torch.autograd.grad([y, h], leaves.values(), [dy, dh])
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    truth = torch.autograd.grad(torch_norm(kind, *_four(exact), offset), exact.values(), [dy.double(), dh.double()])
    again = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    theirs = torch.autograd.grad(torch_norm(kind, *_four(again), offset), again.values(), [dy, dh])
    for name, mine, true, torchs in zip(leaves, found, truth, theirs, strict=True):
        assert_2x(mine, true, torchs, ulps=2, bias_ulps=0.25, what=name)


def _four(tensors):
    return [tensors.get(name) for name in ("x", "weight", "bias", "residual")]


@pytest.mark.parametrize("route", ["eager", "compiled"])
@pytest.mark.parametrize("dtype, residual, bias", [
    (torch.bfloat16, torch.float32, torch.float32), (torch.float32, torch.bfloat16, torch.float16),
    (torch.float16, torch.float16, torch.float32)])
def test_gradients_have_their_inputs_types(route, dtype, residual, bias):
    x, extra = make((6, 40), dtype, residual=((6, 40), residual), weight=((40,), torch.float32), bias=((40,), bias))
    leaves = dict(x=x.requires_grad_(), **{name: t.requires_grad_() for name, t in extra.items()})
    y, h = call("layernorm", leaves, route, prenorm=True)
    (y.float().square().sum() + h.float().square().sum()).backward()
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    y, h = torch_norm("layernorm", *_four(exact))
    (y.square().sum() + h.square().sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype
        scale = exact[name].grad.abs().max()
        assert (leaf.grad.double() - exact[name].grad).abs().max() <= 0.02 * scale, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ["eager", "compiled"])
def test_gradients_of_the_weights_of_heads(kind, route):
    torch.manual_seed(3)
    leaves = {name: torch.randn(shape, requires_grad=True) for name, shape in
              dict(x=(2, 5, 3, 16), weight=(3, 16), bias=(3, 16), residual=(2, 5, 3, 16)).items()}
    y, h = call(kind, leaves, route, prenorm=True, weight_offset=0.5)
    found = torch.autograd.grad(y.square().sum() + h.square().sum(), leaves.values())
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    y, h = torch_norm(kind, *_four(exact), 0.5)
    truth = torch.autograd.grad(y.square().sum() + h.square().sum(), exact.values())
    assert all(torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5) for a, b in zip(found, truth))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_too_long_for_a_gradient_are_refused_before_it_is_needed(kind):
    x, w = torch.ones(2, 3, 4097), torch.ones(3, 4097, requires_grad=True)
    with pytest.raises(NotImplementedError, match=f"{kind}.*heads of 4097 columns, allowed are 1 to 4096"):
        getattr(tkq, kind)(x, w)
    with torch.no_grad():
        assert getattr(tkq, kind)(x, w).shape == x.shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "residual", "x residual", "weight bias"])
def test_gradients_of_exactly_the_inputs_that_need_them(kind, frozen, monkeypatch):
    asked = []
    plain = norms.norm_backward

    def spy(*args, **options):
        asked.append(options)
        return plain(*args, **options)

    monkeypatch.setattr(norms, "norm_backward", spy)
    shapes = dict(x=(6, 40), weight=(40,), bias=(40,), residual=(6, 40))
    leaves = {name: torch.randn(shape, requires_grad=name not in frozen.split()) for name, shape in shapes.items()}
    y, h = call(kind, leaves, "eager", prenorm=True)
    assert h.requires_grad == (leaves["x"].requires_grad or leaves["residual"].requires_grad)
    (y.sum() + h.sum()).backward()
    assert {name for name, t in leaves.items() if t.grad is None} == set(frozen.split())
    needs = leaves["x"].requires_grad or leaves["residual"].requires_grad
    assert asked[0]["needs"] == (needs, leaves["weight"].requires_grad, leaves["bias"].requires_grad)
    assert asked[0]["dresidual_dtype"] is None, "one type: one gradient for both"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ["eager", "op", "compiled"])
def test_either_result_may_be_left_unused(kind, route):
    for used in (0, 1):
        leaves = {name: torch.randn(6, 40, requires_grad=True) for name in ("x", "residual")}
        call(kind, leaves, route, prenorm=True)[used].square().sum().backward()
        exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
        torch_norm(kind, exact["x"], None, None, exact["residual"])[used].square().sum().backward()
        for name, leaf in leaves.items():
            assert torch.allclose(leaf.grad.double(), exact[name].grad, rtol=1e-5, atol=1e-5), (used, name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_without_a_residual_passes_its_gradient_on(kind):
    x = torch.randn(6, 40, requires_grad=True)
    y, h = getattr(tkq, kind)(x, eps=EPS, prenorm=True)
    dy, dh = torch.randn(6, 40), torch.randn(6, 40)
    found, = torch.autograd.grad([y, h], x, [dy, dh])
    z = x.detach().double().requires_grad_()
    truth, = torch.autograd.grad(torch_norm(kind, z), z, [dy.double(), dh.double()])
    assert torch.allclose(found.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_of_a_frozen_x_needs_no_gradient(kind):
    w = torch.ones(40, requires_grad=True)
    x = torch.randn(6, 40)
    y, h = getattr(tkq, kind)(x, w, prenorm=True)
    assert y.requires_grad and not h.requires_grad and torch.equal(h, x)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_not_contiguous(kind):
    x = torch.randn(6, 40, requires_grad=True)
    for use in (lambda y: y.sum(), lambda y: y.t().contiguous().square().sum(), lambda y: (y[:, ::2] ** 2).sum()):
        found, = torch.autograd.grad(use(getattr(tkq, kind)(x, eps=EPS)), x)
        z = x.detach().double().requires_grad_()
        truth, = torch.autograd.grad(use(torch_norm(kind, z)[0]), z)
        assert torch.allclose(found.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
def test_what_is_saved_for_backward(kind, residual, prenorm):
    """What was normalised, the weight, rstd and mean: nothing else, and nothing twice."""
    x, w, r = torch.randn(6, 40, requires_grad=True), torch.randn(40), torch.randn(6, 40) if residual else None
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = getattr(tkq, kind)(x, w, residual=r, prenorm=prenorm)
    assert sorted(t.numel() for t in saved) == [40, 240]
    statistics = (y[0] if prenorm else y).grad_fn.statistics  # by autograd's own node: see gradients.remember_quickly
    assert [t if t is None else t.numel() for t in statistics] == [6, 6 if kind == "layernorm" else None]


@pytest.mark.parametrize("route", ["eager", "op"])
def test_a_second_derivative_is_refused(route):
    x = torch.randn(6, 40, requires_grad=True)
    y = call("rmsnorm", dict(x=x), route, prenorm=True)[0]
    g, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rmsnorm.*: second derivatives"):
        g.square().sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [dict(), dict(prenorm=True), dict(prenorm=True, residual_dtype=torch.float32)])
def test_no_second_derivative_is_lost(kind, options):
    """What is normalised may be a sum that is no result."""
    def tensors(t):
        return dict(x=t(6, 40), weight=t(40), residual=t(6, 40))

    def run(x, weight, residual):
        return getattr(tkq, kind)(x, weight, residual=residual, **options)

    for leaves in (("x", "weight", "residual"), ("x", "residual"), ("weight", "residual"), ("weight",)):
        checks.refuses_second_derivatives(Case(kind, tensors, run, leaves), "cpu", "eager")


@pytest.mark.parametrize("kind", KINDS)
def test_the_op_says_what_a_gradient_needs(kind):
    x = torch.randn(6, 40, requires_grad=True)
    with pytest.raises(ValueError, match="save=True"):
        getattr(torch.ops.tkq, kind)(x, None, None, EPS, None, 0.0, None, None, False)
    with pytest.raises(ValueError, match="total_dtype"):
        getattr(torch.ops.tkq, kind)(x, None, None, EPS, x, 0.0, None, None, True)


# ---- the custom ops -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(kind, grad):
    x, w, r = torch.randn(4, 3, 16, requires_grad=grad), torch.randn(16, requires_grad=grad), torch.randn(4, 3, 16)
    op = getattr(torch.ops.tkq, kind)
    for args in ((x, w, None, EPS, None, 0.0, None, None, True),
                 (x, w, w, EPS, r, 1.0, torch.bfloat16, torch.float32, True),
                 (x, w, None, EPS, None, 0.0, None, torch.float16, True)):
        tests = ("test_schema", "test_faketensor", *(["test_aot_dispatch_static"] if grad else []))
        torch.library.opcheck(op, args, test_utils=tests)
    if kind == "rmsnorm":
        torch.library.opcheck(op, (x, torch.randn(3, 16), None, EPS, None, 0.0, None, None, True),
                              test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("granularity", ["row", "1x128"])
def test_opcheck_of_the_quantising_ops(granularity):
    x = torch.randn(4, 3, 200).bfloat16()
    for kind in KINDS:
        op = getattr(torch.ops.tkq, kind + "_quant")
        for total in (None, torch.float32):
            torch.library.opcheck(op, (x, torch.randn(200), None, EPS, x, 0.0, total, granularity),
                                  test_utils=("test_schema", "test_faketensor"))


def test_opcheck_of_the_backward_op():
    x, w = torch.randn(6, 40), torch.randn(40)
    for kind in KINDS:
        _, _, rstd, mean = norms.norm(kind, x, w, eps=EPS)
        for needs in ((True, True, True), (True, False, False), (False, True, False)):
            torch.library.opcheck(torch.ops.tkq.norm_backward,
                                  (x, x, w, rstd, mean, kind, x, 1.0, *needs, torch.bfloat16, torch.float32,
                                   torch.float32), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [
    dict(), dict(prenorm=True), dict(prenorm=True, residual_dtype=torch.float32), dict(weight_offset=1.0),
    dict(out_dtype=torch.float32)])
@pytest.mark.parametrize("residual", [False, True])
def test_torch_compile_keeps_it_whole(kind, options, residual):
    x, extra = make((6, 40), torch.bfloat16, weight=((40,), torch.bfloat16))
    if residual:
        extra["residual"] = torch.randn(6, 40)
    norm = getattr(tkq, kind)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, extra: norm(x * 2, **extra, **options), backend="aot_eager", fullgraph=True)
    for mine, eager in zip(_pair(compiled(x, extra)), _pair(norm(x * 2, **extra, **options)), strict=True):
        assert torch.equal(mine, eager) and mine.dtype == eager.dtype


def _pair(found):
    return found if isinstance(found, tuple) else (found,)


# ---- float8 ---------------------------------------------------------------------------------------------------------


def e4m3(v):
    """v rounded to the nearest number of e4m3, ties to even, in float64."""
    exponent = torch.floor(torch.log2(v.abs().clamp_min(2.0**-6))).clamp(-6, 8)
    step = 2.0 ** (exponent - 3)
    return (torch.round(v / step) * step).clamp(-448, 448)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["row", "1x128"])
@pytest.mark.parametrize("N", [1, 100, 128, 129, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised(kind, granularity, N, dtype):
    x, extra = make((9, N), dtype, weight=((N,), torch.float32), residual=((9, N), torch.float32))
    q, scale, h = getattr(tkq, kind + "_quant")(x, **extra, eps=EPS, prenorm=True, granularity=granularity)
    y = torch_norm(kind, x.double(), **wide(extra))[0]
    groups = 1 if granularity == "row" else -(-N // 128)
    assert q.shape == x.shape and q.dtype == torch.float8_e4m3fn and q.is_contiguous()
    assert scale.shape == (9, groups) and scale.dtype == torch.float32 and h.dtype == torch.float32
    assert granularity == "row" or scale.stride() == (1, 12)
    width = N if granularity == "row" else 128
    amax = torch.stack([part.abs().amax(1) for part in y.split(width, 1)], 1)
    assert torch.allclose(scale.double(), (amax / 448).clamp_min(2.0**-126), rtol=1e-5)
    each = scale.repeat_interleave(width, 1)[:, :N].double()
    wanted = e4m3(y / each)
    assert (q.double() - wanted).abs().max() <= 32 and (q.double() != wanted).double().mean() <= 0.01  # ties, nearly


def test_zeros_nan_and_infinity_quantise_to_what_is_documented():
    weight = torch.ones(300)
    x = torch.randn(4, 300)
    x[1] = 0
    x[2, 150] = float("nan")
    x[3, 150] = float("inf")
    for granularity, parts in (("row", [slice(None)]), ("1x128", [slice(0, 128), slice(128, 256), slice(256, 300)])):
        q, scale = tkq.rmsnorm_quant(x, weight, granularity=granularity)
        assert (scale[1] == 2.0**-126).all() and (q[1].float() == 0).all()
        assert torch.isnan(scale[2]).all() and torch.isnan(q[2].float()).all(), "the statistics are the row's"
        y = tkq.rmsnorm(x[3], weight)
        assert torch.isnan(y[150]) and (torch.cat([y[:150], y[151:]]) == 0).all()
        for i, part in enumerate(parts):
            bad = part == slice(None) or part.start == 128
            assert torch.isnan(scale[3, i]) == bad and torch.isnan(q[3, part].float()).all() == bad
    weight[7] = float("inf")
    q, scale = tkq.rmsnorm_quant(x[:1], weight)
    assert torch.isinf(scale).all() and torch.isnan(q[0, 7].float()) and (q[0, 8:].float() == 0).all()


def test_a_row_of_quantised_zeros_comes_back_as_zeros():
    q, scale = tkq.layernorm_quant(torch.full((2, 256), 3.0), granularity="1x128")
    assert (q.float() * scale.repeat_interleave(128, 1) == 0).all()

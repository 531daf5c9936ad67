"""tkq.nn.Fp8Linear on a CPU: shapes, gradients beside torch's, what it refuses."""
import copy
import pickle
import re

import pytest
import torch
from torch.autograd import forward_ad

import tkq
from tests.helpers.gemm.fp8_cases import E4M3, E5M2
from tests.helpers.ops import every_op_checks as checks
from tests.helpers.ops.every_op import Case
from tests.helpers.torch_versions import since
from tkq.quantize import linear
from tkq.reference import fp8

GRANULARITIES = tuple(linear.WEIGHTS)


def layers(k=48, n=32, dtype=torch.bfloat16, **kw):
    ours = tkq.nn.Fp8Linear(k, n, dtype=dtype, **kw)
    theirs = torch.nn.Linear(k, n, bias=kw.get("bias", True), dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def off(got, want):
    """Relative error in the mean square."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("gradient", (E4M3, E5M2))
@pytest.mark.parametrize("shape", ((16, 272), (5, 272), (2, 3, 272)))
def test_beside_torch(granularity, gradient, shape):
    torch.manual_seed(0)
    ours, theirs = layers(272, 144, granularity=granularity, gradient=gradient)
    x = torch.randn(shape, dtype=torch.bfloat16)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = ours(a), theirs(b)
    assert y[0].shape == y[1].shape and y[0].dtype == x.dtype
    d = torch.randn_like(y[0])
    for out in y:
        out.backward(d)
    step = 0.04 if gradient == E4M3 else 0.07
    assert off(y[0], y[1]) < 0.04 and off(a.grad, b.grad) < step
    assert off(ours.weight.grad, theirs.weight.grad) < step and off(ours.bias.grad, theirs.bias.grad) < 1e-2
    assert ours.weight.grad.dtype == ours.weight.dtype and a.grad.dtype == x.dtype


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_only_what_is_asked_for(granularity):
    ours, _ = layers(granularity=granularity)
    x = torch.randn(7, 48, dtype=torch.bfloat16)
    ours(x).sum().backward()
    assert ours.weight.grad is not None
    ours.requires_grad_(False)
    x.requires_grad_()
    ours(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not ours(x).requires_grad
    assert ours(x[:0]).shape == (0, 32)


@pytest.mark.parametrize("weight", (False, True))
@pytest.mark.parametrize("bias", (False, True))
def test_each_parameter_may_be_frozen(weight, bias):
    ours, _ = layers()
    ours.weight.requires_grad_(weight), ours.bias.requires_grad_(bias)
    ours(torch.randn(16, 48, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert (ours.weight.grad is not None, ours.bias.grad is not None) == (weight, bias)
    assert not bias or (ours.bias.grad == 16).all()


def test_layers_of_one_input_add_up_its_gradient():
    torch.manual_seed(0)
    both = [layers(n=n)[0] for n in (32, 64)]
    x, dys = torch.randn(16, 48).bfloat16().requires_grad_(), [torch.randn(16, n).bfloat16() for n in (32, 64)]
    found, = torch.autograd.grad(linear.together(x, both), x, dys)
    apart = [torch.autograd.grad(layer(x), x, dy)[0] for layer, dy in zip(both, dys)]
    assert torch.equal(found, apart[0] + apart[1])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_inference_keeps_nothing(granularity, mode, monkeypatch):
    ours, _ = layers(granularity=granularity)
    asked, real = [], linear._quantised
    monkeypatch.setattr(linear, "_quantised", lambda *args: asked.append(args[-1]) or real(*args))
    with mode():
        ours(torch.randn(7, 48, dtype=torch.bfloat16))
    ours(torch.randn(7, 48, dtype=torch.bfloat16))
    assert asked == [False, True]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_tokens(granularity):
    ours, _ = layers(granularity=granularity)
    x = torch.randn(0, 48, dtype=torch.bfloat16, requires_grad=True)
    ours(x).sum().backward()
    assert x.grad.shape == x.shape and not ours.weight.grad.any() and not ours.bias.grad.any()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("tokens", (16, 7))
def test_the_result_may_be_written_in_place(granularity, tokens):
    ours, _ = layers(granularity=granularity)
    x = torch.randn(tokens, 48, dtype=torch.bfloat16)
    y = ours(x)
    z = ours(x).relu_()
    assert torch.equal(z, y.relu())
    z.sum().backward()
    assert ours.weight.grad.any()


def test_sums_of_many_tokens_are_added_up_in_float32(monkeypatch):
    monkeypatch.setattr(linear, "LONG", 64)
    asked, real = [], linear.fp8_gemm
    monkeypatch.setattr(linear, "fp8_gemm", lambda a, b, *args, **kw: asked.append((a.shape[1], kw.get("accumulate")))
                        or real(a, b, *args, **kw))
    ours, _ = layers(144, 80)
    for tokens in (64, 65):
        ours(torch.randn(tokens, 144, dtype=torch.bfloat16)).sum().backward()
    assert asked == [(144, None), (64, None), (144, None), (80, "fp32")]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_weight_that_is_not_kept(granularity):
    """The same gradients; what is saved of it is the weight."""
    saved, found = [], []
    x = torch.randn(20, 48, dtype=torch.bfloat16, requires_grad=True)
    ours = [layers(granularity=granularity, keep_weight=keep)[0] for keep in (True, False)]
    ours[1].load_state_dict(ours[0].state_dict())
    for layer in ours:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = layer(x)
        found.append(torch.autograd.grad(y.square().sum(), (x, layer.weight, layer.bias)))
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert any(t is ours[1].weight for t in saved) and not any(t is ours[0].weight for t in saved)


@pytest.mark.parametrize("of_x", (False, True))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_what_is_saved(granularity, of_x):
    """x's float8 along the tokens, in place of x, which is quantised once for several layers; where x has a gradient,
    the weights' along the outputs. And then nothing, in x's and the weights' place, by a result of no elements."""
    ours = [layers(granularity=granularity)[0] for _ in range(2)]
    x = torch.randn(20, 48, dtype=torch.bfloat16, requires_grad=of_x)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear.together(x, ours)
    if of_x:
        assert not saved.pop().numel()
    assert [t.dtype for t in saved] == [E4M3, torch.float32] * (3 if of_x else 1)
    assert [tuple(t.shape) for t in saved[::2]] == [(48, 32), (48, 32), (48, 32)][:len(saved) // 2]


@pytest.mark.parametrize("keep_weight", (True, False))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_second_derivative_is_lost(granularity, keep_weight):
    """What is saved are numbers in float8, in which autograd sees neither x nor the weight."""
    layer, _ = layers(granularity=granularity, keep_weight=keep_weight)

    def tensors(t):
        return dict(x=t(20, 48), weight=t(32, 48), bias=t(32))

    def run(x, weight, bias):
        return torch.func.functional_call(layer, dict(weight=weight, bias=bias), x)

    for leaves in (("x", "weight", "bias"), ("x",), ("weight",)):
        for way in ("eager", "checkpointed"):
            checks.refuses_second_derivatives(Case("Fp8Linear", tensors, run, leaves), "cpu", way)


@pytest.mark.parametrize("layer", (tkq.nn.Fp8Linear, tkq.nn.Linear))
def test_on_meta(layer):
    kw = dict(dtype=torch.bfloat16, device="meta")
    assert layer(48, 32, **kw)(torch.empty(3, 48, **kw)).shape == (3, 32)


def test_the_products_are_those_of_what_was_quantised():
    ours, _ = layers(bias=False)
    x = torch.randn(16, 48, dtype=torch.bfloat16)
    (q, s), (w, sw) = (fp8.quantize_fp8(t, (1, 0)) for t in (x, ours.weight.detach()))
    assert torch.equal(ours(x), fp8.fp8_gemm(q, w.t(), s, sw.t()))


def test_under_autocast():
    ours = tkq.nn.Fp8Linear(48, 32)
    x = torch.randn(16, 48, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
    y.backward(torch.randn_like(y))
    assert (y.dtype, x.grad.dtype, ours.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    weight, bias = ours.weight.detach(), ours.bias.detach()
    (q, s), (w, sw) = (fp8.quantize_fp8(t, (1, 0)) for t in (x.detach().bfloat16(), weight))
    assert torch.equal(y, fp8.fp8_gemm(q, w.t(), s, sw.t(), bias))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_under_compile(granularity):
    ours, _ = layers(granularity=granularity)
    found = []
    for f in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        x = torch.randn(21, 48, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        y = f(x)
        y.backward(torch.ones_like(y))
        found.append((y, x.grad, ours.weight.grad, ours.bias.grad))
        ours.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found))


@since("2.13", "Dynamo of 2.11 loses a size of the weights that it finds to be fixed while it traces a function")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_one_graph_for_any_number_of_rows(granularity):
    """Zeros are added to a number that is no multiple of 16: in the op, which no guard sees. Weights are arguments."""
    layer, _ = layers(granularity=granularity)

    def tensors(t):
        return dict(x=t(t.rows, 48), weight=t(32, 48))

    def run(x, weight):
        return torch.func.functional_call(layer, dict(weight=weight), x)

    checks.compiles_once(Case("Fp8Linear", tensors, run, ("x", "weight")), "cpu", sizes=(24, 17, 64, 40))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_one_graph_of_a_module_for_any_number_of_rows(granularity):
    """As callers have it: the sizes of a module's own weights are fixed."""
    layer, _ = layers(granularity=granularity)
    checks.compiles_once(Case("Fp8Linear", lambda t: dict(x=t(t.rows, 48)), lambda x: layer(x), ("x",)), "cpu",
                         sizes=(24, 17, 64))


@pytest.mark.parametrize("frozen", (False, True))
def test_compiled_without_a_gradient(frozen):
    ours = layers()[0].requires_grad_(not frozen)
    x = torch.randn(21, 48, dtype=torch.bfloat16)
    with torch.set_grad_enabled(frozen):
        assert torch.equal(torch.compile(ours, fullgraph=True, backend="eager")(x), ours(x))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="in_features, 48"):
        layers()[0](torch.ones(3, 47))
    with pytest.raises(ValueError, match="in_features is 40"):
        tkq.nn.Fp8Linear(40, 32)
    for bad in ("tile", "line", "128x128"):  # one of them the old name of a granularity that the weight has alone
        with pytest.raises(ValueError, match=f"granularity: got '{bad}', allowed are 'row', '1x128', 'tensor', and "):
            tkq.nn.Fp8Linear(32, 32, granularity=bad)
    for bad in (["row"], None):
        with pytest.raises(ValueError, match=f"Fp8Linear: granularity: got {re.escape(repr(bad))}, allowed are 'row'"):
            tkq.nn.Fp8Linear(64, 48, granularity=bad)
    for bad in ("64", 64.0, None):
        with pytest.raises(TypeError, match=f"Fp8Linear: in_features: got {bad!r}, allowed are ints"):
            tkq.nn.Fp8Linear(bad, 48)
    with pytest.raises(TypeError, match="Fp8Linear: keep_weight: got 'yes', allowed are True and False"):
        tkq.nn.Fp8Linear(64, 48, keep_weight="yes")
    with pytest.raises(TypeError, match="gradient: got torch.bfloat16"):
        tkq.nn.Fp8Linear(32, 32, gradient=torch.bfloat16)


def test_transforms_of_functions_are_refused_by_name():
    layer, x = layers()[0], torch.randn(16, 48, dtype=torch.bfloat16)
    for call in (torch.func.grad(lambda x: layer(x).float().sum()), torch.func.vmap(layer)):
        with pytest.raises(NotImplementedError, match="Fp8Linear: torch.func.grad, vjp and jacrev are not supported"):
            call(x[None])


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_forward_mode_is_refused_by_name(name):
    layer, x = tkq.nn.Fp8Linear(16, 16), torch.ones(2, 16)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"Fp8Linear: {name} carries a tangent"):
        given = {"x": x, **dict(layer.named_parameters())}
        given[name] = forward_ad.make_dual(given[name].detach(), torch.ones_like(given[name]))
        torch.func.functional_call(layer, {n: given[n] for n in ("weight", "bias")}, (given["x"],))


def test_is_a_module_like_any():
    ours, theirs = layers(granularity="1x128")
    assert isinstance(ours, torch.nn.Linear) and ours.state_dict().keys() == theirs.state_dict().keys()
    assert "granularity='1x128'" in repr(ours)
    x = torch.randn(16, 48, dtype=torch.bfloat16)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(copied(x), ours(x))

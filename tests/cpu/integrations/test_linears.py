"""Linear layers that share an input (tkq.integrations.linears): what they compute is what each computes by itself."""
import pytest
import torch

import tkq
from tests.helpers.ops import every_op_checks as checks
from tests.helpers.ops.every_op import Case
from tkq.integrations import linears

SIZES = (32, 48, 16)


def found(f, layers, grad=True, shape=(3, 8, 64), loss=lambda y: y.float().square().sum()):
    """(results, gradients) of f, which takes x."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_(grad)
    ys = f(x)
    sum(map(loss, ys)).backward()
    gradients = [x.grad, *(layer.weight.grad for layer in layers)]
    for layer in layers:
        layer.weight.grad = None
    return [*ys, *gradients]


@pytest.mark.parametrize("frozen", ["nothing", "a weight", "x"])
@pytest.mark.parametrize("kind", [tkq.nn.Linear, torch.nn.Linear])
def test_together(kind, frozen):
    torch.manual_seed(0)
    layers = [kind(64, n, bias=False, dtype=torch.bfloat16) for n in SIZES]
    layers[1].weight.requires_grad_(frozen != "a weight")
    grad = frozen != "x"
    want = found(lambda x: [layer(x) for layer in layers], layers, grad)
    got = found(lambda x: linears.together(x, *layers), layers, grad)
    for a, b in zip(got, want, strict=True):
        assert a is b is None or (a - b).norm() <= 0.01 * b.norm()


class Two(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = torch.nn.ModuleList(kind(64, n, bias=False, dtype=torch.bfloat16) for n in SIZES[:2])

    def forward(self, x):
        return linears.together(x, *self.layers)


@pytest.mark.parametrize("kind", [tkq.nn.Linear, torch.nn.Linear])
def test_no_second_derivative_is_lost(kind):
    two = Two(kind)

    def run(x, first, second):
        return torch.func.functional_call(two, {"layers.0.weight": first, "layers.1.weight": second}, x)

    checks.refuses_second_derivatives(Case("together", lambda t: dict(x=t(8, 64), first=t(32, 64), second=t(48, 64)),
                                           run, ("x", "first", "second")), "cpu", "eager")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loss", [lambda y: y.float().square().sum(), torch.sum], ids=["squares", "sum"])
def test_any_number_of_tokens_and_outputs(loss, compiled):
    """Neither of which need be a multiple of 8 in a product that sums over it; and a gradient that autograd expands."""
    torch.manual_seed(0)
    layers = [tkq.nn.Linear(64, n, bias=False, dtype=torch.bfloat16) for n in (32, 12)]
    together = torch.compile(linears.together, backend="aot_eager", fullgraph=True) if compiled else linears.together
    for shape in ((3, 5, 64), (64,), (0, 64)) if not compiled else ((3, 5, 64),):
        want = found(lambda x: [layer(x) for layer in layers], layers, True, shape, loss)
        got = found(lambda x: together(x, *layers), layers, True, shape, loss)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and (a - b).norm() <= 0.01 * b.norm()


@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_without_a_gradient(frozen):
    layers = [tkq.nn.Linear(64, n, bias=False, dtype=torch.bfloat16).requires_grad_(not frozen) for n in SIZES]
    x = torch.randn(16, 64).bfloat16()
    for some in (layers[:2], layers):
        compiled = torch.compile(lambda x, some=some: linears.together(x, *some), backend="eager", fullgraph=True)
        with torch.set_grad_enabled(frozen):
            assert all(torch.equal(y, layer(x)) for y, layer in zip(compiled(x), some, strict=True))


def test_together_under_compile():
    """In one graph, and the products still add up x's gradient: no addition is left to the compiler."""
    torch.manual_seed(0)
    layers, graphs = [tkq.nn.Linear(64, n, bias=False, dtype=torch.bfloat16) for n in SIZES], []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    backend = aot_autograd(fw_compiler=lambda g, x: make_boxed_func(keep(g, x)),
                           bw_compiler=lambda g, x: make_boxed_func(keep(g, x)))
    compiled = torch.compile(lambda x: linears.together(x, *layers), fullgraph=True, backend=backend)
    got, want = found(compiled, layers), found(lambda x: linears.together(x, *layers), layers)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    calls = [str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function"]
    assert len(graphs) == 2 and sum("tkq.gemm" in call for call in calls) == 6
    assert not any("aten.add" in call for call in calls)


class Adapted(torch.nn.Module):
    """As an adapter for fine-tuning does: a layer around another one, without a weight of its own."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, torch.nn.Linear(64, base.out_features, dtype=torch.bfloat16)

    def forward(self, x):
        return self.base(x) + self.more(x)


class Doubled(tkq.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class DoubledInFp8(tkq.nn.Fp8Linear):
    def forward(self, x):
        return super().forward(x) * 2


def own_forward(layer):
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 2
    return layer


def brings_its_weight(layer):
    """As accelerate's offloading does: the weight is there during the call alone."""
    weight, forward = layer.weight.detach().clone(), layer.forward

    def with_weight(x):
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        y = forward(x)
        layer.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
        return y

    layer.weight, layer.forward = torch.nn.Parameter(weight.to("meta"), requires_grad=False), with_weight
    return layer


def hooked(layer):
    layer.register_forward_hook(lambda module, given, y: y * 2)
    return layer


def of(cls):
    return lambda layer: cls(64, layer.out_features, bias=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("change", [Adapted, own_forward, brings_its_weight, hooked, of(Doubled), of(DoubledInFp8),
                                    of(torch.nn.Linear), of(tkq.nn.Linear), of(tkq.nn.Fp8Linear)])
@pytest.mark.parametrize("kind", [torch.nn.Linear, tkq.nn.Linear, tkq.nn.Fp8Linear])
def test_what_is_not_plain_is_called(kind, change, where):
    torch.manual_seed(0)
    layers = [kind(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    layers[where] = change(layers[where])
    x = torch.randn(16, 64).bfloat16().requires_grad_()
    for a, b in zip(linears.together(x, *layers), [layer(x) for layer in layers], strict=True):
        assert torch.equal(a, b)
    residual = torch.randn(16, 64).bfloat16()
    found, wanted = linears.added(layers[where], x, residual), residual + layers[where](x)
    assert (found - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.parametrize("kind", (tkq.nn.Linear, torch.nn.Linear))
def test_layers_with_a_bias_keep_it(kind):
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    layers = [kind(16, 8, bias=bias, dtype=torch.bfloat16) for bias in (True, False)]
    for layer, y in zip(layers, linears.together(x, *layers)):
        assert torch.equal(y, layer(x))


@pytest.mark.parametrize("register", ("register_full_backward_pre_hook", "register_full_backward_hook",
                                      "register_forward_pre_hook", "register_forward_hook"))
def test_layers_with_hooks_have_them_called(register):
    x, seen = torch.randn(4, 16).bfloat16().requires_grad_(), []
    layers = [tkq.nn.Linear(16, 8, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    getattr(layers[1], register)(lambda *given: seen.append(register))
    sum(y.sum() for y in linears.together(x, *layers)).backward()
    assert seen == [register]


def test_a_residual_of_another_type_is_added_behind():
    layer, x = tkq.nn.Linear(16, 8, bias=False, dtype=torch.bfloat16), torch.randn(4, 16).bfloat16()
    residual = torch.randn(4, 8)
    y = linears.added(layer, x, residual)
    assert y.dtype == torch.float32 and torch.equal(y, residual + layer(x))

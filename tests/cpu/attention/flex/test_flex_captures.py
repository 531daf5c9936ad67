"""What a user's function looks at beside its arguments: that nothing of it is served stale, nor lost, nor misread."""
import concurrent.futures
import functools
import math
import sys
import types

import pytest
import torch

import tkq
from tests.helpers.attention import flex_gallery as gallery
from tkq.attention.flex import attend
from tkq.attention.flex.functions import replay
from tkq.attention.flex.functions.record import record
from tkq.attention.flex.functions.trace import ARGUMENTS, trace
from tkq.reference.flex import places
from tkq.reference.graphs import evaluate

SHAPE = 1, 2, 5, 7
SLOPE = 2.0


def check(function):
    """Against the same function on whole tensors."""
    at = gallery.grid(*SHAPE, "cpu")
    score = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    found = evaluate(*trace("score_mod", function), {**places(*SHAPE, "cpu"), "score": score}).expand(SHAPE)
    wanted = gallery.over_all(function, at, score)
    torch.testing.assert_close(found, wanted.expand(SHAPE).float(), rtol=1e-6, atol=1e-6)


def test_attributes_of_functions():
    def helper(score):
        return score * helper.slope

    def score_mod(score, b, h, q, kv):
        return helper(score) + kv * score_mod.shift

    for helper.slope, score_mod.shift in ((2.0, 3), (-3.0, 5), (torch.tensor(0.5), 2.5)):
        check(score_mod)


def test_imports_and_globals_by_name(monkeypatch):
    module = types.ModuleType("of_the_test")
    monkeypatch.setitem(sys.modules, "of_the_test", module)

    def imported(score, b, h, q, kv):
        from of_the_test import slope
        return score * slope

    def by_name(score, b, h, q, kv):
        return score * globals()["SLOPE"]

    for module.slope in (2.0, 5.0):
        monkeypatch.setitem(globals(), "SLOPE", module.slope)
        check(imported)
        check(by_name)


LOOKS = {
    "strides": (lambda x: x * 1.0, lambda x: torch.stack([x, x]).mT[:, 1], lambda x: float(x.stride(0))),
    "contiguous": (lambda x: x, lambda x: torch.stack([x, x]).mT[:, 1], lambda x: 2.0 if x.is_contiguous() else 3.0),
    "gradient": (lambda x: x, lambda x: x.clone().requires_grad_(), lambda x: 2.0 if x.requires_grad else 3.0),
    "leaf": (lambda x: x, lambda x: x.clone().requires_grad_() * 1, lambda x: 2.0 if x.is_leaf else 3.0),
    "class": (lambda x: x, torch.nn.Parameter, lambda x: 2.0 if isinstance(x, torch.nn.Parameter) else 3.0),
    "attribute": (lambda x: x, lambda x: setattr(y := x.clone(), "slope", 5.0) or y,
                  lambda x: getattr(x, "slope", 3.0)),
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_is_asked_of_captured_tensors(name):
    *kinds, slope = LOOKS[name]
    x = torch.rand(7)
    of = lambda y: lambda score, b, h, q, kv: score * slope(y) + y[kv]
    for kind in kinds:
        check(of(kind(x)))


def test_containers_in_themselves():
    some, words = [2.0], {"slope": 3.0}
    some.append(some)
    words["words"] = words
    check(lambda score, b, h, q, kv: score * some[0] + words["slope"])


@pytest.mark.parametrize("n", [2 ** 29, 2 ** 30, 2 ** 31 - 1, 16777217, -2 ** 31, 5])
def test_captured_integers_are_pythons(n):
    """Which do not wrap around, and are no floats."""
    check(lambda score, b, h, q, kv: score + ((n * 4) >> 30) + abs(~n) / 2 ** 31 + (n - 16777216.0) + (n + n) / 2 ** 33)
    check(lambda score, b, h, q, kv: score * (kv % n) + (n << 3) / 2 ** 34 + (n ** 2) / 2 ** 60)


@pytest.mark.parametrize("x", [1e300, 1e-60, -1e300, 1e38, 0.0, math.inf])
def test_captured_floats_are_pythons(x):
    check(lambda score, b, h, q, kv: torch.where(score < x * 1e-300, score, score + (x * 1e60) * 1e-60 + x / 1e60))


def test_small_numbers_stay_arguments():
    of = lambda n, x: lambda score, b, h, q, kv: score * (2 * n + 1) - (1 - x)
    found = [trace("score_mod", of(n, x)) for n, x in ((3, 0.5), (1000, -7.0))]
    assert found[0].graph == found[1].graph and [f.numbers for f in found] == [(3, 0.5), (1000, -7.0)]


def test_parameters_of_no_dimension_have_gradients():
    """Of a module, and of another object that can be called."""
    class Tilted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slope, self.bias = (torch.nn.Parameter(x) for x in (torch.tensor(1.5), torch.rand(7)))

        def forward(self, score, b, h, q, kv):
            return score * self.slope + self.bias[kv]

    module, wanted = Tilted(), Tilted()
    wanted.load_state_dict(module.state_dict())
    q, k, v = torch.randn(3, 1, 2, 7, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    tkq.flex_attention(q, k, v, module).float().square().sum().backward()
    score = wanted(q.float() @ k.float().mT / 8, *gallery.grid(1, 2, 7, 7, "cpu"))
    (score.softmax(-1) @ v.float()).square().sum().backward()
    for x, y in zip(module.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0.05, atol=0.05)


DETACHED = {
    "element": lambda x: lambda score, b, h, q, kv: score + 2 * x[kv].detach() + x[kv],
    "view": lambda x: lambda score, b, h, q, kv: score + 2 * x.detach()[kv] + x[kv],
    "data": lambda x: lambda score, b, h, q, kv: score + 2 * x.data[kv] + x[kv],
    "score": lambda x: lambda score, b, h, q, kv: score * torch.tanh(score.detach()) + x[kv],
    "all of the score": lambda x: lambda score, b, h, q, kv: score.detach() * x[kv]}


@pytest.mark.parametrize("name", DETACHED)
def test_no_gradient_goes_through_detach(name):
    """As autograd has it, of the same function on whole tensors."""
    q, k, v = torch.randn(3, 1, 2, 7, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x, wide = torch.linspace(0.5, 2, 7).requires_grad_(), torch.linspace(0.5, 2, 7).requires_grad_()
    q, exact = q.requires_grad_(), q.detach().float().requires_grad_()
    tkq.flex_attention(q, k, v, DETACHED[name](x)).float().square().sum().backward()
    score = DETACHED[name](wide)(exact @ k.float().mT / 8, *gallery.grid(1, 2, 7, 7, "cpu"))
    (score.softmax(-1) @ v.float()).square().sum().backward()
    torch.testing.assert_close(x.grad, wide.grad, rtol=0.05, atol=0.05)
    wanted = torch.zeros_like(exact) if exact.grad is None else exact.grad
    torch.testing.assert_close(q.grad.float(), wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["element", "score", "all of the score"])
def test_detach_as_torch_compile_has_it(name):
    """Of captured tensors it is done outside."""
    function = DETACHED[name](torch.rand(7))
    found = replay.traced("score_mod", record(function, ARGUMENTS["score_mod"], torch.device("cpu")))
    assert found.graph == trace("score_mod", function).graph
    assert any(map(found.graph.is_detached, range(len(found.graph.nodes))))


WRONG = {
    "sparse": (TypeError, "dense", lambda: torch.ones(7).to_sparse()),
    "nested": (TypeError, "dense", lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)],
                                                                      layout=torch.jagged)),
    "float64": (NotImplementedError, "float64", lambda: torch.ones(7, dtype=torch.float64)),
    "float8": (NotImplementedError, "float8", lambda: torch.ones(7).to(torch.float8_e4m3fn)),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("held", [False, True])
def test_captured_tensors_that_are_refused(name, held):
    error, words, made = WRONG[name]
    x = made()
    holder = types.SimpleNamespace(x=x)
    by_holder = lambda score, b, h, q, kv: score + holder.x[kv]
    with pytest.raises(error, match=f"score_mod: .*{words}"):
        trace("score_mod", by_holder if held else lambda score, b, h, q, kv: score + x[kv])


FAULTS = {
    "does not fit": (ValueError, lambda score, b, h, q, kv: torch.where(q < 3000000000, score, 0.0)),
    "too big": (ValueError, lambda score, b, h, q, kv: score + (q + 2 ** 70)),
    "too many indices": (NotImplementedError, lambda score, b, h, q, kv: score + gallery_table[h, kv, q]),
    "does not trace it": (NotImplementedError, lambda score, b, h, q, kv: score + torch.take(gallery_table, q)),
}
gallery_table = torch.rand(2, 7)


@pytest.mark.parametrize("words", FAULTS)
def test_errors_of_pytorchs_name_the_function(words):
    error, function = FAULTS[words]
    with pytest.raises(error, match=f"score_mod: .*{words}"):
        trace("score_mod", function)


def test_errors_of_the_users_stay():
    with pytest.raises(ZeroDivisionError):
        trace("score_mod", lambda score, b, h, q, kv: score / (1 // 0))
    with pytest.raises(AttributeError, match="no attribute 'slope'"):
        trace("score_mod", functools.partial(lambda score, b, h, q, kv: score * test_errors_of_the_users_stay.slope))


def test_threads_trace_one_at_a_time():
    """torch's tracer patches what all threads share. A function of an object's is traced at each call."""
    def work(n):
        holder = types.SimpleNamespace(n=n)
        for holder.n in range(n, n + 8):
            graph = trace("score_mod", lambda score, b, h, q, kv: score * holder.n).graph
            assert [node.args[0] for node in graph.nodes if node.op == "const"] == [float(holder.n)]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(work, (10, 20, 30, 40)))


def test_which_calls_take_no_look_up():
    """What cannot be said of a function: such a call is traced each time."""
    class Mask:
        def mask_mod(self, b, h, q, kv):
            return q >= kv

    given_of = lambda score, mask: attend.given_of((), (), score, mask, None)[0]
    assert given_of(None, Mask().mask_mod) is None
    assert given_of(lambda score, b, h, q, kv: score, lambda b, h, q, kv: q >= kv) is not None
    assert given_of(None, None) == (None, None)

"""A call's way from tensors to a launch: what the norms ask of the runtime, each fact once."""
import contextlib
import math
import pathlib
import sys

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu

X, R, W = torch.zeros(64, 64).bfloat16(), torch.zeros(64, 64).bfloat16(), torch.ones(64).bfloat16()
PLACES = {"norms": pathlib.Path(tkq.__path__[0]) / "norms", "runtime": pathlib.Path(tkq.__path__[0]) / "runtime"}


def place(code):
    if code.co_filename.startswith("<tkq arguments"):  # the checks that runtime.arguments writes
        return "runtime"
    return next((name for name, folder in PLACES.items() if folder in pathlib.Path(code.co_filename).parents), None)


# a cache without records; what a tensor is made by on this machine; a recipe is data
SILENT = ("_nothing", "empty", "__init__", "__post_init__")


def asked(call):
    """The runtime's functions that the norms call, in turn."""
    found = []

    def note(frame, event, _):
        if event == "call" and place(frame.f_code) == "runtime" and place(frame.f_back.f_code) == "norms":
            found.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return [name for name in found if name not in SILENT]


CALLS = {
    "plain": lambda m: tkq.rmsnorm(X[:m], W),
    "with options": lambda m: tkq.layernorm(X[:m], W, residual=R[:m], prenorm=True),
    "quantising": lambda m: tkq.rmsnorm_quant(X[:m], W),
    "of three dimensions": lambda m: tkq.rmsnorm(X[:2 * m, :32].unflatten(0, (m, 2)), W[:32]),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_first_call_takes_each_step_once(name):
    """Options, the way, results; of tensors their types, then all that they are together; the spec's names of types,
    the strides of rows that are no matrix; the kernel is made, remembered for calls like it, and then the call is."""
    strides = ["one_stride"] * 2 if name == "of three dimensions" else []
    with fake_gpu.launches() as launched, torch.no_grad():
        found = asked(lambda: CALLS[name](3))
    assert len(launched) == 1
    assert found == ["check", "route", "layout_of", "check", "rows", *strides, "names", "function", "added", "add"]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_launcher_is_known_checks_no_tensor(name):
    """Of other sizes. __call__: the choice of the kernel, which is Python's where kernels are."""
    with fake_gpu.launches() as launched, torch.no_grad():
        for m in (2, 3, 4):
            CALLS[name](m)
        found = asked(lambda: CALLS[name](5))
    assert len(launched) == 4
    assert found == ["check", "route", "layout_of", "__call__", "add"]


def test_a_call_on_a_graph_of_gradients_takes_the_same_steps():
    x = X[:7].clone().requires_grad_()
    with fake_gpu.launches():
        found = asked(lambda: tkq.rmsnorm(x, W))
    assert found == ["check", "route", "layout_of", "check", "rows", "names", "function", "added", "add"]


# ---- eps: looked at where it comes in, as a known launcher does not look at numbers ------------------------------


def by_the_op(kind, eps):
    """As a compiled model calls it: no public function has looked at eps."""
    return getattr(torch.ops.tkq, kind)(X, W, None, eps, None, 0.0, None, None, False)


def by_the_quantising_op(kind, eps):
    return getattr(torch.ops.tkq, f"{kind}_quant")(X, W, None, eps, None, 0.0, None, "row")


@pytest.mark.parametrize("eps", [1e39, math.inf, math.nan, -1.0])
@pytest.mark.parametrize("call", [by_the_op, by_the_quantising_op])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_eps_that_no_launch_may_have(on_gpu, call, eps):
    for kind in ("rmsnorm", "layernorm"):
        with fake_gpu.launches() if on_gpu else contextlib.nullcontext([]) as launched:
            call(kind, 1e-6)
            for _ in range(3):
                with pytest.raises(ValueError, match=f"^{kind}(_quant)?: eps: got"):
                    call(kind, eps)
            call(kind, 1e-6)
        assert len(launched) == 2 * on_gpu


@pytest.mark.parametrize("call", [tkq.rmsnorm, tkq.layernorm, tkq.rmsnorm_quant, tkq.layernorm_quant])
def test_eps_is_looked_at_when_the_launcher_is_known_too(call):
    with fake_gpu.launches() as launched:
        call(X, W, eps=1e-5)
        for eps, error in ((-5.0, ValueError), (math.nan, ValueError), ("a", TypeError), (None, TypeError),
                           (10**400, ValueError), (1e39, ValueError)):
            with pytest.raises(error, match=f"^{call.__name__}: eps: got"):
                call(X, W, eps=eps)
        call(X, W, eps=0)
    assert len(launched) == 2

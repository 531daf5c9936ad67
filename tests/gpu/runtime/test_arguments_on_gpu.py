"""Arguments on the GPU, where calls that came before are replayed without Python: a view with a pending negation is no
such call, nor is one with another type in a flag's or a number's place."""
import warnings

import pytest
import torch

import tkq
from tests.helpers.ops import argument_calls as calls
from tests.helpers.ops.every_op import CASES, assert_same, incoming, of_each, results, run
from tkq.runtime import arguments

DEVICE = "cuda"
REPLAYED = 4  # calls, after which one like them takes no Python


@of_each(CASES.values())
@pytest.mark.parametrize("grad", [False, True])
def test_views_with_a_pending_negation(case, grad):
    """Each input by itself, and all, after calls that are remembered; and those calls again."""
    if grad and not case.leaves:
        pytest.skip("has no gradients")
    for _ in range(REPLAYED):
        wanted = run(case, case.inputs(DEVICE, grad=grad))
    for which in (None, *case.inputs()):
        for _ in range(2):
            inputs = case.inputs(DEVICE, grad=grad)
            found = run(case, inputs, lambda *given, which=which, inputs=inputs: case.call(*(
                calls.negated(x) if which in (None, name) else x for name, x in zip(inputs, given))))
            assert_same(found, wanted, case.exact, f"{case.name}, {which or 'all'} negated")
    assert_same(run(case, case.inputs(DEVICE, grad=grad)), wanted, case.exact, case.name)


@of_each([case for case in CASES.values() if case.leaves])
def test_gradients_that_come_in_with_a_pending_negation(case):
    found = []
    for pending in (False, False, False, True, True):
        inputs = case.inputs(DEVICE, grad=True)
        recorded, gradients = incoming(case.call(*inputs.values()))
        torch.autograd.backward(recorded, [calls.negated(g) if pending else g for g in gradients])
        found.append([inputs[name].grad for name in case.leaves])
    for gradients in found[3:]:
        assert_same(gradients, found[0], case.exact, case.name)


@pytest.mark.parametrize("name", calls.FUNCTIONS)
def test_what_is_refused_after_calls_that_came_before(name):
    """Values that are equal to those of the calls, and others."""
    given = calls.call(name, DEVICE)
    if name in ("rope", "rope_qk"):  # of the simple kind, which is replayed
        given = {key: x.view(1, 16, 4, 64) if key == "x" else x for key, x in given.items()
                 if key not in ("cu_seqlens", "position_ids")}
    for _ in range(REPLAYED):
        calls.run(name, given)
    for argument in arguments.table(name):
        if argument.kind in ("tensor", "device", "other") or (name == "rope_cos_sin" and argument.name == "seqlen"):
            continue
        equal = {"flag": (0, 0.0), "number": (True, False), "integer": (True, 1.0)}.get(argument.kind, ())
        bad = [value for value, _ in calls.refused(argument)]
        for value in (*equal, *bad):
            with pytest.raises((TypeError, ValueError, NotImplementedError), match=argument.name):
                calls.run(name, given | {argument.name: value})
    calls.run(name, given)


def test_what_is_written_to_may_have_a_pending_negation():
    cos, sin = tkq.rope_cos_sin(8, 64, device=DEVICE)
    a, b = torch.randn(64, 64, device=DEVICE).bfloat16(), torch.randn(64, 64, device=DEVICE).bfloat16()
    for pending in (False, False, False, True, True):
        x, out = torch.randn(2, 8, 4, 64, device=DEVICE), torch.zeros(64, 64, device=DEVICE).bfloat16()
        view = calls.negated(x.clone()) if pending else x.clone()
        assert tkq.rope(view, cos, sin, inplace=True) is view
        torch.testing.assert_close(view.clone(), tkq.rope(x, cos, sin))
        out = calls.negated(out) if pending else out
        assert tkq.gemm(a, b, out=out) is out
        assert torch.equal(out.clone(), tkq.gemm(a, b))


def test_rope_of_no_keys_after_a_rope():
    cos, sin = tkq.rope_cos_sin(8, 64, device=DEVICE)
    x = torch.randn(2, 8, 4, 64, device=DEVICE)
    for _ in range(REPLAYED):
        tkq.rope(x, cos, sin)
    with pytest.raises(TypeError, match="k: got NoneType"):
        tkq.rope_qk(x, None, cos, sin)


@of_each(CASES.values())
def test_a_traced_program_has_the_op(case):
    for _ in range(REPLAYED):
        run(case, case.inputs(DEVICE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.jit.trace(lambda *x: results(case.call(*x)), tuple(case.inputs(DEVICE).values()))
    assert any(node.kind().startswith("tkq::") for node in program.graph.nodes())
    for grad in (False, True)[:1 + bool(case.leaves)]:
        found = run(case, case.inputs(DEVICE, seed=2, grad=grad), lambda *x: program(*x))
        assert_same(found, run(case, case.inputs(DEVICE, seed=2, grad=grad)), False, case.name)

"""The table of the functions' arguments: the functions, their docstrings and what is refused are as it says."""
import inspect
import math
import re
import warnings

import numpy
import pytest
import torch

import tkq
from tests.helpers.ops import argument_calls as calls
from tests.helpers.ops.every_op import CASES, assert_same, of_each, results, run
from tkq.runtime import arguments

pytestmark = [pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
              pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
              pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")]
ARGUMENTS = [pytest.param(name, a, id=f"{name}-{a.name}") for name in calls.FUNCTIONS for a in arguments.table(name)
             if a.kind != "other"]


def test_every_function_has_a_table():
    classes = {"Exchange", "Monoid", "ReductionBase", "RowKernel", "__version__"}
    assert set(arguments.names()) == set(tkq.__all__) - classes


@pytest.mark.parametrize("name", arguments.names())
def test_a_table_is_the_signature(name):
    taken = {n: p.default for n, p in calls.signature(name).items()
             if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    of_table = {a.name: inspect.Parameter.empty if a.default is arguments.REQUIRED else a.default
                for a in arguments.table(name) if a.name != "effort"}
    taken.pop("effort", None)
    assert taken == of_table
    for a in arguments.table(name):
        if a.kind not in ("other", "tensor") and a.default is not arguments.REQUIRED:
            a.take(name, a.default)


@pytest.mark.parametrize("name", arguments.names())
def test_the_docstring_says_what_the_table_refuses(name):
    """Where this fails: the docstring's "Raises" is to have these words."""
    text = " ".join(inspect.getdoc(getattr(tkq, name)).split())
    for error, clauses in arguments.raises(name).items():
        assert f"{error}: {clauses}" in text, f"{name}: in Raises is to stand: {error}: {clauses}"


def test_the_calls_are_right():
    for name in calls.FUNCTIONS:
        calls.run(name, calls.call(name))


@pytest.mark.parametrize("name, argument", ARGUMENTS)
def test_what_is_refused_is_named(name, argument):
    for value, error in calls.refused(argument):
        given = calls.call(name) | {argument.name: value}
        try:
            calls.run(name, given)
        except error as caught:
            words = str(caught)
            assert re.search(rf"(?<!\w){argument.name}(?!\w)", words), f"{argument.name} is not named: {words}"
            assert len(words) < 1000
        except Exception as other:
            raise AssertionError(f"{value!r}: {type(other).__name__} in place of {error.__name__}: {other}") from other
        else:
            raise AssertionError(f"{value!r} was taken")


@pytest.mark.parametrize("name, argument", [p for p in ARGUMENTS if p.values[1].kind in ("number", "integer")])
def test_numbers_of_numpy_are_taken_by_their_value(name, argument):
    given = calls.call(name) | ({"c": torch.ones(16, 32, dtype=torch.bfloat16)} if argument.name == "beta" else {})
    if argument.name in ("seqlen_offsets", "max_seqlen"):
        given.pop("position_ids", None)
        if name == "rope_qk":
            if argument.name == "max_seqlen":
                pytest.skip("goes with cu_seqlens")
    if argument.name == "gate_lower_bound":
        given |= dict(g=torch.ones(1, 16, 4, 64), use_gate_in_kernel=True)
    least = 1 if argument.low is None or argument.above or name == "rope_cos_sin" else max(argument.low, 0)
    number = {"dim": 64 if name == "rope_cos_sin" else 1, "max_seqlen": 16, "window_size": 64,
              "checkpoint_every": 64, "gate_lower_bound": -5}.get(argument.name, least)
    kinds = (numpy.int64, numpy.int32) if argument.kind == "integer" else (numpy.float32, numpy.float64, numpy.int64)
    wanted = results(calls.run(name, given | {argument.name: number}))
    for kind in kinds:
        found = results(calls.run(name, given | {argument.name: kind(number)}))
        assert_same(found, wanted)


def allowed(argument):
    """Some of the values that an argument may have, and what they are taken as."""
    a, numbers = argument, {argument.low, argument.high} - {None}
    values = {"flag": (True, False), "number": (0.5, 1), "integer": (3,), "choice": a.choices,
              "dtype": a.types, "device": ("cpu", torch.device("cpu")), "window": ((None, 1), (-1, 0), [3, 4]),
              "limits": ((0.0, 1.0), (-math.inf, math.inf), [0, 1])}[a.kind]
    if a.kind in ("number", "integer"):
        values = [v for v in (*values, *numbers) if not (a.above and v == a.low)]
    if a.kind == "integer":
        values += [numpy.int64(3)]
    return [*values, None] if a.none else values


@pytest.mark.parametrize("name, argument", [p for p in ARGUMENTS if p.values[1].kind not in ("tensor", "function")])
def test_the_code_that_is_written_is_the_table(name, argument):
    """It takes and refuses what the argument itself does."""
    check = arguments.checker(name, argument.name)
    for value in allowed(argument):
        taken = argument.take(name, value)
        assert check(value) == taken and type(check(value)) is type(taken)
    for value, error in calls.refused(argument):
        for refuse in (check, lambda value: argument.take(name, value)):
            with pytest.raises(error, match=rf"^{name}: {argument.name}: got"):
                refuse(value)


PLAIN = {"flag": bool, "number": float, "integer": int, "choice": str, "dtype": torch.dtype}


@pytest.mark.parametrize("name, argument", [p for p in ARGUMENTS if p.values[1].kind in PLAIN])
def test_a_plain_value_is_not_looked_at_closely(monkeypatch, name, argument):
    check = arguments.checker(name, argument.name)
    values = [v for v in allowed(argument) if v is None or type(v) is PLAIN[argument.kind]]
    taken = []
    monkeypatch.setattr(arguments.Argument, "take", lambda self, op, value: taken.append(value))
    assert values and [check(value) for value in values] == values and not taken


def test_words_are_those_of_the_specs():
    from tkq.gemm.epilogue import spec
    from tkq.gemm.fp8 import ops
    from tkq.gemm.fp8 import spec as fp8_spec
    from tkq.losses.spec import REDUCTIONS
    from tkq.norms.spec import SCALES
    from tkq.quantize.spec import GRANULARITIES

    words = {(name, a.name): set(a.choices) for name in arguments.names() for a in arguments.table(name) if a.choices}
    assert words["gemm", "activation"] == {*spec.ACTIVATIONS, *spec.GATED}
    assert words["fp8_gemm", "activation"] == set(fp8_spec.ACTIVATIONS)
    assert words["fp8_gemm", "accumulate"] == set(ops.ACCUMULATE)
    assert words["cross_entropy", "reduction"] == words["linear_cross_entropy", "reduction"] == set(REDUCTIONS)
    assert words["rmsnorm_quant", "granularity"] == words["layernorm_quant", "granularity"] == set(SCALES)
    assert words["quantize_fp8", "granularity"] == set(GRANULARITIES)


# ---- views that have something to be done ---------------------------------------------------------------------------


@of_each(CASES.values())
@pytest.mark.parametrize("grad", [False, True])
def test_views_with_a_pending_negation(case, grad):
    if grad and not case.leaves:
        pytest.skip("has no gradients")
    wanted = run(case, case.inputs(grad=grad))
    for which in (None, *case.inputs()):
        inputs = case.inputs(grad=grad)
        found = run(case, inputs, lambda *given, which=which, inputs=inputs: case.call(*(
            calls.negated(x) if which in (None, name) else x for name, x in zip(inputs, given))))
        assert_same(found, wanted, case.exact, f"{case.name}, {which or 'all'} negated")


def test_the_imaginary_part_of_a_conjugated_tensor():
    x = torch.randn(4, 64)
    view = torch.complex(x, x).conj().imag
    assert view.is_neg()
    torch.testing.assert_close(tkq.softmax(view), torch.softmax(-x, -1))


def test_what_is_written_to_may_have_a_pending_negation():
    cos, sin = tkq.rope_cos_sin(8, 64, device="cpu")
    x = torch.randn(2, 8, 4, 64)
    view, wanted = calls.negated(x.clone()), tkq.rope(x, cos, sin)
    assert tkq.rope(view, cos, sin, inplace=True) is view
    torch.testing.assert_close(view.clone(), wanted)
    a, b = torch.randn(8, 16).bfloat16(), torch.randn(16, 24).bfloat16()
    out = calls.negated(torch.zeros(8, 24).bfloat16())
    assert tkq.gemm(a, b, out=out) is out
    assert torch.equal(out.clone(), tkq.gemm(a, b))
    logits, target = torch.randn(4, 16), torch.zeros(4, dtype=torch.long)
    view, (loss, gradient) = calls.negated(logits.clone()), tkq.cross_entropy_and_gradient(logits.clone(), target)
    found, in_place = tkq.cross_entropy_and_gradient(view, target, inplace=True)
    assert in_place is view and torch.equal(found, loss)
    torch.testing.assert_close(view.clone(), gradient)


# ---- torch.jit.trace ------------------------------------------------------------------------------------------------


@of_each(CASES.values())
@pytest.mark.parametrize("grad", [False, True])
def test_a_traced_program_has_the_op(case, grad):
    """Traced with tensors that require a gradient, and with others that do not: it runs with either."""
    if grad and not case.leaves:
        pytest.skip("has no gradients")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.jit.trace(lambda *x: results(case.call(*x)), tuple(case.inputs(grad=grad).values()))
    assert any(node.kind().startswith("tkq::") for node in program.graph.nodes())
    for seed, rows in ((1, 24), (2, 16)):
        found = run(case, case.inputs(rows=rows, seed=seed), lambda *x: program(*x))
        assert_same(found, run(case, case.inputs(rows=rows, seed=seed)), False, case.name)
    if case.leaves:
        found = run(case, case.inputs(seed=3, grad=True), lambda *x: program(*x))
        assert_same(found, run(case, case.inputs(seed=3, grad=True)), False, case.name)


def test_a_traced_gradient_is_not_recorded():
    """As in eager mode, where logits require a gradient: what is traced has no grad mode of its own."""
    logits, target = torch.randn(6, 16, requires_grad=True), torch.zeros(6, dtype=torch.long)
    program = torch.jit.trace(lambda *x: tkq.cross_entropy_and_gradient(*x), (logits, target))
    assert not any(x.requires_grad for x in program(logits, target))


MODULES_TO_TRACE = {
    "RMSNorm": lambda: tkq.nn.RMSNorm(64), "Linear": lambda: tkq.nn.Linear(64, 32, dtype=torch.bfloat16),
    "LinearCrossEntropyLoss": lambda: tkq.nn.LinearCrossEntropyLoss(64, 32),
    "Fp8Linear": lambda: tkq.nn.Fp8Linear(64, 32, dtype=torch.bfloat16)}


@pytest.mark.parametrize("name", MODULES_TO_TRACE)
def test_a_traced_module_has_ops_alone(name):
    module, x = MODULES_TO_TRACE[name](), torch.randn(6, 64, dtype=torch.bfloat16)
    given = (x, torch.zeros(6, dtype=torch.long)) if "Loss" in name else (x,)
    program = torch.jit.trace(module, given)
    kinds = {node.kind() for node in program.inlined_graph.nodes()}
    assert any(kind.startswith("tkq::") for kind in kinds) and "prim::PythonOp" not in kinds
    found = program(*given)
    torch.testing.assert_close(found, module(*given), rtol=2**-6, atol=2**-6)
    if name != "Fp8Linear":
        found.sum().backward()
        assert all(p.grad is not None for p in module.parameters())
    else:
        with pytest.raises(RuntimeError, match="fp8_gemm.*no autograd formula"):
            found.sum().backward()


# ---- modules, tune, prefetch ----------------------------------------------------------------------------------------

MODULES = {  # (what a constructor is given, the function whose arguments these are)
    "CrossEntropyLoss": ((), "cross_entropy", "z_loss", "softcap", "inplace_backward"),
    "LinearCrossEntropyLoss": ((8, 8), "linear_cross_entropy", "ignore_index", "reduction", "label_smoothing", "z_loss",
                               "softcap"),
    "Softmax": ((-1,), "softmax", "scale"), "LogSoftmax": ((-1,), "log_softmax", "scale"),
    "SwiGLU": ((), "swiglu", "layout"), "GEGLU": ((), "geglu", "approximate", "layout"),
    "RMSNormQuant": ((8,), "rmsnorm_quant", "granularity"), "LayerNormQuant": ((8,), "layernorm_quant", "granularity"),
    "RotaryEmbedding": ((8, 4), "rope_qk", "interleaved")}


@pytest.mark.parametrize("module", MODULES)
def test_modules_refuse_when_they_are_made(module):
    given, op, *names = MODULES[module]
    for argument in arguments.table(op):
        for value, error in calls.refused(argument) if argument.name in names else ():
            with pytest.raises(error, match=rf"^{module}: {argument.name}: got"):
                getattr(tkq.nn, module)(*given, **{argument.name: value})


@pytest.mark.parametrize("module, unit, names", [("LinearCrossEntropyLoss", 8, ("in_features", "num_classes")),
                                                 ("Fp8Linear", 16, ("in_features", "out_features"))])
def test_modules_refuse_sizes(module, unit, names):
    refused = (-unit, ValueError), (0, ValueError), (True, TypeError), (16.0, TypeError), (None, TypeError)
    for name in names:
        for bad, error in refused:
            with pytest.raises(error, match=rf"{module}: {name}(:| is)"):
                getattr(tkq.nn, module)(**dict.fromkeys(names, 32) | {name: bad})
    with pytest.raises(ValueError, match="in_features is 20, allowed are ints that are multiples of"):
        getattr(tkq.nn, module)(20, 32)


@pytest.mark.parametrize("function, given", [(tkq.gemm, (None, None)), (tkq.gemm, (1, 2)), (tkq.fp8_gemm, ("a",) * 4),
                                             (tkq.grouped_gemm, ([1], [2], [3]))])
def test_tune_names_what_is_no_tensor(function, given):
    with pytest.raises(TypeError, match=r"\ba: got (NoneType|int|str|list), expected a torch.Tensor"):
        tkq.tune(function, *given)


def test_what_tune_and_prefetch_refuse():
    x = torch.ones(8, 8).bfloat16()
    for bad in (1, "yes", None):
        with pytest.raises(TypeError, match="tune: again: got"):
            tkq.tune(tkq.gemm, x, x, again=bad)
        with pytest.raises(TypeError, match="tune: effort: got"):
            tkq.tune(tkq.gemm, x, x, effort=bad)
    for bad in (True, 1.5, "2", None):
        with pytest.raises(TypeError, match="prefetch: jobs: got"):
            tkq.prefetch("llama-8b", jobs=bad)
    for bad in (5, (None,), ([],)):
        with pytest.raises(TypeError, match="prefetch: ops: got"):
            tkq.prefetch("llama-8b", ops=bad)

"""What a user's subclass of RowKernel or ReductionBase gets wrong is refused by the class's name, before any launch."""
import pytest
import torch
from cutlass import Float32

from tests.helpers.rows import wrong_kernels as kernels
from tests.helpers.rows.row_kernels import ExactLayerNorm
from tkq.reduction import launch as reduction_launch
from tkq.reduction import signature
from tkq.rows.persistent import launch
from tkq.rows.persistent.kernel import RowKernel
from tkq.rows.persistent.monoid import Exchange, Monoid, add
from tkq.rows.persistent.plan import plan
from tkq.testing import report

X = torch.zeros(4, 64)


def call(cls, N=64):
    x = torch.zeros(4, N)
    shapes = dict(loads=x, stores=x, columns=torch.zeros(N), results=torch.zeros(4))
    return {name: like for kind, like in shapes.items() for name in getattr(cls, kind)}


# ---- RowKernel's methods


@pytest.mark.parametrize("name, error, says", [
    ("WriteVector", TypeError, "write returned a vector, allowed is a dict"),
    ("WriteNothing", TypeError, "write returned None, allowed is a dict"),
    ("WriteUnknown", ValueError, "write returned z, allowed are y"),
    ("WriteNumber", TypeError, "write returned a number as y, allowed is a vector"),
    ("WriteFloat", TypeError, "write returned a number as y, allowed is a vector"),
    ("WriteNone", TypeError, "write returned None as y, allowed is a vector"),
    ("WritePart", ValueError, "write returned a vector of 2 values as y, e has 4"),
    ("WriteColumn", ValueError, "write returned c, allowed are y"),
    ("DownVector", TypeError, "down returned a vector, allowed is a dict"),
    ("RowNothing", TypeError, "row returned None, allowed is a dict"),
    ("RowTuple", TypeError, "row returned a tuple of 1, allowed is a dict"),
    ("RowOfTuples", TypeError, "row returned a tuple of 1 as a, allowed are numbers"),
    ("NoResult", ValueError, "row returned no s, which is one of its results; r has a"),
    ("UnknownElement", AttributeError, "partial: e has no z, it has x$"),
    ("UnknownNumber", AttributeError, "write: r has no b, it has a$"),
    ("Mixed", TypeError, "partial returned a vector, a number; allowed are vectors alone and numbers alone")])
def test_what_methods_return(name, error, says):
    cls = getattr(kernels, name)
    with pytest.raises(error, match=f"{name}: {says}"):
        report(cls.recipe(**call(cls)))


@pytest.mark.parametrize("N", [64, 4096])
def test_what_is_left_out_needs_nothing(N):
    x, c = torch.zeros(4, N), torch.zeros(N)
    for given in (dict(x=x), dict(x=x, y=x, c=c), dict(x=x, c=c)):
        report(kernels.Sparing.recipe(**given))


def test_a_tensor_that_a_call_leaves_out():
    with pytest.raises(AttributeError, match=r"LeftOut: partial: e has no z, it has x: .* self.has\('z'\)"):
        report(kernels.LeftOut.recipe(x=X, y=X, z=None))


@pytest.mark.parametrize("N", [64, 4096])
@pytest.mark.parametrize("name, error, says", [
    ("CombineVector", ValueError, r"returned a vector, allowed is a tuple of 1: its neutral element is \(0.0,\)"),
    ("CombineFewer", ValueError, "returned a tuple of 1, allowed is a tuple of 2"),
    ("CombineMore", ValueError, "returned a tuple of 2, allowed is a tuple of 1"),
    ("CombineNone", TypeError, "returned None of a (vector|number) each")])
def test_what_a_monoid_combines(name, error, says, N):
    cls = getattr(kernels, name)
    with pytest.raises(error, match=rf"Monoid.combine, tests.helpers.rows.wrong_kernels.{name}.<lambda>, {says}"):
        report(cls.recipe(**call(cls, N)))


@pytest.mark.parametrize("N", [63, 64])
def test_vectors_of_other_types_are_counted_as_fp32(N):
    report(kernels.OfBooleans.recipe(**call(kernels.OfBooleans, N)))


# ---- RowKernel's tables


def made(monkeypatch, tables):
    """A class that this module has."""
    cls = type("Made", (kernels.Scale,), {"__module__": __name__, "__qualname__": "Made", **tables})
    monkeypatch.setitem(globals(), "Made", cls)
    return cls


@pytest.mark.parametrize("error, says, tables", [
    (TypeError, r"loads: got 'xin', allowed is a tuple of names: \('xin',\)", dict(loads="xin")),
    (TypeError, "stores: got None", dict(stores=None)), (TypeError, "parameters: got 'eps'", dict(parameters="eps")),
    (TypeError, "parameters: got 5", dict(parameters=5)), (TypeError, "scalars: got", dict(scalars=(1,))),
    (ValueError, "loads: got 'a b'", dict(loads=("a b",))),
    (ValueError, "loads: got plan, which is an argument of launch", dict(loads=("plan",))),
    (ValueError, "parameters: got plan", dict(parameters=("plan",))),
    (ValueError, "scalars: got x, which is in loads already", dict(scalars=("x",))),
    (ValueError, "parameters: got s, which is in scalars already", dict(scalars=("s",), parameters=("s",))),
    (ValueError, "options: got x, which is in loads already", dict(options={"x": 1})),
    (TypeError, r"options: got \('flag',\), allowed is a dict", dict(options=("flag",))),
    (ValueError, "options: got spec, an attribute", dict(options={"spec": 1})),
    (ValueError, "options: got write, an attribute", dict(options={"write": 1})),
    (ValueError, "options: got N, an attribute", dict(options={"N": 1})),
    (TypeError, "flag: got list, allowed are values that can be hashed", dict(options={"flag": [1]})),
    (TypeError, "down: got dict", dict(down={})),
    (TypeError, "exchanges: got Exchange, allowed is a tuple", dict(exchanges=Exchange(add()))),
    (TypeError, "exchanges: got Monoid as number 0", dict(exchanges=(add(),))),
    (ValueError, "partial of number 0: got 'first'", dict(exchanges=(Exchange(add(), "first"),))),
    (ValueError, "row of number 1: got 'last'", dict(exchanges=(Exchange(add()), Exchange(add(), row="last"))))])
def test_tables_are_checked(error, says, tables, monkeypatch):
    cls = made(monkeypatch, tables)
    for ask in (cls.recipe, cls.launch):
        with pytest.raises(error, match=rf"Made(\.|: ).*{says}"):
            ask(x=X, y=X)


@pytest.mark.parametrize("says, make", [
    ("Exchange: monoid: got <function add", lambda: Exchange(add)),
    ("Exchange: partial, row: got None", lambda: Exchange(add(), None)),
    ("Monoid: combine: got 'add'", lambda: Monoid("add", (0.0,))),
    ("Monoid: neutral: got 0.0", lambda: Monoid(max, 0.0)),
    (r"Monoid: neutral: got \(\)", lambda: Monoid(max, ())), ("neutral: got .None", lambda: Monoid(max, (None,))),
    (r"Monoid: neutral: got \(\)", lambda: add(0)), ("add: sums: got 1.5", lambda: add(1.5))])
def test_monoids_and_exchanges_are_checked_where_they_are_made(says, make):
    with pytest.raises(TypeError, match=says):
        make()


# ---- calls


@pytest.mark.parametrize("error, says, changes", [
    (TypeError, "Softcap: x: got list", dict(x=[1.0])), (TypeError, "Softcap: softcap: got list", dict(softcap=[1])),
    (TypeError, "Softcap: softcap: got tuple", dict(softcap=([],))), (TypeError, "an argument no", dict(no=None)),
    (ValueError, r"Softcap: x: shape is \(4, 0\)", dict(x=X[:, :0])),
    (TypeError, "Softcap: plan: got int", dict(plan=5)), (TypeError, "Softcap: plan: got list", dict(plan=[5]))])
def test_calls_of_a_row_kernel(error, says, changes):
    for ask in (kernels.Softcap.recipe, kernels.Softcap.launch):
        with pytest.raises(error, match=says):
            ask(**{"x": X, "y": X, **changes})


def test_parameters_are_numbers_and_all_there():
    """In a call without rows too."""
    for eps in (None, "1", [1.0]):
        for ask in (ExactLayerNorm.recipe, ExactLayerNorm.launch):
            with pytest.raises(TypeError, match="ExactLayerNorm: eps: got"):
                ask(x=X, y=X, eps=eps)
    with pytest.raises(TypeError, match="ExactLayerNorm: eps: got NoneType"):
        ExactLayerNorm.launch(x=X[:0], y=X[:0])


def test_a_plan_for_other_rows_is_refused():
    spec = launch.spec_of(kernels.Scale, dict(x=X, y=X))
    with pytest.raises(ValueError, match="Scale: plan: is for N = 64, the call has N = 128"):
        kernels.Scale.recipe(plan(spec.shape), **call(kernels.Scale, 128))


def test_an_option_may_be_none():
    made = kernels.Softcap.recipe(x=X, y=X, softcap=None)
    assert made.args[0].options == (("softcap", None),) and kernels.Softcap(*made.args).softcap is None
    assert kernels.Softcap(*kernels.Softcap.recipe(x=X, y=X).args).softcap == 30.0


def test_launch_tells_none_from_what_is_not_given(monkeypatch):
    """Of an option; a tensor that is None is left out."""
    asked = []
    monkeypatch.setattr(launch, "_launchers", {})
    monkeypatch.setattr(launch, "_check_devices", lambda cls, given: None)
    monkeypatch.setattr(launch, "launcher", lambda spec, *_: asked.append(spec) or (lambda *args: None))
    for more in ({}, dict(softcap=None), dict(softcap=None), dict(y=None)):
        kernels.Softcap.launch(**{"x": X, "y": X, **more})
    assert [spec.options for spec in asked] == [(), (("softcap", None),), ()] and not asked[2].stores


def in_a_function():
    class Rows(kernels.Scale):
        pass

    class Reduction(kernels.Reduction):
        pass

    return Rows, Reduction


def test_classes_made_inside_a_function():
    rows, reduction = in_a_function()
    for ask in (rows.recipe, rows.launch):
        with pytest.raises(ValueError, match="Rows: is in_a_function.<locals>.Rows of .*inside a function"):
            ask(x=X, y=X)
    for ask in (reduction.recipe, reduction.launch):
        with pytest.raises(ValueError, match="Reduction: is in_a_function.<locals>.Reduction of"):
            ask(X, X, 1.0)
    with pytest.raises(ValueError, match="Scale: is Scale of"):
        type("Scale", (RowKernel,), {"__module__": kernels.__name__, "loads": ("x",)}).recipe(x=X)


# ---- ReductionBase


@pytest.mark.parametrize("name, error, says, args, options", [
    ("Reduction", TypeError, "Reduction: argument 0: got list, the first", ([1.0], X, 1.0), {}),
    ("Reduction", TypeError, "Reduction: got no arguments", (), {}),
    ("Reduction", ValueError, r"Reduction: argument 0: got shape \(64,\), the first", (X[0], X, 1.0), {}),
    ("Reduction", ValueError, r"Reduction: argument 0: got shape \(4, 0\)", (X[:, :0], X[:, :0], 1.0), {}),
    ("Reduction", TypeError, "Reduction: argument 2, scale: got None, .*: a float", (X, X, None), {}),
    ("Reduction", TypeError, "Reduction: argument 2, scale: got a tensor, .*: a float", (X, X, X), {}),
    ("Reduction", TypeError, "Reduction: argument 1, out: got a float, .*: a tensor", (X, 1.0, 1.0), {}),
    ("Reduction", TypeError, "Reduction: argument 3, times: got a float, .*: an int", (X, X, 1.0, 2.0), {}),
    ("Reduction", TypeError, "Reduction: heads: got list", (X, X, 1.0), dict(heads=[1])),
    ("NoBits", ValueError, "NoBits.copy_bits: got 0, allowed for rows of torch.float32 are 32, 64, 128", (X, X, 1.0),
     {}),
    ("FewBits", ValueError, "FewBits.copy_bits: got 16", (X, X, 1.0), {}),
    ("FewBits", ValueError, "FewBits: argument 1: got torch.float32", (X.bfloat16(), X, 1.0), {}),
    ("WordsForBits", ValueError, "WordsForBits.copy_bits: got '128'", (X, X, 1.0), {}),
    ("ByName", TypeError, "ByName: __call__ takes scale by name alone", (X, X, 1.0), {}),
    ("NoCall", TypeError, "NoCall: it has no __call__", (X, X, 1.0), {})])
def test_calls_of_a_reduction(name, error, says, args, options):
    cls = getattr(kernels, name)
    for ask in (cls.recipe, cls.launch):
        with pytest.raises(error, match=says):
            ask(*args, **options)


def test_an_int_is_a_float_where_call_says_so(monkeypatch):
    """The same recipe, and what is launched gets floats; where the int is an int it stays one."""
    cls = kernels.Reduction
    assert cls.recipe(X, X[:, 0].contiguous(), 2) == cls.recipe(X, X[:, 0].contiguous(), 2.0)
    report(cls.recipe(X, torch.zeros(4), 2, 3))
    called = []
    monkeypatch.setattr(reduction_launch, "_launchers", {})
    monkeypatch.setattr(reduction_launch, "_check_devices", lambda cls, args: None)
    monkeypatch.setattr(reduction_launch.arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(reduction_launch.runtime, "function", lambda made: lambda *args: called.append(args[2:]))
    for numbers in ((2,), (2.0,), (3, 4), (2,)):
        cls.launch(X, torch.zeros(4), *numbers)
    assert called == [(2.0,), (2.0,), (3.0, 4), (2.0,)]
    assert [[type(n) for n in numbers] for numbers in called] == [[float], [float], [float, int], [float]]


def test_annotations_that_say_nothing_allow_everything():
    for flag in (None, 1, 2.0, X):
        kernels.Unannotated.recipe(X, 1.0, 2, flag)
    with pytest.raises(TypeError, match="argument 2, scale: got a tensor, .*: a float or None"):
        kernels.Unannotated.recipe(X, 1.0, X, None)


@pytest.mark.parametrize("annotation, kinds", [
    ("cutlass.Float32", ("float",)), ("Optional[Float32]", ("float", "none")), ("Int32 | None", ("int", "none")),
    (Float32, ("float",)), ("Constexpr", None), (Float32 | None, ("float", "none"))])
def test_what_an_annotation_allows(annotation, kinds):
    assert signature.kinds(annotation) == kinds

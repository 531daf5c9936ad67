"""The names of float8 scales: one table, torch's members and the old names beside it."""
import pickle
import warnings

import pytest
import torch
from torch.nn import functional as F

import tkq
from tkq.gemm.fp8.spec import Fp8Spec
from tkq.gemm.grouped.spec import GroupedSpec
from tkq.granularity import BLOCKS, NAMES, PRODUCTS, SCALING_TYPES, TABLE, pair_name, scales_of
from tkq.runtime.arguments.granularities import RENAMED, parse

SCALING = getattr(F, "ScalingType", None)  # torch 2.10 and later
of_torch = pytest.mark.skipif(SCALING is None, reason="this torch has no ScalingType")
X = torch.randn(130, 260)
TAKEN = {"quantize_fp8": NAMES, "rmsnorm_quant": ("row", "1x128"), "layernorm_quant": ("row", "1x128"),
         "RMSNormQuant": ("row", "1x128"), "LayerNormQuant": ("row", "1x128")}
PAIRS = [(op, name) for op, names in TAKEN.items() for name in names]


def quantised(op, granularity):
    """(q, scale)"""
    if op.endswith("Quant"):
        with torch.no_grad():
            return getattr(tkq.nn, op)(X.shape[1], granularity=granularity)(X)
    return getattr(tkq, op)(X, granularity=granularity)


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and torch.equal(a.float(), b.float())


def test_the_table():
    assert NAMES == ("tensor", "row", "1x128", "128x128") == tuple(SCALING_TYPES)
    assert BLOCKS == {"tensor": (0, 0), "row": (1, 0), "1x128": (1, 128), "128x128": (128, 128)}
    assert set(RENAMED.values()) <= set(NAMES) and not set(RENAMED) & set(NAMES)


@of_torch
@pytest.mark.parametrize("granularity", TABLE, ids=lambda g: g.name)
def test_torch_has_these_members(granularity):
    assert parse("f: granularity", getattr(SCALING, granularity.scaling_type)) == granularity.name


@pytest.mark.parametrize("value", [*NAMES, "", "nonsense", "line", "RowWise", None, 1, ["row"], X])
def test_all_else_comes_back_as_it_is(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse("f: granularity", value) is value


@pytest.mark.parametrize("op, name", PAIRS)
def test_shapes_of_scales(op, name):
    rows, columns = BLOCKS[name]
    wanted = (1,) if name == "tensor" else (-(-130 // rows), -(-260 // columns) if columns else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quantised(op, name)[1].shape == wanted


@of_torch
@pytest.mark.parametrize("op, name", PAIRS)
def test_members_of_torch_are_taken(op, name):
    assert_same(quantised(op, getattr(SCALING, SCALING_TYPES[name])), quantised(op, name))


@pytest.mark.parametrize("op, old", [(op, old) for op, names in TAKEN.items() for old, new in RENAMED.items()
                                     if new in names])
def test_old_names_warn_the_caller(op, old):
    with pytest.warns(DeprecationWarning, match=f"^{op}: granularity: '{old}' is now '{RENAMED[old]}'; ") as caught:
        found = quantised(op, old)
    assert [w.filename for w in caught] == [__file__]
    assert_same(found, quantised(op, RENAMED[old]))


@pytest.mark.parametrize("op", TAKEN)
def test_a_refusal_names_all_that_is_allowed(op):
    members = ", ".join(SCALING_TYPES[name] for name in TAKEN[op])
    words = f"{op}: granularity: got 'line', allowed are {', '.join(map(repr, TAKEN[op]))}, and {members} of torch's"
    with pytest.raises(ValueError, match=f"^{words} ScalingType$"):
        quantised(op, "line")


@of_torch
@pytest.mark.parametrize("op", TAKEN)
def test_members_that_are_not_for_float8_are_refused(op):
    with pytest.raises(ValueError, match=f"^{op}: granularity: got 'BlockWise1x32', allowed are"):
        quantised(op, SCALING.BlockWise1x32)


@pytest.mark.parametrize("op", ("rmsnorm_quant", "layernorm_quant"))
def test_a_block_of_128_by_128_is_none_of_a_norm(op):
    with pytest.raises(ValueError, match="got '128x128', allowed are 'row', '1x128'"):
        quantised(op, "128x128")


@of_torch
@pytest.mark.parametrize("op", ("quantize_fp8", "rmsnorm_quant"))
def test_under_compile(op):
    for given in ("block", "1x128", SCALING.BlockWise1x128):
        compiled = torch.compile(lambda x, given=given: getattr(tkq, op)(x, granularity=given), fullgraph=True,
                                 backend="eager")
        assert_same(compiled(X), quantised(op, "1x128"))


@pytest.mark.parametrize("op", ("quantize_fp8", "rmsnorm_quant"))
def test_programs_exported_with_an_old_name_run(op):
    """Their nodes have the name as a number has its value: the op itself takes it, and warns."""
    given = dict(weight=None, bias=None, eps=1e-6, residual=None, weight_offset=0.0, total_dtype=None)
    given = (dict(dtype=torch.float8_e4m3fn, transpose=False, unit=1) if op == "quantize_fp8" else given)
    run = getattr(torch.ops.tkq, op)
    with pytest.warns(DeprecationWarning, match="'block' is now '1x128'"):
        found = run(X, granularity="block", **given)
    assert_same(found, run(X, granularity="1x128", **given))


def test_the_old_name_of_a_linear_layers_warns_the_caller():
    with pytest.warns(DeprecationWarning, match="^Fp8Linear: granularity: 'block' is now '1x128'; ") as caught:
        found = tkq.nn.Fp8Linear(32, 32, granularity="block")
    assert [w.filename for w in caught] == [__file__] and found.recipe.granularity == "1x128"


def test_a_linear_layer_that_was_pickled_with_an_old_name():
    made = tkq.nn.Fp8Linear(272, 128, granularity="1x128")
    made.recipe = made.recipe._replace(granularity="block")
    found = pickle.loads(pickle.dumps(made))
    assert found.recipe.granularity == "1x128" and found(torch.randn(3, 272)).shape == (3, 128)


@pytest.mark.parametrize("pair, granularities", PRODUCTS.items())
def test_pairs_of_products(pair, granularities):
    assert scales_of(pair) == dict(zip(("scale_a", "scale_b"), granularities)) and set(granularities) <= set(NAMES)
    assert pair_name(Fp8Spec(**scales_of(pair), promote=True)) == pair and pair_name(GroupedSpec()) == "none"


@of_torch
def test_a_linear_layer_has_the_granularity_of_x():
    for given in ("row", "1x128", "tensor"):
        member = getattr(SCALING, SCALING_TYPES[given])
        assert tkq.nn.Fp8Linear(32, 32, granularity=member).recipe.granularity == given
    with pytest.raises(ValueError, match="Fp8Linear: granularity: got '128x128', allowed are 'row', '1x128', "):
        tkq.nn.Fp8Linear(32, 32, granularity=SCALING.BlockWise128x128)

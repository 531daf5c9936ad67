"""Kernels written against the tutorial's contract compile for Hopper on ReductionBase, into the code one expects."""
import inspect
import re

import pytest
import torch

from tests.helpers.rows import contract_kernels, reduction_kernels
from tkq import utils
from tkq.reduction_base import ReductionBase
from tkq.runtime.compile.expectation import Expectation
from tkq.testing import sass

BF16, FP32 = torch.bfloat16, torch.float32


def recipe(name, N, x_type=BF16, w_type=BF16, **options):
    x = torch.zeros(2, N, dtype=x_type)
    return getattr(contract_kernels, name).recipe(x, torch.zeros(N, dtype=w_type), x, torch.zeros(2), 1e-5, **options)


def check(found, instructions, absent=()):
    """No local memory is in every Expectation."""
    assert sass.expect_all(found, Expectation(instructions=instructions, absent=absent)) == []


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("N, bits, clustered", [(64, 128, False), (1000, 128, False), (4096, 128, False),
                                                (4100, 64, False), (32768, 128, True), (262144, 128, True)])
# LayerNorm has two exchanges where RMSNorm has one, and the same loads
@pytest.mark.sampled(when=lambda name, N: name == "LayerNorm" or N in (4096, 262144))
@pytest.mark.machine_code(recipe=lambda name, N: recipe(name, N))
def test_contract_kernels_compile(name, N, bits, clustered, machine_code):
    wide = (f"LDGSTS.E.{bits}", f"STG.E.{bits}", f"LDG.E.{bits}")
    exchange = ("STAS", "UCGABAR_ARV", "UCGABAR_WAIT") if clustered else ("SHFL",)
    absent = () if clustered else ("STAS", "UCGABAR_ARV")
    check(machine_code, (*wide, *exchange), absent)


@pytest.mark.parametrize("types", [(BF16, FP32), (FP32, BF16), (FP32, FP32), (torch.float16, torch.float16)])
@pytest.mark.machine_code(recipe=lambda types: recipe("LayerNorm", 2048, *types))
def test_contract_kernels_compile_in_other_types(types, machine_code):
    check(machine_code, ("LDGSTS.E.128", "STG.E.128"))


def stream_first(eps):
    x = torch.zeros(2, 1000, dtype=BF16)
    return contract_kernels.RMSNormStreamFirst.recipe(x, x[0], x, torch.zeros(2), *eps)


@pytest.mark.parametrize("eps", [(), (1e-5,)])
@pytest.mark.machine_code(recipe=stream_first)
def test_the_stream_may_stand_before_eps(eps, machine_code):
    check(machine_code, ("LDGSTS.E.128", "STG.E.128", "SHFL"))


@pytest.mark.parametrize("op", ["add", "max", "min"])
@pytest.mark.parametrize("N", [1, 1000, 40000])
@pytest.mark.sampled(each_value=True)
@pytest.mark.machine_code(recipe=lambda op, N: reduction_kernels.RowReduce.recipe(
    torch.zeros(2, N), torch.zeros(2), torch.zeros(2), op=op))
def test_row_reduce_compiles(op, N, machine_code):
    check(machine_code, ("SHFL",) if N < 4096 else ("SHFL", "STAS"))


@pytest.mark.parametrize("N, w_type", [(7, FP32), (1000, FP32), (4096, BF16), (65536, FP32)])
@pytest.mark.machine_code(recipe=lambda N, w_type: reduction_kernels.WeightedSum.recipe(
    torch.zeros(2, N, dtype=BF16), torch.zeros(N, dtype=w_type), torch.zeros(2)))
def test_a_vector_in_the_rows_layout_compiles(N, w_type, machine_code):
    check(machine_code, ("LDG.E.128", "STG.E") if N > 7 else ("LDG.E.U16", "STG.E"))


def test_only_two_lines_of_the_contract_kernels_know_tkq():
    source = inspect.getsource(contract_kernels).split('"""', 2)[2]
    assert len([line for line in source.splitlines() if re.search(r"\btkq\b", line)]) == 2


def test_the_contract_name_for_name():
    methods = {"_calculate_threads_per_row": [], "_get_num_threads": [], "_set_cluster_n": [],
               "_get_tv_layout": ["num_copy_bits"], "_smem_size_in_bytes": ["tiler_mn", "num_warps"],
               "_get_reduction_buffer_layout": ["tv_layout", "cluster_n"],
               "_allocate_reduction_buffer_and_mbar": ["smem", "tv_layout", "is_persistent"],
               "_initialize_cluster": ["tidx", "mbar_ptr", "num_warps", "is_persistent"]}
    for name, parameters in methods.items():
        assert list(inspect.signature(getattr(ReductionBase, name)).parameters)[1:] == parameters, name
    assert list(inspect.signature(ReductionBase).parameters) == ["dtype", "N", "stage", "reduction_dtype"]
    assert list(inspect.signature(utils.row_reduce).parameters) == [
        "x", "op", "threads_per_row", "reduction_buffer", "mbar_ptr", "phase", "init_val", "hook_fn"]
    assert list(inspect.signature(utils.predicate_k).parameters) == ["tAcA", "limit"]
    assert list(inspect.signature(utils.domain_offset_i64).parameters)[:2] == ["coord", "tensor"]
    assert list(inspect.signature(utils.rsqrt).parameters)[:1] == ["x"]


def defaults(function):
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.default is not p.empty}


def test_the_contract_default_for_default():
    """A kernel that leaves out what the tutorial leaves out gets the same."""
    methods = {name: defaults(getattr(ReductionBase, name)) for name in vars(ReductionBase) if name[:2] != "__"
               and inspect.isfunction(getattr(ReductionBase, name))}
    found = {name: values for name, values in methods.items() if values}
    assert found == {"_get_tile": {"num_copy_bits": 128}, "_get_tv_layout": {"num_copy_bits": 128},
                     "_allocate_reduction_buffer_and_mbar": {"is_persistent": False},
                     "_initialize_cluster": {"is_persistent": False}}
    assert [p.__name__ for p in defaults(ReductionBase).values()] == ["Float32"]
    assert defaults(utils.row_reduce) == {"reduction_buffer": None, "mbar_ptr": None, "phase": None, "init_val": 0.0,
                                          "hook_fn": None}
    assert "limit" not in defaults(utils.predicate_k) and "tensor" not in defaults(utils.domain_offset_i64)
    assert [p.default for p in inspect.signature(utils.rsqrt).parameters.values()
            if p.kind is not p.KEYWORD_ONLY] == [inspect.Parameter.empty]


def test_attributes_and_defaults():
    base = ReductionBase("a type", 640, 3)
    assert (base.dtype, base.N, base.stage, base.reduction_dtype.__name__) == ("a type", 640, 3, "Float32")
    base._set_cluster_n()
    assert base.cluster_n == 1 and base._calculate_threads_per_row() == 32 and base._get_num_threads() == 128


@pytest.mark.parametrize("args, says", [
    ((torch.zeros(4),), r"\(M, N\)"), ((torch.zeros(2, 3), torch.zeros(5)), "argument 1: got shape"),
    ((torch.zeros(3, 2).t(),), "argument 0: got strides")])
def test_arguments_that_no_kernel_takes(args, says):
    with pytest.raises(ValueError, match=says):
        contract_kernels.RMSNorm.recipe(*args)


def test_arguments_of_another_kind():
    with pytest.raises(TypeError, match="argument 1: got str"):
        contract_kernels.RMSNorm.recipe(torch.zeros(2, 3), "weight")


def test_launch_refuses_what_autograd_would_lose():
    x = torch.zeros(4, 64)
    with pytest.raises(NotImplementedError, match="RMSNorm.launch: argument 1 requires a gradient"):
        contract_kernels.RMSNorm.launch(x, torch.zeros(64, requires_grad=True), x, None, 1e-5)


def test_launch_wants_the_gpu():
    x = torch.zeros(2, 64)
    with pytest.raises(ValueError, match="CUDA"):
        contract_kernels.RMSNorm.launch(x, torch.zeros(64), x, None, 1e-5)


def test_a_recipe_tells_alignment_types_and_options_apart():
    wide = torch.zeros(4, 72, dtype=BF16)
    made = [recipe("RMSNorm", 64), recipe("RMSNorm", 64, FP32), recipe("RMSNorm", 64, BF16, FP32),
            recipe("LayerNorm", 64), recipe("RMSNorm", 64, cluster_n=2), recipe("RMSNorm", 72)]
    views = [contract_kernels.RMSNorm.recipe(wide[:, i:i + 64], wide[0, :64], wide[:, :64], None, 1e-5) for i in (0, 8)]
    assert len({repr(r) for r in made}) == len(made) and repr(views[0]) == repr(views[1])


@pytest.mark.parametrize("argument, args", [
    (0, lambda x, w: (x[:, 1:65], w, x[:, :64])), (0, lambda x, w: (x[:, 4:68], w, x[:, :64])),
    (0, lambda x, w: (torch.zeros(4, 71, dtype=BF16)[:, :64], w, x[:, :64])),
    (1, lambda x, w: (x[:, :64], x[0, 1:65], x[:, :64])), (2, lambda x, w: (x[:, :64], w, x[:, 2:66]))])
def test_an_access_that_does_not_fit_an_address_is_refused(argument, args):
    x = torch.zeros(4, 72, dtype=BF16)
    with pytest.raises(ValueError, match=f"RMSNorm: argument {argument}: .* multiples of 16 bytes"):
        contract_kernels.RMSNorm.recipe(*args(x, torch.zeros(64, dtype=BF16)), None, 1e-5)


def test_as_many_rows_as_columns():
    """(N,) and (M,) look alike: what lies where no row of columns may is taken as one value a row."""
    x, w = torch.zeros(64, 64, dtype=BF16), torch.zeros(64, dtype=BF16)
    kinds = [[a.kind for a in contract_kernels.RMSNorm.recipe(x, w, x, rstd, 1e-5).args[0].arguments]
             for rstd in (torch.zeros(64), torch.zeros(65)[1:])]
    assert kinds == [["matrix", "columns", "matrix", kind, "float"] for kind in ("columns", "rows")]
    made = contract_kernels.RMSNorm.recipe(x, w, x, torch.zeros(65)[1:], 1e-5)
    check(sass.report(made), ("LDGSTS.E.128", "STG.E.128"))


def test_one_row_has_no_stride():
    x, w = torch.zeros(1, 65, dtype=BF16)[:, :64], torch.zeros(64, dtype=BF16)
    assert x.stride(0) == 65
    contract_kernels.RMSNorm.recipe(x, w, x, None, 1e-5)
    with pytest.raises(ValueError, match="rows 130 bytes apart"):
        contract_kernels.RMSNorm.recipe(torch.zeros(2, 65, dtype=BF16)[:, :64], w, x.expand(2, 64), None, 1e-5)


def test_a_kernel_of_narrow_accesses_takes_any_address():
    x, rows = torch.zeros(4, 1001)[:, 1:], torch.zeros(4)
    made = reduction_kernels.RowReduceAnywhere.recipe(x, rows, rows, op="add")
    check(sass.report(made), ("LDG.E",), ("LDG.E.64", "LDG.E.128"))

"""What ``tkq.tune`` chooses among: configurations that fit, each once, the plan's first."""
import pytest

from tkq.gemm import candidates
from tkq.gemm.dense import plan
from tkq.gemm.dense.small_m_config import SmallMConfig
from tkq.gemm.dense.spec import GemmSpec
from tkq.gemm.epilogue.spec import Epilogue
from tkq.gemm.fp8.plan import planned_kernel
from tkq.gemm.fp8.spec import Fp8Spec
from tkq.gemm.grouped.spec import GroupedSpec
from tkq.granularity import PRODUCTS, scales_of
from tkq.runtime.compile.tuned import Problem

SIZES = ((1, 8192, 8192), (64, 4096, 512), (128, 1000, 72), (129, 136, 272), (4096, 4096, 4096), (65536, 128, 28672))
GEMMS = (GemmSpec(), GemmSpec(b_major="k"), GemmSpec(out="fp32"), GemmSpec(store="direct"),
         GemmSpec(a_major="m", accumulate=True), GemmSpec(batch="ab"), GemmSpec(epilogue=Epilogue("gelu", bias="bf16")),
         GemmSpec(b_major="k", epilogue=Epilogue("swiglu")), GemmSpec(out="fp32", epilogue=Epilogue(residual=True)))
FP8S = (*(Fp8Spec(**scales_of(pair), promote="128" in pair) for pair in PRODUCTS),
        Fp8Spec(out="e4m3"), Fp8Spec(store="direct"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", GEMMS)
def test_candidates_of_gemm_fit_and_begin_with_the_plan(spec, size):
    found = candidates.of_gemm(spec, *size, 132)
    assert 2 < len(found) < 50 and len(set(found)) == len(found)
    assert plan.planned_kernel(spec, *size, 132)[0].args[1] == found[0]
    for config in found:
        config.check(spec)
        assert plan.planned_kernel(spec, *size, 132, config)[0].args[1] == config
        if isinstance(config, SmallMConfig):
            assert config.m >= size[0]


def test_nothing_is_chosen_where_there_is_one_kernel():
    assert candidates.of_gemm(GemmSpec(load="direct", store="direct"), 64, 64, 64, 132) == []


@pytest.mark.parametrize("size", [(m, n, -(-k // 16) * 16) for m, n, k in SIZES])
@pytest.mark.parametrize("spec", FP8S)
def test_candidates_of_fp8_gemm(spec, size):
    found = candidates.of_fp8_gemm(spec, *size, 132)
    assert 2 < len(found) < 50 and len(set(found)) == len(found)
    assert planned_kernel(spec, *size, 132)[0].args[1] == found[0]
    assert all(config.check(spec) is config for config in found)


@pytest.mark.parametrize("spec", (GroupedSpec(), GroupedSpec("k", b_major="n"),
                                  GroupedSpec("m", "e4m3", "e4m3", "bf16", "1x128", "128x128")))
def test_candidates_of_grouped_gemm(spec):
    found = candidates.of_grouped_gemm(spec, 8192, 4096, 16, 132)
    assert 2 < len(found) < 50 and len(set(found)) == len(found)


@pytest.mark.parametrize("op, spec, sizes, listed", (
    ("gemm", GemmSpec(), (64, 4096, 512, 1), lambda: candidates.of_gemm(GemmSpec(), 64, 4096, 512, 132, 1)),
    ("fp8_gemm", Fp8Spec(), (64, 4096, 512), lambda: candidates.of_fp8_gemm(Fp8Spec(), 64, 4096, 512, 132)),
    ("grouped_gemm", GroupedSpec(), (64, 4096, 512, 4),
     lambda: candidates.of_grouped_gemm(GroupedSpec(), 64, 4096, 4, 132))))
def test_candidates_of_a_problem_are_those_of_its_op(op, spec, sizes, listed):
    assert candidates.of(Problem(op, spec, sizes, "a GPU"), 132) == listed()
    for i in range(len(sizes)):
        nothing = (*sizes[:i], 0, *sizes[i + 1:])
        assert candidates.of(Problem(op, spec, nothing, "a GPU"), 132) == [], "nothing is multiplied"

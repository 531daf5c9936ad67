"""LongSoftmax's plans, and its machine code. What it computes: tests/gpu/test_softmax_long.py."""
import pytest

from tkq import row_plan
from tkq.row_plan import RowConfig
from tkq.rows.plan import RowPlan, smem_bytes
from tkq.softmax import plan
from tkq.softmax.ops import recipe
from tkq.softmax.spec import SoftmaxSpec
from tkq.testing import sass
from tkq.testing.expectation import Expectation


@pytest.mark.parametrize("x, N", [("bf16", 262144), ("bf16", 131072), ("bf16", 262136), ("fp32", 262144),
                                  ("fp16", 200008)])
def test_variants_cover_each_row_once(x, N):
    spec = SoftmaxSpec(N, x, 4 if x == "fp32" else 8)
    found = plan.long_variants(spec)
    assert len(found) >= 3 and set(found) <= set(plan.variants(spec)) and plan.plan(spec) not in found
    for p in found:
        plan.check(spec, p)
        assert p.threads_per_row * p.per_thread >= p.cols and p.cols * p.cluster >= N and p.groups == 1
        for units in (1, 7, 8, 16):
            rows = sorted(row for unit in range(units) for row in p.rows_of(unit, units, 37))
            assert rows == list(range(37))


@pytest.mark.parametrize("spec", [
    SoftmaxSpec(262144, "bf16", 8, backward=True), SoftmaxSpec(262140, "bf16", 4),
    SoftmaxSpec(262143, "bf16", 8, shifted=True)], ids=str)
def test_what_no_ring_takes(spec):
    config = plan.long_variants(SoftmaxSpec(262144, "bf16", 8))[0]
    assert not any(isinstance(c, RowPlan) for c in plan.variants(spec)) if spec.vector == 8 else True
    with pytest.raises(ValueError, match="a RowPlan"):
        plan.check(spec, config)


def test_rows_that_others_hold_get_no_long_plan():
    assert not plan.long_variants(SoftmaxSpec(65536, "bf16", 8))


@pytest.mark.parametrize("log", [False, True])
def test_machine_code(log):
    if sass.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    spec = SoftmaxSpec(262144, "bf16", 8, log)
    config = plan.long_variants(spec)[0]
    found = sass.report(recipe(spec, config))
    wanted = Expectation(instructions=("UBLKCP", "STG.E.128", "STAS", "UCGABAR_ARV", "LDS.128"), registers=168,
                         smem=smem_bytes(plan.shape(spec), config) + 2048)
    assert sass.expect_all(found, wanted) == [], sass.text("long", found)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 6])
def test_memory_that_nobody_uses(most):
    """So many blocks fit on a multiprocessor, and no more; none is added where rows need as much themselves."""
    spec = SoftmaxSpec(262144, "bf16", 8)
    config = RowConfig(256, 256, 16, "shared", most=most)
    plan.check(spec, config)
    a_block = row_plan.smem_bytes(spec, config, plan.EXCHANGES) + 1024
    assert (228 << 10) // a_block == most
    assert row_plan.unused(config, 200 << 10) == 0

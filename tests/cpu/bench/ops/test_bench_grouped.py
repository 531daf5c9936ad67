"""bench.tune.grouped_gemm where no GPU is needed."""
from bench.tune import grouped_gemm
from tkq.gemm.grouped.plan import FAST, fit_to_spec
from tkq.gemm.grouped.spec import GroupedSpec


def test_variants_are_kernels():
    for kind in grouped_gemm.SPECS:
        assert len({grouped_gemm.made(kind, name) for name in grouped_gemm.VARIANTS}) == len(grouped_gemm.VARIANTS)


def test_the_table_of_groups_leaves_room_for_four_stages():
    assert fit_to_spec(FAST[0], GroupedSpec()).stages == FAST[0].stages == 4

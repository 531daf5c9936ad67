"""bench.tune_grouped where no GPU is needed."""
from bench import tune_grouped
from tkq.gemm.grouped_spec import FAST, GroupedSpec, fitted


def test_variants_are_kernels():
    for kind in tune_grouped.SPECS:
        assert len({tune_grouped.made(kind, name) for name in tune_grouped.VARIANTS}) == len(tune_grouped.VARIANTS)


def test_the_table_of_groups_leaves_room_for_four_stages():
    assert fitted(FAST[0], GroupedSpec()).stages == FAST[0].stages == 4

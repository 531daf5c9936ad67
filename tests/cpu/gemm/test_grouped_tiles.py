"""Which block of a grouped GEMM works on what: the kernel's own order, with Python's numbers in place of the GPU's."""
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tkq.gemm.fp8 import matrices
from tkq.gemm.grouped import groups, table
from tkq.gemm.grouped.plan import FAST, PROMOTED, fit_to_spec
from tkq.gemm.grouped.spec import GroupedSpec

SPECS = {"rows": GroupedSpec(), "blocks": GroupedSpec("m", "e4m3", "e4m3", "bf16", "1x128", "128x128"),
         "along k": GroupedSpec("k", b_major="n")}


def ceil_div(a, b):
    return -(-a // b)


@pytest.fixture
def gpu(monkeypatch):
    """Where the next block is; its arithmetic is Python's."""
    here = SimpleNamespace(block=0, blocks=1, cluster=1)
    arch = SimpleNamespace(grid_dim=lambda: (here.blocks, 1, 1), block_idx=lambda: (here.block, 0, 0),
                           make_warp_uniform=lambda x: x)
    monkeypatch.setattr(table, "cute", SimpleNamespace(ceil_div=ceil_div, arch=arch))
    monkeypatch.setattr(table, "cutlass", SimpleNamespace(max=max, min=min, select_=lambda so, a, b: a if so else b))
    monkeypatch.setattr(table, "Int32", int)
    monkeypatch.setattr(matrices.tk, "cluster_rank", lambda: here.block % here.cluster)
    return here


def seek(counts, cursor, number):
    """As the table's, which is compiled."""
    while counts[cursor[0] + 1] <= number:
        cursor[0] += 1


def counted(table, g, sizes):
    """What the kernel counts first: where groups begin, and their tiles."""
    tall, wide = table.span()
    begins, counts = [0], [0]
    for size in sizes:
        begins.append(begins[-1] + size)
        counts.append(counts[-1] + ceil_div(g.m if table.along_k else size, tall) * ceil_div(g.n, wide))
    return SimpleNamespace(begins=begins, counts=counts)


def dealt(here, spec, config, g, sizes, blocks):
    """(block, tile) of all blocks."""
    operands = groups.Groups(spec, config, groups.tiles_of(spec, config))
    operands.table.seek = seek
    s, here.cluster = counted(operands.table, g, sizes), config.cluster
    here.blocks = blocks // config.cluster * config.cluster
    for block in range(here.blocks):
        here.block = block
        order = table.Order(s.counts[-1], config.cluster, [0])
        number = order.first()
        while number < order.tasks:
            yield block, operands.tile(g, s, order, number)
            number = order.following(number)


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 2000)), min_size=1, max_size=12),
       m=st.integers(1, 700), n=st.integers(1, 1500), tile=st.integers(0, 3), blocks=st.integers(2, 132))
def test_every_tile_once(gpu, name, sizes, m, n, tile, blocks):
    spec = SPECS[name]
    config = fit_to_spec((PROMOTED if spec.promote else FAST)[tile], spec)
    rows = m if spec.along == "k" else sum(sizes)
    found = list(dealt(gpu, spec, config, SimpleNamespace(m=rows, n=n), sizes, blocks))
    places = [(t.group, t.row, t.col) for _, t in found]
    assert len(set(places)) == len(places)
    down, right = (1, config.cluster) if config.cluster_along_n else (config.cluster, 1)
    wanted = set()
    for group, size in enumerate(sizes):
        high = ceil_div(m if spec.along == "k" else size, config.m * down) * down
        wide = ceil_div(n, config.n * right) * right
        wanted |= {(group, row, col) for row in range(high) for col in range(wide)}
    assert set(places) == wanted  # and those past an end, which are the rest of a cluster, write nothing
    assert all((t.first, t.size) == (sum(sizes[:t.group]), sizes[t.group]) for _, t in found)


def test_a_cluster_works_on_tiles_side_by_side_and_rounds_are_even(gpu):
    spec = SPECS["rows"]
    config = fit_to_spec(FAST[0], spec)
    g, sizes = SimpleNamespace(m=4096, n=1024), [1024, 0, 3072]
    found = list(dealt(gpu, spec, config, g, sizes, 132))
    assert config.cluster == 2 and not config.cluster_along_n
    for (_, upper), (_, lower) in zip([f for f in found if f[0] % 2 == 0], [f for f in found if f[0] % 2]):
        assert (upper.group, upper.col, upper.row + 1) == (lower.group, lower.col, lower.row)
    work = [sum(block == b for block, _ in found) for b in range(132)]
    assert max(work) == 1 and sum(work) == 16 * 2 * 4

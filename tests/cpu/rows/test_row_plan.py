"""The geometry of RowKernel: pure Python, so every shape can be looked at; and what the compiler made of it."""
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tkq.norms.backward.catalog import shipped, spec
from tkq.rows.persistent import plan as rows
from tkq.rows.persistent.launch import recipe_of
from tkq.rows.persistent.plan import RowPlan, RowShape, plan
from tkq.rows.persistent.variants import variants

MAX_N = 1 << 18
COLUMNS = st.one_of(
    st.integers(1, MAX_N), st.integers(1, 4096), st.integers(1, MAX_N // 8).map(lambda n: 8 * n),
    st.integers(0, 18).flatmap(lambda e: st.sampled_from([2**e, max(1, 2**e - 1), min(MAX_N, 2**e + 1)])))
WIDTHS = st.sampled_from([16, 32])


@st.composite
def shapes(draw):
    N = draw(COLUMNS)
    loads = tuple(draw(st.lists(WIDTHS, min_size=1, max_size=4)))
    stores = tuple(draw(st.lists(WIDTHS, max_size=3)))
    vectors = tuple(draw(st.lists(WIDTHS, max_size=2)))
    sums = tuple(draw(st.lists(st.integers(1, 5), max_size=2)))
    widest = 128 // max(loads + stores)
    vector = draw(st.sampled_from([v for v in (1, 2, 4, 8) if v <= widest and N % v == 0]))
    bulk = N * min(loads) % 128 == 0 and draw(st.booleans())
    return RowShape(N, loads, stores, vectors, draw(st.integers(0, 3)), sums, vector, bulk)


def test_each_row_once():
    """Whatever M and the number of units are, no row is left out and none is taken twice."""

    @given(st.integers(1, 5000), st.integers(1, 140), st.sampled_from([1, 64, 1000, 1024, 2048, 4096, 8192, 65536]))
    def check(rows_, most, N):
        p = plan(RowShape(N, (16, 16), vector=8 if N % 8 == 0 else 1, bulk=N % 8 == 0))
        units = p.units(rows_, most)
        found = [row for unit in range(units) for row in p.rows_of(unit, units, rows_)]
        assert sorted(found) == list(range(rows_))
        assert all(p.rows_of(unit, units, rows_) for unit in range(units)), "a unit without a tile would wait for ever"

    check()


def columns_covered(p: RowPlan):
    """How often the threads of all blocks hold each column, out of those below N."""
    count = [0] * p.N
    for rank in range(p.cluster):
        limit = min(p.cols, p.N - rank * p.cols)
        for thread in range(p.threads_per_row):
            for j in range(p.chunks):
                first = (j * p.threads_per_row + thread) * p.vector
                if first < limit:
                    for c in range(rank * p.cols + first, rank * p.cols + first + p.vector):
                        count[c] += 1
    return count


@pytest.mark.parametrize("N", [1, 2, 7, 8, 63, 64, 65, 100, 128, 129, 1000, 1024, 3073, 4100, 16392, 40000, 65537])
@pytest.mark.parametrize("width", [16, 32])
def test_each_column_belongs_to_one_thread(N, width):
    bulk = N * width % 128 == 0
    vector = 128 // width if bulk else next(v for v in (4, 2, 1) if N % v == 0)
    assert columns_covered(plan(RowShape(N, (width, width), vector=vector, bulk=bulk))) == [1] * N


@given(shapes())
def test_every_shape_has_a_plan_that_fits(shape):
    p = plan(shape)
    rows.check(shape, p)
    assert rows.smem_bytes(shape, p) <= 226 * 1024
    assert p.cols * p.cluster >= shape.N > p.cols * (p.cluster - 1)
    assert p.chunks * p.vector * p.threads_per_row >= p.cols
    assert p.cols % rows.QUAD == 0, "a quad of column sums belongs to one block"
    assert p.block <= 1024 and p.threads % 128 == 0
    assert shape.vector % p.vector == 0
    assert p.per_thread <= 64 and (p.direct or p.per_thread * shape.columns <= p.consumer_registers)
    if not p.direct:
        assert shape.bulk and all(p.cols * bits % 128 == 0 for bits in shape.loads), "bulk copies start at 16 bytes"
        assert p.stages > len(shape.sums)


@given(shapes())
def test_registers_that_are_dealt_out_are_there(shape):
    p = plan(shape)
    assert p.launch_registers % 8 == 0 or p.launch_registers == 255
    few, many = p.registers
    if not p.direct:
        assert few * 128 + many * p.threads <= p.launch_registers * p.block
    assert p.launch_registers * p.block <= 65536
    assert many <= 240 and many % 8 == 0 and p.consumer_registers >= many * p.direct


@settings(deadline=None)
@given(shapes(), st.integers(1, 140))
def test_a_slab_reads_every_row_of_the_workspace(shape, units):
    """`sum_slabs`, in Python: each quad once, each unit's row once."""
    p = plan(shape)
    quads = -(-shape.N // rows.QUAD)
    lanes = p.threads // p.slab
    assert p.slab & (p.slab - 1) == 0 and p.threads % p.slab == 0
    read = [u for r0 in range(lanes) for u0 in range(r0, units, lanes * p.slab_loads)
            for u in range(u0, u0 + lanes * p.slab_loads, lanes) if u < units]
    assert sorted(read) == list(range(units))
    blocks = 132
    covered = [s * p.slab + c for b in range(blocks) for s in range(b, -(-quads // p.slab), blocks)
               for c in range(p.slab) if s * p.slab + c < quads]
    assert sorted(covered) == list(range(quads))


def test_the_planned_sizes():
    """What was measured on an H100: a table of two or three loads of 16 bits, a ladder of 8 warps of 32 elements."""
    for N, threads, cluster, warps, per_thread in (
            (512, 32, 1, 4, 16), (1024, 64, 1, 4, 16), (2048, 128, 1, 4, 16), (4096, 256, 1, 8, 16),
            (8192, 256, 2, 8, 16), (16384, 512, 1, 16, 32),
            (32768, 512, 2, 16, 32), (65536, 256, 16, 8, 16), (131072, 256, 16, 8, 32)):
        p = plan(RowShape(N, (16, 16), (16,), (16,), 1))
        assert (p.threads_per_row, p.cluster, p.warps, p.per_thread) == (threads, cluster, warps, per_thread)
    for N, threads, warps, per_thread in ((1024, 32, 8, 32), (2048, 128, 4, 16), (4096, 256, 8, 16)):
        p = plan(RowShape(N, (16, 16, 16), (16,), (16,), 1))
        assert (p.threads_per_row, p.cluster, p.warps, p.per_thread) == (threads, 1, warps, per_thread)
    for N, threads, cluster in ((8192, 256, 1), (16384, 256, 2), (65536, 256, 8)):
        p = plan(RowShape(N, (16, 16, 16), (16,), (16,), 1))
        assert (p.threads_per_row, p.cluster, p.warps, p.per_thread) == (threads, cluster, 8, 32)
        assert p.vectors == "float" and not p.direct
    assert plan(RowShape(262144, (16, 16), (16,), (16,), 1)).cluster == 16
    assert plan(RowShape(262144, (32, 32), (32,), (32,), 1, vector=4)).direct, "no two rows fit beside each other"
    assert plan(RowShape(1001, (16, 16), vector=1, bulk=False)).direct


@pytest.mark.parametrize("N, cluster, warps, threads, per_thread, min_blocks_per_sm", [
    (7, 1, 4, 8, 1, 10), (96, 1, 4, 8, 16, 10), (1000, 1, 4, 32, 32, 10), (1001, 1, 4, 32, 32, 7),
    (1024, 1, 4, 32, 32, 10), (1032, 1, 4, 64, 24, 10), (4096, 1, 4, 128, 32, 10), (8192, 1, 8, 256, 32, 5),
    (16384, 2, 8, 256, 32, 5), (32768, 4, 8, 256, 32, 5), (65536, 8, 8, 256, 32, 5)])
def test_threads_hold_the_rows_of_kernels_that_write_numbers_alone(N, cluster, warps, threads, per_thread,
                                                                   min_blocks_per_sm):
    bulk = N % 8 == 0
    shape = RowShape(N, (16,), sums=(1, 2), vector=8 if bulk else 1, bulk=bulk)
    p = plan(shape)
    assert p.held and p.direct and p.past_l1 and (p.cluster, p.min_blocks_per_sm) == (cluster, min_blocks_per_sm)
    assert (p.warps, p.threads_per_row, p.per_thread) == (warps, threads, per_thread)
    assert not plan(replace(shape, stores=(16,))).held and not plan(replace(shape, columns=1)).held


@given(shapes())
def test_no_thread_holds_more_than_its_registers(shape):
    p = plan(shape)
    column = (sum(shape.loads) + sum(shape.vectors)) // 8
    if p.held:
        assert not shape.stores and not shape.columns
        assert p.per_thread * column <= 64 or p.per_thread == shape.vector
        assert 48 <= p.launch_registers <= 255 and p.min_blocks_per_sm * p.threads <= 2048
        assert p.units(1000, 0) == -(-1000 // p.groups)


@pytest.mark.parametrize("N, cluster", [(70000, 16), (131072, 16)])
def test_longer_rows_come_through_a_ring_to_blocks_that_share_a_multiprocessor(N, cluster):
    p = plan(RowShape(N, (16,), sums=(1, 2)))
    assert (p.cluster, p.warps, p.min_blocks_per_sm, p.stages, p.held) == (cluster, 8, 3, 3, False)
    shape = RowShape(N, (32, 32), vector=4, sums=(1, 2, 1))
    wide = plan(shape)
    assert wide.direct or (wide.stages == 4 and rows.smem_bytes(shape, wide) <= rows.smem_limit(wide))
    assert wide.direct == (N == 131072), "four rows do not fit"
    assert not wide.held


def mean_of(N, **choices):
    """(a spec, its plan) of means and nothing stored."""
    from bench.tune.row_forward import spec_of

    bulk = N % 8 == 0
    s = replace(spec_of("mean", N), vector=8 if bulk else 1, bulk=bulk)
    return s, plan(s.shape, **choices)


@pytest.mark.machine_code(recipe=lambda: recipe_of(*mean_of(131072)))
def test_registers_of_longer_rows(machine_code):
    """Without spills; and the registers that the launch takes are those that the plan deals out."""
    _, p = mean_of(131072)
    (kernel,) = machine_code
    assert kernel.registers == p.launch_registers and kernel.threads == p.block
    assert dict(kernel.setmaxreg) == {"DEALLOC": p.registers[0], "TRY_ALLOC": p.registers[1]}
    assert not kernel.spill_loads and not kernel.stack


@pytest.mark.parametrize("N, choices", [
    (1024, {}), (4096, {}), (16384, {}), (1001, {}), (1000, dict(held=True, per_thread=64, warps=4, cluster=1)),
    (65536, dict(held=True, per_thread=64, warps=8, cluster=4)),
    (4096, dict(held=True, per_thread=32, warps=4, cluster=1, min_blocks_per_sm=10))], ids=str)
@pytest.mark.sampled(when=lambda N, choices: choices or N in (1001, 16384))  # of those that are planned the longest
@pytest.mark.machine_code(recipe=lambda N, choices: recipe_of(*mean_of(N, **choices)))
def test_every_load_of_a_held_row_goes_out_before_any_is_waited_for(N, choices, machine_code):
    _, p = mean_of(N, **choices)
    (kernel,) = machine_code
    assert not kernel.spill_loads and not kernel.stack and kernel.registers <= p.launch_registers
    assert kernel.count("LDG") == p.chunks and not kernel.count("UBLKCP", "USETMAXREG")
    assert bool(kernel.count("STAS")) == (p.cluster > 1)
    last = max(i for i, op in enumerate(kernel.order) if op.startswith("LDG"))
    assert not any(op.startswith(("FMNMX", "FADD", "SHFL", "MUFU")) for op in kernel.order[:last])


@pytest.mark.parametrize("choices, columns, says", [
    (dict(stages=3), 0, "held: got stages"), (dict(per_thread=8, warps=4), 0, "got per_thread = 8"),
    (dict(per_thread=32), 1, "no column sums"), (dict(min_blocks_per_sm=17), 0, "min_blocks_per_sm")])
def test_what_cannot_be_held_is_refused(choices, columns, says):
    with pytest.raises(ValueError, match=says):
        plan(RowShape(4096, (16,), columns=columns), held=True, **choices)


@pytest.mark.parametrize("N", [64, 1024, 4096, 16384, 65536, 131072])
def test_variants_are_valid_and_begin_with_the_plan(N):
    shape = RowShape(N, (16, 16), (16,), (16,), 1)
    found = variants(shape)
    assert next(iter(found.values())) == plan(shape) and len(found) == len(set(found.values())) >= 8
    for p in found.values():
        rows.check(shape, p)


@pytest.mark.parametrize("choices", [
    dict(finish="now"), dict(vectors="none"), dict(stages=1), dict(stages=40), dict(warps=5), dict(cluster=3),
    dict(per_thread=8, cluster=1, warps=4), dict(min_blocks_per_sm=0), dict(min_blocks_per_sm=2, stages=6),
    dict(min_blocks_per_sm=4, warps=16, stages=2)])
def test_a_choice_that_cannot_be_is_refused(choices):
    with pytest.raises(ValueError):
        plan(RowShape(4096, (16, 16), (16,), (16,), 1), **choices)


@pytest.mark.parametrize("bad", [dict(N=0), dict(loads=()), dict(vector=3), dict(vector=16), dict(N=1004, vector=4),
                                 dict(stores=(32,))])
def test_a_shape_that_cannot_be_is_refused(bad):
    with pytest.raises(ValueError):
        RowShape(**{**dict(N=1024, loads=(16, 16)), **bad})


def test_direct_plans_cannot_have_stages():
    shape = RowShape(1001, (16,), vector=1, bulk=False)
    with pytest.raises(ValueError, match="bulk copies"):
        rows.check(shape, replace(plan(shape), stages=2))


def norm_of(kind, N, choices):
    s = spec(kind, N)
    return s, plan(s.shape, **choices)


@pytest.mark.parametrize("kind, N, choices", [("rmsnorm", 4096, {}), ("rmsnorm", 1024, dict(warps=16)),
                                              ("layernorm", 512, dict(warps=4)),
                                              ("layernorm", 4096, dict(per_thread=16, stages=3, min_blocks_per_sm=2))])
@pytest.mark.machine_code(recipe=lambda kind, N, choices: recipe_of(*norm_of(kind, N, choices)))
def test_the_compiler_counts_as_the_plan_does(kind, N, choices, machine_code):
    """setmaxnreg deals out the registers of the launch: fewer than planned, and the consumers wait for ever."""
    s, p = norm_of(kind, N, choices)
    (kernel,) = machine_code
    assert kernel.registers == p.launch_registers and kernel.threads == p.block
    assert dict(kernel.setmaxreg) == {"DEALLOC": p.registers[0], "TRY_ALLOC": p.registers[1]}
    assert kernel.dynamic_smem <= rows.smem_bytes(s.shape, p) <= kernel.dynamic_smem + 2048
    assert not kernel.spill_loads and not kernel.stack


def test_shipped_names_are_unique_and_some_are_quick():
    kernels = shipped()
    assert len({k.name for k in kernels}) == len(kernels) and 2 <= sum(k.quick for k in kernels) <= 4

"""Whatever the spec, its planned config and M are: the kernels' own arithmetic gives each row to one group of threads
of each part, and each column of a norm's row to one thread. The kernels' methods are called with Python's numbers."""
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.losses import test_losses_plan, test_softmax_cpu
from tests.cpu.norms import test_norm_long_cpu
from tests.cpu.rows import test_reduction_plan
from tkq.losses import launch as loss_launch
from tkq.losses import plan as loss_plan
from tkq.losses.spec import CrossEntropySpec
from tkq.norms import plan as norm_plan
from tkq.norms.forward import row_norm
from tkq.norms.forward.kernel import norm_of
from tkq.norms.forward.row_norm import Output, RowNorm
from tkq.rows.one_pass import kernel as row_pass
from tkq.rows.one_pass.kernel import Here
from tkq.runtime.compile import build
from tkq.softmax import ops as softmax_ops

ROWS = st.one_of(st.integers(1, 70), st.integers(1, 3000))


@pytest.fixture(autouse=True, scope="module")
def in_python():
    """What the DSL has for numbers on the GPU. block_idx is whatever `at.block` is."""
    at = types.SimpleNamespace(block=(0, 0, 0))
    cute = types.SimpleNamespace(arch=types.SimpleNamespace(block_idx=lambda: at.block),
                                 ceil_div=lambda a, b: -(-a // b))
    with pytest.MonkeyPatch.context() as patch:
        for module in (row_norm, row_pass):
            patch.setattr(module, "cute", types.SimpleNamespace(**{**vars(module.cute), **vars(cute)}))
        for module in (row_norm, row_pass):
            patch.setattr(module, "cutlass", types.SimpleNamespace(min=min))
        yield at


def a_norm(spec, config):
    return RowNorm(spec, config, norm_of(spec, config)(), Output())


@settings(max_examples=30, deadline=None)
@given(test_reduction_plan.specs())
def test_each_column_of_a_norm_once(spec):
    kernel = a_norm(spec, norm_plan.plan(spec))
    columns = kernel.copies.columns
    t, firsts = kernel.tile, []  # of each vector
    for rank in range(t.cluster):
        for thread in range(t.threads_per_row):
            col = columns.first(thread, rank)
            firsts += [col + j * columns.pace for j, inside in enumerate(columns.inside(col)) if inside]
    assert max(firsts) + t.vector <= spec.N, "a vector that is partly inside"
    assert sorted(firsts) == [*range(0, spec.N, t.vector)]


@settings(max_examples=30, deadline=None)
@given(test_reduction_plan.specs(), ROWS, st.data())
def test_each_row_of_a_norm_once(in_python, spec, M, data):
    """With any of the configs that tuning may choose, the planned one first."""
    kernel = a_norm(spec, data.draw(st.sampled_from(norm_plan.variants(spec))))
    assert sorted(rows_of_a_norm(kernel, in_python, M)) == list(range(M))


@pytest.mark.parametrize("scale", ["row", "1x128"])
@pytest.mark.parametrize("N", [131072, 262144])
def test_each_row_of_a_long_norm_once(in_python, N, scale):
    """In float8, by several blocks on an SM."""
    spec = test_norm_long_cpu.spec(N, out="e4m3", scale=scale)
    found = [config for config in norm_plan.variants(spec) if config.min_blocks_per_sm]
    assert found
    for config in found:
        for M in (1, 2, 3, 7, 64):
            assert sorted(rows_of_a_norm(a_norm(spec, config), in_python, M)) == list(range(M)), config


def rows_of_a_norm(kernel, at, M):
    """The rows that the first block of each cluster stores."""
    t, found = kernel.tile, []
    for block in range(-(-M // (t.rows * kernel.config.rows_per_thread))):  # the launch's grid
        at.block = block, 0, 0
        for thread in range(0, t.threads, t.threads_per_row):
            for place in kernel._places(thread, M, None):
                assert 0 <= place.at[0] < M, "what is read lies within"
                if kernel._whole_grid() or place.row < M:
                    found.append(place.row)
    return found


def rows_of(kernel, at, M, N):
    """The rows that a kernel with a OnePassRows stores, of each part."""
    rows = kernel.rows
    rows.shift = lambda m, row: 0
    t, m = rows.tile, types.SimpleNamespace(shape=(M, N))
    across, down, _ = rows.launch_shape(M)["grid"]
    found = {}
    for x in range(across):
        for y in range(down):
            at.block = x, y, 0
            tile, part = rows.block()
            for thread in range(0, t.threads, t.threads_per_row):
                place = rows.place(Here(thread, tile, part, None, None, None), m)
                assert 0 <= place.there < M, "what is read lies within"
                if place.row < M:
                    found.setdefault(part, []).append(place.row)
    assert set(found) == set(range(t.cluster))
    return found.values()


@settings(max_examples=25, deadline=None)
@given(test_softmax_cpu.specs(), ROWS)
def test_each_row_of_softmax_once(in_python, spec, M):
    kernel, _ = build._made(softmax_ops.recipe(spec))
    for rows in rows_of(kernel, in_python, M, spec.N):
        assert sorted(rows) == list(range(M))


@settings(max_examples=25, deadline=None)
@given(test_losses_plan.specs(), ROWS)
def test_each_row_of_a_loss_once(in_python, spec, M):
    """Those that hold their rows, those that stream them, and the backward."""
    kernel, _ = build._made(loss_launch.recipe(spec))
    for rows in rows_of(kernel, in_python, M, spec.N):
        assert sorted(rows) == list(range(M))


@pytest.mark.parametrize("N", [1000, 32001, 128256, 262208])
def test_each_row_of_a_loss_that_adds_up_in_its_launch_once(in_python, N):
    spec = CrossEntropySpec("forward", N, "bf16", reduction="mean", vector=1 if N % 8 else 8, once=True)
    kernel, _ = build._made(loss_launch.recipe(spec))
    for M in (1, 2, 37, loss_plan.SINGLE_LAUNCH_ROWS):
        for rows in rows_of(kernel, in_python, M, N):
            assert sorted(rows) == list(range(M))

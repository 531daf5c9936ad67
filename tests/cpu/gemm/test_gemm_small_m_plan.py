"""The plan for small M: pure Python, checked over all sizes."""
import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkq.gemm.dense import small_m_plan
from tkq.gemm.dense.config import Config
from tkq.gemm.dense.plan import planned_kernel
from tkq.gemm.dense.small_m_config import SLOT_BYTES, WIDTHS, SmallMConfig, takes
from tkq.gemm.dense.small_m_plan import MOST_M, SPLITS, blocks, fit_to_spec, nanoseconds, parts_of_k, plan
from tkq.gemm.dense.spec import DTYPES, OUT_DTYPES, GemmSpec
from tkq.gemm.epilogue.spec import Epilogue

rows, sizes, num_sms = st.integers(1, MOST_M), st.integers(1, 60000), st.integers(1, 264)
steps, splits = st.integers(1, 5000), st.sampled_from(SPLITS)


@given(steps, st.integers(0, 7), splits)
def test_parts_of_k_are_every_step_once_and_even(count, less, split):
    parts = parts_of_k(64 * count - less * 8, split)
    assert [i for first, end in parts for i in range(first, end)] == list(range(count))
    lengths = [end - first for first, end in parts]
    assert max(lengths) - min(lengths) <= 1


@given(st.sampled_from(DTYPES), st.sampled_from(OUT_DTYPES), rows, sizes, steps, num_sms)
def test_plan_fits(dtype, out, M, N, k, num_sms):
    spec = GemmSpec(dtype, out, b_major="k")
    config = plan(spec, M, N, 8 * k, num_sms)
    assert config.m >= M and (config.m == WIDTHS[0] or config.m // 2 < M)
    assert config.shared_bytes(spec) <= 2 * SLOT_BYTES and config.stages >= 2
    assert config.shared_bytes(spec) <= SLOT_BYTES or blocks(config, N) <= num_sms or config.stages == 2
    assert all(end > first for first, end in parts_of_k(8 * k, config.split))
    assert config.threads <= 1024 and config.m // config.reducers % 8 == 0
    for split, rows in itertools.product(SPLITS, (64, 128)):
        other = dataclasses.replace(config, split=split, rows=rows)
        if split == 1 or -(-8 * k // 64) // split >= small_m_plan.FEWEST_STEPS:
            times = [nanoseconds(x, spec, N, 8 * k, num_sms) for x in (config, other)]
            assert times[0] <= times[1]


def test_what_was_measured():
    """On an H100 these were the quickest, or within 2 % (docs/attempts.md)."""
    wanted = {(m, 8192, 8192): (64, 1) for m in (1, 16, 64, 128)}
    wanted |= {(16, 1024, 8192): (64, 4), (64, 4096, 4096): (64, 2), (64, 28672, 8192): (64, 1)}
    for problem, best in wanted.items():
        config = plan(GemmSpec(b_major="k"), *problem, 132)
        assert (config.rows, config.split) == best, (problem, config)
    assert plan(GemmSpec(b_major="k"), 128, 8192, 8192, 132).stages == 9  # all of an SM's shared memory
    assert plan(GemmSpec(b_major="k"), 64, 8192, 8192, 132).stages == 7


@given(st.sampled_from(WIDTHS), st.sampled_from((64, 128)), splits, sizes, steps, num_sms)
def test_model(m, rows, split, N, k, num_sms):
    """No product is faster than HBM, none faster for more of N or K, nor for fewer SMs."""
    spec, config = GemmSpec(b_major="k"), fit_to_spec(SmallMConfig(m, rows, split), GemmSpec())
    time = nanoseconds(config, spec, N, 64 * k, num_sms)
    assert time >= 2 * N * 64 * k / small_m_plan.HBM
    assert time <= nanoseconds(config, spec, N + 1, 64 * k, num_sms)
    assert time <= nanoseconds(config, spec, N, 64 * k + 64, num_sms)
    assert time >= nanoseconds(config, spec, N, 64 * k, num_sms + 1)


@given(st.sampled_from(WIDTHS), st.sampled_from((64, 128)), splits)
def test_every_number_is_exchanged_once(m, rows, split):
    """Each of the reducers' parts is some of the accumulator's columns; together they are all of them, once."""
    config = SmallMConfig(m, rows, split)
    cols = m // config.reducers
    seen = [part * cols // 2 + 4 * i + e for part in range(config.reducers) for i in range(cols // 8) for e in range(4)]
    assert sorted(seen) == list(range(m // 2))  # the numbers of a thread
    assert config.exchange_bytes == (split - 1) * 128 * config.consumers * cols // 8 * 16
    for part in range(config.reducers):
        slots = [(rank - part + split - 1) % split for rank in range(split) if rank != part]
        assert sorted(slots) == list(range(split - 1))


@given(rows, sizes, steps)
def test_few_rows_take_the_narrow_kernel(M, N, k):
    recipe, blocks = planned_kernel(GemmSpec(b_major="k"), M, N, 8 * k, 132)
    assert recipe.builder == "tkq.gemm.dense.small_m_kernel:SmallMGemm" and blocks == 0
    assert recipe.args[0].store == "direct"
    for m, config in ((M, Config()), (MOST_M + 1, None)):
        recipe = planned_kernel(GemmSpec(b_major="k"), m, N, 8 * k, 132, config)[0]
        assert recipe.builder == "tkq.gemm.dense.kernel:DenseGemm"


@pytest.mark.parametrize("spec", (
    GemmSpec(a_major="m"), GemmSpec(batch="ab"), GemmSpec(accumulate=True),
    GemmSpec(load="direct", store="direct")))
def test_what_it_does_not_take(spec):
    assert not takes(spec)
    assert planned_kernel(spec, 16, 8192, 8192, 132)[0].builder != "tkq.gemm.dense.small_m_kernel:SmallMGemm"
    with pytest.raises(ValueError, match="spec does not fit"):
        SmallMConfig().check(spec)


@given(rows, sizes, steps)
def test_gated_has_two_accumulators(M, N, k):
    spec = GemmSpec(b_major="k", epilogue=Epilogue("swiglu"))
    config = plan(spec, M, 2 * N, 8 * k, 132)
    assert config.parts == 2 and config.rows == 128 and config.consumers == 1
    assert config.shared_bytes(spec) <= 2 * SLOT_BYTES
    with pytest.raises(ValueError, match="parts does not fit"):
        dataclasses.replace(config, parts=1).check(spec)
    with pytest.raises(ValueError, match="rows does not fit"):
        dataclasses.replace(config, rows=64).check(spec)


@pytest.mark.parametrize("change", (dict(m=24), dict(rows=96), dict(split=3), dict(stages=1)))
def test_a_config_that_does_not_fit_is_named(change):
    with pytest.raises(ValueError, match=f"gemm: {next(iter(change))} does not fit"):
        dataclasses.replace(SmallMConfig(), **change).check(GemmSpec())


def test_shared_memory_is_checked():
    with pytest.raises(ValueError, match="bytes of shared memory"):
        SmallMConfig(stages=30).check(GemmSpec())

"""Long rows of layernorm with a plan of their own: who takes it, and whether it fits. What they compute: tests/gpu."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tkq.norms import config as norms_config
from tkq.norms import long_rows_plan
from tkq.norms import plan as every
from tkq.norms.catalog import expectation
from tkq.norms.launch import recipe
from tkq.norms.long_rows_config import Fp8LongRowsConfig
from tkq.norms.spec import NormSpec

QUANT = dict(out="e4m3", scale="row")


def spec(N, weight="bf16", bias=None, x="bf16", vector=8, kind="layernorm", **options):
    return NormSpec(kind, N, x, weight, bias, vector, **options)


def test_who_has_such_a_plan():
    for N in (65544, 100008, 131072):
        for weight, bias in ((None, None), ("bf16", None), (None, "bf16")):
            s = spec(N, weight, bias, **QUANT)
            assert isinstance(long_rows_plan.plan(s),
                              Fp8LongRowsConfig) and recipe(s).module == "tkq.norms.forward.fp8_long_rows"
    for other in (spec(65536, **QUANT), spec(131072, kind="rmsnorm", **QUANT), spec(131072, vector=4, **QUANT),
                  spec(262144, **QUANT), spec(131072, "fp32", "fp32", **QUANT),
                  spec(131072, residual="bf16", total="bf16", **QUANT), spec(131072, x="fp32", vector=4, **QUANT),
                  spec(262144, residual="bf16", total="bf16", out="e4m3", scale="1x128")):
        assert long_rows_plan.plan(other) == every.plan(other) and recipe(other).module == "tkq.norms.forward.build"
    assert isinstance(long_rows_plan.plan(spec(262144, residual="bf16", total="bf16", **QUANT)), Fp8LongRowsConfig)
    assert long_rows_plan.plan(spec(131072)).load == "shared"
    assert recipe(spec(131072)).module == "tkq.norms.forward.build"
    assert long_rows_plan.plan(spec(262144)) == every.plan(spec(262144))
    assert long_rows_plan.plan(spec(131072, "fp32", "fp32")) == every.plan(spec(131072, "fp32", "fp32"))


@settings(max_examples=60)
@given(st.integers(8193, 32768), st.sampled_from([None, "bf16", "fp32"]), st.sampled_from([None, "fp32"]),
       st.sampled_from(["row", "1x128", None]))
def test_every_row_fits(vectors, weight, bias, scale):
    s = spec(8 * vectors, weight, bias, out=scale and "e4m3", scale=scale)
    config = long_rows_plan.plan(s)
    t = config.tile(s)
    assert t.cols * t.cluster >= s.N
    if isinstance(config, Fp8LongRowsConfig):
        long_rows_plan.check(s, config)
        assert t.per_thread <= 64 and recipe(s).module == "tkq.norms.forward.fp8_long_rows"
        assert expectation(s, config).registers * t.threads * config.min_blocks_per_sm <= 65536
    else:
        norms_config.check(s, config)


@pytest.mark.parametrize("scale", ["row", "1x128"])
@pytest.mark.parametrize("N", [100008, 131072])
def test_variants_are_valid_and_begin_with_the_plan(N, scale):
    s = spec(N, out="e4m3", scale=scale)
    found = long_rows_plan.variants(s)
    assert scale == "1x128" or found[0] == long_rows_plan.plan(s)
    assert len(found) == len(set(found)) >= 2
    for config in found:
        long_rows_plan.check(s, config)
    assert not long_rows_plan.variants(spec(N)) and not long_rows_plan.variants(spec(N, kind="rmsnorm", out="e4m3",
                                                                                     scale=scale))


@pytest.mark.parametrize("change",
                         [dict(cluster=1), dict(min_blocks_per_sm=8), dict(load="registers", rows_per_thread=2),
                          dict(rows_per_thread=4, min_blocks_per_sm=3), dict(threads=512)])
def test_a_config_that_cannot_serve_is_refused(change):
    config = Fp8LongRowsConfig(**{**dict(threads_per_row=256, threads=256, cluster=16), **change})
    with pytest.raises(ValueError):
        long_rows_plan.check(spec(262144, **QUANT), config)

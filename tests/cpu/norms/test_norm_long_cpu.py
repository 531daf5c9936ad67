"""Long rows of layernorm with few registers: which rows have such a config, whether it fits, and what the kernel is
made of. What they compute: tests/gpu."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tkq.norms import config as norms_config
from tkq.norms import fp8_persistent_plan
from tkq.norms import plan as norms
from tkq.norms.catalog import expectation
from tkq.norms.config import Config
from tkq.norms.forward.fp8_output import Fp8Output
from tkq.norms.forward.kernel import NormWithOptions, norm_of, output_of
from tkq.norms.forward.layernorm import LayerNorm
from tkq.norms.forward.row_norm import Output
from tkq.norms.spec import NormSpec

QUANT = dict(out="e4m3", scale="row")


def spec(N, weight="bf16", bias=None, x="bf16", vector=8, kind="layernorm", **options):
    return NormSpec(kind, N, x, weight, bias, vector, **options)


def parts(s):
    """(the norm's, the output's) class of the kernel that a spec has."""
    return norm_of(s, norms.plan(s)), output_of(s)


def test_which_rows_have_small_blocks():
    small = Config(128, 128, 16, prefetch_weight=False)
    for N in range(65544, 131080, 8):
        for weight, bias in ((None, None), ("bf16", None), (None, "bf16")):
            s = spec(N, weight, bias, **QUANT)
            norms_config.check(s, small)
            assert norms.plan(s) == small and small.tile(s).cols * small.tile(s).cluster >= N
            assert parts(s) == (LayerNorm, Fp8Output) and fp8_persistent_plan.planned(s) is None
    for other in (spec(65536, **QUANT), spec(131072, kind="rmsnorm", **QUANT), spec(131072, vector=4, **QUANT),
                  spec(262144, **QUANT), spec(131072, "fp32", "fp32", **QUANT),
                  spec(131072, residual="bf16", total="bf16", **QUANT), spec(131072, x="fp32", vector=4, **QUANT),
                  spec(262144, residual="bf16", total="bf16", out="e4m3", scale="1x128")):
        config = norms.plan(other)
        assert config != small and config.min_blocks_per_sm == 0 and parts(other)[1] is Fp8Output
    config = norms.plan(s := spec(262144, residual="bf16", total="bf16", **QUANT))
    assert config.min_blocks_per_sm == 2 and parts(s) == (LayerNorm, Fp8Output)
    assert norms.plan(spec(131072)) == Config(128, 128, 16, "shared") and parts(spec(131072)) == (LayerNorm, Output)
    assert norms.plan(spec(262144)) != Config(128, 128, 16, "shared")


def test_the_kernel_has_the_parts_that_are_chosen():
    s = spec(131072, **QUANT)
    kernel = NormWithOptions(s, norms.plan(s)).norm
    assert (type(kernel.norm), type(kernel.output)) == parts(s) == (LayerNorm, Fp8Output)


@settings(max_examples=60)
@given(st.integers(8193, 32768), st.sampled_from([None, "bf16", "fp32"]), st.sampled_from([None, "fp32"]),
       st.sampled_from(["row", "1x128", None]))
def test_every_row_fits(vectors, weight, bias, scale):
    s = spec(8 * vectors, weight, bias, out=scale and "e4m3", scale=scale)
    config = norms.plan(s)
    t = config.tile(s)
    assert t.cols * t.cluster >= s.N
    norms_config.check(s, config)
    if config.min_blocks_per_sm:
        assert t.per_thread <= 64
        assert expectation(s, config).registers * t.threads * config.min_blocks_per_sm <= 65536


@pytest.mark.parametrize("scale", ["row", "1x128"])
@pytest.mark.parametrize("N", [100008, 131072])
def test_variants_are_valid_and_begin_with_the_plan(N, scale):
    s = spec(N, out="e4m3", scale=scale)
    found = norms.variants(s)
    assert found[0] == norms.plan(s) and len(found) == len(set(found))
    assert len([config for config in found if config.min_blocks_per_sm]) >= 2
    for config in found:
        norms_config.check(s, config)
    for other in (spec(N), spec(N, kind="rmsnorm", out="e4m3", scale=scale)):
        assert not any(config.min_blocks_per_sm for config in norms.variants(other))


@pytest.mark.parametrize("change, words", [
    (dict(cluster=1), "elements a thread"), (dict(min_blocks_per_sm=9), "min_blocks_per_sm: got 9"),
    (dict(min_blocks_per_sm=-1), "min_blocks_per_sm: got -1"), (dict(load="shared"), "load: got 'shared'")])
def test_a_config_that_cannot_serve_is_refused(change, words):
    config = {**dict(threads_per_row=256, threads=256, cluster=16, min_blocks_per_sm=1), **change}
    with pytest.raises(ValueError, match=words):
        norms_config.check(spec(262144, **QUANT), Config(**config))


def test_a_config_with_more_shared_memory_than_an_sm_has_is_refused():
    several = Config(256, 256, 16, "shared", rows_per_thread=4, min_blocks_per_sm=3)
    with pytest.raises(ValueError, match="min_blocks_per_sm: got 3"):
        norms_config.check(spec(262144), several)

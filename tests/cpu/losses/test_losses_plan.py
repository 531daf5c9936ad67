"""The plans of the losses: pure Python, checked over all sizes."""
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cpu.losses.test_softmax_cpu import held
from tkq.losses import launch, plan
from tkq.losses.spec import MAX_V, CrossEntropySpec, ReduceSpec, ScaleSpec
from tkq.reduction import geometry
from tkq.rows.one_pass import plan as row_plan

CLASSES = st.one_of(st.integers(1, MAX_V), st.integers(1, 4096), st.sampled_from(
    [1, 2, 7, 32001, 50257, 128256, 151936, 262144, 262208, MAX_V - 1, MAX_V]))


@st.composite
def specs(draw):
    kind, x = draw(st.sampled_from(["forward", "fused", "backward"])), draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    N, whole = draw(CLASSES), 128 // row_plan.WIDTH[x]
    options = dict(smoothing=draw(st.booleans()), softcap=draw(st.booleans()), part=kind == "fused")
    if whole <= N and draw(st.booleans()):
        return CrossEntropySpec(kind, N, x, vector=whole, shifted=True, **options)
    widest = geometry.vector(N, row_plan.WIDTH[x])
    return CrossEntropySpec(kind, N, x, vector=draw(st.sampled_from([v for v in (1, 2, 4, 8) if widest % v == 0])),
                            **options)


@settings(max_examples=60)
@given(specs())
@example(CrossEntropySpec("backward", 8193, "bf16", vector=8, shifted=True))
def test_every_spec_has_a_config_that_holds_each_column_once(spec):
    config = plan.plan(spec)
    plan.check(spec, config)
    t = row_plan.tile(spec, config)
    assert t.threads == config.threads <= 1024
    if isinstance(config, plan.StreamingConfig):
        assert spec.kind == "forward" and not spec.smoothing
    else:
        assert t.per_thread * spec.width <= 32 * plan.WORDS
    assert plan.smem_bytes(spec, config) <= geometry.SMEM_BYTES
    if spec.kind == "backward":  # fewer blocks than planned where those have more threads than the row has accesses
        assert t.cluster <= config.cluster and t.cluster * t.cols >= spec.N
    for shift in {0, spec.vector - 1} if spec.shifted else {0}:
        assert torch.equal(held(t, spec.N, shift), torch.ones(spec.N, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["forward", "fused", "backward"])
@pytest.mark.parametrize("N", [1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144])
def test_variants_are_valid_and_begin_with_the_plan(kind, N):
    spec = CrossEntropySpec(kind, N, "bf16", vector=8, part=kind == "fused")
    found = plan.variants(spec)
    assert found[0] == plan.plan(spec) and len(found) == len(set(found)) >= 3
    for config in found:
        plan.check(spec, config)


def test_a_backward_of_any_number_of_classes():
    for N in (MAX_V + 8, 5_000_000):
        spec = CrossEntropySpec("backward", N, "bf16", vector=8)
        t = row_plan.tile(spec, plan.plan(spec))
        assert t.cols * t.cluster >= N


@pytest.mark.parametrize("change, says", [
    (dict(load="global"), "load"), (dict(threads_per_row=16), "elements|bf16 a thread"), (dict(threads=100), "threads"),
    (dict(cluster=3), "cluster")])
def test_a_config_that_cannot_serve_is_refused(change, says):
    spec = CrossEntropySpec("forward", 4096, "bf16", vector=8)
    with pytest.raises(ValueError, match=says):
        plan.check(spec, replace(row_plan.RowConfig(128, 128), **change))


@pytest.mark.parametrize("spec, change, says", [
    (dict(kind="fused"), {}, "fused"), (dict(smoothing=True), {}, "smoothing True"), ({}, dict(vectors=9), "vectors"),
    ({}, dict(stages=1), "stages"), ({}, dict(stages=15), "stages"), ({}, dict(cluster=3), "cluster")])
def test_streaming_that_cannot_serve_is_refused(spec, change, says):
    spec = CrossEntropySpec(**{**dict(kind="forward", N=65536, x="bf16", vector=8), **spec})
    with pytest.raises(ValueError, match=says):
        plan.check(spec, replace(plan.StreamingConfig(256, 256), **change))


@pytest.mark.parametrize("error, says, bad", [
    (ValueError, "kind", dict(kind="both")), (ValueError, "reduction", dict(reduction="max")),
    (ValueError, "reduction", dict(kind="fused", part=True, reduction="mean")),
    (ValueError, "reduction", dict(part=True, reduction="mean")),
    (TypeError, "x:", dict(x="e4m3")),
    (TypeError, "target", dict(target="int16")), (TypeError, "weight", dict(weight="int32")),
    (ValueError, "vector", dict(vector=3)), (ValueError, "vector", dict(vector=4, shifted=True)),
    (NotImplementedError, "classes", dict(N=MAX_V + 1)), (NotImplementedError, "classes", dict(N=0))])
def test_a_spec_that_is_not_supported_says_so(error, says, bad):
    with pytest.raises(error, match=says):
        CrossEntropySpec(**{**dict(kind="forward", N=64, x="bf16", vector=8), **bad})
    with pytest.raises(ValueError, match="losses"):
        ReduceSpec(False, False)


def test_recipes_differ_where_kernels_do():
    base = dict(kind="backward", N=64, x="bf16", vector=8)
    changes = [{}, dict(kind="forward"), dict(N=128), dict(x="fp16"), dict(vector=4), dict(target="int32"),
               dict(weight="fp32"), dict(reduction="sum"), dict(smoothing=True), dict(softcap=True), dict(shifted=True),
               dict(part=True)]
    recipes = {repr(launch.recipe(CrossEntropySpec(**{**base, **change}))) for change in changes}
    assert len(recipes) == len(changes)


# ---- the linear layer's chunks --------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20), st.integers(1, MAX_V), st.sampled_from([2, 4]))
def test_chunks_fit_in_memory(M, V, size):
    rows, row = plan.chunk_rows(M, V, size), plan.padded(V, size) * size
    assert rows % 256 == 0 and rows >= 256
    assert row % 16 == 0 and V * size <= row < V * size + 16
    assert rows * row <= max(plan.CHUNK_BYTES, 256 * row)
    assert rows <= max(plan.CHUNK_ROWS, M / plan.CHUNK_PART + 256)


def test_the_size_that_the_memory_bound_is_about():
    """8192 x 4096 x 128256: below 15 % of what PyTorch needs at the least, the logits and their log-softmax."""
    rows = plan.chunk_rows(8192, 128256, 2)
    assert rows == 2048
    assert rows * 128256 * 2 < 0.15 * (2 * 8192 * 128256 * 2)


@given(st.integers(1, 1 << 18), st.sampled_from(["bf16", "fp16"]))
def test_scaling_covers_each_row(N, x):
    spec = ScaleSpec(N, x, geometry.vector(N, 16))
    t = row_plan.tile(spec, plan.scale(spec))
    assert t.cols * t.cluster >= N and t.threads == 256 and t.per_thread <= 64

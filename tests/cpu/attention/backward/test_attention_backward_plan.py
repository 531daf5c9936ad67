"""Configurations of attention's backward: what fits, what is refused, what a workspace holds."""
import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.tune.attention_backward import VARIANTS, variants
from tkq.attention.backward.catalog import shipped
from tkq.attention.backward.config import SHARED_BYTES, BackwardConfig
from tkq.attention.backward.plan import PACKED_LENGTHS, packed_class, plan
from tkq.attention.backward.preprocess import COUNTERS
from tkq.attention.backward.spec import WIDTHS, BackwardSpec, width
from tkq.attention.common.refusals import DTYPES
from tkq.attention.forward.plan import length_class

SPECS = st.builds(BackwardSpec, dtype=st.sampled_from(DTYPES), width=st.sampled_from(WIDTHS), left=st.booleans(),
                  right=st.booleans(), softcap=st.booleans(), dq=st.booleans(), dlse=st.booleans(),
                  deterministic=st.booleans())


@given(SPECS, st.booleans(), st.sampled_from(PACKED_LENGTHS), st.integers(1, 9))
def test_what_is_planned_can_run(spec, varlen, length, group):
    config = plan(dataclasses.replace(spec, varlen=varlen), length, group).check(spec.width)
    assert config.shared_bytes(spec.width) <= SHARED_BYTES
    assert sum(groups for _, groups in config.roles) == 4
    assert sum(registers * groups for registers, groups in config.roles) <= 512


@given(SPECS, st.integers(1, 100_000), st.integers(1, 9), st.sampled_from(("bulk", "serial", "ordered")))
def test_the_workspace_has_room_for_what_is_laid_into_it(spec, rows, heads, reduce):
    """As the kernels lay it out: of all tiles the statistics, the accumulator from 16 bytes on, the counters, which the
    blocks of BackwardPreprocess, one of each tile, clear."""
    config = dataclasses.replace(plan(spec), dq_reduce=reduce)
    tiles = heads * -(-rows // config.tile)
    end = tiles * 2 * config.tile
    if spec.dq and (reduce == "ordered" or not spec.deterministic):
        end = -(-end // 4) * 4 + tiles * config.tile * spec.width
    counters = {"serial": 1 + 4 * tiles, "ordered": 3 + 2 * (tiles + 1), "bulk": 3 + 2 * heads}[reduce]
    assert counters <= COUNTERS * tiles
    end += counters
    assert end <= heads * config.workspace_floats(spec, rows) <= end + heads * 16 + 6 * tiles


@given(st.integers(1, 100_000), st.integers(1, 9))
def test_the_workspace_has_room_for_what_is_handed_on(keys, heads):
    """Behind the counters: a counter for each of 4 warps of each 64 keys, then dK and dV, from 16 bytes on."""
    config, spec = plan(BackwardSpec(right=True), "short", 4), BackwardSpec(right=True)
    halves = 2 * heads * -(-keys // 128)
    for at in range(4):
        counters = at + 4 * halves
        assert -(-counters // 4) * 4 + halves * 2 * 64 * 128 - at <= heads * config.dkv_partial_floats(spec, keys)
    assert plan(spec, "long").dkv_partial_floats(spec, keys) == 0


@pytest.mark.parametrize("change, words", [
    ({"tile": 80}, "tile must be a multiple of 64"),
    ({"dq_cols": 48}, "dq_cols divide"),
    ({"block": 192}, "block be 128"),
    ({"stages": 5}, "bytes of shared memory at"),
    ({"dq_kernel_kv": 256}, "bytes of shared memory for dQ alone"),
    ({"dq_reduce": "push"}, "dq_reduce is one of atomic, bulk, first_store, serial"),
    ({"registers": (24, 72, 208, 208)}, "registers of 3 roles"),
    ({"registers": (24, 72, 216)}, "512 for a thread"),
    ({"persistent": True}, "persistent needs store_from_registers"),
    ({"helper_warps": True}, "helper_warps needs persistent"),
    ({"dq_reduce": "serial"}, "serial needs persistent"),
    ({"dq_reduce": "serial", "persistent": True, "store_from_registers": True, "helper_warps": True},
     "serial needs persistent, without helper_warps"),
    ({"dq_reduce": "first_store"}, "first_store needs by_query_head"),
])
def test_what_cannot_run_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(BackwardConfig(), **change).check(128)


@pytest.mark.parametrize("change, words", [
    ({"dtype": "fp32"}, "q is fp32, supported are bf16, fp16"),
    ({"width": 96}, "tiles of 96 columns, supported are 64, 128, 256"),
])
def test_what_is_not_supported_is_named(change, words):
    with pytest.raises(NotImplementedError, match=words):
        BackwardSpec(**change)


def test_the_variants_to_tune_can_run_and_differ():
    names = set()
    for dim, causal, length in itertools.product(WIDTHS, (False, True), (1024, 4096, 16384)):
        found = variants(dim, causal, length)
        assert found["plan"] == plan(BackwardSpec(width=dim, right=causal), length_class(length)) and len(found) >= 4
        assert len(set(found.values())) == len(found)
        for config in found.values():
            config.check(dim)
        names |= set(found)
    assert set(VARIANTS) == names - {"plan"}


@given(SPECS, st.sampled_from(PACKED_LENGTHS), st.booleans(), st.integers(1, 9))
def test_forms_with_limits_stay_where_they_are_tested(spec, length, varlen, group):
    """Blocks that stay: at most a limit on the right, dQ added up, no softcap. Parts of two heads: where there are two
    parts or more, as workspace is taken for them."""
    config = plan(dataclasses.replace(spec, varlen=varlen), length, group)
    if spec.left or spec.softcap or not config.adds_dq(spec):
        assert not (config.persistent or config.helper_warps)
    assert not (config.helper_warps and group > 1 and varlen) or config.ordered
    asked = spec.deterministic or (spec.width == 64 and group == 1 and not varlen)
    assert config.ordered == (asked and spec.dq and (spec.width < 256 or group == 1)
                              and not (spec.left or spec.softcap))
    heads_per_task = config.heads_per_task
    assert not heads_per_task or (group in (4, 6, 8) and heads_per_task == 2 and not varlen and spec.right)
    assert not config.serial or (varlen and length == "brief" and (spec.width == 128 or spec.right))
    if spec == BackwardSpec(spec.dtype, 128, right=True) and length == "short" and not varlen and group in (2, 3, 5, 7):
        assert config.persistent and not heads_per_task


@given(st.integers(1, 20_000))
def test_brief_sequences_are_short_ones(keys):
    assert packed_class(keys) == ("brief" if keys <= 512 else length_class(keys))
    assert packed_class(keys) != "brief" or length_class(keys) == "short"


def test_each_shipped_kernel_has_its_name():
    kernels = shipped()
    assert len({k.recipe for k in kernels}) == len({k.name for k in kernels}) == len(kernels)


@given(st.integers(1, 32), st.integers(1, 32))
def test_a_tile_holds_both_heads(n, m):
    found = width(8 * n, 8 * m)
    assert found in WIDTHS and found >= max(8 * n, 8 * m) and all(w < max(8 * n, 8 * m) for w in WIDTHS if w < found)

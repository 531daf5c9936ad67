"""What attention's spec takes, which configuration its plan chooses, and that every one of them fits the hardware."""
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkq.attention.common.refusals import DTYPES, PACKS
from tkq.attention.forward.catalog import shipped
from tkq.attention.forward.config import SHARED_BYTES, AttentionConfig
from tkq.attention.forward.plan import LENGTHS, PACK_ROWS, fitted, length_class, pack_of, plan
from tkq.attention.forward.spec import HEAD_DIMS, WIDTHS, AttentionSpec, width

SPECS = st.builds(
    AttentionSpec, dtype=st.sampled_from(DTYPES), head_dim=st.sampled_from(HEAD_DIMS), causal=st.booleans(),
    lse=st.booleans(), head_dim_v=st.sampled_from(HEAD_DIMS), left=st.booleans(), softcap=st.booleans(),
    sinks=st.sampled_from((None, "fp32")), varlen=st.booleans(), pack=st.sampled_from(PACKS))


@given(SPECS, st.sampled_from(LENGTHS))
def test_every_plan_fits_the_hardware(spec, length):
    config, kernel = plan(spec, length), spec.kernel()
    assert config.check(kernel.head_dim, kernel.head_dim_v) is config
    assert config.shared_bytes(kernel.head_dim, kernel.head_dim_v) <= SHARED_BYTES
    assert config.tile_rows % spec.pack == 0
    few, many = config.registers or (24, 240)
    assert config.consumers != 2 or few + 2 * many <= 3 * 168
    assert not spec.varlen or (config.schedule == "dynamic" and few >= 40), "tasks among sequences are fetched"


@given(SPECS)
def test_windows_of_all_lengths_have_one_plan(spec):
    assert not spec.left or len({plan(spec, length) for length in LENGTHS}) == 1


@pytest.mark.parametrize("dims", list(itertools.product(WIDTHS, WIDTHS)))
def test_any_pair_of_head_dims_has_a_configuration(dims):
    config = fitted(*dims)
    assert config.kv >= 64 and config.check(*dims) is config


@given(st.sampled_from(HEAD_DIMS))
def test_head_dims_are_padded_to_the_next_tile(head_dim):
    assert width(head_dim) in WIDTHS and width(head_dim) >= head_dim
    assert all(w < head_dim or w >= width(head_dim) for w in WIDTHS)
    assert width(head_dim) % 16 == 0


def test_a_kernel_serves_all_head_dims_of_its_width():
    specs = {AttentionSpec("bf16", d, head_dim_v=dv).kernel() for d in (136, 152, 192) for dv in (104, 128)}
    assert specs == {AttentionSpec("bf16", 192, head_dim_v=128)}
    assert AttentionSpec("bf16", 80).head_dim_v == 80


@given(st.integers(1, 5000), st.integers(1, 64))
def test_heads_share_tiles_only_where_that_saves_some(rows, ratio):
    pack = pack_of(rows, ratio)
    assert ratio % pack == 0 and pack in PACKS
    if pack > 1:
        assert -(-rows * pack // PACK_ROWS) <= 0.75 * pack * -(-rows // PACK_ROWS)


def test_one_query_packs_all_it_can():
    assert [pack_of(1, ratio) for ratio in (1, 2, 4, 5, 6, 8, 12, 64, 128)] == [1, 2, 4, 1, 2, 8, 4, 64, 64]
    assert pack_of(1024, 4) == 1


@pytest.mark.parametrize("bad", (
    dict(kv=512), dict(cluster=4), dict(overlap_tasks=True, schedule="single"), dict(q_stages=4),
    dict(overlap_tasks=True, q_stages=1), dict(kv=240, q_stages=1), dict(o_reuses_q_smem=True), dict(kv=240),
    dict(stagger=True),
    dict(consumers=3, kv=176, q_stages=1, stages=1)))
def test_impossible_configurations_are_refused(bad):
    with pytest.raises(ValueError):
        AttentionConfig(**bad).check(128, 128)


@pytest.mark.parametrize("bad", (
    dict(head_dim=260), dict(head_dim=84), dict(head_dim=0), dict(head_dim_v=264), dict(dtype="fp32"),
    dict(sinks="fp16"), dict(pack=3)))
def test_unsupported_specs_are_named(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(NotImplementedError) as caught:
        AttentionSpec(**bad)
    assert str(value) in str(caught.value) and (name in str(caught.value) or name == "dtype")


@pytest.mark.parametrize("bad",
                         (dict(causal=True, right=True), dict(seqused_q=True), dict(seqused_k=True),
                          dict(long_window=True)))
def test_contradictions_are_refused(bad):
    with pytest.raises(ValueError):
        AttentionSpec(**bad)


def test_shipped_covers_what_plan_chooses():
    kernels = shipped()
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    args = {kernel.recipe.args for kernel in kernels}
    for dtype, dim, causal in itertools.product(DTYPES, WIDTHS, (False, True)):
        for seqlen in (1, 128, 512, 1024, 2048, 4096, 8192, 16384, 65536):
            spec = AttentionSpec(dtype, dim, causal)
            assert (spec, plan(spec, length_class(seqlen))) in args
    for name in ("left", "long_window", "right", "softcap", "sinks", "varlen", "seqused_q", "seqused_k"):
        assert {bool(getattr(spec, name)) for spec, _ in args} == {False, True}
    assert {spec.pack > 1 for spec, _ in args} == {False, True}


def test_specs_differ_in_the_compile_key():
    """repr is the key: every field is in it."""
    assert len({repr(AttentionSpec(**one)) for one in (
        {}, dict(causal=True), dict(lse=False), dict(left=True), dict(right=True), dict(softcap=True),
        dict(sinks="fp32"), dict(varlen=True), dict(varlen=True, seqused_q=True), dict(varlen=True, seqused_k=True),
        dict(pack=2), dict(head_dim_v=64), dict(left=True, long_window=True))}) == 13

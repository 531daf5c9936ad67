"""Attention with wide heads on the CPU: specs, plans, the catalog, what is refused; and the public function."""
import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tkq
from tests.helpers.emulation.wide_ring import Ring
from tkq import reference
from tkq.attention import kernels
from tkq.attention.common.refusals import DTYPES, PACKS
from tkq.attention.forward.config import SHARED_BYTES
from tkq.attention.forward.spec import AttentionSpec
from tkq.attention.wide.backward import plan as backward_plan
from tkq.attention.wide.backward.catalog import shipped as backward_shipped
from tkq.attention.wide.backward.spec import WideBackwardSpec
from tkq.attention.wide.catalog import shipped
from tkq.attention.wide.plan import filled, plan, recipe
from tkq.attention.wide.spec import HEAD_DIMS, WIDTHS, WideSpec, width
from tkq.reference import attention_backward as reference_backward

BF16 = torch.bfloat16
SPECS = st.builds(WideSpec, dtype=st.sampled_from(DTYPES), head_dim=st.sampled_from(HEAD_DIMS), causal=st.booleans(),
                  left=st.booleans(), softcap=st.booleans(), sinks=st.sampled_from((None, "fp32")),
                  varlen=st.booleans(), pack=st.sampled_from(PACKS))


@given(SPECS)
def test_every_plan_fits_the_hardware(spec):
    config, dim = plan(spec), spec.kernel().head_dim
    assert dim in WIDTHS and spec.head_dim <= dim and not any(spec.head_dim <= w < dim for w in WIDTHS)
    assert config.check(dim) is config and config.shared_bytes(dim) <= SHARED_BYTES
    assert config.shared_bytes(dim) + config.slot_bytes(dim) > SHARED_BYTES, "there is room for one slot more"
    assert 2 * config.value_tiles(dim) * config.value_cols == dim and config.rows % spec.pack == 0
    assert not spec.varlen or config.registers[0] >= 40, "tasks among sequences are fetched"
    assert kernels.plan(spec) == config and kernels.recipe(spec, config) == recipe(spec, config)


@pytest.mark.parametrize("bad", (
    dict(stages=10), dict(value_keys=48), dict(value_cols=256), dict(value_cols=96), dict(key_cols=96), dict(cluster=4),
    dict(value_keys=16, cluster=4), dict(scores_in_flight=8), dict(scores_in_flight=-1), dict(kv=512),
    dict(registers=(40, 152, 168))))
def test_impossible_configurations_are_refused(bad):
    config = plan(WideSpec())
    assert replace(config, schedule="static", cluster=1, scores_in_flight=0).check(512)
    with pytest.raises(ValueError, match="WideConfig"):
        replace(config, **bad).check(512)


def test_slots_are_known_before_they_are_waited_for():
    """Of four large slots V's of a block have all: a wait could take one filling for the one before."""
    config = filled(replace(plan(WideSpec()), key_cols=128, value_keys=128), 512)
    assert config.stages == 4
    with pytest.raises(ValueError, match="stages is 4, allowed are more than the 4 slots of a block of V"):
        config.check(512)
    with pytest.raises(ValueError, match="scores_in_flight is 3, allowed are 0 to 2"):
        replace(plan(WideSpec()), scores_in_flight=3).check(512)


def test_every_pass_of_the_backward_fits_the_hardware():
    for dtype, wide, left, right, dq in itertools.product(DTYPES, WIDTHS, *((False, True),) * 3):
        spec = WideBackwardSpec(dtype, wide, left, right, dq)
        configs = backward_plan.plan(spec)
        assert len(configs) == len(spec.passes) == 2 + dq
        for name, config in zip(spec.passes, configs):
            assert config.check(wide) is config and config.products == (1 if name == "dv" else 2)
    names = [kernel.name for kernel in backward_shipped()]
    assert len(set(names)) == len(names)
    with pytest.raises(NotImplementedError, match="tiles of 256 columns"):
        WideBackwardSpec(width=256)
    with pytest.raises(NotImplementedError, match="q is fp32"):
        WideBackwardSpec("fp32")


def test_gradients_on_the_cpu_are_the_formula_s():
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, n, h, 264, generator=g).to(BF16).requires_grad_()
                   for n, h in ((5, 2), (9, 1), (9, 1), (5, 2)))
    o, lse = tkq.flash_attn(q, k, v, causal=True, return_lse=True)
    want = reference_backward.flash_attn_backward(do, q, k, v, o, lse, None, True, None, (-1, -1), 0.0, None)
    for a, b in zip(torch.autograd.grad(o, (q, k, v), do), want):
        assert torch.equal(a, b)


def rings():
    """(configuration, head dim) of every plan, and the forward's with each allowed number of slots in flight."""
    for wide in WIDTHS:
        config = plan(WideSpec(head_dim=wide))
        for in_flight in range(3):
            yield replace(config, scores_in_flight=in_flight).check(wide), wide
        yield from ((config, wide) for config in backward_plan.plan(WideBackwardSpec(width=wide)))


def emulated(config, wide, known=None, seeds=5):
    """How many of some emulated runs go wrong."""
    wrong = 0
    for seed in range(seeds):
        tasks = random.Random(seed).choices((1, 1, 2, 3, 5), k=3)
        try:
            Ring.of(config, wide, tasks, seed, known).run()
        except AssertionError:
            wrong += 1
    return wrong


def test_every_slot_is_multiplied_as_what_it_is_whoever_is_late():
    assert not sum(emulated(config, wide) for config, wide in rings())
    config = plan(WideSpec())
    assert emulated(replace(config, stages=8), 512, 1, 20), "a filling is taken for the one before"


@pytest.mark.parametrize("bad", (dict(head_dim=520), dict(head_dim=300), dict(head_dim=256), dict(dtype="fp32"),
                                 dict(sinks="fp16"), dict(pack=3)))
def test_unsupported_specs_are_named(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(NotImplementedError) as caught:
        WideSpec(**bad)
    assert str(value) in str(caught.value) and (name in str(caught.value) or name == "dtype")


@pytest.mark.parametrize("bad", (dict(causal=True, right=True), dict(seqused_q=True), dict(seqused_k=True),
                                 dict(long_window=True)))
def test_contradictions_are_refused(bad):
    with pytest.raises(ValueError):
        WideSpec(**bad)


def test_which_kernel_serves_which_heads():
    assert isinstance(kernels.spec_of("bf16", 256, 64), AttentionSpec)
    assert kernels.spec_of("bf16", 264, 264, causal=True, lse=False) == WideSpec("bf16", 264, True, False)
    assert {width(dim) for dim in HEAD_DIMS} == set(WIDTHS)
    for dims in ((264, 256), (256, 264), (512, 320)):
        with pytest.raises(NotImplementedError, match=f"head_dim is {dims[0]} and head_dim_v {dims[1]}"):
            kernels.spec_of("bf16", *dims)
    with pytest.raises(NotImplementedError, match="head_dim is 520, supported beyond 256 are multiples of 8 up to 512"):
        kernels.spec_of("bf16", 520, 520)


def test_shipped_covers_what_plan_chooses():
    found = shipped()
    assert len({kernel.name for kernel in found}) == len(found)
    args = {kernel.recipe.args for kernel in found}
    for dtype, dim, causal in itertools.product(DTYPES, WIDTHS, (False, True)):
        spec = WideSpec(dtype, dim, causal)
        assert (spec, plan(spec)) in args
    for name in ("left", "long_window", "right", "softcap", "sinks", "varlen", "seqused_q", "seqused_k"):
        assert {bool(getattr(spec, name)) for spec, _ in args} == {False, True}


def test_the_functions_take_wide_heads():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 328, generator=g).to(BF16) for n, h in ((5, 2), (9, 1), (9, 1)))
    o, lse = tkq.flash_attn(q, k, v, causal=True, return_lse=True)
    want, want_lse = reference.flash_attn(q, k, v, True)
    assert torch.equal(o, want) and torch.equal(lse, want_lse)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (5, 9))
    packed = [x[0] for x in (q, k, v)]
    assert torch.equal(tkq.flash_attn_varlen(*packed, cu_q, cu_k, 5, 9, causal=True), want[0])
    with pytest.raises(NotImplementedError, match="head_dim is 328 and head_dim_v 320, beyond 256"):
        tkq.flash_attn(q, k, v[..., :320])

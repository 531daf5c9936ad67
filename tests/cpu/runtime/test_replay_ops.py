"""runtime.call.replay of every operation: the calls that are known by the fourth, and those that never are."""
import sys
import types

import pytest
import torch
import tvm_ffi

import tkq
from tests.cpu.runtime.test_calls import launches, results  # noqa: F401  a fixture
from tests.cpu.runtime.test_replay import facts, seen
from tests.helpers.ops import call_cases
from tkq.attention.mla import launch as mla_launch
from tkq.gemm.dense import plan
from tkq.gemm.fp8 import ops as fp8_ops
from tkq.gemm.fp8 import plan as fp8_plan
from tkq.runtime.call import counters, debug, ops, replay
from tkq.runtime.compile import link

pytestmark = pytest.mark.skipif(link.compiler() is None, reason="no C compiler")

TENSORS = types.SimpleNamespace(**call_cases.inputs("cpu"))
CASES = call_cases.cases(TENSORS)
EACH = [x if torch.is_tensor(x) else x() for x in vars(TENSORS).values()]
# Copies or transforms before its launch, launches twice, depends on more than `take` looks at, has a short way in
# Python, or none.
LONG = ("rmsnorm of slices", "rope in place of a part", "rope in place of a slice", "rope with ids", "merge_state",
        "quantize_qkv", "flash_attn_varlen in use", "gemm of a batch that shares", "gemm into out",
        "gemm onto c", "cascade_attention", "quantize_fp8, tensor", "cross_entropy_and_gradient", "fft_conv",
        "mla_decode", "mla_decode of lists", "plan_decode", "kv_append",
        *(f"flash_attn_with_kvcache{x}" for x in ("", " of pages", " of float8", " of ragged queries")))


@pytest.fixture
def kernels(launches, monkeypatch):  # noqa: F811
    """As `launches`, by kernels that replay.c can call."""
    notes = []

    def function(recipe):
        return tvm_ffi.convert(lambda *given: notes.append((recipe, tuple(map(seen, given)))))

    for name, module in list(sys.modules.items()):
        if name.startswith("tkq") and callable(getattr(module, "function",
                                                       None)) and name != "tkq.runtime.compile.build":
            monkeypatch.setattr(module, "function", function)
    replay.clear()
    yield notes
    replay.clear()


ADDRESSES = {x.data_ptr() for x in EACH}


def launched(notes):
    """What was noted since it was asked the last time, without the addresses of new tensors."""
    def hide(given):
        if isinstance(given, tuple) and len(given) == 4 and isinstance(given[2], str):
            return *given[:3], given[3] if given[3] in ADDRESSES else None
        return tuple(map(hide, given)) if isinstance(given, tuple) else given

    found = [(recipe, hide(given)) for recipe, given in notes]
    notes.clear()
    return found


@pytest.mark.parametrize("name", CASES)
def test_ops(kernels, monkeypatch, name):
    """The fourth call asks nothing in Python, and launches what the first did."""
    with torch.no_grad():
        first = results(CASES[name]())
        before = launched(kernels)
        for _ in range(3):
            assert results(CASES[name]()) == first and launched(kernels) == before
        if name not in LONG:
            monkeypatch.setattr(ops, "route", lambda *tensors: pytest.fail("goes the long way"))
        assert results(CASES[name]()) == first and launched(kernels) == before


X, STATE, ROWS = torch.zeros(2, 1, 2, 64).bfloat16(), torch.zeros(2, 2, 64, 64), torch.arange(2)
G, COLUMNS = torch.zeros(2, 1, 2), torch.zeros(2, 1, 2, 64)
WITH_AN_OPTION = {  # a call, an option that is not its default
    "linear_attn": (lambda **more: tkq.linear_attn(X, X, X, G, output_final_state=True, **more),
                    dict(state_v_first=True)),
    "linear_attn with a pool": (lambda **more: tkq.linear_attn(
        X, X, X, G, initial_state=STATE, state_indices=ROWS, **more), dict(state_v_first=True)),
    "gated_delta_rule": (lambda **more: tkq.gated_delta_rule(X, X, X, G, G, output_final_state=True, **more),
                         dict(state_v_first=True)),
    "gated_delta_rule with gates of columns": (lambda **more: tkq.gated_delta_rule(X, X, X, COLUMNS, G, **more),
                                               dict(use_qk_l2norm_in_kernel=True)),
    "mamba2_ssd": (lambda **more: tkq.mamba2_ssd(X, G, G[0, 0], X, X, **more), dict(dt_softplus=True)),
    "mamba2_ssd with limits": (lambda **more: tkq.mamba2_ssd(X, G, G[0, 0], X, X, **more), dict(dt_limit=(0.1, 0.5))),
    "based": (lambda **more: tkq.based(X[..., :16], X[..., :16], X, **more), dict(use_norm=False)),
    "linear_attn_step": (lambda **more: tkq.linear_attn_step(X, X, X, G, STATE, **more), dict(state_v_first=True)),
    "gated_delta_rule_step": (lambda **more: tkq.gated_delta_rule_step(X, X, X, G, G, STATE, **more),
                              dict(use_qk_l2norm_in_kernel=True)),
    "ssd_step": (lambda **more: tkq.ssd_step(STATE, X[:, 0], G[:, 0], G[0, 0], X[:, 0], X[:, 0], **more),
                 dict(dt_softplus=True)),
    "causal_conv1d": (lambda **more: tkq.causal_conv1d(X[:, :, 0], TENSORS.taps, **more), dict(activation="silu")),
    "scan": (lambda **more: tkq.scan(X[:, :, 0], X[:, :, 0], **more), dict(reverse=True))}


@pytest.mark.parametrize("name", WITH_AN_OPTION)
def test_an_option_makes_another_call(kernels, name):
    """However often the other one came before."""
    call, option = WITH_AN_OPTION[name]
    with torch.no_grad():
        wanted = []
        for more in ({}, option):
            wanted.append((results(call(**more)), launched(kernels)))
            replay.clear()
        assert wanted[0] != wanted[1]
        for order in ((0, 1, 0), (1, 0, 1)):
            replay.clear()
            for i in order:
                for _ in range(4):
                    assert (results(call(**option if i else {})), launched(kernels)) == wanted[i]


WRITTEN = {
    "linear_attn": lambda pool, out: tkq.linear_attn(X, X, X, initial_state=pool, state_indices=ROWS),
    "gated_delta_rule": lambda pool, out: tkq.gated_delta_rule(
        X, X, X, None, G, initial_state=pool, state_indices=ROWS),
    "mamba2_ssd": lambda pool, out: tkq.mamba2_ssd(X, G, G[0, 0], X, X, initial_states=pool, state_indices=ROWS),
    "linear_attn_step": lambda pool, out: tkq.linear_attn_step(X, X, X, G, pool, out=out),
    "gated_delta_rule_step": lambda pool, out: tkq.gated_delta_rule_step(X, X, X, G, G, pool, out=out),
    "ssd_step": lambda pool, out: tkq.ssd_step(
        pool, X[:, 0], G[:, 0], G[0, 0], X[:, 0], X[:, 0], out=out[:, 0]),
    "causal_conv1d_step": lambda pool, out: tkq.causal_conv1d_step(
        X[:, 0, 0], pool[:, 0], TENSORS.taps, out=out[:, 0, 0])}


def pool_and_out():
    return torch.zeros_like(STATE), torch.zeros_like(X)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_has_a_new_version(kernels, name):
    """In every call, so that a backward which saved it raises."""
    written = pool_and_out()[:2 if name.endswith("_step") else 1]
    with torch.no_grad():
        for _ in range(5):
            before = [x._version for x in written]
            WRITTEN[name](*written, *pool_and_out()[len(written):])
            assert all(x._version > n for x, n in zip(written, before))


@pytest.mark.parametrize("name, place", [(name, place) for name in WRITTEN
                                         for place in range(1 + name.endswith("_step"))])
def test_what_is_written_was_not_made_in_inference_mode(kernels, name, place):
    """Unlike what calls like it wrote to before."""
    with torch.inference_mode():
        inside = pool_and_out()
    with torch.no_grad():
        for _ in range(4):
            WRITTEN[name](*pool_and_out())
        with pytest.raises(RuntimeError, match="inference"):
            WRITTEN[name](*(made[place == i] for i, made in enumerate(zip(pool_and_out(), inside))))


def test_targets_are_checked_where_that_was_asked_for(kernels):
    x, target = torch.zeros(4, 128), torch.full((4,), 500)
    for _ in range(4):
        tkq.cross_entropy(x, target)
    with debug.checks(), pytest.raises(IndexError):
        tkq.cross_entropy(x, target)


@pytest.mark.parametrize("name", ("gemm", "fp8_gemm by blocks"))
def test_a_product_that_keeps_pace_has_its_streams_counter(kernels, monkeypatch, name):
    """Every time, without Python from the third call on."""
    monkeypatch.setattr(plan, "needs_wave_sync", lambda *problem: True)
    monkeypatch.setattr(fp8_plan, "WAVE_SYNC_STEPS", 0)
    monkeypatch.setattr(fp8_plan, "WAVE_SYNC_BYTES", 0)
    counter, asked = torch.zeros(1, dtype=torch.int32), []
    monkeypatch.setattr(counters, "counter", lambda index: asked.append(index) or counter)
    m, n, k = 4096, 2048, 512
    if name == "gemm":
        a, b = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16).t()
        call = lambda: tkq.gemm(a, b)
    else:
        a, b = torch.zeros(m, k, dtype=torch.float8_e4m3fn), torch.zeros(n, k, dtype=torch.float8_e4m3fn).t()
        scales = torch.ones(4, m).t(), torch.ones(4, n // 128)
        call = lambda: tkq.fp8_gemm(a, b, *scales)
        fp8_ops.clear()
    with torch.no_grad():
        for _ in range(5):
            y, (recipe, given) = call(), kernels.pop()
            assert plan.takes_counter(recipe) and given[2] == facts(y)
            assert (given[3] == facts(counter)) if name == "gemm" else (given[-1] == counter.data_ptr())
            assert y.shape == (m, n)
    assert len(asked) <= 3, "found in Python"
    fp8_ops.clear()


def test_latent_pages_of_either_form_are_replayed(kernels, monkeypatch):
    """With a plan; the kernel takes pages (N, page, 1, 576)."""
    with torch.no_grad():
        plan_of = tkq.plan_decode(TENSORS.used_k, TENSORS.latent_q.shape[2], 1, 576, head_dim_v=512,
                                  max_seqlen_q=TENSORS.latent_q.shape[1])
        for pages in (TENSORS.latent.flatten(2), TENSORS.latent.flatten(2).unsqueeze(2)):
            call = lambda pages=pages: tkq.mla_decode(TENSORS.latent_q, pages, TENSORS.ids, TENSORS.used_k,
                                                      softmax_scale=0.1, plan=plan_of)
            kernels.clear()
            first = results(call())
            (recipe, before), = kernels
            for _ in range(3):
                call()
            kernels.clear()
            with monkeypatch.context() as patched:
                patched.setattr(mla_launch, "decode", lambda *given: pytest.fail("goes the long way"))
                assert results(call()) == first and kernels[0][0] == recipe
            assert kernels[0][1][1][0][:3] == before[1][0][:3]  # the pages' sizes, strides and place

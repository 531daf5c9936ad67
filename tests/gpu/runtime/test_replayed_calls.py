"""A call that came before is replayed: to the same result, to the bit, as the first call."""
import importlib
import types

import pytest
import torch

from tests.helpers.ops import call_cases
from tkq.runtime.call import dispatch, ops, replay

NAMES = (
    "rmsnorm", "rmsnorm of three dimensions", "rmsnorm with a residual", "rmsnorm of heads", "rmsnorm of slices",
    "rmsnorm of a view of three dimensions", "rmsnorm of three dimensions with a residual", "layernorm",
    "rmsnorm_quant", "softmax", "log_softmax of three dimensions", "cross_entropy, mean",
    "cross_entropy of three dimensions", "swiglu", "swiglu of three dimensions",
    "geglu of one tensor", "rope", "rope in place", "rope_qk", "flash_attn", "flash_attn with options",
    "flash_attn_varlen", "flash_attn_fp8", "flash_attn_fp8_varlen", "flash_attn_fp8_varlen of pages", "gemm",
    "gemm with an epilogue", "gemm with c", "gemm into out", "gemm onto c", "gemm of a batch", "fp8_gemm by rows",
    "grouped_gemm", "quantize_fp8", "quantize_fp8 with the transpose",
    "quantize_fp8 by rows with the transpose", "quantize_fp8, tensor", "layernorm_quant by blocks", "linear_attn",
    "linear_attn of packed sequences", "gated_delta_rule", "mamba2_ssd", "hedgehog", "based", "causal_conv1d",
    "causal_conv1d of contiguous tokens", "scan", "scan of contiguous tokens, backwards, with states")


CHOOSERS = {"tkq.norms.launch": ("rmsnorm of three dimensions", "rmsnorm of slices", "rmsnorm with a residual"),
            "tkq.softmax.ops": ("log_softmax of three dimensions",),
            "tkq.losses.launch": ("cross_entropy of three dimensions",),
            "tkq.pointwise.gated_ops": ("swiglu of three dimensions",), "tkq.pointwise.rope_launch": ("rope_qk",)}


# Copies before its launch, launches twice, or is replayed in Python, past `route`.
LONG = ("rmsnorm of slices", "gemm into out", "gemm onto c")


@pytest.fixture(scope="module")
def calls():
    return call_cases.cases(types.SimpleNamespace(**call_cases.inputs("cuda")))


def copies(found):
    """What a call returned. Its own is written over: the next call is given that memory, and has to write it."""
    found = found if isinstance(found, (tuple, list)) else (found,)
    made = [t.clone() for t in found]
    spoil(found)
    return made


def spoil(found):
    for t in found:
        (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).fill_(7)


def assert_same(found, first):
    assert len(found) == len(first)
    for a, b in zip(found, first):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
        assert torch.equal(*(t.view(torch.uint8) if t.dtype.itemsize == 1 else t.nan_to_num() for t in (a, b)))


@pytest.mark.parametrize("name", NAMES)
def test_replayed(calls, name, monkeypatch):
    """The second call and more, some on another stream, one where torch fills what is new, and one that a CUDA graph
    replays."""
    call, side = calls[name], torch.cuda.Stream()
    with torch.no_grad():
        first = copies(call())
        assert_same(copies(call()), first)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                found = copies(call())
        torch.cuda.current_stream().wait_stream(side)
        assert_same(found, first)
        assert_same(copies(call()), first)
        with monkeypatch.context() as m:
            if name not in LONG:
                m.setattr(ops, "route", lambda *tensors: pytest.fail("goes the long way"))
            for _ in range(3):
                assert_same(copies(call()), first)
            with torch.cuda.stream(side):
                found = copies(call())
            torch.cuda.current_stream().wait_stream(side)
            assert_same(found, first)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert_same(copies(call()), first)
        finally:
            torch.use_deterministic_algorithms(False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call()
        spoil(found if isinstance(found, (tuple, list)) else (found,))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(copies(found), first)


@pytest.mark.parametrize("module, name", [(module, name) for module, names in CHOOSERS.items() for name in names])
def test_without_a_compiler(calls, module, name, monkeypatch):
    """Python chooses the kernel, and makes views: to the same result."""
    with torch.no_grad():
        first, module = copies(calls[name]()), importlib.import_module(module)
        assert any(isinstance(found, type(dispatch._in_c())) for found in module._launch_cache.values())
        monkeypatch.setattr(dispatch, "_in_c", lambda: None)
        monkeypatch.setattr(replay, "_library", lambda: None)
        replay.clear()
        for table in ("_launch_cache", "_launchers"):
            monkeypatch.setattr(module, table, {})
        asked, arranged = [], dispatch._arranged
        monkeypatch.setattr(dispatch, "_arranged", lambda *args: asked.append(args) or arranged(*args))
        for _ in range(2):
            assert_same(copies(calls[name]()), first)
        assert len(asked) == 1, "by the second call"


def test_memory_is_as_all_of_torchs(calls):
    """What a call that came before returns can be resized, waited for, and goes back to the allocator."""
    with torch.no_grad():
        for name in ("rmsnorm with a residual", "flash_attn", "gemm"):
            for _ in range(5):
                found = calls[name]()
            made = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
            side = torch.cuda.Stream()
            for t in made:
                t.record_stream(side)
                assert t._base is None and t.untyped_storage().resizable() and t.is_leaf and t._version == 0
                t.untyped_storage().resize_(0)
            del found, made, t


def test_in_inference_mode(calls):
    with torch.inference_mode():
        for _ in range(5):
            found = calls["rmsnorm"]()
    assert found.is_inference()
    with torch.no_grad():
        assert not calls["rmsnorm"]().is_inference()


def test_another_device_is_current(calls):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    with torch.no_grad():
        for _ in range(4):
            first = copies(calls["rmsnorm"]())
        with torch.cuda.device(1):
            assert_same(copies(calls["rmsnorm"]()), first)


def test_gradients_after_calls_without(calls):
    """What came before without a gradient is not taken where one is recorded."""
    import tkq

    x, w = torch.randn(6, 64, device="cuda"), torch.randn(64, device="cuda")
    for _ in range(4):
        tkq.rmsnorm(x, w)
    for _ in range(5):
        leaf = w.clone().requires_grad_()
        y = tkq.rmsnorm(x, leaf)
        y.sum().backward()
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        assert torch.allclose(leaf.grad, h.sum(0), rtol=1e-4, atol=1e-4)
        assert not tkq.rmsnorm(x, w).requires_grad

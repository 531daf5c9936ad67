"""A call that came before takes a shorter way: to the same result, to the bit, as the first call."""
import importlib
import types

import pytest
import torch

from tests import call_cases
from tkq.runtime import chooser

NAMES = (
    "rmsnorm", "rmsnorm of three dimensions", "rmsnorm with a residual", "rmsnorm of heads", "rmsnorm of slices",
    "rmsnorm of a view of three dimensions", "rmsnorm of three dimensions with a residual", "layernorm",
    "rmsnorm_quant", "softmax", "log_softmax of three dimensions", "cross_entropy, mean",
    "cross_entropy of three dimensions", "swiglu", "swiglu of three dimensions",
    "geglu of one tensor", "rope", "rope in place", "rope_qk", "flash_attn", "flash_attn with options",
    "flash_attn_varlen", "gemm", "gemm with an epilogue", "gemm with c", "gemm into out", "gemm onto c",
    "gemm of a batch", "fp8_gemm by rows", "grouped_gemm", "quantize_fp8", "quantize_fp8 with the transpose")


CHOOSERS = {"tkq.norms.launch": ("rmsnorm of three dimensions", "rmsnorm of slices", "rmsnorm with a residual"),
            "tkq.softmax.ops": ("log_softmax of three dimensions",),
            "tkq.losses.launch": ("cross_entropy of three dimensions",),
            "tkq.pointwise.gated_ops": ("swiglu of three dimensions",), "tkq.pointwise.rope_launch": ("rope_qk",)}


@pytest.fixture(scope="module")
def calls():
    return call_cases.cases(types.SimpleNamespace(**call_cases.inputs("cuda")))


def copies(found):
    return [t.clone() for t in (found if isinstance(found, (tuple, list)) else (found,))]


def assert_same(found, first):
    assert len(found) == len(first)
    for a, b in zip(found, first):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
        assert torch.equal(*(t.view(torch.uint8) if t.dtype.itemsize == 1 else t.nan_to_num() for t in (a, b)))


@pytest.mark.parametrize("name", NAMES)
def test_again(calls, name):
    """The second call, one on another stream, one where torch fills what is new, and one that a CUDA graph replays."""
    call, side = calls[name], torch.cuda.Stream()
    with torch.no_grad():
        first = copies(call())
        assert_same(copies(call()), first)
        side.wait_stream(torch.cuda.current_stream())
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
        for t in found if isinstance(found, (tuple, list)) else (found,):
            (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(copies(found), first)


@pytest.mark.parametrize("module, name", [(module, name) for module, names in CHOOSERS.items() for name in names])
def test_without_a_compiler(calls, module, name, monkeypatch):
    """Python chooses the kernel, and makes views: to the same result."""
    with torch.no_grad():
        first, module = copies(calls[name]()), importlib.import_module(module)
        assert any(isinstance(found, type(chooser._in_c())) for found in module._known.values())
        monkeypatch.setattr(chooser, "_in_c", lambda: None)
        for table in ("_known", "_launchers"):
            monkeypatch.setattr(module, table, {})
        asked, arranged = [], chooser._arranged
        monkeypatch.setattr(chooser, "_arranged", lambda *args: asked.append(args) or arranged(*args))
        for _ in range(2):
            assert_same(copies(calls[name]()), first)
        assert len(asked) == 1, "by the second call"

"""What GPU tests trust: that results are NaN before a kernel writes them, however they are allocated."""
import pytest
import torch

import tkq
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.norms import launch
from tkq.norms.launch import Call
from tkq.runtime.call import alloc, ops
from tkq.runtime.device import arch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ways_to_allocate_bring_nan(dtype):
    like = torch.zeros(3, 8, dtype=dtype)
    with poisoned():
        assert alloc._filling(), "the fast allocation asks this"
        made = (torch.empty(3, 8, dtype=dtype), torch.empty_like(like), like.new_empty(3, 8),
                torch.empty_strided((3, 8), (1, 4), dtype=dtype), alloc.empty(-1, (3, 8), (8, 1), dtype),
                alloc.like(like, -1, dtype), alloc.contiguous(-1, (3, 2, 4), dtype))
    assert all(t.float().isnan().all() for t in made)


def test_the_switch_is_as_before():
    for before in (False, True):
        torch.use_deterministic_algorithms(before)
        try:
            with pytest.raises(KeyError), poisoned():
                raise KeyError
            assert torch.are_deterministic_algorithms_enabled() == before
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_a_norm_that_writes_nothing_is_nan(monkeypatch, kind):
    monkeypatch.setattr(arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(launch, "compiled", lambda spec, device: lambda *given: None)
    for name in ("_launch_cache", "_launchers", "_seen"):
        monkeypatch.setattr(launch, name, ops.LaunchCache(), raising=False)
    x = torch.zeros(5, 256, dtype=torch.bfloat16)
    for call in (Call(kind, 1e-6), Call(kind, 1e-6, total=torch.float32, stats=True),
                 Call(kind, 1e-6, out=torch.float8_e4m3fn, scale="row"),
                 Call(kind, 1e-6, out=torch.float8_e4m3fn, scale="1x128")):
        for _ in range(3):
            with poisoned():
                made = [t for t in launch.norm(call, x, x[0], None, x) if t is not None]
            assert made and all(t.float().isnan().all() for t in made), call
    assert not tkq.rmsnorm(x).isnan().any()

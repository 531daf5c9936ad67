"""Attention's backward with background by query heads, of K/V heads that are shared: small problems, also with few
blocks for all tasks."""
import dataclasses

import pytest
import torch

from tests.helpers.attention.gradients import FEW_SIZES, compare, make
from tkq.attention.backward import ops
from tkq.attention.backward.plan import _HELPER_WARPS

BF16, FP16 = torch.bfloat16, torch.float16
FORMS = (
    ("bulk", 128, True, BF16, {"heads_per_task": 2}),
    pytest.param("bulk", 128, False, BF16, {}, marks=pytest.mark.slow),
    pytest.param("first_store", 128, True, BF16, {"heads_per_task": 2}, marks=pytest.mark.slow),  # planned elsewhere
    *(pytest.param(*form, marks=pytest.mark.slow) for form in (
        ("first_store", 128, False, BF16, {"heads_per_task": 2}),
        ("bulk", 128, True, FP16, {"heads_per_task": 1, "tail_waves": 2}),
        ("bulk", 128, True, BF16, {"l2_section_mb": 1}), ("bulk", 128, False, BF16, {"heads_per_task": 2}),
        ("bulk", 64, True, BF16, {"heads_per_task": 2}),
        ("first_store", 128, True, FP16, {"heads_per_task": 2}))))


@pytest.mark.parametrize("dq_reduce, dim, causal, dtype, change", FORMS)
def test_heads_in_the_background(dq_reduce, dim, causal, dtype, change, monkeypatch):
    """Parts that go on from each other, groups that no part divides, more tasks than the device holds at once, more
    queries than keys and fewer; large scores, and a gradient of lse."""
    config = dataclasses.replace(_HELPER_WARPS[dim], by_query_head=True, dq_reduce=dq_reduce, **change)
    for rows, keys in ((1, 1), (113, 203), (300, 100), (1000, 65), (641, 1100), (1023, 1024), (300, 2100)):
        compare(*make(2, rows, keys, 8, 2, dim, dtype), causal, what=f"{rows} x {keys} {change}", config=config)
    for batch, heads, kv_heads in ((8, 32, 8), (3, 40, 8), (2, 24, 4), (4, 6, 2), (3, 5, 5)):
        compare(*make(batch, 500, 420, heads, kv_heads, dim, dtype), causal, what=f"{heads} on {kv_heads}",
                config=config)
    q, k, v, do = make(2, 517, 517, 8, 2, dim, dtype)
    compare(q * 20, k, v, do, causal, what=f"large scores {change}", config=config)
    compare(q, k, v, do, causal, dlse=torch.randn(2, 8, 517, device="cuda"), what=f"dlse {change}", config=config)
    for blocks in (1, 3):
        monkeypatch.setattr(ops.arch, "num_sms", lambda device, blocks=blocks: blocks)
        monkeypatch.setattr(ops, "_launchers", {})
        for rows, keys in FEW_SIZES:
            compare(*make(2, rows, keys, 8, 2, dim, dtype), causal, what=f"{blocks} blocks, {rows} x {keys}",
                    config=config)

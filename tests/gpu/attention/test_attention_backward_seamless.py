"""Attention's backward with fuse_preprocess, planned for long packed sequences, on small ones; and its choices."""
import dataclasses

import pytest
import torch

from tests.helpers.attention.gradients import compare, make
from tests.helpers.attention.varlen_gradients import MANY, MIXED, Problem
from tkq.attention.arguments import Options
from tkq.attention.backward import ops, varlen_ops
from tkq.attention.backward.plan import _HELPER_WARPS


def shown(value):
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


NOT_PLANNED = ((128, True, {"dq_reduce": "atomic", "ds_stages": 4}),)


@pytest.mark.parametrize("dim, causal, change", (
    *[(dim, causal, {}) for dim in (64, 128) for causal in (False, True)],
    *[pytest.param(*x, marks=pytest.mark.slow) for x in NOT_PLANNED]), ids=shown)
@pytest.mark.sampled(when=lambda dim, causal: causal and dim == 128)  # `test_the_plan_of_long_ones` has 64
def test_packed(dim, causal, change, monkeypatch):
    """Blocks of 128 keys: none, one, parts of them; fewer queries than keys, and more; rows of no sequence, and not in
    use; more tiles than the kernel before makes statistics of."""
    config, options = dataclasses.replace(_HELPER_WARPS[dim], fuse_preprocess=True, **change), Options(causal)
    Problem(MIXED, 4, 2, dim, options=options).judge(f"mixed {change}", config=config)
    Problem(MIXED[::-1], 3, 3, dim, spare=300, options=options).judge(f"spare rows {change}", config=config)
    Problem(MANY, 2, 1, dim, options=options).judge(f"many short ones {change}", config=config)
    Problem(((500, 420),) * 9, 24, 12, dim, options=options).judge(f"many heads {change}", config=config)
    if not change and causal:
        Problem(MIXED, 4, 2, dim, spare=50, in_use=True, options=options).judge("in use", config=config)
    if not change and not causal:
        Problem(((700, 641), (641, 1100), (1, 1)), 8, 2, dim, dlse=True, options=options).judge("dlse", config=config)
    if causal:
        limit = Options(False, None, -1, 50)
        Problem(MIXED, 4, 2, dim, spare=20, options=limit).judge(f"a limit on the right {change}", config=config)
    monkeypatch.setattr(varlen_ops, "_launchers", {})
    monkeypatch.setattr("tkq.attention.backward.ops.arch.num_sms", lambda device: 3)
    Problem(MIXED, 4, 2, dim, options=options).judge(f"3 blocks {change}", config=config)


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.sampled(when=lambda causal: causal)
def test_the_plan_of_long_ones(causal, dim):
    """Also the sinks' gradient, of the statistics of all slots."""
    problem = Problem(MIXED, 4, 4, dim, options=Options(causal), sinks=torch.float32, longest=9000)
    problem.judge("long")


def test_dk_and_dv_are_the_same_in_each_run():
    problem = Problem((*MIXED, (3000, 3000)), 8, 8, 128, options=Options(True), longest=3000)
    config = dataclasses.replace(_HELPER_WARPS[128], fuse_preprocess=True)
    first = problem.judge("first", config=config)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(problem.run(config=config)[1:3], first[1:3]))


@pytest.mark.slow
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dim", (64, 128))
def test_equal_sequences(dim, causal, monkeypatch):
    """Which the plan has nothing of."""
    config = dataclasses.replace(_HELPER_WARPS[dim], fuse_preprocess=True)
    for rows, keys in ((700, 641), (1, 1), (113, 203), (300, 100), (1000, 65), (641, 1100), (1023, 1024)):
        compare(*make(2, rows, keys, 4, 2, dim, torch.bfloat16), causal, what=f"{rows} x {keys}", config=config)
    compare(*make(8, 500, 420, 32, 16, dim, torch.bfloat16), causal, what="many heads", config=config)
    monkeypatch.setattr(ops.arch, "num_sms", lambda device: 3)
    monkeypatch.setattr(ops, "_launchers", {})
    for rows, keys in ((113, 203), (641, 641), (65, 1000)):
        compare(*make(2, rows, keys, 4, 2, dim, torch.bfloat16), causal, what=f"3 blocks {rows} x {keys}",
                config=config)

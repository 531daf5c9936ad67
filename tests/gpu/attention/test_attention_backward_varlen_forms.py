"""The forms of attention's backward that the plan, or a measurement, chooses for packed sequences, on small ones."""
import dataclasses
import subprocess
import sys

import pytest
import torch

from tests.helpers.attention.varlen_gradients import MANY, MIXED, Problem
from tkq.attention.arguments import Options
from tkq.attention.backward import varlen_ops
from tkq.attention.backward.plan import SINGLE

PERSISTENT = {"store_from_registers": True, "persistent": True, "ping_pong": True}
DQ_SERIAL = {**PERSISTENT, "dq_reduce": "serial", "l2_section_mb": 4}
BRIEF64 = {**PERSISTENT, "dq_reduce": "serial", "l2_section_mb": 4, "stages": 2}
HELPER_WARPS = {**PERSISTENT, "helper_warps": True, "l2_section_mb": 8, "registers": (32, 64, 208)}
ORDERED = {**HELPER_WARPS, "dq_reduce": "ordered", "dq_stages": 2}
ORDERED256 = {**HELPER_WARPS, "ping_pong": False, "dq_reduce": "ordered", "dq_stages": 0, "l2_section_mb": 32,
              "registers": (32, 64, 208, 208)}


def shown(value):
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("dim, causal, change", (
    pytest.param(128, False, HELPER_WARPS, marks=pytest.mark.slow), (128, True, HELPER_WARPS),
    pytest.param(64, True, HELPER_WARPS, marks=pytest.mark.slow), *(  # planned, but for a gradient of lse
        pytest.param(*each, marks=pytest.mark.slow) for each in (
            (128, True, DQ_SERIAL), (128, False, DQ_SERIAL), (64, True, BRIEF64), (128, True, ORDERED),
            (128, False, ORDERED), (256, True, ORDERED256), (256, False, ORDERED256))), *[
        pytest.param(dim, causal, PERSISTENT, marks=pytest.mark.slow) for dim in (64, 128) for causal in (False, True)]
), ids=shown)
def test_form(dim, causal, change, monkeypatch):
    """Blocks of 128 keys: none, one, parts of them; fewer queries than keys, and more."""
    config, options = dataclasses.replace(SINGLE[dim], **change), Options(causal)
    Problem(MIXED, 4, 2, dim, options=options).judge(f"mixed {change}", config=config)
    Problem(MIXED[::-1], 3, 3, dim, spare=300, options=options).judge(f"spare rows {change}", config=config)
    Problem(((700, 641), (641, 1100), (1, 1)), 8, 2, dim, dlse=True, options=options).judge("dlse", config=config)
    Problem(MANY, 2, 1, dim, options=options).judge(f"many short ones {change}", config=config)
    Problem(MIXED, 4, 2, dim, spare=50, in_use=True, options=options).judge(f"in use {change}", config=config)
    Problem(((500, 420),) * 9, 24, 12, dim, options=options).judge(f"many heads {change}", config=config)
    if causal:
        limit = Options(False, None, -1, 50)
        Problem(MIXED, 4, 2, dim, spare=20, options=limit).judge(f"a limit on the right {change}", config=config)
    if config.persistent:
        monkeypatch.setattr(varlen_ops, "_launchers", {})
        monkeypatch.setattr("tkq.attention.backward.ops.arch.num_sms", lambda device: 3)
        Problem(MIXED, 4, 2, dim, options=options).judge(f"3 blocks {change}", config=config)


@pytest.mark.parametrize("causal", (False, True))
def test_dk_and_dv_are_the_same_in_each_run(causal):
    problem = Problem((*MIXED, *MANY), 4, 2, 128, options=Options(causal))
    config = dataclasses.replace(SINGLE[128], **HELPER_WARPS)
    first = problem.judge("helper_warps", config=config)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(problem.run(config=config)[1:3], first[1:3]))


def test_few_queries_of_a_long_sequence_are_in_use():
    """In a process of its own, both forms: it would hang if zeroes were made too late. See there."""
    subprocess.run([sys.executable, "-m", "tests.helpers.attention.seqused_program", "", "fuse_preprocess"], check=True,
                   timeout=180)

"""The forms of attention's backward that only long or many sequences ask for, on small ones; and variants to time."""
import dataclasses

import pytest
import torch

from tests.helpers.attention.gradients import FEW_SIZES, compare, make
from tkq.attention.backward import ops
from tkq.attention.backward.plan import SINGLE, plan
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.forward.plan import LENGTHS

BF16, FP16 = torch.bfloat16, torch.float16
PERSISTENT = {"store_from_registers": True, "persistent": True}
HELPER_WARPS = {**PERSISTENT, "helper_warps": True, "l2_section_mb": 8, "registers": (32, 64, 208)}
DQ_SERIAL = {**PERSISTENT, "ping_pong": True, "dq_reduce": "serial", "l2_section_mb": 4}
BULK = {"dq_reduce": "bulk", "dq_cols": 64, "ds_stages": 1, "p_stages": 1, "registers": (24, 72, 208, 208)}
NOT_PLANNED = [pytest.param(dim, causal, BF16, change, marks=pytest.mark.slow) for dim in (64, 128)
               for causal in (False, True)
               for change in ({"dkv_parts": 4}, {"dkv_parts": 1, "ping_pong": True}, HELPER_WARPS)]
NOT_PLANNED += [pytest.param(*form, marks=pytest.mark.slow) for form in (
    (128, True, BF16, PERSISTENT), (128, False, BF16, PERSISTENT), (256, True, BF16, PERSISTENT),
    (256, False, BF16, BULK))]
# Blocks of 128 keys: an odd number of them, one, parts of one; causal with fewer and with more queries than keys.
SIZES = ((700, 641), (1, 1), (64, 300), (113, 203), (300, 100), (1000, 65), (641, 1100), (1023, 1024), (300, 2100))


def shown(value):
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None


@pytest.mark.parametrize("dim, causal, dtype, change", (
    pytest.param(128, True, FP16, {"dkv_parts": 4}, marks=pytest.mark.slow), *(
        pytest.param(128, causal, BF16, DQ_SERIAL, marks=pytest.mark.slow) for causal in (True, False)),  # of packed
    *NOT_PLANNED), ids=shown)  # sequences it is the plan
def test_form(dim, causal, dtype, change, monkeypatch):
    """Also with three blocks for all tasks, where blocks stay, and with more tasks than the device holds at once."""
    config = dataclasses.replace(SINGLE[dim], **change)
    for rows, keys in SIZES:
        compare(*make(2, rows, keys, 4, 2, dim, dtype), causal, what=f"{rows} x {keys} {change}", config=config)
    compare(*make(8, 500, 420, 32, 16, dim, dtype), causal, what=f"many heads {change}", config=config)
    compare(*make(3, 333, 417, 40, 8, dim, dtype), causal, what=f"groups of 5 {change}", config=config)
    q, k, v, do = make(2, 517, 517, 4, 4, dim, dtype)
    compare(q * 20, k, v, do, causal, what=f"large scores {change}", config=config)
    compare(q, k, v, do, causal, dlse=torch.randn(2, 4, 517, device="cuda"), what=f"dlse {change}", config=config)
    if config.persistent:
        monkeypatch.setattr(ops.arch, "num_sms", lambda device: 3)
        monkeypatch.setattr(ops, "_launchers", {})
        for rows, keys in FEW_SIZES:
            compare(*make(2, rows, keys, 4, 2, dim, dtype), causal, what=f"3 blocks, {rows} x {keys}", config=config)


@pytest.mark.parametrize("dim, causal, change", (
    (64, True, {}), (128, True, {}), (256, True, {}),
    *(pytest.param(dim, False, {}, marks=pytest.mark.slow) for dim in (64, 128, 256)),
    *(pytest.param(128, True, change, marks=pytest.mark.slow) for change in (
        {"dq_stages": 1}, {"longest_first": False}, {"tail_waves": 2, "l2_section_mb": 1}))), ids=shown)
def test_ordered(dim, causal, change, monkeypatch):
    """dQ in one order: heads in both directions, more tasks than blocks, three blocks for all; the same bits again."""
    config = dataclasses.replace(plan(BackwardSpec(width=dim, right=causal, deterministic=True)), **change)
    options = dict(config=config, deterministic=True)
    for rows, keys in ((700, 641), (300, 100), (1000, 65), (300, 2100)):
        compare(*make(2, rows, keys, 4, 2, dim, BF16), causal, what=f"{rows} x {keys}", **options)
    x = make(8, 500, 420, 32, 16, dim, BF16)
    found = compare(*x, causal, what="many heads", **options)
    for _ in range(3):
        assert all(map(torch.equal, compare(*x, causal, what="again", **options), found))
    monkeypatch.setattr(ops.arch, "num_sms", lambda device: 3)
    monkeypatch.setattr(ops, "_launchers", {})
    for rows, keys in FEW_SIZES:
        compare(*make(2, rows, keys, 4, 2, dim, BF16), causal, what=f"3 blocks, {rows} x {keys}", **options)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.sampled(when=lambda dim, causal: causal or dim == 256)  # others without a mask differ by that alone
def test_what_is_planned_for_each_length(dim, causal, monkeypatch):
    """On small problems and on long ones, with what else may come along: a limit on the right, dlse, head_dim 96; of
    shared K/V heads also with three blocks for all tasks."""
    for length, keys in zip(LENGTHS, (900, 2500, 8300)):
        config, grouped = (plan(BackwardSpec(width=dim, right=causal), length, g) for g in (1, 4))
        if grouped != config:
            for rows, n in ((1, 1), (113, 203), (641, 641), (300, keys)):
                compare(*make(2, rows, n, 8, 2, dim, BF16), causal, what=f"grouped {length} {rows} x {n}",
                        config=grouped)
            with monkeypatch.context() as few:
                few.setattr(ops.arch, "num_sms", lambda device: 3)
                few.setattr(ops, "_launchers", {})
                for rows, n in FEW_SIZES if grouped.persistent else ():
                    compare(*make(2, rows, n, 8, 2, dim, BF16), causal, what=f"grouped {length} {rows} x {n}, 3 blocks",
                            config=grouped)
        for rows, n in ((1, 1), (113, 203), (300, 100), (641, 641)):
            compare(*make(2, rows, n, 4, 2, dim, BF16), causal, what=f"{length} {rows} x {n}", config=config)
        x = make(1, 300, keys, 2, 1, dim, BF16)
        compare(*x, causal, what=f"{length}")
        if causal:
            compare(*x, False, what=f"{length}, a limit on the right", window_size=(-1, 50))
        if dim == 128:
            compare(*make(1, 300, keys, 2, 1, 96, BF16, dim_v=72), causal, what=f"{length} 96, 72")


def variants(dim):
    """Configurations that the plan does not choose, and bench/tune/attention_backward.py times."""
    base = SINGLE[dim]
    change = lambda **options: dataclasses.replace(base, **options)
    yield change(longest_first=False)
    if dim < 256:
        yield change(ping_pong=not base.ping_pong, stages=2)
        yield change(dq_reduce="atomic", dkv_parts=4)
    if dim == 64:
        yield change(tile=64)
    if dim == 256:
        yield change(**BULK, **PERSISTENT)


@pytest.mark.slow
@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("causal", (False, True))
def test_each_variant(dim, causal):
    for config in variants(dim):
        for rows, keys in FEW_SIZES:
            x = make(2, rows, keys, 4, 2, dim, BF16)
            compare(*x, causal, what=f"{rows} x {keys} {config}", config=config)

"""The forms of attention's backward that only long or many sequences ask for, on small ones; and variants to time."""
import dataclasses

import pytest
import torch

from tests.attention_gradients import FEW_SIZES, compare, forward, make, poisoned
from tkq.attention import backward_ops
from tkq.attention.arguments import Options
from tkq.attention.backward_plan import SINGLE, plan
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.plan import LENGTHS

BF16, FP16 = torch.bfloat16, torch.float16
PAIR = {"pair": True, "cluster": 2, "stages": 2}
STAYS = {"direct": True, "persistent": True}
BULK = {"dq_add": "bulk", "dq_cols": 64, "ds_stages": 1, "p_stages": 1, "registers": (24, 72, 208, 208)}
LATE = {"late": True, "direct": True}
BEHIND = {**STAYS, "background": True, "registers": (32, 64, 208)}
NOT_PLANNED = [pytest.param(dim, causal, BF16, change, marks=pytest.mark.slow) for dim, changes in (
    (128, (BEHIND, {**LATE, **BEHIND, "last_first": True}, {**PAIR, **STAYS}, {**PAIR, **LATE},
           {**PAIR, **LATE, **BEHIND})),
    (64, (LATE, {**LATE, **BEHIND}))) for causal in (False, True) for change in changes]
# Blocks of 128 keys: an odd number of them, one, parts of one; causal with fewer and with more queries than keys.
SIZES = ((700, 641), (1, 1), (64, 300), (113, 203), (300, 100), (1000, 65), (641, 1100), (1023, 1024), (300, 2100))


def shown(value):
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None


@pytest.mark.parametrize("dim, causal, dtype, change", (
    (128, False, BF16, PAIR), (128, True, BF16, PAIR), (128, True, FP16, PAIR),
    (128, True, BF16, {**STAYS, "skip": True}), (128, False, BF16, STAYS), (64, True, BF16, STAYS),
    (256, True, BF16, STAYS), (256, False, BF16, BULK), (128, True, BF16, LATE),
    (128, True, BF16, {**LATE, **STAYS, "turns": True, "last_first": True}), *NOT_PLANNED), ids=shown)
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
        monkeypatch.setattr(backward_ops.arch, "processors", lambda device: 3)
        monkeypatch.setattr(backward_ops, "_launchers", {})
        for rows, keys in FEW_SIZES:
            compare(*make(2, rows, keys, 4, 2, dim, dtype), causal, what=f"3 blocks, {rows} x {keys}", config=config)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_what_is_planned_for_each_length(dim, causal):
    """On small problems and on long ones, with what else may come along: a limit on the right, dlse, head_dim 96."""
    for length, keys in zip(LENGTHS, (900, 2500, 8300)):
        config = plan(BackwardSpec(width=dim, right=causal), length)
        for rows, n in ((1, 1), (113, 203), (300, 100), (641, 641)):
            compare(*make(2, rows, n, 4, 2, dim, BF16), causal, what=f"{length} {rows} x {n}", config=config)
        x = make(1, 300, keys, 2, 1, dim, BF16)
        compare(*x, causal, what=f"{length}")
        if causal:
            compare(*x, False, what=f"{length}, a limit on the right", window_size=(-1, 50))
        if dim == 128:
            compare(*make(1, 300, keys, 2, 1, 96, BF16, dim_v=72), causal, what=f"{length} 96, 72")


@pytest.mark.parametrize("causal", (False, True))
def test_dk_and_dv_of_pairs_are_the_same_in_each_run(causal):
    q, k, v, do = make(4, 700, 1111, 8, 4, 128, BF16)
    config = dataclasses.replace(SINGLE[128], **PAIR)
    o, lse, _ = forward(q, k, v, causal, 128**-0.5, (-1, -1))
    given, found = (do, q, k, v, o.to(BF16), lse.float(), None), []
    for _ in range(20):
        found.append([poisoned(t) for t in (q, k, v)])
        backward_ops.run(given, found[-1], Options(causal), config=config)
        assert torch.equal(found[-1][1], found[0][1]) and torch.equal(found[-1][2], found[0][2])
        assert (found[-1][0].float() - found[0][0].float()).norm() <= 1e-3 * found[0][0].float().norm()


def variants(dim):
    """Configurations that the plan does not choose, and bench/tune_attention_backward.py times."""
    base = SINGLE[dim]
    change = lambda **options: dataclasses.replace(base, **options)
    yield change(post=False)
    yield change(stagger=True)
    yield change(cluster=2)
    yield change(cluster=2, post=False)
    yield change(longest_first=False)
    if dim < 256:
        pair = dict(**PAIR, dq_add="bulk" if dim == 128 else "red")
        yield change(post=False, turns=True, stages=2)
        yield change(turns=not base.turns)
        yield change(dq_add="red")
        yield change(stages=2, dq_buffers=2)
        yield change(**pair)
        yield change(**pair, share=False)
    if dim == 64:
        yield change(tile=64)
    if dim == 256:
        yield change(**BULK, **STAYS)


@pytest.mark.slow
@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("causal", (False, True))
def test_each_variant(dim, causal):
    for config in variants(dim):
        for rows, keys in FEW_SIZES:
            x = make(2, rows, keys, 4, 2, dim, BF16)
            compare(*x, causal, what=f"{rows} x {keys} {config}", config=config)


@pytest.mark.parametrize("dim, causal", ((64, False), (128, False), (128, True), (256, True)))
def test_the_last_block_of_a_head_makes_dq(dim, causal):
    """Of many heads, whose blocks end in any order, and of several query heads to a K/V head."""
    config = dataclasses.replace(SINGLE[dim], post=False)
    for batch, rows, keys, heads, kv_heads in ((2, 113, 203, 4, 2), (1, 1, 1, 1, 1), (1, 300, 100, 2, 2),
                                               (8, 512, 512, 16, 4), (4, 1000, 1000, 16, 16), (1, 2000, 300, 8, 1)):
        x = make(batch, rows, keys, heads, kv_heads, dim, BF16)
        what = f"B{batch} {rows} x {keys} H{heads}/{kv_heads}"
        q, k, v, do = x
        first = compare(*x, causal, what=what, config=config)
        o, lse, _ = forward(q, k, v, causal, dim**-0.5, (-1, -1))
        for _ in range(20):
            again = [poisoned(t) for t in (q, k, v)]
            given = do, q, k, v, o.to(q.dtype), lse.float(), None
            backward_ops.run(given, again, Options(causal), config=config)
            assert (again[0].float() - first[0].float()).norm() <= 1e-3 * first[0].float().norm() + 1e-6, what

"""Two heads of a block that share q and k, where no GPU is needed: when they are chosen, what has none, and what is
launched."""
import itertools

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention.catalog import shipped
from tkq.linear_attention.launch import Given
from tkq.linear_attention.plan import SHARED, plan
from tkq.linear_attention.spec import LinearSpec, SsdSpec
from tkq.linear_attention.split.launch import in_segments
from tkq.linear_attention.split.plan import LONG, PAIRS_GAIN, SHORTEST, Sizes, Split, split, time


@pytest.mark.parametrize("sizes, more, how", [
    ((8, 80, 2048, 64, 64), dict(key_heads=1), Split(2, 1, 2)),
    ((8, 80, 64, 64, 64), dict(key_heads=8), Split(2, 1, 2)),
    ((16, 16, 1024, 64, 64), dict(key_heads=1), Split(2, 1, 2)),
    ((8, 80, 2048, 32, 48), dict(key_heads=1), Split(2, 1, 2)),
    ((8, 80, 2048, 64, 64), dict(), Split(1, 1)), ((8, 80, 2048, 64, 64), dict(key_heads=80), Split(1, 1)),
    ((8, 15, 2048, 64, 64), dict(key_heads=5), Split(1, 1)), ((8, 80, 2048, 64, 80), dict(key_heads=1), Split(2, 1)),
    ((8, 80, 2048, 128, 64), dict(key_heads=1), Split(2, 1, 2)),
    ((4, 80, 4096, 128, 64), dict(key_heads=1), Split(1, 1)),  # three waves, which are shorter than two of pairs
    ((2, 80, 8192, 128, 64), dict(key_heads=1), Split(2, 1, 2)),
    # three segments of 40 pairs are 120 blocks, of 24 pairs five; bench/results/h200/tuning/mamba2_segments.json
    ((1, 80, 32768, 128, 64), dict(key_heads=1), Split(2, 3, 2)),
    ((1, 80, 32768, 64, 64), dict(key_heads=1), Split(2, 3, 2)),
    ((1, 48, 32768, 128, 64), dict(key_heads=1), Split(2, 5, 2)),
    ((1, 24, 32768, 128, 64), dict(key_heads=1), Split(2, 11, 2)),
    ((1, 80, 8192, 128, 64), dict(key_heads=1), Split(1, 1)),
    ((8, 80, 2048, 144, 64), dict(key_heads=1), Split(1, 1)),
    ((8, 80, 2048, 64, 64), dict(key_heads=1, single=True), Split(1, 1)),
    ((8, 80, 2048, 64, 64), dict(key_heads=1, delta=True), Split(1, 1)),
    ((1, 80, 1024, 64, 64), dict(key_heads=1), Split(1, 1))])  # of 132 SMs 40 would have all of it
def test_two_heads_of_a_block(sizes, more, how):
    """Where two neighbours share one of q and k, each fills a warpgroup of the state, and it takes no longer."""
    assert split(Sizes(*sizes, 132, **more)) == how


def test_few_sequences_with_shared_keys_are_cut_where_that_is_worth_it():
    for B, H, S, K in itertools.product((1, 2, 8), (2, 16, 80), (4096, 32768, 1 << 18), (64, 128)):
        sizes = Sizes(B, H, S, K, 64, 132, key_heads=1)
        how = split(sizes)
        assert how.heads == 1 or how.groups == 2
        assert time(sizes, how) <= min(time(sizes, Split(1, 1)), time(sizes, Split(2, 1, 2)))
        if how.heads == 2 and how.segments > 1:
            assert time(sizes, how) <= PAIRS_GAIN * min(time(sizes, Split(1, 1)), time(sizes, Split(2, 1, 2)))
            assert S >= LONG * 64 and how.segments * SHORTEST <= S // 64


@pytest.mark.parametrize("more", [
    dict(head_dim=144), dict(value_dim=80), dict(delta="fp32"), dict(gate="token", dot=True), dict(second="query"),
    dict(others=True), dict(packed="int32"), dict(pool="int32", initial="fp32", final="fp32"),
    dict(checkpoints="fp32"), dict(part="states", final="fp32"),
    dict(part="states", final="fp32", delta="fp32", inverse="out")])
def test_what_has_one_head_a_block(more):
    spec = LinearSpec(**dict(dtype="bf16", head_dim=64, value_dim=64) | more)
    with pytest.raises(ValueError, match="plan: heads is 2, allowed is 1 for"):
        plan(spec, heads=2)
    with pytest.raises(ValueError, match="plan: heads is 3, allowed is 1 or 2 for"):
        plan(LinearSpec("bf16", 64, 64), heads=3)


@pytest.mark.parametrize("gated, stages", [(False, 4), (True, 3)])
def test_two_heads_have_room(gated, stages):
    spec = LinearSpec("bf16", 64, 64, "token", ssd=SsdSpec("bf16", gated=gated))
    config = plan(spec, heads=2)
    assert (config.groups, config.heads, config.stages) == (2, 2, stages)
    assert stages * (2 + 2 * (1 + gated)) * 8192 + (4 + 2 * config.outputs) * 8192 + 4 * 4 * 64 * 4 <= SHARED


def test_segments_of_two_heads():
    """Of gates, states are those of two heads, too; without, of one."""
    q, k = torch.zeros(2, 1, 512, 2, 64, dtype=torch.bfloat16)
    v = torch.zeros(1, 512, 4, 64, dtype=torch.bfloat16)
    for g, heads in ((torch.zeros(4), 2), (torch.zeros(1, 512, 4), 2), (None, 1)):
        with fake_gpu.launches() as seen:
            in_segments(Given(q, k, v, g), 1.0, Split(2, 3, 2))
        (states, _), (_, (made, *_)), (outputs, args) = seen
        assert [r.args[0].part for r in (states, outputs)] == ["states", "outputs"] and made.shape[:3] == (1, 3, 4)
        assert [r.args[1].heads for r in (states, outputs)] == [heads, 2] and args[1][5].shape[:2] == (3, 4)


@pytest.mark.parametrize("g", [None, torch.full((4,), -0.1), torch.full((99, 70, 4), -0.1)])
def test_two_heads_of_a_block_are_shipped(g):
    """Forward and backward, where gates get no gradient: what `split` chooses is what the catalog has."""
    q, k = torch.zeros(2, 99, 70, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    v = torch.zeros(99, 70, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    with fake_gpu.launches() as seen:
        tkq.linear_attn(q, k, v, g).backward(torch.zeros_like(v))
    recipes = [r for r, _ in seen if isinstance(r.args[0], LinearSpec)]
    assert [r.args[0].reverse for r in recipes if r.args[1].heads == 2] == [False, True]
    assert {*recipes} <= {kernel.recipe for kernel in shipped()}


@pytest.mark.parametrize("N", [64, 128])
@pytest.mark.parametrize("final", [False, True])
def test_segments_of_two_heads_are_shipped(N, final):
    """Of Mamba-2's forward as models call it, where one sequence is long."""
    x, dt = torch.zeros(1, 4096, 48, 64, dtype=torch.bfloat16), torch.zeros(1, 4096, 48, dtype=torch.bfloat16)
    B, C = torch.zeros(2, 1, 4096, 1, N, dtype=torch.bfloat16)
    heads = -torch.ones(48)
    with fake_gpu.launches() as seen:
        tkq.mamba2_ssd(x, dt, heads, B, C, heads, dt_bias=heads, dt_softplus=True, return_final_states=final)
    recipes = [r for r, _ in seen]
    assert len(recipes) == 3 and [r.args[1].heads for r in recipes[::2]] == [2, 2]
    assert {*recipes} <= {kernel.recipe for kernel in shipped()}

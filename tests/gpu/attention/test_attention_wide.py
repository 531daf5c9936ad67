"""flash_attn with heads of more than 256 columns on a GPU: against float64, beside PyTorch at the same precision."""
import math
from dataclasses import replace

import pytest
import torch

import tkq
from tests.helpers.attention import gradients as cases
from tests.helpers.attention import varlen_inputs
from tests.helpers.attention.inputs import compare, judge, make
from tests.helpers.attention.varlen_gradients import MIXED as MIXED_BACKWARD
from tests.helpers.attention.varlen_gradients import Problem
from tkq.attention.arguments import Options
from tkq.attention.wide.backward import plan as backward_plan
from tkq.attention.wide.backward.spec import WideBackwardSpec
from tkq.attention.wide.plan import plan
from tkq.attention.wide.spec import WideSpec

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = ((128, 128), (64, 64), (1, 1), (1, 777), (113, 203), (300, 100), (65, 1999), (641, 641), (127, 129),
         (1023, 1024), (129, 1), (300, 2500), (63, 63), (799, 3))
KINDS = ((512, BF16, True), (384, FP16, False), (320, BF16, False), (512, FP16, False))  # the last two: with --slow


def everyday(dim, dtype, causal):
    return (dim, dtype, causal) in KINDS[:2]


@pytest.mark.parametrize("dim, dtype, causal", KINDS)
@pytest.mark.sampled(when=lambda dim, causal: causal)  # of packed heads; of single ones `test_hard_data` has two
def test_sizes(dim, dtype, causal):
    for rows, keys in SIZES:
        compare(*make(2, rows, keys, 4, 2, dim, dtype), what=f"{rows} x {keys}", causal=causal)


@pytest.mark.parametrize("dim, dtype, causal", KINDS)
@pytest.mark.sampled(when=everyday)
def test_hard_data(dim, dtype, causal):
    q, k, v = make(2, 517, 517, 4, 4, dim, dtype)
    compare(q * 20, k, v, "large scores", causal=causal)
    compare(q, k, v * 1000 + 500, "large values with a mean", causal=causal)
    peaked, twice, dominating = k.clone(), k.clone(), k.clone()
    peaked[:, ::50] = q[:, ::50] * 4
    compare(q, peaked, v, "peaked rows", causal=causal)
    dominating[:, 0] = 30 * q.mean(1)
    compare(q, dominating, v, "one dominating key", causal=causal)
    twice[:, 1::2] = twice[:, :-1:2].clone()
    compare(q, twice, v, "each key twice", causal=causal)
    rising = k * torch.linspace(4, 0.1, 517, device="cuda", dtype=dtype)[:, None, None]
    compare(q * 3, rising, v, "the maximum moves in many blocks", causal=causal)


@pytest.mark.parametrize("dim, dtype, causal", KINDS[:2])
def test_many_tasks(dim, dtype, causal):
    """More tasks than clusters of blocks, each with largest scores of its own."""
    for batch, heads, kv_heads in ((3, 40, 8), (1, 1, 1), (7, 13, 1)):
        q, k, v = make(batch, 333, 417, heads, kv_heads, dim, dtype)
        apart = torch.linspace(0.2, 5, batch * heads, device="cuda")[torch.randperm(batch * heads, device="cuda")]
        q = (q * apart.view(batch, 1, heads, 1)).to(dtype)
        compare(q, k, v, f"B{batch} H{heads}/{kv_heads}", causal=causal)


@pytest.mark.parametrize("dim, dtype, causal", KINDS[:1])
def test_long(dim, dtype, causal):
    compare(*make(1, 4200, 4200, 2, 1, dim, dtype), "4200 rows", causal=causal)


def test_narrower_heads_and_strides():
    """TMA fills the tile up; columns, rows and heads of other tensors lie behind them."""
    for dim, dtype, causal in ((328, FP16, False), (440, BF16, True)):  # kernels of the other tests
        whole = torch.full((2, 200, 6, dim + 8), math.nan, device="cuda", dtype=dtype)
        whole[..., :dim] = torch.randn(2, 200, 6, dim, device="cuda")
        q, k, v = whole[:, :, :4, :dim], whole[:, :150, 4:5, :dim], whole[:, :150, 5:, :dim]
        o = torch.full((2, 200, 4, dim), math.nan, device="cuda", dtype=dtype)
        compare(q, k, v, f"{dim} columns", o, causal=causal)


def test_a_run_repeats_and_leaves_neighbours_alone():
    q, k, v = make(2, 300, 300, 4, 2, 512)
    first = tkq.flash_attn(q, k, v, causal=True, return_lse=True)
    for _ in range(5):
        again = tkq.flash_attn(q, k, v, causal=True, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again))
    judge(*first, q, k, v, causal=True)


@pytest.mark.parametrize("change", (dict(cluster=1, scores_in_flight=0), dict(kv=96, value_keys=48, stages=12)),
                         ids=str)
@pytest.mark.slow
def test_other_configurations(change):
    config = replace(plan(WideSpec("bf16", 512)), **change)
    for rows, keys in SIZES:
        compare(*make(2, rows, keys, 4, 2, 512), f"{rows} x {keys}", config=config)


OPTIONS = dict(left=200, right=40, softcap=15.0)


def test_windows_softcap_sinks_and_packed_sequences():
    """One kernel of all that the wide kernel shares with the narrow one."""
    lengths = varlen_inputs.MIXED
    x = varlen_inputs.make(lengths, 4, 2, 512, BF16, spare=30)
    varlen_inputs.compare(*x, "mixed", **OPTIONS)


# ---- gradients ---------------------------------------------------------------------------------------------------

BACKWARD = ((512, BF16, True), (320, FP16, False))  # the last one: with --slow


def everyday_gradients(dim, dtype, causal):
    return dim == 512


@pytest.mark.parametrize("dim, dtype, causal", BACKWARD)
@pytest.mark.sampled(when=everyday_gradients)
def test_gradients(dim, dtype, causal):
    for rows, keys in cases.FEW_SIZES:
        x = cases.make(2, rows, keys, 4, 2, dim, dtype)
        cases.compare(*x, causal, what=f"{rows} x {keys}")


@pytest.mark.parametrize("dim, dtype, causal", BACKWARD)
@pytest.mark.sampled(when=everyday_gradients)
def test_gradients_of_hard_data(dim, dtype, causal):
    q, k, v, do = cases.make(2, 517, 517, 4, 4, dim, dtype)
    cases.compare(q * 20, k, v, do, causal, what="large scores")
    cases.compare(q, k, v, do * 1e-2, causal, what="small gradients")
    peaked = k.clone()
    peaked[:, ::50] = q[:, ::50] * 4
    cases.compare(q, peaked, v, do, causal, what="peaked rows")


@pytest.mark.parametrize("window_size", ((70, 30), (0, 0), (130, 0)))
@pytest.mark.sampled(when=lambda window_size: False)
def test_gradients_of_windows(window_size):
    for rows, keys in cases.FEW_SIZES:
        x = cases.make(1, rows, keys, 2, 1, 384, BF16)
        cases.compare(*x, False, what=f"{rows} x {keys}", window_size=window_size)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.sampled(when=lambda causal: False)
def test_gradients_of_lse_and_sinks(causal):
    x = cases.make(2, 200, 330, 4, 2, 440, BF16)
    dlse, sinks = torch.randn(2, 4, 200, device="cuda"), torch.randn(4, device="cuda")
    cases.compare(*x, causal, dlse=dlse, sinks=sinks)


@pytest.mark.parametrize("dim, dtype, causal", BACKWARD)
@pytest.mark.sampled(when=everyday_gradients)
def test_gradients_of_groups(dim, dtype, causal):
    for batch, heads, kv_heads in ((3, 40, 8), (1, 1, 1), (2, 13, 1)):
        x = cases.make(batch, 333, 417, heads, kv_heads, dim, dtype)
        cases.compare(*x, causal, what=f"B{batch} H{heads}/{kv_heads}")


def test_gradients_of_packed_sequences():
    """All choices together: rows that are not in use are NaN, a softcap, sinks and a gradient of lse."""
    Problem(MIXED_BACKWARD, 4, 2, 320, in_use=True, sinks=torch.float32, dlse=True, spare=7,
            options=Options(True, softcap=20.0)).judge()


@pytest.mark.parametrize("dim", (384, 512))
@pytest.mark.sampled(when=lambda dim: False)
def test_gradients_of_packed_sequences_alone(dim):
    Problem(MIXED_BACKWARD, 4, 2, dim, options=Options(True)).judge()


@pytest.mark.slow
def test_gradients_with_smaller_slots():
    configs = backward_plan.plan(WideBackwardSpec("bf16", 512, right=True))
    small = backward_plan.filled(replace(configs[0], key_cols=64, value_keys=32), 512)
    for rows, keys in cases.FEW_SIZES:
        x = cases.make(2, rows, keys, 4, 2, 512, BF16)
        cases.compare(*x, True, what=f"{rows} x {keys}", config=(small, small, configs[2]))


def test_gradients_repeat():
    q, k, v, do = cases.make(2, 300, 300, 4, 2, 512, BF16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = [torch.autograd.grad(tkq.flash_attn(*leaves, causal=True), leaves, do) for _ in range(3)]
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again))


def test_gradients_of_more_sequences_than_a_grid_has_blocks_across():
    """Of one token each: o is v, and what queries and keys get is nothing but rounding."""
    leaves = [torch.randn(65537, 1, 1, 512, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
    o = tkq.flash_attn(*leaves)
    do = torch.randn_like(o)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    assert torch.equal(o, leaves[2]) and torch.equal(dv, do)
    assert max(x.abs().max().item() for x in (dq, dk)) < 1e-3

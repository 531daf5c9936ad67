"""Attention's gradients on a GPU: against float64, beside PyTorch's autograd at the same precision."""
import math

import pytest
import torch

import tkq
from tests.helpers.attention.gradients import (
    FEW_SIZES,
    NAMES,
    SIZES,
    compare,
    forward,
    gradients,
    low_precision_gradients,
    make,
    rounded_once,
)
from tkq import reference
from tkq.attention.arguments import Options
from tkq.attention.backward import ops
from tkq.attention.backward.ops import attention_backward
from tkq.reference import attention_backward as reference_attention
from tkq.testing import assert_2x


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype, dim", ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256),
                                        (torch.float16, 64), (torch.float16, 128), (torch.float16, 256)))
@pytest.mark.sampled(when=lambda dtype, dim, causal: dtype != torch.float16 or causal)
def test_sizes(dtype, dim, causal):
    for rows, keys in SIZES:
        compare(*make(2, rows, keys, 4, 2, dim, dtype), causal, what=f"{rows} x {keys}")


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("causal", (False, True))
def test_long_sequences(dim, causal):
    compare(*make(1, 4097, 4097, 2, 1, dim, torch.bfloat16), causal, what="long")


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("causal", (False, True))
def test_heads(dim, causal):
    for batch, heads, kv_heads in ((1, 1, 1), (3, 6, 3), (2, 4, 2), (2, 8, 1), (2, 40, 8), (7, 13, 1)):
        x = make(batch, 333, 417, heads, kv_heads, dim, torch.bfloat16)
        compare(*x, causal, what=f"B{batch} H{heads}/{kv_heads}")


@pytest.mark.parametrize("dim, dim_v", ((64, 64), (128, 128), (192, 128), (256, 256)))
@pytest.mark.parametrize("causal", (False, True))
def test_hard_data(dim, dim_v, causal):
    q, k, v, do = make(2, 517, 517, 4, 4, dim, torch.bfloat16, dim_v=dim_v)
    compare(q * 20, k, v, do, causal, what="large scores")
    compare(q, k, v * 1000, do, causal, what="large values")
    compare(q, k, v, do * 1e4, causal, what="large gradients")
    compare(q, k, v, do * 1e-4, causal, what="small gradients")
    peaked = k.clone()
    peaked[:, ::50] = q[:, ::50] * 4
    compare(q, peaked, v, do, causal, what="peaked rows")
    dominating = k.clone()
    dominating[:, 0] = 30 * q.mean(1)
    compare(q, dominating, v, do, causal, what="one dominating key")
    compare(q, k[:, :1].expand(-1, 517, -1, -1).contiguous(), v, do, causal, what="equal keys")
    twice = k.clone()
    twice[:, 1::2] = twice[:, :-1:2]
    compare(q, twice, v, do, causal, what="each key twice")
    compare(torch.zeros_like(q), k, v, do, causal, what="zero queries")
    compare(-q.abs(), k.abs() * 8, v, do, causal, what="all scores far below zero")
    compare(q, k, v, torch.zeros_like(do), causal, what="no gradient")
    compare(q, k, v, do, causal, scale=1.5, what="scale")
    compare(q, k, v, do, causal, scale=1e-4, what="small scale")


@pytest.mark.parametrize("causal", (False, True))
def test_keys_past_the_end_with_scores_far_below_zero(causal):
    """exp(0 - lse) of keys past the end would overflow."""
    q, k, v, do = make(1, 200, 131, 2, 2, 128, torch.bfloat16)
    compare(-q.abs() * 4, k.abs() * 8, v, do, causal, what="lse about -500")


@pytest.mark.parametrize("dim, causal", ((128, False), (128, True), *(
    pytest.param(dim, True, marks=pytest.mark.slow) for dim in (64, 256))))  # of packed sequences: every day
def test_gradient_of_lse(dim, causal):
    q, k, v, do = make(2, 300, 400, 4, 2, dim, torch.bfloat16)
    dlse = torch.randn(2, 4, 300, device="cuda")
    compare(q, k, v, do, causal, dlse=dlse, what="dlse")
    compare(q, k, v, torch.zeros_like(do), causal, dlse=dlse, what="dlse alone")
    compare(q, k, v, do, causal, dlse=torch.ones(1, 1, 1, device="cuda").expand(2, 4, 300), what="expanded dlse")
    q, k, v, do = make(2, 300, 100, 4, 2, dim, torch.bfloat16)  # causal: rows that see no key
    compare(q, k, v, do, causal, dlse=dlse, what="dlse of rows that see no key")


@pytest.mark.parametrize("dim", (96, 192, 256))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.sampled(when=lambda dim, causal: causal and dim != 192)
def test_fp16_hard_data(dim, causal):
    q, k, v, do = make(2, 517, 517, 4, 2, dim, torch.float16, dim_v=128 if dim == 192 else None)
    compare(q * 20, k, v, do, causal, what="large scores")
    compare(q, k, v * 100, do, causal, what="large values")


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("window_sizes", (((0, 0), (100, 0), (-1, 50), (256, 256), (2000, 2000)), ((30, -1),)))
@pytest.mark.sampled(when=lambda dim, window_sizes: dim == 128 and len(window_sizes) > 1)
def test_windows(dim, window_sizes):
    for window_size in window_sizes:
        for rows, keys in ((700, 700), (300, 500), (500, 300)):
            x = make(1, rows, keys, 2, 1, dim, torch.bfloat16)
            compare(*x, False, window_size=window_size, what=f"window {window_size} of {rows} x {keys}")
        q, k, v, do = make(1, 517, 517, 2, 1, dim, torch.bfloat16)
        compare(q * 20, k, v, do, False, window_size=window_size, what=f"large scores, window {window_size}")


@pytest.mark.parametrize("dims", ((96, 96), (192, 128), (72, 72), (8, 8), (40, 64), (128, 64), (64, 128), (256, 192)))
@pytest.mark.parametrize("deterministic", (False, True))
def test_other_head_dims(dims, deterministic):
    """Beside data that must not be read or written: rows lie in the middle of wider ones."""
    for rows, keys in ((113, 203), (300, 100), (333, 333)):
        for causal in (False, True):
            x = make(2, rows, keys, 4, 2, dims[0], torch.bfloat16, dim_v=dims[1])
            room = [torch.full((*t.shape[:3], t.shape[3] + 16), math.nan, dtype=t.dtype, device="cuda") for t in x]
            inside = [r[..., 8:-8] for r in room]
            for t, r in zip(x, inside):
                r.copy_(t)
            compare(*inside, causal, what=f"{dims} {rows} x {keys}", deterministic=deterministic)


def test_head_dims_write_inside_their_rows():
    q, k, v, do = make(1, 100, 130, 2, 2, 72, torch.bfloat16, dim_v=40)
    o, lse = reference.flash_attn(q, k, v)
    room = [torch.full((*t.shape[:3], t.shape[3] + 16), math.nan, dtype=t.dtype, device="cuda") for t in (q, k, v)]
    ops.run((do, q, k, v, o, lse, None), [r[..., 8:-8] for r in room])
    for r in room:
        assert torch.isfinite(r[..., 8:-8]).all() and torch.isnan(r[..., :8]).all() and torch.isnan(r[..., -8:]).all()


@pytest.mark.parametrize("dim, causal, deterministic", (
    (128, True, True), pytest.param(128, False, False, marks=pytest.mark.slow),
    *(pytest.param(dim, True, False, marks=pytest.mark.slow) for dim in (64, 256)),
    pytest.param(256, False, True, marks=pytest.mark.slow)))
def test_softcap(dim, causal, deterministic):
    for softcap in (15.0, 50.0, 1.0):
        q, k, v, do = make(1, 300, 333, 4, 2, dim, torch.bfloat16)
        compare(q * 2, k, v, do, causal, what=f"softcap {softcap}", softcap=softcap, deterministic=deterministic)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("causal", (False, True))
def test_sinks(dtype, causal):
    for rows, keys in ((300, 333), (300, 100)):
        q, k, v, do = make(2, rows, keys, 4, 2, 128, torch.bfloat16)
        sinks, dlse = torch.randn(4, device="cuda").to(dtype), torch.randn(2, 4, rows, device="cuda")
        compare(q, k, v, do, causal, dlse=dlse, sinks=sinks, what="sinks")
        o, lse, _ = forward(q, k, v, causal, 128**-0.5, (-1, -1), 0.0, sinks)
        *_, found = attention_backward((do, q, k, v, o.to(q.dtype), lse.float(), dlse), sinks, Options(causal))
        assert found.dtype == dtype and found.shape == sinks.shape


def test_layouts():
    for dim in (64, 128, 256):
        q, k, v, do = make(2, 333, 333, 4, 4, dim, torch.bfloat16)
        packed = torch.randn(2, 333, 12, dim, device="cuda", dtype=torch.bfloat16)
        compare(*packed.split(4, 2), do, True, what="packed qkv")
        heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do)]
        compare(*heads_first, True, what="(B, H, S, D) in memory")
        one_head = [x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v)]
        compare(q, *one_head, do, True, what="stride 0 over heads")
        wide = torch.randn(2, 333, 4, 2 * dim, device="cuda", dtype=torch.bfloat16)
        compare(wide[..., :dim], wide[..., dim:], v, do, True, what="rows with a pitch")
        compare(q[:, ::3], k[:, ::2], v[:, ::2], do[:, ::3], True, what="every second row")
        one = q[:1].as_strided((1, 333, 4, dim), (3, *q.stride()[1:]))  # the stride of an extent of 1 says nothing
        compare(one, k[:1], v[:1], do[:1], False, what="odd stride of an extent of 1")


def test_do_that_tma_cannot_take_is_copied():
    q, k, v, do = make(2, 100, 120, 2, 2, 64, torch.bfloat16)
    o, lse = reference.flash_attn(q, k, v)
    for strange in (torch.ones(1, 1, 1, 1, device="cuda", dtype=q.dtype).expand(q.shape),
                    do.transpose(2, 3).contiguous().transpose(2, 3)):
        found = gradients(strange, q, k, v, o, lse)
        for a, b in zip(found[1:], gradients(strange.contiguous(), q, k, v, o, lse)[1:]):
            assert torch.equal(a, b)


@pytest.mark.parametrize("causal", (False, True))
def test_nothing_outside_is_read_or_written(causal):
    for dim in (64, 128, 256):
        room = [torch.full((2, 400, 4, dim), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        q, k, v, do, o, dq, dk, dv = [x[:, 30:330] for x in room]
        for x in (q, k, v, do):
            x.copy_(torch.randn(x.shape, device="cuda"))
        true_o, lse = reference.flash_attn(q, k, v, causal)
        o.copy_(true_o)
        ops.run((do, q, k, v, o, lse, None), (dq, dk, dv), Options(causal))
        assert all(torch.isnan(x[:, :30]).all() and torch.isnan(x[:, 330:]).all() for x in room)
        assert all(torch.isfinite(x).all() for x in (dq, dk, dv))


def test_rows_that_see_no_key():
    q, k, v, do = make(2, 300, 100, 2, 2, 64, torch.float16)
    dq, dk, dv = compare(q, k, v, do, True, what="300 x 100")
    assert dq[:, :200].abs().max() == 0
    do[:, :200] = 1e4  # it does not enter
    again = compare(q, k, v, do, True, what="large gradients of rows that see no key")
    assert torch.equal(dk, again[1]) and torch.equal(dv, again[2])


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.sampled(when=lambda causal, dim: causal == (dim == 256))
def test_equal_accuracy(causal, dim):
    """The rule by which speeds are compared: P and dP - delta in fp32, and dS rounded once, have the error of other
    implementations. dS of a rounded P would have 1.22 times that, of a rounded dP - delta too 1.4 times."""
    for deterministic in (False, True):
        q, k, v, do = make(1, 2048, 2048, 2, 1, dim, torch.bfloat16)
        o, lse, p = forward(q, k, v, causal, dim**-0.5, (-1, -1))
        given = [x.double() for x in (do, q, k, v, o)]
        true = reference_attention.flash_attn_backward(*given, lse, None, causal)
        like = rounded_once(*given, p, dim**-0.5)
        found = gradients(do, q, k, v, o.bfloat16(), lse.float(), causal=causal, deterministic=deterministic)
        for name, a, b, c in zip(NAMES, found, true, like):
            ours, theirs, rounding = (((x.double() - b).norm() / b.norm()).item() for x in (a, c, b.bfloat16()))
            assert ours <= 1.05 * theirs + 0.1 * rounding, f"{name}: error {ours:.2e}, rounded once {theirs:.2e}"


@pytest.mark.parametrize("rows, keys", ((0, 5), (5, 0), (0, 0)))
def test_no_rows_no_keys(rows, keys):
    q, k, v, do = make(2, rows, keys, 2, 1, 64, torch.bfloat16)
    o, lse = reference.flash_attn(q, k, v)
    for got, x in zip(gradients(do, q, k, v, o, lse), (q, k, v)):
        assert got.shape == x.shape and (not got.numel() or got.abs().max() == 0)


@pytest.mark.parametrize("needs", ((True, False, False, False), (False, True, True, False),
                                   (False, False, True, False)))
def test_only_what_is_needed(needs):
    q, k, v, do = make(2, 300, 400, 4, 2, 128, torch.bfloat16)
    o, lse = reference.flash_attn(q, k, v, True)
    every = gradients(do, q, k, v, o, lse, causal=True)
    some = gradients(do, q, k, v, o, lse, causal=True, needs=needs)
    for a, b, needed in zip(some, every, needs):
        assert (a is not None) == needed
        if needed:
            assert (a.float() - b.float()).norm() <= 1e-3 * b.float().norm()


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("causal", (False, True))
def test_dk_and_dv_are_the_same_in_each_run(dim, causal):
    q, k, v, do = make(4, 700, 1111, 8, 4, dim, torch.bfloat16)
    o, lse = reference.flash_attn(q, k, v, causal)
    first = gradients(do, q, k, v, o, lse, causal=causal)
    for _ in range(20):
        again = gradients(do, q, k, v, o, lse, causal=causal)
        assert torch.equal(again[1], first[1]) and torch.equal(again[2], first[2])
        assert (again[0].float() - first[0].float()).norm() <= 1e-3 * first[0].float().norm()


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("causal", (False, True))
def test_deterministic(dim, causal):
    dtype = torch.bfloat16
    for rows, keys in (*FEW_SIZES, (50, 300), (129, 129)):
        compare(*make(2, rows, keys, 4, 2, dim, dtype), causal, what=f"{rows} x {keys}", deterministic=True)
    q, k, v, do = make(2, 517, 517, 4, 2, dim, dtype)
    compare(q * 20, k, v, do, causal, what="large scores", deterministic=True)
    twice = k.clone()
    twice[:, 1::2] = twice[:, :-1:2]
    compare(q, twice, v * 1000, do, causal, what="each key twice, large values", deterministic=True)
    q, k, v, do = make(2, 700, 1111, 8, 2, dim, dtype)
    o, lse = reference.flash_attn(q, k, v, causal)
    first = gradients(do, q, k, v, o, lse, causal=causal, deterministic=True)
    for _ in range(20):
        again = gradients(do, q, k, v, o, lse, causal=causal, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first))


@pytest.mark.parametrize("dim, window_sizes", (
    pytest.param(64, ((0, 0), (100, 0), (30, -1), (256, 256)), marks=pytest.mark.slow),
    pytest.param(128, ((0, 0), (100, 0), (30, -1), (256, 256)), marks=pytest.mark.slow),
    pytest.param(256, ((100, 0), (256, 256)), marks=pytest.mark.slow)))
def test_deterministic_windows(dim, window_sizes):
    for window_size in window_sizes:
        for rows, keys in ((700, 700), (300, 500), (500, 300)):
            x = make(1, rows, keys, 2, 1, dim, torch.bfloat16)
            compare(*x, False, window_size=window_size, what=f"{window_size} {rows} x {keys}", deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("dim, causal, keys", (
    (64, True, 2111), (64, False, 2111), (128, True, 1111), (128, True, 2111), (128, True, 8300), (128, False, 2111),
    (256, True, 2111)))
def test_500_runs(dim, causal, keys, deterministic):
    """Groups of query heads, beside other work on another stream: persistent blocks, and full blocks of one task."""
    q, k, v, do = make(2, 1024, keys, 8, 2, dim, torch.bfloat16)
    o, lse = reference.flash_attn(q, k, v, causal)
    first = gradients(do, q, k, v, o, lse, causal=causal, deterministic=deterministic)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for i in range(500):
        if i % 5 == 0:
            with torch.cuda.stream(other):
                noise @ noise
        again = gradients(do, q, k, v, o, lse, causal=causal, deterministic=deterministic)
        assert torch.equal(again[1], first[1]) and torch.equal(again[2], first[2])
        if deterministic:
            assert torch.equal(again[0], first[0])
        assert (again[0].float() - first[0].float()).norm() <= 1e-3 * first[0].float().norm()


def test_streams_and_graphs():
    sets = []
    for seed in range(3):
        q, k, v, do = make(2, 700, 700, 8, 8, 128, torch.bfloat16, seed)
        sets.append((do, q, k, v, *reference.flash_attn(q, k, v, True)))
    want = [gradients(*x, causal=True) for x in sets]
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in sets], []
    for _ in range(10):
        for x, stream in zip(sets, streams):
            with torch.cuda.stream(stream):
                got.append(gradients(*x, causal=True))
    torch.cuda.synchronize()
    near = lambda a, b: (a.float() - b.float()).norm() <= 1e-3 * b.float().norm()
    for i, found in enumerate(got):
        assert all(torch.equal(a, b) for a, b in zip(found[1:], want[i % 3][1:])) and near(found[0], want[i % 3][0])
    fixed = [x.clone() for x in sets[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gradients(*fixed, causal=True)
    for x, w in zip(sets, want):
        for dst, src in zip(fixed, x):
            dst.copy_(src)
        graph.replay()
        assert torch.equal(out[1], w[1]) and torch.equal(out[2], w[2]) and near(out[0], w[0])


@pytest.mark.slow
def test_large_strides():
    """Offsets beyond 2^31 elements."""
    room = torch.empty(3, (1 << 30) // 64 + 300, 1, 64, device="cuda", dtype=torch.bfloat16)
    q = room[:, -300:]
    q.copy_(torch.randn(q.shape, device="cuda"))
    compare(q, q, q, q, True, what="far apart")


# ---- through autograd ------------------------------------------------------------------------------

@pytest.mark.parametrize("causal", (False, True))
def test_a_step_of_training(causal):
    """Forward and backward together, with lse in the loss, beside PyTorch's attention in float64."""
    q, k, v, do = make(2, 256, 320, 4, 2, 128, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = tkq.flash_attn(*leaves, causal=causal, return_lse=True)
    (o.float() * do.float()).sum().add(lse[:, :, -64:].square().sum()).backward()
    wide = [x.detach().double() for x in (q, k, v)]
    true_o, true_lse = reference.flash_attn(*wide, causal)
    dlse = torch.zeros_like(true_lse)
    dlse[:, :, -64:] = 2 * true_lse[:, :, -64:]
    true = reference_attention.flash_attn_backward(do.double(), *wide, true_o, true_lse.double(), dlse, causal)
    low = low_precision_gradients(q.detach(), k.detach(), v.detach(), do, dlse, causal, None, (-1, -1))
    for name, x, t, p in zip(("dq", "dk", "dv"), leaves, true, low):
        assert_2x(x.grad, t, p, 1, name)

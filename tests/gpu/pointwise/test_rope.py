"""rope on the GPU: numerics by the 2x rule, every pairing and position, views, in place, gradients."""
import math

import pytest
import torch

import tkq
from tests.helpers.process.streams import on_a_side_stream
from tkq.pointwise.rope_check import Rotation
from tkq.pointwise.rope_launch import launch
from tkq.reference import pointwise as reference
from tkq.testing import assert_2x

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS = 512  # of the tables


def make(shape, dtype="bf16", scale=1.0, seed=0):
    g = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, device=DEVICE, generator=g) * scale).to(DTYPES[dtype])


def tables(R, dtype="fp32", rows=ROWS):
    return tkq.rope_cos_sin(rows, R, dtype=DTYPES[dtype], device=DEVICE)


def poisoned(x):
    return torch.full(x.shape, math.nan, dtype=x.dtype, device=x.device)


def truth(x, cos, sin, **more):
    return reference.rope(x.double(), cos.double(), sin.double(), **more)


def check(x, cos, sin, x2=None, config=None, what="", **more):
    """Forward and, with the same data, backward; into outputs that are NaN before. more: as reference.rope has it."""
    for inverse in (False, True):
        rotation = Rotation(cos, sin, more.get("offset", 0), more.get("offsets"), more.get("position_ids"),
                    more.get("cu_seqlens"), more.get("interleaved", False), inverse)
        given = [x] if x2 is None else [x, x2]
        outs = [poisoned(t) for t in given]
        launch(rotation, *[t for pair in zip(given, outs) for t in pair], config=config)
        for t, y in zip(given, outs):
            same = reference.rope(t.float(), cos.float(), sin.float(), inverse=inverse, **more).to(t.dtype)
            assert_2x(y, truth(t, cos, sin, inverse=inverse, **more), same, ulps=1, what=f"{what} inverse {inverse}")
            R = 2 * cos.shape[-1]
            assert torch.equal(y[..., R:], t[..., R:]), f"{what}: the columns that do not rotate"
    return outs


@pytest.mark.parametrize("dtype, interleaved", [("bf16", False), ("bf16", True), ("fp32", False), ("fp32", True),
                                                ("fp16", False)])
def test_numerics(dtype, interleaved):
    for scale in (1.0, 1e4, 1e-4) if dtype != "fp16" else (1.0, 1e3):
        check(make((2, 37, 5, 64), dtype, scale), *tables(64), interleaved=interleaved, what=f"scale {scale}")


@pytest.mark.parametrize("dtype, table, interleaved", [
    ("bf16", "bf16", False), ("bf16", "bf16", True), ("fp32", "fp16", False)])
def test_tables_of_their_own_type(dtype, table, interleaved):
    check(make((2, 37, 8, 64), dtype), *tables(64, table), interleaved=interleaved)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 8, 9, 32])
def test_any_number_of_heads(heads):
    for interleaved in (False, True) if heads in (3, 9) else (False,):
        check(make((2, 9, heads, 64)), *tables(64), interleaved=interleaved, what=f"interleaved {interleaved}")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D, R", [(3, 2), (80, 32), (127, 64), *(
    pytest.param(*size, marks=pytest.mark.slow) for size in (
        (2, 2), (10, 6), (20, 20), (128, 128), (64, 32), (65, 64), (96, 96), (128, 64), (192, 64), (256, 256),
        (512, 512)))])
@pytest.mark.sampled(each_value=True)
def test_any_number_of_columns(interleaved, D, R):
    check(make((2, 7, 3, D)), *tables(R), interleaved=interleaved)


@pytest.mark.parametrize("seqlen", [1, 2, 31, 255, 512])
def test_any_length(seqlen):
    check(make((3, seqlen, 4, 64)), *tables(64))


@pytest.mark.parametrize("offset", [1, 100, ROWS - 37])
def test_a_common_offset(offset):
    check(make((2, 37, 4, 64)), *tables(64), offset=offset)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_positions_of_every_kind(index):
    x, (cos, sin) = make((3, 37, 4, 64)), tables(64)
    starts = torch.tensor([7, 0, 400], device=DEVICE, dtype=index)
    ids = torch.randint(0, ROWS, (3, 37), device=DEVICE, dtype=index)
    check(x, cos, sin, offsets=starts)
    check(x, cos, sin, position_ids=ids)
    for form in (ids[:1], ids[0]):
        assert torch.equal(tkq.rope(x, cos, sin, position_ids=form),
                           tkq.rope(x, cos, sin, position_ids=ids[:1].repeat(3, 1)))
    assert torch.equal(tkq.rope(x, cos, sin, position_ids=ids.t().contiguous().t()),
                       tkq.rope(x, cos, sin, position_ids=ids))
    per_token = cos[ids.long()], sin[ids.long()]
    assert torch.equal(tkq.rope(x, *per_token), tkq.rope(x, cos, sin, position_ids=ids))
    assert torch.equal(tkq.rope(x, per_token[0][:1], per_token[1][:1]), tkq.rope(x, cos, sin, position_ids=ids[:1]))
    # transformers' tables: both halves, of which one is passed
    both = [torch.cat((t, t), -1)[..., :32] for t in per_token]
    assert torch.equal(tkq.rope(x, *both), tkq.rope(x, *per_token))


@pytest.mark.parametrize("lengths", [(37,), (5, 0, 12, 1), (0, 0, 30, 0), tuple(range(1, 20)), (1,) * 100])
@pytest.mark.parametrize("outside", [(0, 0), (3, 4)])
@pytest.mark.sampled(each_value=True)
def test_sequences_of_several_lengths(lengths, outside):
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int() + outside[0]
    total = sum(lengths) + sum(outside)
    x, (cos, sin) = make((total, 5, 64)), tables(64)
    y, _ = check(x, cos, sin, make((total, 2, 64), seed=1), cu_seqlens=ends)
    check(x, cos, sin, cu_seqlens=ends, offset=9)
    offsets = torch.arange(len(lengths), device=DEVICE, dtype=torch.int64) * 3
    check(x, cos, sin, cu_seqlens=ends, offsets=offsets)
    before, after = outside
    assert torch.equal(y[:before], x[:before]) and torch.equal(y[total - after:], x[total - after:])
    ids = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
    inside = x[before:total - after]
    assert torch.equal(tkq.rope(inside, cos, sin, position_ids=ids),
                       tkq.rope(x, cos, sin, cu_seqlens=ends)[before:total - after])


def test_a_position_outside_the_table_gives_nan():
    cos, sin = tables(32, rows=8)
    cos, sin = cos.clone(), sin.clone()  # so that row 8 is not there
    x = make((1, 3, 2, 40))
    for bad in (8, -1, 1 << 40, (1 << 32) + 1):
        ids = torch.tensor([[0, bad, 7]], device=DEVICE)
        y = tkq.rope(x, cos, sin, position_ids=ids)
        assert torch.isnan(y[0, 1, :, :32]).all() and torch.isfinite(y[0, ::2]).all()
        assert torch.equal(y[..., 32:], x[..., 32:])
    y = tkq.rope(x[0], cos, sin, cu_seqlens=torch.tensor([0, 3], device=DEVICE, dtype=torch.int32), seqlen_offsets=6)
    assert torch.isnan(y[2, :, :32]).all() and torch.isfinite(y[:2]).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_infinities_and_nan_stay_in_their_pair(interleaved):
    cos, sin = tables(64)
    x = make((2, 5, 8, 80))
    clean = tkq.rope(x, cos, sin, interleaved=interleaved)
    for value in (math.nan, math.inf):
        for column in (3, 40, 70):
            bad = x.clone()
            bad[1, 2, 3, column] = value
            y = tkq.rope(bad, cos, sin, interleaved=interleaved)
            want = truth(bad, cos, sin, interleaved=interleaved)
            assert torch.equal(torch.isnan(y), torch.isnan(want)) and torch.equal(torch.isinf(y), torch.isinf(want))
            same = torch.isfinite(want)
            assert int((~same).sum()) == (1 if column >= 64 else 2) and torch.equal(y[same], clean[same])


def test_q_and_k_in_one_launch():
    cos, sin = tables(64)
    for heads, kv_heads in ((32, 8), (8, 1), (3, 5), (4, 4), (5, 0)):
        q, k = make((2, 37, heads, 64)), make((2, 37, kv_heads, 64), seed=1)
        check(q, cos, sin, k, what=f"{heads} and {kv_heads} heads")
        a, b = tkq.rope_qk(q, k, cos, sin)
        assert torch.equal(a, tkq.rope(q, cos, sin)) and torch.equal(b, tkq.rope(k, cos, sin))
    check(make((2, 9, 8, 64)), *tables(64), make((2, 9, 2, 64)), interleaved=True)


# ---- views -----------------------------------------------------------------------------------------------------------


def test_views_are_read_in_place():
    """Around them there is NaN: a read too far shows."""
    cos, sin = tables(64)
    x = make((2, 9, 4, 64))
    want = tkq.rope(x, cos, sin)
    wide = torch.full((3, 11, 7, 80), math.nan, device=DEVICE, dtype=x.dtype)
    for first, width in ((0, 64), (8, 64), (2, 64), (1, 64)):
        view = wide[1:, 1:10, 2:6, first:first + width].copy_(x)
        y = tkq.rope(view, cos, sin)
        assert torch.equal(y, want) and y.is_contiguous()
        wide.fill_(math.nan)
    heads_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(tkq.rope(heads_first, cos, sin), want) and tkq.rope(heads_first, cos, sin).is_contiguous()
    assert torch.equal(tkq.rope(x[:, :, :1].expand(2, 9, 4, 64), cos, sin),
                       tkq.rope(x[:, :, :1], cos, sin).expand(2, 9, 4, 64))
    # tables with a row stride, at addresses that 16 bytes do not divide
    for first in (0, 1, 2, 4):
        padded = [torch.full((ROWS, 40), math.nan, device=DEVICE)[:, first:first + 32].copy_(t) for t in (cos, sin)]
        assert torch.equal(tkq.rope(x, *padded), want)


def test_nothing_is_written_outside_the_output():
    for shape, R in (((2, 9, 5, 64), 64), ((2, 9, 3, 80), 32)):
        x, (cos, sin) = make(shape), tables(R)
        whole = torch.full((shape[0] + 2, *shape[1:]), math.nan, device=DEVICE, dtype=x.dtype)
        launch(Rotation(cos, sin, 0, None, None, None, False, False), x, whole[1:-1])
        assert torch.isfinite(whole[1:-1]).all() and torch.isnan(whole[0]).all() and torch.isnan(whole[-1]).all()


@pytest.mark.parametrize("R, interleaved", [(64, False), (64, True), (32, False)])
def test_in_place(R, interleaved):
    cos, sin = tables(R)
    qkv = make((2, 37, 12, 64))
    before, view = qkv.clone(), qkv[:, :, 4:9]
    assert tkq.rope(view, cos, sin, interleaved=interleaved, inplace=True) is view
    assert torch.equal(view, tkq.rope(before[:, :, 4:9], cos, sin, interleaved=interleaved))
    rest = [0, 1, 2, 3, 9, 10, 11]
    assert torch.equal(qkv[:, :, rest], before[:, :, rest])
    x = make((37, 5, 64))
    starts = torch.tensor([3, 20, 30], device=DEVICE, dtype=torch.int32)
    want = tkq.rope(x, cos, sin, cu_seqlens=starts)
    assert torch.equal(tkq.rope(x, cos, sin, cu_seqlens=starts, inplace=True), want)


def test_in_place_and_autograd():
    cos, sin = tables(64)
    x = make((2, 9, 6, 64)).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        tkq.rope(x, cos, sin, inplace=True)
    qkv = x * 1
    tkq.rope(qkv[:, :, 1:3], cos, sin, inplace=True)
    dy = make((2, 9, 6, 64), seed=3)
    got, = torch.autograd.grad(qkv, x, dy)
    want = dy.clone()
    want[:, :, 1:3] = reference.rope(dy[:, :, 1:3], cos, sin, inverse=True)
    assert torch.equal(got, want)
    y = x * 1
    z = y.square()
    with torch.no_grad():
        tkq.rope(y, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    with pytest.raises(ValueError, match="share memory"), torch.no_grad():
        tkq.rope(x[:, :, :1].expand(2, 9, 6, 64), cos, sin, inplace=True)


# ---- gradients and PyTorch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_autograd(interleaved):
    cos, sin = tables(64)
    q, k = make((2, 37, 8, 80)).requires_grad_(), make((2, 37, 2, 80), seed=1).requires_grad_()
    a, b = tkq.rope_qk(q, k, cos, sin, interleaved=interleaved, seqlen_offsets=5)
    dq = make((2, 8, 37, 80), seed=2).transpose(1, 2)  # strides that autograd hands on
    dk = make((), seed=3).expand(2, 37, 2, 80)
    got = torch.autograd.grad((a, b), (q, k), (dq, dk))
    for mine, dy in zip(got, (dq, dk)):
        more = dict(offset=5, interleaved=interleaved, inverse=True)
        assert_2x(mine, truth(dy, cos, sin, **more), reference.rope(dy, cos, sin, **more), ulps=1)
    one, = torch.autograd.grad(tkq.rope(q, cos, sin, interleaved=interleaved, seqlen_offsets=5), q, dq)
    assert torch.equal(one, got[0])
    a, b = tkq.rope_qk(q, k.detach(), cos, sin, interleaved=interleaved, seqlen_offsets=5)
    assert torch.equal(torch.autograd.grad(a, q, dq)[0], got[0])


def test_turning_back_undoes_it():
    x, (cos, sin) = make((2, 37, 8, 64), "fp32"), tables(64)
    y, z = tkq.rope(x, cos, sin), torch.empty_like(x)
    launch(Rotation(cos, sin, 0, None, None, None, False, True), y, z)
    assert (z - x).abs().max() < 1e-5


def test_compiled():
    cos, sin = tables(64)
    q, k = make((2, 37, 8, 64)).requires_grad_(), make((2, 37, 2, 64), seed=1).requires_grad_()

    def call(q, k):
        a, b = tkq.rope_qk(q * 2, k, cos, sin)
        return tkq.rope(a, cos, sin, seqlen_offsets=3), tkq.rope(b * 2, cos, sin, inplace=True)

    got, want = torch.compile(call, fullgraph=True)(q, k), call(q, k)
    assert all(map(torch.equal, got, want))
    mine, theirs = (torch.autograd.grad([y.sum() for y in ys], (q, k)) for ys in (got, want))
    for a, b in zip(mine, theirs):
        assert_2x(a, b.double(), b, ulps=2)


def test_the_torch_op():
    cos, sin = tables(64)
    x = make((2, 5, 3, 64)).requires_grad_()
    torch.library.opcheck(torch.ops.tkq.rope, (x, cos, sin, 1, None, None, None, False, False),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.parametrize("shape", [(0, 5, 3, 64), (2, 0, 3, 64), (2, 5, 0, 64)])
def test_no_elements(shape):
    x, (cos, sin) = make(shape).requires_grad_(), tables(64)
    y = tkq.rope(x, cos, sin)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_bad_input_launches_nothing():
    x, (cos, sin) = make((2, 5, 3, 64)), tables(64)
    flat, starts = make((10, 3, 64)), torch.tensor([0, 4, 10], device=DEVICE, dtype=torch.int32)
    tkq.rope(x, cos, sin)
    tkq.rope(flat, cos, sin, cu_seqlens=starts)
    cases = [
        (ValueError, "cos: is on cpu", (x, cos.cpu(), sin), {}), (ValueError, "sin is", (x, cos, sin[:5]), {}),
        (ValueError, "5 tokens from position 510", (x, cos, sin), dict(seqlen_offsets=510)),
        (ValueError, "seqlen_offsets: got -1", (x, cos, sin), dict(seqlen_offsets=-1)),
        (TypeError, "seqlen_offsets: got float", (x, cos, sin), dict(seqlen_offsets=0.5)),
        (ValueError, "x: strides are", (x.transpose(2, 3), cos, sin), {}),
        (ValueError, "cu_seqlens: goes with", (x, cos, sin), dict(cu_seqlens=starts)),
        (ValueError, "cu_seqlens or position_ids", (flat, cos, sin), {}),
        (ValueError, "cu_seqlens: got shape", (flat, cos, sin), dict(cu_seqlens=starts[:1])),
        (TypeError, "cu_seqlens: dtype", (flat, cos, sin), dict(cu_seqlens=starts.long())),
        (TypeError, "x: dtype", (x.double(), cos, sin), {}),
        (ValueError, "cos: last dimension", (x[..., :32], cos, sin), {})]
    for error, says, args, more in cases:
        for _ in range(2):  # a refused call leaves nothing behind that would let the next one through
            with pytest.raises(error, match=says):
                tkq.rope(*args, **more)


def test_on_a_side_stream_and_in_a_graph():
    x, (cos, sin) = make((4, 512, 32, 128)), tables(128)
    want = tkq.rope(x, cos, sin)
    assert torch.equal(on_a_side_stream(lambda late: tkq.rope(late, cos, sin), x), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tkq.rope(x, cos, sin)
        captured = tkq.rope_cos_sin(64, 34, device=DEVICE)  # a table that is not there yet is computed in the graph
    x.copy_(x.flip(0))
    y.fill_(math.nan)
    graph.replay()
    assert torch.equal(y, tkq.rope(x, cos, sin))
    assert torch.equal(captured[0], tkq.rope_cos_sin(64, 34, device=DEVICE)[0])


def test_an_eager_call_is_one_launch():
    from torch.profiler import ProfilerActivity, profile

    cos, sin = tables(64)
    q, k = make((2, 37, 8, 64)).requires_grad_(), make((2, 37, 2, 64)).requires_grad_()

    def call():
        a, b = tkq.rope_qk(q, k, cos, sin)
        torch.autograd.grad((a, b), (q, k), (q, k))
        with torch.no_grad():
            tkq.rope(q, cos, sin, inplace=True)

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    kernels = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 3, [e.name for e in kernels]


def test_the_variants_that_tuning_may_choose():
    from tkq.pointwise.plan import RopeConfig

    check(make((2, 37, 11, 64)), *tables(64), config=RopeConfig(256, 8))


@pytest.mark.slow
@pytest.mark.alone
def test_more_than_2_31_elements():
    B, S, H, D = 130, 4096, 32, 128
    x = torch.empty(B, S, H, D, device=DEVICE, dtype=torch.bfloat16)
    x.view(torch.int16).fill_(0x3F80)
    cos, sin = tables(D, rows=S)
    sample = make((3, S, H, D))
    x[[0, 64, B - 1]] = sample
    want = tkq.rope(sample, cos, sin)
    y = torch.full_like(x, math.nan)
    launch(Rotation(cos, sin, 0, None, None, None, False, False), x, y)
    assert torch.equal(y[[0, 64, B - 1]], want)
    ones = tkq.rope(torch.ones_like(sample[:1]), cos, sin)[0]
    assert all(torch.equal(y[b], ones) for b in range(B) if b not in (0, 64, B - 1))


@pytest.mark.slow
def test_the_same_bits_every_time():
    x, (cos, sin) = make((4, 500, 32, 128)), tables(128)
    once = tkq.rope(x, cos, sin)
    assert all(torch.equal(tkq.rope(x, cos, sin), once) for _ in range(20))

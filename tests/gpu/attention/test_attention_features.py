"""Windows, softcap, sinks, head dims and packed heads on a GPU: against float64, beside PyTorch at the same precision.

Each kernel is compiled once and called with many shapes and numbers."""
import math
from dataclasses import replace

import pytest
import torch

import tkq
from tests.helpers.attention.inputs import compare, in_low_precision, judge, make, run
from tkq import reference
from tkq.attention import ops
from tkq.attention.forward.config import AttentionConfig
from tkq.attention.forward.plan import plan
from tkq.attention.forward.spec import AttentionSpec
from tkq.testing import assert_2x

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = ((1, 1), (1, 777), (63, 64), (64, 63), (65, 65), (113, 203), (799, 3), (3, 799), (300, 100), (1023, 1024),
         (1024, 1023), (641, 641))
LIMITS = (0, 1, 63, 64, 65, 127, 128, 200, 1000)


def windows(kind):
    """(left, right), -1 for no limit: those of the kind that need kernels of their own."""
    for i, n in enumerate(LIMITS):
        other = LIMITS[(i * 5 + 2) % len(LIMITS)]
        yield {"left": (n, -1), "right": (-1, max(n, 1)), "both": (other, max(n, 1)), "causal": (n, 0)}[kind]


@pytest.mark.parametrize("dim, dtype, kind", (
    (128, BF16, "left"), (128, BF16, "right"), (128, BF16, "both"), *(
        pytest.param(*each, marks=pytest.mark.slow) for each in (
            (64, BF16, "causal"), (128, FP16, "causal"), (256, BF16, "both")))))
def test_windows(dim, dtype, kind):
    for rows, keys in SIZES:
        x = make(2, rows, keys, 3, 3, dim, dtype)
        for left, right in list(windows(kind))[::1 if rows < 200 else 3]:
            compare(*x, f"{rows} x {keys}", left=left, right=right)
    q, k, v = make(2, 517, 517, 3, 3, dim, dtype)
    for left, right in list(windows(kind))[::4]:
        compare(q * 20, k, v, "large scores", left=left, right=right)


def test_windows_of_long_sequences():
    x = make(1, 4097, 4097, 2, 1, 128)
    for left, right in ((1023, 0), (1024, 0), (4000, 0), (0, 0), (5000, 0), (512, 70), (511, 70), (512, 511),
                        (1023, -1)):
        compare(*x, "4097", left=left, right=right)
    compare(*make(1, 2500, 4097, 2, 2, 128), "2500 x 4097", left=700, right=0)


def test_window_arguments():
    q, k, v = make(2, 300, 300, 2, 2, 128)
    same = lambda a, b: torch.equal(tkq.flash_attn(q, k, v, **a), tkq.flash_attn(q, k, v, **b))
    assert same(dict(window_size=(None, 0)), dict(causal=True))
    assert same(dict(window_size=(-1, -1)), dict())
    assert same(dict(window_size=(299, 299)), dict())
    assert same(dict(window_size=(40, 70), causal=True), dict(window_size=(40, 0)))


@pytest.mark.parametrize("dim, dtype, causal", ((128, BF16, False), (64, FP16, True)))
def test_softcap(dim, dtype, causal):
    for rows, keys in SIZES:
        compare(*make(2, rows, keys, 2, 2, dim, dtype), f"{rows} x {keys}", causal=causal, softcap=15.0)
    q, k, v = make(2, 517, 517, 2, 2, dim, dtype)
    for cap in (0.5, 5.0, 50.0, 1e4):
        compare(q, k, v, "a cap", causal=causal, softcap=cap)
        compare(q * 20, k, v, "large scores", causal=causal, softcap=cap)
    compare(q, k, v * 100 + 50, "large values with a mean", causal=causal, softcap=15.0, softmax_scale=0.5)
    compare(torch.zeros_like(q), k, v, "zero queries", causal=causal, softcap=15.0)


@pytest.mark.parametrize("dim, dtype, kind, causal", ((128, BF16, torch.float32, True), (64, FP16, FP16, False),
                                                      pytest.param(64, BF16, BF16, True, marks=pytest.mark.slow)))
def test_sinks(dim, dtype, kind, causal):
    for rows, keys in SIZES:
        sinks = torch.randn(4, device="cuda").to(kind)
        compare(*make(2, rows, keys, 4, 4, dim, dtype), f"{rows} x {keys}", causal=causal, sinks=sinks)
    q, k, v = make(2, 517, 517, 4, 2, dim, dtype)
    for values in ((0, 30, -30, 2), (100, -100, -math.inf, 9), (-math.inf,) * 4):
        sinks = torch.tensor(values, device="cuda", dtype=kind)
        compare(q, k, v, f"sinks {values}", causal=causal, sinks=sinks)
        compare(q * 20, k, v, f"large scores, sinks {values}", causal=causal, sinks=sinks)
    without = tkq.flash_attn(q, k, v, causal=causal, return_lse=True)
    none = tkq.flash_attn(q, k, v, causal=causal, sinks=torch.full((4,), -math.inf, device="cuda"), return_lse=True)
    assert all(torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-3) for a, b in zip(without, none))


def test_sinks_of_rows_that_see_no_key():
    q, k, v = make(2, 300, 100, 2, 2, 128)
    sinks = torch.tensor([1.5, -math.inf], device="cuda")
    o, lse = tkq.flash_attn(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert o[:, :200].abs().max() == 0 and (lse[:, 1, :200] == -math.inf).all()
    assert (lse[:, 0, :200] - 1.5).abs().max() < 1e-6
    o, lse = tkq.flash_attn(q, k[:, :0], v[:, :0], sinks=sinks, return_lse=True)
    assert o.abs().max() == 0 and torch.equal(lse, sinks[:, None].expand(2, 2, 300))


def surrounded(x):
    """x inside NaN: rows before and behind, columns behind."""
    batch, rows, heads, dim = x.shape
    room = torch.full((batch, rows + 20, heads, dim + 24), math.nan, device="cuda", dtype=x.dtype)
    inside = room[:, 10:10 + rows, :, :dim]
    return inside.copy_(x)


@pytest.mark.parametrize("dim, dim_v, dtype, causal", (
    (8, 8, BF16, True), (96, 96, BF16, True),
    pytest.param(192, 192, BF16, False, marks=pytest.mark.slow), (192, 128, BF16, True), (256, 256, BF16, True),
    (64, 256, BF16, False),
    *[pytest.param(dim, dim, FP16, causal, marks=pytest.mark.slow)
      for dim, causal in ((96, False), (192, True), (256, False))]))
def test_head_dims(dim, dim_v, dtype, causal):
    """A kernel at all sizes, then the head dims of its width, between NaN."""
    for rows, keys in SIZES:
        compare(*make(2, rows, keys, 3, 1, dim, dtype, dim_v=dim_v), f"{rows} x {keys}", causal=causal)
    narrower = {8: (16, 40, 56), 96: (72, 80, 88), 192: (136, 160), 256: (200, 248), 64: (32,)}[dim]
    for d in narrower:
        dv = d if dim == dim_v else dim_v - 8
        q, k, v = (surrounded(x) for x in make(2, 333, 417, 4, 2, d, dtype, dim_v=dv))
        compare(q, k, v, f"head dims {d} and {dv}", causal=causal)
        room = torch.full((2, 340, 4, dv + 8), math.nan, device="cuda", dtype=dtype)
        compare(q, k, v, f"head dims {d} and {dv}, into a part", o=room[:, :333, :, :dv], causal=causal)
        assert torch.isnan(room[:, 333:]).all() and torch.isnan(room[..., dv:]).all(), f"head dim {d}: written beyond"


@pytest.mark.parametrize("dim, dtype, causal", (
    (192, BF16, True), (256, BF16, True), (96, BF16, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (256, BF16, False), (96, FP16, True), (192, FP16, True)))))
def test_hard_data(dim, dtype, causal):
    q, k, v = make(2, 517, 517, 4, 4, dim, dtype, dim_v=128 if dim == 192 else None)
    compare(q * 20, k, v, "large scores", causal=causal)
    compare(q, k, v * 1000 + 500, "large values with a mean", causal=causal)
    peaked = k.clone()
    peaked[:, ::50] = q[:, ::50] * 4
    compare(q, peaked, v, "peaked rows", causal=causal)
    dominating, twice = k.clone(), k.clone()
    dominating[:, 0], twice[:, 1::2] = 30 * q.mean(1), twice[:, :-1:2]
    compare(q, dominating, v, "one dominating key", causal=causal)
    compare(q, twice, v, "each key twice", causal=causal)
    compare(q, k[:, :1].expand(-1, 517, -1, -1), v, "equal keys", causal=causal)
    compare(q * 1e-4, k, v * 1e-4, "small numbers", causal=causal)
    one = v.clone()
    one[:, 100] = 3e4
    compare(q, k, one, "one dominating value", causal=causal)


@pytest.mark.parametrize("causal, groups", (
    (True, ((2, 3), (8, 1))), *(pytest.param(causal, ((4, 2),), marks=pytest.mark.slow) for causal in (False, True))))
def test_packed_heads(causal, groups):
    """Few queries of several heads in one tile: one query (decoding), a tile's worth, one more. Each number of heads in
    a tile is a kernel of its own."""
    for ratio, kv_heads in groups:
        for rows, keys in ((1, 1), (1, 4097), (2, 300), (15, 16), (16, 15), (33, 1000), (96, 96), (130, 200)):
            x = make(3, rows, keys, ratio * kv_heads, kv_heads, 128)
            compare(*x, f"{rows} x {keys}, {ratio} heads", causal=causal)


def test_packed_heads_with_everything():
    for rows, keys in ((1, 500), (7, 300), (40, 700)):
        x, sinks = make(2, rows, keys, 8, 2, 128), torch.randn(8, device="cuda")
        for left, right in ((0, 3), (100, 1), (130, 70)):
            compare(*x, f"{rows} x {keys}", left=left, right=right, sinks=sinks, softcap=20.0)
    assert ops.pack_of(1, 4) == 4
    for ratio in (3, 5, 6, 16):  # what no, or not every, head can share a tile with
        compare(*make(2, 1, 300, 2 * ratio, 2, 128), f"{ratio} heads", causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("changes", (dict(overlap_tasks=True), dict(ping_pong=False),
                                     dict(kv=176, q_stages=1, o_store_steps=2, ping_pong=False)), ids=str)
def test_pairs_of_blocks_whose_first_one_fetches(changes):
    config = AttentionConfig(cluster=2, **changes)
    for rows, keys in (*SIZES, (2304, 2304)):
        for options in (dict(causal=True), dict()):
            compare(*make(2, rows, keys, 4, 4, 128), f"{rows} x {keys}", config=config, **options)
    x = make(3, 900, 1300, 40, 40, 128)
    o, _ = compare(*x, "many tasks", config=config)
    for _ in range(50):
        again = torch.full_like(o, math.nan)
        run(*x, again, config=config)
        assert torch.equal(o, again)


@pytest.mark.slow
def test_o_from_registers():
    """A variant that plan may come to choose."""
    for dim, dim_v in ((256, 256), (200, 104), (128, 128)):
        planned = plan(AttentionSpec("bf16", 256 if dim > 128 else 128))
        config = replace(planned, o_reuses_q_smem=False, o_store_steps=1, o_from_registers=True)
        for rows, keys in SIZES:
            for options in (dict(causal=True), dict()):
                x = make(2, rows, keys, 4, 2, dim, dim_v=dim_v)
                compare(*x, f"{dim} {rows} x {keys}", config=config, **options)
        compare(*make(2, 2304, 2304, 8, 8, dim, dim_v=dim_v), "many tasks", config=config, causal=True)
        compare(*make(3, 5, 500, 8, 2, dim, dim_v=dim_v), "packed heads", config=config, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("changes", (dict(o_from_registers=False, o_reuses_q_smem=True), dict(ping_pong=True),
                                     dict(cluster=2)), ids=str)
def test_variants_of_wide_heads(changes):
    """What plan may come to choose for 256 columns."""
    config = replace(plan(AttentionSpec("bf16", 256)), **changes)
    for options in (dict(causal=True), dict()):
        for rows, keys in SIZES:
            compare(*make(2, rows, keys, 4, 2, 256), f"{rows} x {keys}", config=config, **options)
        compare(*make(2, 2304, 2304, 8, 8, 256), "many tasks", config=config, **options)


def test_nothing_outside_is_read_or_written():
    for dim, options in ((128, dict(left=50, right=10)), (256, dict(causal=True))):
        room = [torch.full((2, 400, 4, dim), math.nan, device="cuda", dtype=BF16) for _ in range(4)]
        q, k, v, o = [x[:, 30:330] for x in room]
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, device="cuda"))
        compare(q, k, v, "inside NaN", o=o, **options)
        assert all(torch.isnan(x[:, :30]).all() and torch.isnan(x[:, 330:]).all() for x in room)


def test_many_tasks():
    """More than there are blocks, with Q's tile used for O and windows between."""
    compare(*make(3, 900, 1300, 16, 4, 256), "head_dim 256", causal=True)
    compare(*make(3, 900, 1300, 16, 4, 192, dim_v=128), "head dims 192 and 128", causal=True)
    compare(*make(3, 900, 1300, 24, 8, 128), "windows", left=100, right=0)


def test_repeats_are_equal():
    """With lse, as the other tests have these kernels."""
    sinks = torch.randn(8, device="cuda")
    for dim, options in ((256, dict(causal=True)), (128, dict(window_size=(200, 0))), (128, dict(softcap=15.0)),
                         (128, dict(causal=True, sinks=sinks))):
        q, k, v = make(4, 1111, 1111, 8, 8, dim)
        first = tkq.flash_attn(q, k, v, **options, return_lse=True)
        for _ in range(30):
            again = tkq.flash_attn(q, k, v, **options, return_lse=True)
            assert all(torch.equal(a, b) for a, b in zip(again, first)), options


@pytest.mark.slow
def test_lse_changes_nothing():
    q, k, v = make(1, 333, 700, 4, 2, 256)
    want, _ = compare(q, k, v, "256", causal=True)
    o = torch.full(q.shape, math.nan, dtype=q.dtype, device="cuda")
    run(q, k, v, o, causal=True)
    assert torch.equal(o, want)


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_compiled_call():
    q, k, v = make(2, 200, 200, 4, 4, 128)
    call = lambda q, k, v: tkq.flash_attn(q, k, v, window_size=(200, 0), return_lse=True)
    for got, want in zip(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v)):
        assert torch.equal(got, want)


def test_an_empty_window_size_of_head_dims_that_differ():
    q, k, v = make(2, 5, 0, 4, 2, 192, dim_v=128)
    o, lse = tkq.flash_attn(q, k, v, return_lse=True)
    assert o.shape == (2, 5, 4, 128) and o.abs().max() == 0 and (lse == -math.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("dim, dim_v, causal", (
    (192, 192, False), (192, 192, True), (192, 128, False), (192, 128, True), (96, 96, False), (96, 96, True),
    (256, 256, False), (256, 256, True)))
def test_long_sequences(dim, dim_v, causal):
    for n in (4097, 8300):
        compare(*make(1, n, n, 2, 1, dim, dim_v=dim_v), f"{n} rows", causal=causal)


@pytest.mark.slow
def test_every_pair_of_widths():
    for dim in (64, 96, 128, 192, 256):
        for dim_v in (64, 96, 128, 192, 256):
            for rows, keys in ((113, 203), (1023, 1024), (65, 65)):
                compare(*make(2, rows, keys, 2, 1, dim, dim_v=dim_v), f"{dim} and {dim_v}", causal=True)


@pytest.mark.slow
@pytest.mark.alone
def test_under_memory_pressure_and_on_two_streams():
    """500 repeats of each call, bit for bit, ten at a time on two streams, while most of the memory is taken."""
    every = (64, 64), (128, 128), (192, 128), (256, 256)
    inputs = {dims: make(2, 1500, 1500, 8, 2, dims[0], dim_v=dims[1]) for dims in every}
    calls = [(dims, options) for dims in inputs for options in (dict(causal=True), {})]
    calls += [((256, 256), dict(window_size=(300, 0))), ((128, 128), dict(causal=True, softcap=20.0))]
    want = [tkq.flash_attn(*inputs[dims], **options) for dims, options in calls]
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(max(free - (4 << 30), 0), dtype=torch.uint8, device="cuda")
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for (dims, options), right in zip(calls, want):
        for _ in range(50):
            found = []
            for i in range(10):
                with torch.cuda.stream(streams[i % 2]):
                    found.append(tkq.flash_attn(*inputs[dims], **options))
            torch.cuda.synchronize()
            assert all(torch.equal(o, right) for o in found), f"{dims} {options}"
    del taken


def test_references_agree():
    """What judges the others: the definition at low precision is within its own rounding of the definition."""
    q, k, v = make(1, 100, 120, 2, 2, 64)
    options = dict(left=30, right=5, softcap=10.0, sinks=torch.zeros(2, device="cuda"))
    o, lse = reference.flash_attn(q.double(), k.double(), v.double(), **options)
    low_o, low_lse = in_low_precision(q, k, v, **options)
    assert (low_o - o).abs().max() < 0.05 and (low_lse - lse).abs().max() < 0.1
    judge(o.to(BF16), lse.float(), q, k, v, **options)
    with pytest.raises(AssertionError):
        assert_2x((o + 0.2).to(BF16), o, low_o)

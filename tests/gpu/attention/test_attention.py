"""flash_attn on a GPU: against float64, beside PyTorch at the same precision."""
import math

import pytest
import torch

import tkq
from tests.helpers.attention import inputs
from tests.helpers.attention.inputs import make, run
from tkq.attention.forward.config import AttentionConfig
from tkq.attention.forward.plan import LENGTHS, plan
from tkq.attention.forward.spec import AttentionSpec

DTYPES = (torch.bfloat16, torch.float16)
SIZES = ((128, 128), (64, 64), (1, 1), (1, 777), (113, 203), (300, 100), (65, 1999), (2000, 65), (641, 641),
         (1024, 1024), (127, 129), (1023, 1024), (129, 1), (2048, 1111), (300, 2500), (2304, 2304), (63, 63), (65, 65),
         (799, 3), (1023, 1023))


def compare(q, k, v, causal, scale=None, o=None, what="", config=None):
    return inputs.compare(q, k, v, what, o, config, causal=causal, softmax_scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.sampled(when=lambda dtype, dim, causal: dtype == torch.bfloat16 or (dim == 64 and not causal))
def test_sizes(dtype, dim, causal):
    for rows, keys in SIZES:
        compare(*make(2, rows, keys, 4, 2, dim, dtype), causal, what=f"{rows} x {keys}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.sampled(when=lambda dtype, dim, causal: dtype == torch.bfloat16)
def test_each_length_s_kernel_at_all_sizes(dtype, dim, causal):
    """Every kernel is right at every size, whatever the plan uses it for."""
    spec = AttentionSpec({torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype], dim, causal)
    for config in dict.fromkeys(plan(spec, length) for length in LENGTHS):
        for rows, keys in SIZES:
            compare(*make(2, rows, keys, 4, 2, dim, dtype), causal, what=f"{rows} x {keys} {config}", config=config)
        x = make(3, 900, 1300, 40, 8, dim, dtype)  # more tasks than blocks
        compare(*x, causal, what=f"many tasks {config}", config=config)


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True))
def test_long_sequences(dim, causal):
    for n in (4097, 8300):
        compare(*make(1, n, n, 2, 1, dim, torch.bfloat16), causal, what=f"{n} rows")


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True))
def test_heads(dim, causal):
    for batch, heads, kv_heads in ((1, 1, 1), (3, 6, 3), (2, 8, 1), (2, 40, 8), (7, 13, 1)):
        x = make(batch, 333, 417, heads, kv_heads, dim, torch.bfloat16)
        compare(*x, causal, what=f"B{batch} H{heads}/{kv_heads}")


@pytest.mark.parametrize("overlap_tasks", (False, True))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.sampled(when=lambda causal, overlap_tasks: not causal or not overlap_tasks)
def test_each_task_has_its_own_largest_scores(causal, overlap_tasks):
    """512 tasks: a block has several and, with overlap_tasks, begins the next one before it has written O and lse of
    the last."""
    q, k, v = make(8, 256, 256, 32, 8, 128)
    apart = torch.linspace(0.2, 5, 8 * 32, device="cuda")[torch.randperm(8 * 32, device="cuda")]
    q = (q * apart.view(8, 1, 32, 1)).to(q.dtype)
    compare(q, k, v, causal, what="tasks", config=AttentionConfig(overlap_tasks=overlap_tasks))


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True))
def test_hard_data(dim, causal):
    q, k, v = make(2, 517, 517, 4, 4, dim, torch.bfloat16)
    compare(q * 20, k, v, causal, what="large scores")
    compare(q, k, v * 1000 + 500, causal, what="large values with a mean")
    peaked = k.clone()
    peaked[:, ::50] = q[:, ::50] * 4
    compare(q, peaked, v, causal, what="peaked rows")
    dominating, twice = k.clone(), k.clone()
    dominating[:, 0], twice[:, 1::2] = 30 * q.mean(1), twice[:, :-1:2]
    compare(q, dominating, v, causal, what="one dominating key")
    compare(q, twice, v, causal, what="each key twice")
    compare(q, k[:, :1].expand(-1, 517, -1, -1), v, causal, what="equal keys")
    compare(torch.zeros_like(q), k, v, causal, what="zero queries")
    compare(-q.abs(), k.abs() * 8, v, causal, what="all scores far below zero")
    compare(q, k, v, causal, scale=1.5, what="scale")
    compare(q, k, v, causal, scale=1e-4, what="small scale")


@pytest.mark.parametrize("causal", (False, True))
def test_layouts(causal):
    for dim in (64, 128):
        packed = torch.randn(2, 333, 12, dim, device="cuda", dtype=torch.bfloat16)
        compare(*packed.split(4, 2), causal, what="packed qkv")
        q, k, v = make(2, 333, 333, 4, 4, dim, torch.bfloat16)
        heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        compare(*heads_first, causal, what="(B, H, S, D) in memory")
        one_head = [x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v)]
        compare(q, *one_head, causal, what="stride 0 over heads")
        one_batch = [x[:1].expand(2, -1, -1, -1) for x in (k, v)]
        compare(q, *one_batch, causal, what="stride 0 over the batch")
        wide = torch.randn(2, 333, 4, 2 * dim, device="cuda", dtype=torch.bfloat16)
        compare(wide[..., :dim], wide[..., dim:], v, causal, what="rows with a pitch")
        compare(q[:, ::3], k[:, ::2], v[:, ::2], causal, what="every second row")
        one = q[:1].as_strided((1, 333, 4, dim), (3, *q.stride()[1:]))  # the stride of an extent of 1 says nothing
        compare(one, k[:1], v[:1], causal, what="odd stride of an extent of 1")


@pytest.mark.parametrize("causal", (False, True))
def test_nothing_outside_is_read_or_written(causal):
    for dim in (64, 128):
        room = [torch.full((2, 400, 4, dim), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        q, k, v, o = [x[:, 30:330] for x in room]
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, device="cuda"))
        compare(q, k, v, causal, o=o, what="inside NaN")
        assert all(torch.isnan(x[:, :30]).all() and torch.isnan(x[:, 330:]).all() for x in room)


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.sampled(when=lambda dim, causal: causal and dim == 64)
def test_lse_changes_nothing(dim, causal):
    for keys in (333, 4096, 8200):  # the kernels of short, medium and long sequences
        q, k, v = make(1, 333, keys, 2, 2, dim, torch.bfloat16)
        want, _ = compare(q, k, v, causal, what=f"{keys} keys")
        o = torch.full(q.shape, math.nan, dtype=q.dtype, device="cuda")
        run(q, k, v, o, causal=causal)
        assert torch.equal(o, want)


def test_many_rows_of_few_keys():
    """More tiles than a section of heads may have, counted in 32 bits."""
    q = torch.randn(1, 1 << 22, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    o, lse = tkq.flash_attn(q, k, v, causal=True, return_lse=True)
    assert o[:, :-1].abs().max() == 0 and (lse[:, :, :-1] == -math.inf).all()
    assert torch.equal(o[:, -1], v[:, 0])


def test_nan_and_infinity_stay_in_their_rows():
    q, k, v = make(1, 200, 200, 2, 2, 128, torch.bfloat16)
    want = tkq.flash_attn(q, k, v)
    q = q.clone()
    q[0, 17, 1, 5] = math.nan
    got = tkq.flash_attn(q, k, v)
    assert torch.isnan(got[0, 17, 1]).all()
    got[0, 17, 1] = want[0, 17, 1]
    assert torch.equal(got, want)


def test_rows_that_see_no_key():
    q, k, v = make(2, 300, 100, 2, 2, 64, torch.float16)
    o, lse = tkq.flash_attn(q, k, v, causal=True, return_lse=True)
    assert o[:, :200].abs().max() == 0 and (lse[:, :, :200] == -math.inf).all()
    assert torch.isfinite(lse[:, :, 200:]).all()


@pytest.mark.parametrize("rows, keys", ((0, 5), (5, 0), (0, 0)))
def test_no_rows_no_keys(rows, keys):
    q, k, v = make(2, rows, keys, 2, 1, 64, torch.bfloat16)
    o, lse = tkq.flash_attn(q, k, v, return_lse=True)
    assert o.shape == q.shape and lse.shape == (2, 2, rows)
    assert not rows or (o.abs().max() == 0 and (lse == -math.inf).all())
    assert tkq.flash_attn(q[:0], k[:0], v[:0]).shape == (0, rows, 2, 64)


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True))
def test_repeats_are_equal_and_the_counter_comes_back(dim, causal):
    for keys in (1111, 8200):  # the kernels of short and of long sequences
        q, k, v = make(4, 1111, keys, 8, 8, dim, torch.bfloat16)
        first = tkq.flash_attn(q, k, v, causal=causal, return_lse=True)  # as other tests' kernels do
        for _ in range(50):
            assert all(map(torch.equal, tkq.flash_attn(q, k, v, causal=causal, return_lse=True), first))


def test_streams_and_graphs():
    sets = [make(2, 700, 700, 8, 8, 128, torch.bfloat16, seed) for seed in range(3)]
    want = [tkq.flash_attn(*x, causal=True) for x in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in sets]
    got = []
    for _ in range(10):
        for x, stream in zip(sets, streams):
            with torch.cuda.stream(stream):
                got.append(tkq.flash_attn(*x, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(o, want[i % 3]) for i, o in enumerate(got))
    fixed = [x.clone() for x in sets[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tkq.flash_attn(*fixed, causal=True)
    for x, w in zip(sets, want):
        for dst, src in zip(fixed, x):
            dst.copy_(src)
        graph.replay()
        tkq.flash_attn(*sets[1], causal=True)  # beside it, on the same stream
        assert torch.equal(o, w)


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_compiled_call():
    q, k, v = make(2, 200, 200, 4, 4, 64, torch.bfloat16)
    f = torch.compile(lambda q, k, v: tkq.flash_attn(q, k, v, causal=True, return_lse=True), fullgraph=True)
    for got, want in zip(f(q, k, v), tkq.flash_attn(q, k, v, causal=True, return_lse=True)):
        assert torch.equal(got, want)


def test_large_strides():
    """Offsets beyond 2^31 elements."""
    room = torch.empty(3, (1 << 30) // 64 + 300, 1, 64, device="cuda", dtype=torch.bfloat16)
    q = room[:, -300:]
    q.copy_(torch.randn(q.shape, device="cuda"))
    compare(q, q, q, True, what="far apart")


@pytest.mark.parametrize("causal", ["no", None, 2])
def test_bad_causal_is_named(causal):
    q, k, v = make(1, 64, 64, 2, 2, 64, torch.bfloat16)
    with pytest.raises(TypeError, match="flash_attn: causal: got"):
        tkq.flash_attn(q, k, v, causal=causal)


def test_layout_errors_name_the_argument():
    q, k, v = make(1, 64, 64, 2, 2, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="k: strides are .* contiguous"):
        tkq.flash_attn(q, torch.zeros(1, 64, 2, 128, device="cuda", dtype=q.dtype)[..., ::2], v)
    with pytest.raises(ValueError, match="v: begins .* 16 bytes"):
        tkq.flash_attn(q, k, torch.zeros(v.numel() + 1, device="cuda", dtype=q.dtype)[1:].view_as(v))
    with pytest.raises(ValueError, match="k is on cpu|device"):
        tkq.flash_attn(q, k.cpu(), v)

"""flash_attn_varlen on a GPU: each sequence by itself, nothing of its neighbours, and how tasks are dealt out."""
import math
import random

import pytest
import torch

import tkq
from tests.helpers.attention.inputs import judge
from tests.helpers.attention.varlen_inputs import LONGER, MIXED, compare, cumulated, make, run
from tests.helpers.sanitizer.guard_pages import guarded
from tkq import reference, runtime
from tkq.attention.arguments import Lengths
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.tile_order import heads_in_l2_section, tile_of_task, work_rank
from tkq.runtime import Recipe

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("dim, dtype, options", (
    (128, BF16, {}), (128, BF16, dict(causal=True)), (64, FP16, dict(causal=True)), (256, BF16, dict(causal=True)),
    (128, BF16, dict(left=70, right=0)), (128, BF16, dict(left=33, right=65))), ids=str)
def test_mixed_lengths(dim, dtype, options):
    compare(*make(MIXED, 4, 2, dim, dtype), "mixed", **options)
    compare(*make(MIXED, 4, 2, dim, dtype, spare=200), "rows behind the last sequence", **options)
    compare(*make(MIXED[::-1], 3, 3, dim, dtype, spare=1), "the other way round", **options)
    compare(*make([(0, 0), (0, 5), (3, 0)], 3, 3, dim, dtype), "no row sees a key", **options)
    compare(*make([(700, 700)], 3, 3, dim, dtype), "one sequence", **options)


@pytest.mark.parametrize("causal", (False, True))
def test_longer_sequences(causal):
    """Whatever is said of their lengths; 8192 keys or more, causal, have a kernel of their own."""
    for lengths in (LONGER, LONGER[::-1]):
        compare(*make(lengths, 2, 1, 128), "longer", causal=causal)
    for longest in (900, 8300):
        compare(*make(MIXED, 4, 2, 128, spare=20), f"of up to {longest}", max_q=longest, max_k=longest, causal=causal)
    x = make([(300, 8300), (1, 1), (2100, 2100)], 2, 1, 128)
    compare(*x, "8300 keys", max_q=8300, max_k=8300, causal=causal)


@pytest.mark.parametrize("dim, causal", ((64, False), (128, True), (256, True)))
def test_hard_data(dim, causal):
    """Groups of heads; in each sequence by itself."""
    q, k, v, cu_q, cu_k = make(MIXED, 4, 2, dim, spare=5)
    compare(q * 20, k, v, cu_q, cu_k, "large scores", causal=causal)
    compare(q, k, v * 1000 + 500, cu_q, cu_k, "large values with a mean", causal=causal)
    dominating, twice = k.clone(), k.clone()
    for s in range(len(MIXED)):
        a, b, c, d = (int(cu[i]) for cu in (cu_q, cu_k) for i in (s, s + 1))
        if b > a and d > c:
            dominating[c] = 30 * q[a:b].unflatten(1, (2, 2)).mean((0, 2))
        twice[c + 1:d:2] = twice[c:d - 1:2].clone()
    compare(q, dominating, v, cu_q, cu_k, "one dominating key", causal=causal)
    compare(q, twice, v, cu_q, cu_k, "each key twice", causal=causal)


def test_pairs_of_blocks_that_fetch_tasks():
    """Without a mask and with long sequences two blocks share a task: the first one sends it to the second."""
    long = dict(max_q=8192, max_k=8192)
    for lengths in (MIXED, [(2500, 2500), (1, 3000), (700, 0), (257, 255), (3000, 1)], [(1, 1)], [(40, 90)] * 200):
        compare(*make(lengths, 4, 2, 128), f"{len(lengths)} sequences", **long)
    q, k, v, *cu = make([(1300, 1300), (600, 2000), *MIXED], 20, 20, 128, spare=200)
    first, _ = compare(q, k, v, *cu, "rows behind the last sequence", **long)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for i in range(50):
        with torch.cuda.stream(streams[i % 2]):
            o = tkq.flash_attn_varlen(q, k, v, *cu, 8192, 8192)
        torch.cuda.synchronize()
        assert torch.equal(o, first), f"repeat {i}"


def test_everything_at_once():
    sinks = torch.randn(8, device="cuda")
    x = make(MIXED, 8, 2, 192, spare=77, dim_v=128)
    seqused_q, seqused_k = (torch.tensor([max(n - 3 * (n % 2), 0) for n in lengths], device="cuda", dtype=torch.int32)
                            for lengths in zip(*MIXED))
    empty_beyond(x, seqused_q, seqused_k)
    for left, right in ((-1, 5), (100, 3), (0, 200)):
        compare(*x, "all", seqused_q=seqused_q, seqused_k=seqused_k, max_q=1, sinks=sinks, softcap=20.0, left=left,
                right=right)


def empty_beyond(x, seqused_q, seqused_k):
    """NaN where nothing is in use."""
    q, k, v, cu_q, cu_k = x
    for x, cu, used in ((q, cu_q, seqused_q), (k, cu_k, seqused_k), (v, cu_k, seqused_k)):
        for s, n in enumerate(used.tolist()):
            x[int(cu[s]) + n:int(cu[s + 1])] = math.nan


@pytest.mark.parametrize("dim, causal", ((128, True), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in ((128, False), (64, True)))))
def test_what_is_not_in_use_is_not_looked_at(dim, causal):
    q, k, v, cu_q, cu_k = x = make(MIXED, 4, 2, dim, spare=50)
    seqused_q, seqused_k = (torch.tensor([n // 2 for n in lengths], device="cuda", dtype=torch.int32)
                            for lengths in zip(*MIXED))
    empty_beyond(x, seqused_q, seqused_k)
    compare(q, k, v, cu_q, cu_k, "NaN", seqused_q=seqused_q, seqused_k=seqused_k, causal=causal)
    if dim == 128:
        compare(q, k, v, cu_q, cu_k, "NaN, fewer keys only", seqused_k=torch.zeros_like(seqused_k), causal=causal)


def test_a_sequence_s_nan_stays_in_it():
    x = make(MIXED, 4, 2, 128)
    want = tkq.flash_attn_varlen(*x, 513, 900)
    q, k, v, cu_q, cu_k = x
    a, b, c, d = (int(cu[s]) for cu in (cu_q, cu_k) for s in (2, 3))
    q, k, v = q.clone(), k.clone(), v.clone()
    q[a:b], k[c:d], v[c:d] = math.nan, math.inf, math.nan
    got = tkq.flash_attn_varlen(q, k, v, cu_q, cu_k, 513, 900)
    assert torch.isnan(got[a:b]).all()
    assert torch.equal(got[:a], want[:a]) and torch.equal(got[b:], want[b:])


def test_results_do_not_depend_on_the_others():
    """Bit for bit what flash_attn gives for the sequence alone, whatever is before and behind it."""
    q, k, v, cu_q, cu_k = make(MIXED, 4, 4, 128)
    o = tkq.flash_attn_varlen(q, k, v, cu_q, cu_k, 513, 900, causal=True)
    for s in (2, 7, 8):
        a, b, c, d = (int(cu[i]) for cu in (cu_q, cu_k) for i in (s, s + 1))
        alone = tkq.flash_attn_varlen(q[a:b], k[c:d], v[c:d], cumulated([b - a]), cumulated([d - c]), 513, 900,
                                      causal=True)
        assert torch.equal(alone, o[a:b])


@pytest.mark.parametrize("where", ("front", "end"))
def test_nothing_outside_is_touched(where):
    """No memory in front of any tensor, or behind it."""
    for lengths in ([(n, n) for n in (700, 1, 64, 0, 333, 2000)], MIXED, [(300, 200)]):
        q, k, v, cu_q, cu_k = make(lengths, 4, 4, 128)
        want, want_lse = compare(q, k, v, cu_q, cu_k, "anywhere")
        q, k, v, o, lse = (guarded(x, where) for x in (q, k, v, torch.full_like(want, math.nan), want_lse + 1))
        run((q, k, v, o, lse), Lengths(cu_q, cu_k))
        torch.cuda.synchronize()
        assert torch.equal(o, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("causal", (pytest.param(False, marks=pytest.mark.slow), True))
def test_packed_heads(causal):
    lengths = [(1, n) for n in (1, 500, 0, 64, 1025, 77)] + [(0, 10), (3, 200)]
    compare(*make(lengths, 8, 2, 128, spare=9), "decode", max_q=1, causal=causal)
    compare(*make(MIXED, 8, 2, 128), "packed, though sequences are longer than was said", max_q=1, causal=causal)


def test_many_sequences():
    """More than a warp looks at together, most of them short, of few ranks and of many."""
    choose = random.Random(0)
    short = [(choose.randrange(5), choose.randrange(5)) for _ in range(1500)]
    compare(*make(short, 2, 1, 128, spare=3), "short", max_q=4096, causal=True)
    lengths = [(n := choose.choice((1, 7, 64, 200, 700)), n + choose.randrange(3)) for _ in range(100)]
    compare(*make(lengths, 2, 1, 128), "of many ranks", causal=True)


def test_layouts():
    q, k, v, cu_q, cu_k = make(MIXED, 4, 4, 128)
    packed = torch.randn(q.shape[0], 12, 128, device="cuda", dtype=BF16)
    compare(*packed.split(4, 1), cu_q, cu_q, "packed qkv", causal=True)
    one_head = [x[:, :1].expand(-1, 4, -1) for x in (k, v)]
    compare(q, *one_head, cu_q, cu_k, "stride 0 over heads", causal=True)
    one_key = [x[:1].as_strided((1, 4, 128), (1001, 128, 1)) for x in (k, v)]
    compare(q[:3], *one_key, cumulated([3]), cumulated([1]), "one key, of a stride that is not used")
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    compare(*heads_first, cu_q, cu_k, "(H, total, D) in memory", causal=True)


def test_public_function():
    x = make(MIXED, 4, 2, 128, spare=5)
    for options in (dict(window_size=(20, 3)), dict(sinks=torch.zeros(4, device="cuda")), dict(causal=True)):
        o, lse = tkq.flash_attn_varlen(*x, 513, 900, return_lse=True, **options)
        assert o.shape == x[0].shape and lse.shape == (4, x[0].shape[0]) and lse.dtype == torch.float32
    assert torch.equal(tkq.flash_attn_varlen(*x, 513, 900, causal=True), o)
    used = torch.zeros(len(MIXED), device="cuda", dtype=torch.int32)
    o, lse = tkq.flash_attn_varlen(*x, 513, 900, seqused_q=used, return_lse=True)
    assert o.abs().max() == 0 and (lse == -math.inf).all()
    q, k, v, cu_q, cu_k = x
    none = tkq.flash_attn_varlen(q, k[:0], v[:0], cu_q, torch.zeros_like(cu_k), 513, 0)
    assert none.abs().max() == 0 and none.shape == q.shape
    assert tkq.flash_attn_varlen(q[:0], k, v, torch.zeros_like(cu_q), cu_k, 0, 900).shape == (0, 4, 128)
    assert tkq.flash_attn_varlen(q, k, v, cu_q[:1], cu_k[:1], 0, 0).abs().max() == 0
    call = lambda *x: tkq.flash_attn_varlen(*x, 513, 900, causal=True)
    assert torch.equal(torch.compile(call, fullgraph=True)(*x), call(*x))


def test_errors_name_the_argument():
    q, k, v, cu_q, cu_k = make(MIXED, 4, 2, 128)
    with pytest.raises(TypeError, match="cu_seqlens_q.*int64.*int32"):
        tkq.flash_attn_varlen(q, k, v, cu_q.long(), cu_k, 513, 900)
    with pytest.raises(ValueError, match="cu_seqlens_k.*cpu"):
        tkq.flash_attn_varlen(q, k, v, cu_q, cu_k.cpu(), 513, 900)
    with pytest.raises(ValueError, match="k: strides are"):
        strided = torch.zeros(k.shape[0], 2, 256, device="cuda", dtype=BF16)[..., ::2]
        tkq.flash_attn_varlen(q, strided, v, cu_q, cu_k, 513, 900)


def test_graph_with_lengths_that_change():
    """Captured once, replayed with other sequences: nothing waits for their lengths."""
    others = [(n, n) for n in (300, 0, 1, 64, 5, 70, 2, 9, 400, 1, 1)]
    first, second = make(MIXED, 4, 2, 128, spare=500), make(others, 4, 2, 128, spare=500)
    q, k, v, cu_q, cu_k = (x.clone() for x in first)
    options = dict(causal=True, return_lse=True)
    tkq.flash_attn_varlen(q, k, v, cu_q, cu_k, 513, 900, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = tkq.flash_attn_varlen(q, k, v, cu_q, cu_k, 513, 900, **options)
    for other in (first, second, first):
        for dst, src in zip((q, k, v), other):
            n = min(len(dst), len(src))
            dst[:n], dst[n:] = src[:n], 0.0
        cu_q.copy_(other[3])
        cu_k.copy_(other[4])
        graph.replay()
        want, want_lse = tkq.flash_attn_varlen(q, k, v, cu_q, cu_k, 513, 900, **options)
        assert torch.equal(o, want) and torch.equal(lse, want_lse)
        used = int(other[3][-1])
        true, _ = reference.flash_attn_varlen(q.double(), k.double(), v.double(), cu_q, cu_k, causal=True)
        assert (o[:used] - true[:used]).abs().max() < 0.05 and o[used:].abs().max() == 0


def test_repeats_are_equal_on_two_streams():
    x = make(MIXED * 4, 8, 2, 128)
    want = tkq.flash_attn_varlen(*x, 513, 900, causal=True)
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    got = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 2]):
            got.append(tkq.flash_attn_varlen(*x, 513, 900, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(o, want) for o in got)


# ---- which task is which -------------------------------------------------------------------------


def dealt(lengths, heads, total_q, used=None):
    """The tasks in their order, from the definition."""
    queries, block, l2_section_bytes = 64, 80, 1 << 20
    starts_q, starts_k = ([sum(n[:s]) for s in range(len(n) + 1)] for n in zip(*lengths))
    rows = [(starts_q[s], starts_k[s], *(used[s] if used else lengths[s])) for s in range(len(lengths))]
    rows.append((starts_q[-1], starts_k[-1], total_q - starts_q[-1], 0))
    order = sorted(rows, key=lambda r: work_rank(ceil_div(r[3], block)))  # stable: then in their order
    tasks = []
    for q, k, rows_q, rows_k in order:
        tiles = ceil_div(rows_q, queries)
        l2_section = heads_in_l2_section(max(rows_k, 1) * 512, l2_section_bytes, 1, heads)
        for i in range(tiles * heads):
            head, tile = tile_of_task(i, tiles, heads, l2_section, True)
            tasks.append([q + rows_q, k + rows_k, head, tile, rows_q, rows_k])
    return tasks


def test_tasks_are_those_of_the_definition():
    choose = random.Random(1)
    deal = runtime.function(Recipe("tests.helpers.attention.scheduler_kernel:Deal", ()))
    for count in (1, 2, 31, 32, 33, 100, 700):
        most = 3000 if count < 50 else 200
        lengths = [(choose.randrange(most), choose.randrange(most)) for _ in range(count)]
        lengths = [x if choose.random() < 0.8 else (0, x[1] % 9) for x in lengths]
        used = [(min(choose.randrange(most), q), min(choose.randrange(most), k)) for q, k in lengths]
        cu_q, cu_k = (cumulated(n) for n in zip(*lengths))
        total_q, total_k, heads = int(cu_q[-1]) + 100, int(cu_k[-1]), 3
        seqused_q, seqused_k = (torch.tensor(n, device="cuda", dtype=torch.int32) for n in zip(*used))
        want = torch.tensor(dealt(lengths, heads, total_q, used), device="cuda", dtype=torch.int32)
        for blocks in (1, 7):
            tasks = torch.full((len(want) + 1, 6), -77, device="cuda", dtype=torch.int32)
            number = torch.zeros(1, device="cuda", dtype=torch.int32)
            deal(cu_q, cu_k, seqused_q, seqused_k, tasks, number, total_q, total_k, heads, blocks)
            assert number.item() == len(want) and (tasks[-1] == -77).all()
            wrong = (tasks[:-1] != want).any(1).nonzero().flatten()
            assert not len(wrong), f"{count} sequences: task {wrong[0]} is {tasks[wrong[0]]}, expected {want[wrong[0]]}"


@pytest.mark.slow
@pytest.mark.alone
def test_more_than_2_31_elements():
    rows = (1 << 31) // 2048 + 5000
    q = torch.randn(rows, 16, 128, device="cuda", dtype=BF16)
    lengths = [rows - 700, 300, 400]
    cu = cumulated(lengths)
    o, lse = tkq.flash_attn_varlen(q, q, q, cu, cu, max(lengths), max(lengths), window_size=(100, 0), return_lse=True)
    for s in (1, 2):
        a, b = int(cu[s]), int(cu[s + 1])
        x = q[None, a:b]
        judge(o[None, a:b], lse[None, :, a:b], x, x, x, "far away", left=100, right=0)

"""Attention over a cache where there is no GPU: kv_append's and merge_state's own code, CPU tensors, plans, and what
is refused."""
import math
import random

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.emulation.decode import KvAppendOnCpu, ListerOnCpu, MergeStateOnCpu, function, walk_function
from tkq.attention.decode import launch, words
from tkq.attention.decode.check import Call, Options
from tkq.attention.decode.plan import SHARED, padded, plan
from tkq.attention.decode.planned import Planned
from tkq.attention.decode.spec import HEAD_DIMS, AppendSpec, DecodeSpec, MergeSpec
from tkq.reference import decode as reference

BF16 = torch.bfloat16


def test_the_kernel_of_merge_state(monkeypatch):
    torch.manual_seed(0)
    a, b = torch.randn(2, 2, 5, 3, 24).half()
    of_a, of_b = torch.randn(2, 2, 3, 5).mul(3)
    of_a[0, 0, 0] = of_a[1, 2, 4] = of_b[1, 2, 4] = of_b[1, 0, 1] = -math.inf
    a[0, 0, 0] = math.nan
    o, lse = torch.full_like(a, math.nan), torch.full_like(of_a, math.nan)
    function(MergeStateOnCpu(MergeSpec("fp16")), monkeypatch)(a, (b, of_a, of_b, o, lse, None, None, None))
    truth, true_lse = reference.merge_state(a.double(), of_a.double(), b.double(), of_b.double())
    torch.testing.assert_close(o.double(), truth, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, true_lse)
    assert not o[1, 4, 2].any()


@pytest.mark.parametrize("fixed", [False, True])
def test_a_result_in_parts_is_merged(monkeypatch, fixed):
    """Of tasks that one block has, and of those that many share; each part where the decode kernel's walk has it."""
    torch.manual_seed(0)
    parts, generator = 20, random.Random(1)
    walk, merge = walk_function(fixed, parts, monkeypatch), function(MergeStateOnCpu(MergeSpec("fp32", True)),
                                                                     monkeypatch)
    for keys, heads, group, batch, queries in ((3000, 1, 4, 3, 2), (19000, 2, 4, 5, 1), (900, 3, 3, 10, 5),
                                               (128, 2, 1, 1, 1)):
        of, rows = Planned(heads * group, heads, 128, batch * queries, -1, fixed), batch * queries * group
        seqlens, sizes = torch.tensor([keys], dtype=torch.int32), of.sizes(1, parts)
        plan, tasks, tile_rows = reference.planned(seqlens, sizes), heads * of.tiles, min(64, rows)
        slots = tasks * (20000 // 1024 + 2) if fixed else 2 * parts
        count, found = torch.zeros(parts, dtype=torch.int32), torch.zeros(parts, 2000, 8, dtype=torch.int32)
        walk(plan, (seqlens, torch.zeros(slots, 1, 1), count, found), (*sizes[:8], 20000, *sizes[9:]))
        partial, partial_lse = torch.full((slots, tile_rows, 24), math.nan), torch.full((slots, tile_rows), math.nan)
        shape = batch, queries, heads * group
        a, b = torch.randn(2, *shape, 24)
        of_a, of_b = torch.randn(2, *shape).mul(3)
        want, of_want = a.double(), of_a.double()
        for task in range(tasks):
            own = sorted((s[4], s[6]) for p, n in enumerate(count.tolist()) for s in found[p, :n].tolist()
                         if s[1] == task)
            places = [slot for _, slot in own]
            if len(own) > 1:
                partial[places], partial_lse[places] = torch.randn(len(own), tile_rows, 24), 5 * torch.randn(
                    len(own), tile_rows)
                partial_lse[places[generator.randrange(len(own))], 0] = -math.inf
            head, tile = divmod(task, of.tiles)
            for row in range(min(64, rows - 64 * tile) if len(own) > 1 else 0):
                query, member = divmod(64 * tile + row, group)
                at = *divmod(query, queries), head * group + member
                exponents = partial_lse[places, row].double() * math.log(2)
                want[at], of_want[at] = exponents.softmax(0) @ partial[places, row].double(), exponents.logsumexp(0)
                a[at], of_a[at] = math.nan, math.inf
        o, lse = torch.full_like(a, math.nan), torch.full(shape, math.nan).mT.contiguous()
        merge(a, (b, of_a.mT, of_b.mT, o, lse, partial, partial_lse, plan))
        truth, true_lse = reference.merge_state(want, of_want.mT, b.double(), of_b.mT.double())
        torch.testing.assert_close(o.double(), truth, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), true_lse.double(), rtol=1e-5, atol=1e-5)
        plan[words.PART:words.OVERHEAD + 1] = torch.tensor([1 << 20, -9, 1 << 30])  # what lies stays in memory
        plan[words.GROUP], plan[words.HEADS_KV] = 0, -5
        merge(a, (b, of_a.mT, of_b.mT, o, lse, partial, partial_lse, plan))


@pytest.mark.parametrize("interleaved, columns", [(False, 16), (True, 8)])
def test_the_kernel_of_kv_append(monkeypatch, interleaved, columns):
    torch.manual_seed(0)
    packed = torch.randn(6, 7, 24).half()
    q, k, v = packed[:, :3], packed[:, 3:5], packed[:, 5:]
    caches = torch.randn(3, 2, 5, 2, 24).half().unbind(1)
    slots = torch.tensor([14, -1, 5, 15, 4, -(1 << 31)], dtype=torch.int32)
    positions = torch.tensor([3, 0, 9, -1, 8, 10])
    cos, sin = tkq.rope_cos_sin(10, columns)
    want = [c.double() for c in caches]
    wanted = reference.kv_append(k.double(), v.double(), *want, slots, cos, sin, interleaved, positions, q.double())
    spec, out = AppendSpec("fp16", "int32", "fp32", interleaved, "int64", True), torch.full_like(q, math.nan)
    function(KvAppendOnCpu(spec), monkeypatch)(k, (v, *caches, slots, q, out.contiguous(), cos, sin, positions, None,
                                                None))
    for cache, truth in zip(caches, want):
        torch.testing.assert_close(cache.double(), truth, rtol=1e-3, atol=1e-3)
    assert wanted[3].isnan()[:, :columns].all()


@pytest.mark.parametrize("fixed, latent", [(False, False), (True, False), (False, True)])
def test_blocks_walk_through_a_plan(monkeypatch, fixed, latent):
    """All key blocks of all tasks, each once; a task's splits in the order of its keys, each with a slot of its own."""
    parts, generator = 20, random.Random(0)
    function = walk_function(fixed, parts, monkeypatch)
    for _ in range(30):
        lengths = [generator.choice((0, 1, 127, 128, 129, generator.randrange(20000), -4))
                   for _ in range(generator.choice((1, 2, 7, 40)))]
        heads, group, queries, left = (generator.choice(x) for x in ((1, 3), (1, 4), (1, 4, 70), (-1, -1, 0, 300)))
        if latent:
            heads, left = 1, -1
        of = Planned(heads * group, heads, 128, queries, left, fixed, together=5 if latent else 1, latent=latent)
        assert of.balanced(len(lengths), parts) == latent
        seqlens, sizes = torch.tensor(lengths, dtype=torch.int32), of.sizes(len(lengths), parts)
        tasks, most = heads * of.tiles, 20000 // 1024 + 2
        count = torch.zeros(parts, dtype=torch.int32)
        found = torch.zeros(parts, 2000, 8, dtype=torch.int32)
        partial = torch.zeros(most * tasks * len(lengths) if fixed else 2 * parts, 1, 1)
        made = reference.plan_decode(seqlens, None, of, parts)
        function(made, (seqlens, partial, count, found), (*sizes[:8], 20000, *sizes[9:]))
        segments = sorted(tuple(s) for p, n in enumerate(count.tolist()) for s in found[p, :n].tolist())
        shared = [s[6] for s in segments if s[5] > 1]
        assert len({*shared}) == len(shared) and all(0 <= slot < len(partial) for slot in shared)
        for b, length in enumerate(lengths):
            first = 0 if left < 0 else max(length - queries - left, 0) // 128
            end = max(-(-length // 128), first + 1)
            for task in range(tasks):
                mine = [s for s in segments if s[:2] == (b, task)]
                assert [s[4] for s in mine] == list(range(mine[0][5])) and all(s[7] == (length >= 0) for s in mine)
                assert [mine[0][2], *(s[3] for s in mine)] == [*(s[2] for s in mine), end] and mine[0][2] == first


@pytest.mark.parametrize("fixed", [False, True])
def test_a_length_that_is_none_begins_with_the_first_key(monkeypatch, fixed):
    """Also where a window does: a block on, numbers of keys would begin anew below zero."""
    function, most = walk_function(fixed, 20, monkeypatch), (1 << 31) - 1
    for lengths in ([most], [most - 200, 5, most], [20001, 7]):
        of = Planned(1, 1, 128, 3, 3, fixed)
        seqlens, sizes = torch.tensor(lengths, dtype=torch.int32), of.sizes(len(lengths), 20)
        count, found = torch.zeros(20, dtype=torch.int32), torch.zeros(20, 2000, 8, dtype=torch.int32)
        function(reference.planned(seqlens, sizes), (seqlens, torch.zeros(4000, 1, 1), count, found),
                 (*sizes[:8], 20000, *sizes[9:]))
        segments = [s for p, n in enumerate(count.tolist()) for s in found[p, :n].tolist()]
        beyond = [s for s in segments if lengths[s[0]] > 20000]
        assert {s[0] for s in beyond} <= {b for b, length in enumerate(lengths) if length > 20000}
        assert all(not s[7] and s[2:4] == [0, 1] for s in beyond) and len(segments) == len(lengths)


def test_the_tiles_of_ragged_queries(monkeypatch):
    """The kernel's list is the reference's: sequences without queries, with more than there are keys, that lie."""
    run = function(ListerOnCpu(), monkeypatch)
    lengths = torch.tensor([500, 0, 70, -3, 128, 9], dtype=torch.int32)
    for ends in ([70, 70, 75, 80, 100, 103], [70, 70, 75, 80, 100, 99], [1, 2, 3, 4, 5, 6], [-1, 0, 0, 0, 50, 300]):
        cu = torch.tensor([0, *ends], dtype=torch.int32)
        of = Planned.made((128, 128), (8, 2), (103,), True)
        want = reference.plan_decode(lengths, cu, of, 20)
        tiles, found = of.batch(len(lengths)), torch.full((of.words(len(lengths)),), 7, dtype=torch.int32)
        listed, own = torch.zeros(tiles, dtype=torch.int32), words.listed(tiles, of.heads_kv, of.tiles)
        run(cu, (lengths, listed, found), (of.queries, of.total, tiles, own))
        assert torch.equal(found[own:], want[own:]) and (found[:own] == 7).all()
        assert torch.equal(listed, want[words.LENGTHS:words.LENGTHS + tiles])


def _cache(lengths, page=4):
    torch.manual_seed(0)
    pages = torch.randperm(24).view(3, 8).int()
    k, v = torch.randn(2, 24, page, 2, 64).to(BF16)
    return torch.randn(len(lengths), 2, 4, 64).to(BF16), k, v, torch.tensor(lengths, dtype=torch.int32), pages


@pytest.mark.parametrize("options", [{}, dict(window_size=(3, None), sinks=torch.ones(4)),
                                     dict(window_size=(4, 1), causal=False, softcap=5.0), dict(softmax_scale=0.3)])
def test_a_paged_cache_is_a_plain_one(options):
    """Against flash_attn of each sequence's keys; a sequence of no key, and one that lies."""
    q, k, v, lengths, pages = _cache([30, 0, 7])
    o, lse = tkq.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=pages, return_lse=True, **options)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (c[pages[b].long()].flatten(0, 1)[None, :length] for c in (k, v))
        want, of = tkq.flash_attn(q[b:b + 1], keys, values, return_lse=True, **(dict(causal=True) | options))
        torch.testing.assert_close(o[b:b + 1], want)
        torch.testing.assert_close(lse[b:b + 1], of)
    lengths[1], pages[2, 1] = 33, 24
    o = tkq.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=pages, **options)
    assert o[1:].isnan().all() and not o[0].isnan().any()


def test_ragged_queries_are_those_of_each_sequence():
    q, k, v, lengths, pages = _cache([30, 0, 7])
    starts, q = torch.tensor([1, 6, 6, 15], dtype=torch.int32), torch.randn(16, 4, 64).to(BF16)
    given = dict(block_table=pages, window_size=(9, None), return_lse=True)
    out = torch.full_like(q, 7.0)
    o, lse = tkq.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cu_seqlens_q=starts, out=out, **given)
    assert o is out and (o[[0, 15]] == 7.0).all()  # rows of no sequence
    call = torch.compile(tkq.flash_attn_with_kvcache, backend="eager", fullgraph=True)
    for again in (call, tkq.flash_attn_with_kvcache):  # and on the dispatcher's way
        copied = torch.full_like(q, 7.0)
        again(torch._neg_view(-q), k, v, cache_seqlens=lengths, cu_seqlens_q=starts, out=copied, **given)
        assert torch.equal(copied, o)
    for b in (0, 2):
        own = slice(*starts[b:b + 2].tolist())
        want, of = tkq.flash_attn_with_kvcache(q[None, own], k, v, cache_seqlens=lengths[b:b + 1],
                                               **(given | dict(block_table=pages[b:b + 1])))
        assert torch.equal(o[own], want[0]) and torch.equal(lse[:, own], of[0])
    assert not o[6:8].any() and (lse[:, 6:8] == -math.inf).all()  # before the first of 7 keys


def test_rows_of_no_sequence_are_nan_with_a_plan():
    q, k, v, lengths, pages = _cache([30, 0, 7])
    starts, q = torch.tensor([1, 6, 6, 14], dtype=torch.int32), torch.randn(16, 4, 64).to(BF16)
    given = dict(cache_seqlens=lengths, cu_seqlens_q=starts, block_table=pages, return_lse=True)
    given["plan"] = tkq.plan_decode(lengths, 4, 2, 64, cu_seqlens_q=starts, total_q=16)
    out = torch.full_like(q, 7.0)
    none = torch.ones(16, dtype=torch.bool)
    none[1:14] = False
    for found, lse in (tkq.flash_attn_with_kvcache(q, k, v, out=out, **given),
                       tkq.flash_attn_with_kvcache(torch._neg_view(-q), k, v, **given)):
        assert torch.equal(found.isnan().all(-1).all(-1), none) and torch.equal(lse.isnan().all(0), none)


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn])
def test_a_cache_of_no_pages(dtype):
    """Keys of a page -1 are skipped, also where there is no other."""
    empty, q = torch.zeros(0, 4, 2, 64).to(dtype), torch.randn(2, 1, 4, 64).to(BF16)
    lengths, table = torch.tensor([3, 0], dtype=torch.int32), torch.full((2, 1), -1, dtype=torch.int32)
    scales = {} if dtype == BF16 else dict.fromkeys(("k_descale", "v_descale"), torch.ones(0, 4, 2))
    o, lse = tkq.flash_attn_with_kvcache(q, empty, empty, cache_seqlens=lengths, block_table=table, return_lse=True,
                                         **scales)
    assert not o.any() and (lse == -math.inf).all()
    table[0, 0] = 0
    o = tkq.flash_attn_with_kvcache(q, empty, empty, cache_seqlens=lengths, block_table=table, **scales)
    assert o[0].isnan().all() and not o[1].any()


@pytest.mark.parametrize("scales", [None, "head", "token"])
def test_a_float8_cache(scales):
    """Quantised and read: near what 16 bits give; rows of no token stay NaN and are not read."""
    q, k, v, lengths, pages = _cache([30, 0, 7])
    slots = torch.cat([pages[b, torch.arange(n) // 4].long() * 4 + torch.arange(n) % 4 for b, n in ((0, 30), (2, 7))])
    at, names = (slots // 4, slots % 4), ("k_scale", "v_scale")
    low = torch.full((2, 24, 4, 2, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    given = {} if scales is None else dict(zip(names, torch.full((2, 2), 0.01) if scales == "head" else
                                               torch.full((2, 24, 4, 2), math.nan)))
    tkq.kv_append(k[at], v[at], *low, slots, **given)
    of = {name.replace("scale", "descale"): x for name, x in given.items()}
    cache = dict(cache_seqlens=lengths, block_table=pages)
    o = tkq.flash_attn_with_kvcache(q, *low, **cache, **of).float()
    want = tkq.flash_attn_with_kvcache(q, k, v, **cache).float()
    assert 1e-4 < (o - want).norm() / want.norm() < 0.06


def test_plans_on_the_cpu():
    lengths = torch.tensor([500, 17], dtype=torch.int32)
    made = tkq.plan_decode(lengths, 8, 2, 128)
    tkq.check_plan(made)
    lengths[0] = -1
    assert tkq.plan_decode(lengths, 8, 2, 128, out=made) is made
    with pytest.raises(ValueError, match="a length is negative"):
        tkq.check_plan(made)
    for zeros in (torch.zeros, torch._efficientzerotensor):
        with pytest.raises(ValueError, match="is none of tkq.plan_decode"):
            tkq.check_plan(zeros((30,), dtype=torch.int32))
    with pytest.raises(ValueError, match="check_plan: plan: is on meta"):
        tkq.check_plan(made.to("meta"))
    with torch.inference_mode():
        made = tkq.plan_decode(lengths, 8, 2, 128)
    with pytest.raises(RuntimeError, match="plan_decode: out: was made under torch.inference_mode"):
        tkq.plan_decode(lengths, 8, 2, 128, out=made)
    with pytest.raises(ValueError, match="plan_decode: out: is zeros without memory"):
        tkq.plan_decode(lengths, 8, 2, 128, out=torch._efficientzerotensor(made.shape, dtype=torch.int32))


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_configs_fit(dim):
    for dim_v in HEAD_DIMS:
        config = plan(DecodeSpec("bf16", dim, dim_v))
        tile = config.keys * (padded(dim) + padded(dim_v)) * 2
        assert config.stages >= 2 and config.stages * tile + 64 * padded(dim) * 2 <= SHARED


LOW = dict.fromkeys(("k_cache", "v_cache"), torch.zeros(24, 4, 2, 64).to(torch.float8_e4m3fn))
RAGGED = dict(q=torch.zeros(5, 4, 64, dtype=BF16), cu_seqlens_q=torch.tensor([0, 1, 2, 5], dtype=torch.int32))


@pytest.mark.parametrize("error, words, changed", [
    (ValueError, "v_cache: shape is", dict(v_cache=torch.zeros(24, 4, 1, 64, dtype=BF16))),
    (TypeError, "k_cache is torch.float16", dict(k_cache=torch.zeros(24, 4, 2, 64).half())),
    (ValueError, "q has 3 heads, k_cache has 2", dict(q=torch.zeros(3, 1, 3, 64, dtype=BF16))),
    (NotImplementedError, "head_dim is 40", dict(q=torch.zeros(3, 1, 4, 40, dtype=BF16),
                                                 k_cache=torch.zeros(24, 4, 2, 40, dtype=BF16))),
    (ValueError, "rows of 64, q of 128", dict(q=torch.zeros(3, 1, 4, 128, dtype=BF16))),
    (ValueError, "24 rows for 3 sequences", dict(block_table=None)),
    (ValueError, "plan: shape is", dict(plan=torch.zeros(20, dtype=torch.int32))),
    (ValueError, "stride 1 must be a multiple of 8", dict(k_cache=torch.zeros(24, 4, 132, dtype=BF16)[..., :128]
                                                          .unflatten(2, (2, 64)))),
    (ValueError, "k_descale is given, k_cache is torch.bfloat16", dict(k_descale=torch.ones(2))),
    (ValueError, "v_descale is None", dict(LOW, k_descale=torch.ones(2))),
    (ValueError, "k_descale: shape is", dict(LOW, k_descale=torch.ones(4), v_descale=torch.ones(4))),
    (ValueError, "both must have as many", dict(LOW, k_descale=torch.ones(2), v_descale=torch.ones(3, 2))),
    (TypeError, "v_cache is torch.bfloat16", dict(k_cache=LOW["k_cache"])),
    (ValueError, "cu_seqlens_q: shape is", dict(RAGGED, cu_seqlens_q=torch.zeros(3, dtype=torch.int32))),
    (ValueError, "q: has 4 dimensions", dict(RAGGED, q=torch.zeros(3, 1, 4, 64, dtype=BF16))),
    (NotImplementedError, "ragged queries are causal", dict(RAGGED, causal=False)),
    (NotImplementedError, "q requires a gradient", dict(q=torch.zeros(3, 1, 4, 64, dtype=BF16, requires_grad=True)))])
def test_what_is_refused(error, words, changed):
    q, k, v, lengths, pages = _cache([30, 0, 7])
    given = dict(q=q, k_cache=k, v_cache=v, cache_seqlens=lengths, block_table=pages) | changed
    with pytest.raises(error, match=f"flash_attn_with_kvcache: .*{words}"):
        tkq.flash_attn_with_kvcache(**given)


@pytest.mark.parametrize("other", [lambda x: torch._neg_view(-x), lambda x: x[:1].expand(2)])
@pytest.mark.parametrize("traced", [False, True])
def test_scales_of_heads_are_read_alone(other, traced):
    """However they lie: a negative view, expanded; zeros without memory are zeros."""
    k, v, slots = *torch.randn(2, 3, 2, 64).to(BF16), torch.tensor([3, 4, -1])
    caches = [torch.zeros(2, 5, 4, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = torch.full((2,), 0.01)
    call = torch.compile(tkq.kv_append, backend="aot_eager", fullgraph=True) if traced else tkq.kv_append
    call(k, v, *caches[0], slots, k_scale=other(scales), v_scale=scales)
    tkq.kv_append(k, v, *caches[1], slots, k_scale=scales, v_scale=scales)
    assert torch.equal(*(x.view(torch.uint8) for x in caches)) and caches[0].view(torch.uint8).any()
    none = torch._efficientzerotensor((2,))
    tkq.kv_append(k, v, *caches[0], slots, k_scale=none, v_scale=none)
    tkq.kv_append(k, v, *caches[1], slots, k_scale=torch.zeros(2), v_scale=torch.zeros(2))
    assert torch.equal(*(x.view(torch.uint8) for x in caches))


@pytest.mark.parametrize("words, changed", [
    ("go together", dict(cos=None)), ("shape is", dict(positions=torch.zeros(2, dtype=torch.int32))),
    ("rotate 24", dict(cos=torch.zeros(9, 12), sin=torch.zeros(9, 12))),
    ("k_scale is given", dict(k_scale=torch.ones(2), v_scale=torch.ones(2))),
    ("one tensor", {}), ("share memory", dict(k_cache=torch.zeros(1, 4, 2, 64, dtype=BF16).expand(5, 4, 2, 64)))])
def test_what_kv_append_refuses(words, changed):
    k, v = torch.zeros(2, 3, 2, 64, dtype=BF16)
    caches = torch.zeros(2, 5, 4, 2, 64, dtype=BF16)
    given = dict(k=k, v=v, k_cache=caches[0], v_cache=caches[1], slot_mapping=torch.tensor([3, 4, -1]),
                 cos=torch.zeros(9, 32), sin=torch.zeros(9, 32), positions=torch.tensor([3, 8, 0])) | changed
    if words == "one tensor":
        given["v_cache"] = given["k_cache"]
    with pytest.raises((ValueError, NotImplementedError), match=f"kv_append: .*{words}"):
        tkq.kv_append(**given)


def test_more_rows_than_threads_can_be_counted():
    """As a warp has a row, where scales are written; and a thread eight elements of a merged state."""
    def of(*shape, dtype=BF16):
        return torch.empty(shape, device="meta", dtype=dtype)

    k, caches = of((1 << 21) + 1, 32, 8), [of(4, 16, 32, 16, dtype=torch.float8_e4m3fn)[..., :8] for _ in range(2)]
    scales, slots = [of(4, 16, 32, dtype=torch.float32) for _ in range(2)], of(len(k), dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="kv_append: k, v and q have 134217792 rows; .*fewer than 2.26"):
        tkq.kv_append(k, k, *caches, slots, k_scale=scales[0], v_scale=scales[1])
    o, lse = of(1, 65536, 32768, 8), of(1, 32768, 65536, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="merge_state: o_a has 17179869184 elements, .*fewer than 2.34"):
        tkq.merge_state(o, lse, o, lse)


def test_parts_of_a_fixed_split_with_a_window():
    """Its first key may lie within a split."""
    q, cache = torch.zeros(2, 1, 4, 128, dtype=BF16), torch.zeros(2, 4096, 4, 128, dtype=BF16)
    slots = []
    for window in ((None, None), (4000, None)):
        with fake_gpu.launches() as seen, torch.no_grad():
            tkq.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([4096, 9]).int(),
                                        window_size=window, batch_invariant=True)
        slots.append(next(len(x) for x in seen[-1][1][1]
                          if torch.is_tensor(x) and x.dtype == torch.float32 and x.dim() == 3))
    assert slots == [2 * 4 * 4, 2 * 4 * 5]


def test_which_masks_a_kernel_knows():
    q, cache = torch.zeros(1, 4, 2, 64, dtype=BF16), torch.zeros(1, 128, 2, 64, dtype=BF16)
    call = Call(q, cache, cache, torch.tensor([9]).int())

    def edges(call, **options):
        return launch.spec_of(call, Options(**options)).edges

    assert edges(call) and edges(call, causal=False, right=0) and edges(call, causal=False, left=0)
    assert not edges(call, causal=False)
    assert not edges(call._replace(q=q[:, :1])) and not edges(call._replace(q=q[:, :1]), causal=False, right=0)

"""flash_attn_with_kvcache of float8 caches on the GPU against float64 on what their numbers mean."""
import math

import pytest
import torch

import tkq
from tests.helpers.attention.float8_cache import float8
from tests.helpers.attention.kv_cache import ENDS, call, compare, judge_all, make, queries
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.reference import decode as reference

FP16 = torch.float16


@pytest.mark.parametrize("page, layout, scales, rows", [
    (16, "pages", "head", 1), (1, "pages", "sequence", 3), (7, "heads", "head", 1), (64, "pairs", "sequence", 1),
    (7, "pages", "head", 3), (256, "pages", "head", 1)])
def test_pages_of_float8(page, layout, scales, rows):
    """One query: the direct form; three: producers that widen."""
    lengths = [*ENDS, 20000]  # the last one: several blocks of keys for each part of the work
    with poisoned():
        cache, descales = float8(make(lengths, page, 2, 128, layout=layout), scales)
        compare(queries(len(lengths), rows, 8, 128), cache, f"pages of {page}", **descales)


@pytest.mark.parametrize("lengths, heads, rows", [
    ([65536 + 3], 32, 1), ([3000, 2999, 1], 64, 1), ([300] * 40, 16, 1), ([20000, 2999, 1], 64, 2)])
def test_float8_work_that_blocks_share(lengths, heads, rows):
    with poisoned():
        cache, descales = float8(make(lengths, 64, max(1, heads // 8), 128), "sequence")
        compare(queries(len(lengths), rows, heads, 128), cache, "shared", **descales)


@pytest.mark.parametrize("rows, window", [(4, (None, None)), (3, (100, None)), (70, (None, None)), (5, (300, 2)),
                                          (2, (300, 2)), (1, (100, None))])
def test_queries_that_see_other_float8_keys(rows, window):
    """Several queries, some before the first key; windows; softcap and sinks; scales of tokens."""
    lengths, sinks = [0, 1, 3, 130, 1000, 2500], torch.linspace(-2, 2, 6, device="cuda")
    with poisoned():
        cache, descales = float8(make(lengths, 16, 2, 128), "token")
        compare(queries(len(lengths), rows, 6, 128, FP16), cache, f"{rows} queries", window_size=window,
                causal=window[1] is None, softcap=20.0, sinks=sinks, **descales)


@pytest.mark.parametrize("dims, dtype, layout, scales", [
    ((64, 64), torch.bfloat16, "rows", "token"), pytest.param((96, 96), FP16, "pages", None, marks=pytest.mark.slow),
    pytest.param((192, 128), torch.bfloat16, "pages", "head", marks=pytest.mark.slow),
    pytest.param((96, 96), FP16, "pages", "token", marks=pytest.mark.slow),
    pytest.param((192, 128), torch.bfloat16, "pages", "token", marks=pytest.mark.slow),
    ((256, 256), FP16, "pages", "token")])
def test_float8_head_dims(dims, dtype, layout, scales):
    lengths, page = [1, 64, 1000, 0, 777, 3000], 3072 if layout == "rows" else 24
    with poisoned():
        cache, descales = float8(make(lengths, page, 4, *dims, layout=layout), scales)
        rows = 2 if scales == "token" else 5  # 4 packed queries, which are few, or 10
        compare(queries(len(lengths), rows, 8, dims[0], dtype), cache, f"{dims}", **descales)


@pytest.mark.parametrize("factor, rows", [("grows", 2), ("grows", 5), ("falls", 2), ("tiny", 2), ("some are 0", 5),
                                          ("the first of a block are 0", 2), ("peaks", 5)])
def test_scales_of_tokens_that_differ(factor, rows):
    """Values' scales over 12 decades: O is in units of the largest that there was. Rows of a cache, as above; several
    blocks of keys for each part of the work. Two queries: the direct form; five: producers that widen."""
    of = {"grows": lambda i: 10.0 ** (i / 3500 - 6), "falls": lambda i: 10.0 ** (6 - i / 1750.0),
          "tiny": lambda i: 1e-30 + 0 * i.float(), "some are 0": lambda i: (i % 3 == 0).float(),
          "the first of a block are 0": lambda i: (i % 128 >= 32).float(),
          "peaks": lambda i: 10.0 ** (6 * (i % 128 >= 96).float())}[factor]
    cache, descales = float8(make([21000, 17, 129], 21056, 4, 64, layout="rows"), "token", of)
    if factor != "tiny":
        descales["k_descale"] = torch.rand_like(descales["k_descale"]) * 0.02
        cache = cache._replace(keys=[(_meant(cache.k, descales["k_descale"], b, len(k)), v)
                                     for b, (k, v) in enumerate(cache.keys)])
    with poisoned():
        compare(queries(3, rows, 8, 64), cache, factor, **descales)


@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("rows", [2, 5])
def test_values_of_0_at_the_largest_weights(scales, rows):
    """All weight is on two keys whose values are 0, as of a first token that takes what nobody wants: the others, of
    2^-28 of it each, are all that O is."""
    made, q = make([1000, 300, 2], 16, 4, 64), queries(3, rows, 8, 64).abs()
    for k, v in made.keys:
        k[:2], v[:2] = 3.0, 0.0
    cache, descales = float8(made, scales)
    with poisoned():
        compare(q, cache, f"values of 0, scales of a {scales}", **descales)


def _meant(cache, descale, b, length):
    return cache[b, :length].double() * descale[b, :length, :, None].double()


@pytest.mark.parametrize("size, scale", [(1e30, 1e-31), (1e-30, 1e29), (1e36, 1e-36), (1e36, None), (1e8, None),
                                         (0.0, None), (40.0, None)])
def test_queries_beyond_float16(size, scale):
    """Rows of q of any size: each is scaled by itself. Scores, too: no weight is beyond float16."""
    cache, descales = float8(make([700, 5000], 16, 2, 128), "head")
    q = queries(2, 1, 8, 128).clamp(-1, 1) * size
    q[:, :, 1::2] *= 1e-3
    with poisoned():
        compare(q, cache, f"size {size}", softmax_scale=scale, **descales)


def test_queries_that_are_no_numbers():
    """Give NaN in their rows alone; a NaN in the cache in its sequence's head alone."""
    cache, descales = float8(make([700, 500], 16, 2, 128), "head")
    q = queries(2, 1, 8, 128)
    want, _ = call(q, cache, **descales)
    q[0, 0, 3, 5] = math.nan
    cache.v.view(torch.uint8)[cache.table[1, 2], 3, 1, 7] = 0x7F
    o, _ = call(q, cache, **descales)
    wrong = torch.zeros_like(o, dtype=torch.bool)
    wrong[0, 0, 3], wrong[1, 0, 4:, 7] = True, True
    assert torch.equal(o.isnan(), wrong) and torch.equal(o[~wrong], want[~wrong])


@pytest.mark.parametrize("rows", [1, 3])
def test_scales_of_no_key_mean_nothing(rows):
    """A head's scale that is NaN makes those NaN that have keys, by either form."""
    cache, descales = float8(make([0, 300], 7, 2, 128), "head")
    descales["v_descale"][1] = math.nan
    with poisoned():
        o, _ = call(queries(2, rows, 8, 128), cache, **descales)
    assert not o[0].any()
    assert o[1, :, 4:].isnan().all() and not o[1, :, :4].isnan().any()


def test_float8_pages_that_are_skipped():
    cache, descales = float8(make([100, 1000, 40], 16, 2, 128), "sequence")
    table = cache.table.clone()
    table[1, 3:5], table[2, :3] = -1, -1
    q = queries(3, 1, 8, 128)
    o, lse = call(q, cache._replace(table=table), **descales)
    truth, true_lse = reference.flash_attn_with_kvcache(q.double(), cache.k, cache.v, cache.lengths, table, **descales)
    torch.testing.assert_close(o.double(), truth, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse, true_lse, rtol=1e-4, atol=1e-4)
    assert not o[2].any() and (lse[2] == -math.inf).all()


@pytest.mark.parametrize("what, words", [("length", "a length is negative"), ("page", "neither -1 nor one")])
def test_what_lies_of_float8_gives_nan(what, words):
    cache, descales = float8(make([100, 2000, 40], 16, 2, 128), "sequence")
    q = queries(3, 1, 8, 128)
    whole, _ = call(q, cache, **descales)
    lengths, table = cache.lengths.clone(), cache.table.clone()
    if what == "length":
        lengths[1] = 1 << 28
    else:
        table[1, 70] = 4000
    plan = tkq.plan_decode(lengths, 8, 2, 128)
    o, lse = tkq.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=lengths, block_table=table, plan=plan,
                                         return_lse=True, **descales)
    with pytest.raises(ValueError, match=words):
        tkq.check_plan(plan)
    assert o[1].isnan().all() and lse[1].isnan().all()
    torch.testing.assert_close(o[[0, 2]], whole[[0, 2]], rtol=0.02, atol=0.02)


def test_the_same_bits_of_float8_in_every_run():
    cache, descales = float8(make([20000, 300, 7], 16, 2, 128), "head")
    q = queries(3, 1, 8, 128)
    first = call(q, cache, **descales)
    judge_all(*first, q, cache, **descales)
    for _ in range(20):
        again = call(q, cache, **descales)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


# ---- kv_append ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales, dtype, index, interleaved", [
    ("head", torch.bfloat16, torch.int64, False), ("token", torch.bfloat16, torch.int32, True),
    (None, FP16, torch.int64, None)])
def test_append_to_float8(scales, dtype, index, interleaved):
    """Numbers that are rotated in float32 and rounded once; slots of no token stay as they are, scales as well."""
    torch.manual_seed(0)
    packed = (torch.randn(9, 12, 64, device="cuda") * torch.logspace(-3, 2, 9, device="cuda")[:, None, None]).to(dtype)
    q, k, v = packed[:, :8], packed[:, 8:10], packed[:, 10:]
    k[7] = 0.0
    caches = [torch.randint(0, 0x7F, (5, 7, 2, 64), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
              for _ in range(2)]
    slots = torch.tensor([34, 0, -1, 8, 35, 6, -(1 << 31), 7, (1 << 31) - 1], device="cuda").to(index)
    angles = {}
    if interleaved is not None:
        cos, sin = tkq.rope_cos_sin(50, 24 if interleaved else 64, device="cuda")
        positions = torch.tensor([0, 49, 3, 10, 7, -1, 1, 2, 20], device="cuda").to(index)
        angles = dict(cos=cos, sin=sin, interleaved=interleaved, positions=positions, q=q)
    found = {"head": torch.rand(2, 2, device="cuda") / 4, "token": torch.full((2, 5, 7, 2), -3.0, device="cuda")}
    given = dict(zip(("k_scale", "v_scale"), found[scales])) if scales else {}
    want, wanted = [c.clone() for c in caches], {name: x.clone() for name, x in given.items()}
    wide = {name: x.double() if name in ("cos", "sin", "q") else x for name, x in angles.items()}
    turned_ = reference.kv_append(k.double(), v.double(), *want, slots, **wide, **wanted)
    with poisoned():
        turned = tkq.kv_append(k, v, *caches, slots, **angles, **given)
    if interleaved is not None:
        torch.testing.assert_close(turned.double(), turned_, rtol=1e-2, atol=1e-4, equal_nan=True)
    for name, x in given.items():
        torch.testing.assert_close(x, wanted[name], rtol=1e-5, atol=0, equal_nan=True)
    for got, truth in zip(caches, want):
        same = got.view(torch.uint8) == truth.view(torch.uint8)  # but for what lies between two numbers
        assert same.float().mean() > 0.995
        a, b = got.float(), truth.float()
        assert torch.equal(a.isnan(), b.isnan())
        assert ((a - b).abs() <= 0.126 * b.abs() + 2.0**-9).logical_or(a.isnan()).all()


def test_float8_tokens_come_and_are_seen():
    """What kv_append quantised, with scales of tokens, is what attention reads: beside a cache of bf16."""
    torch.manual_seed(0)
    lengths = torch.tensor([70, 33], device="cuda", dtype=torch.int32)
    table = torch.randperm(10, device="cuda").int().view(2, 5)
    k, v = torch.randn(2, 103, 2, 128, device="cuda").bfloat16()
    at = torch.cat([table[b, torch.arange(n, device="cuda") // 16].long() * 16 + torch.arange(n, device="cuda") % 16
                    for b, n in enumerate(lengths.tolist())])
    low = torch.full((2, 10, 16, 2, 128), 0x7F, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.full((2, 10, 16, 2), math.nan, device="cuda")
    tkq.kv_append(k, v, *low, at, k_scale=scales[0], v_scale=scales[1])
    high = torch.full((2, 10, 16, 2, 128), math.nan, device="cuda", dtype=torch.bfloat16)
    tkq.kv_append(k, v, *high, at)
    q = queries(2, 1, 8, 128)
    given = dict(cache_seqlens=lengths, block_table=table)
    want = tkq.flash_attn_with_kvcache(q, *high, **given).float()
    o = tkq.flash_attn_with_kvcache(q, *low, **given, k_descale=scales[0], v_descale=scales[1]).float()
    assert 1e-4 < (o - want).norm() / want.norm() < 0.06

"""The host path of attention over a cache, with kernels that are notes: what they are given, and memory for parts."""
import functools

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.emulation.contract import misfits
from tkq.attention.decode.plan import LATENT

BF16, E4M3, INT = torch.bfloat16, torch.float8_e4m3fn, torch.int32


@pytest.fixture(autouse=True)
def nothing_recorded():
    with torch.no_grad():
        yield


def every_other(*shape, dtype=INT):
    """Zeros between others."""
    return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def decoding(queries=1, heads=4, batch=2, ragged=False, dim=128, low=False, **options):
    q = torch.zeros(*(batch * queries,) if ragged else (batch, queries), heads, dim, dtype=BF16)
    k, v = torch.zeros(2, 8, 16, 2, dim).to(E4M3 if low else BF16)
    given = dict(cache_seqlens=every_other(batch), block_table=torch.zeros(batch, 9, dtype=INT)[:, :4],
                 cu_seqlens_q=every_other(batch + 1) if ragged else None)
    return functools.partial(tkq.flash_attn_with_kvcache, q, k, v, **given | options)


SCALES = [{name: torch.ones(shape) for name in ("k_descale", "v_descale")} for shape in ((2,), (2, 2), (8, 16, 2))]
KINDS = [dict(queries=3), dict(ragged=True), dict(ragged=True, queries=9, return_lse=True), dict(heads=32, queries=5),
         dict(low=True), dict(low=True, queries=5), dict(low=True, ragged=True), *(dict(low=True) | s for s in SCALES),
         dict(return_lse=True), dict(softcap=3.0), dict(softmax_scale=0.3), dict(causal=False, queries=3),
         dict(window_size=(5, None)), dict(sinks=every_other(4, dtype=torch.float32)), dict(dim=256),
         dict(tree_mask=every_other(2, 3, dtype=torch.int64), queries=3), dict(batch_invariant=True),
         dict(queries=2), dict(queries=2, causal=False, window_size=(None, 1))]


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_kernels_are_given_what_they_take(kind):
    with fake_gpu.launches() as seen:
        decoding(**kind)()
    assert misfits(seen) == [] and len(seen) == (3 if kind.get("ragged") else 2)


def test_calls_that_differ_in_one_thing_are_launched_apart():
    assert fake_gpu.apart(decoding(), *(decoding(**kind) for kind in KINDS))


@pytest.mark.parametrize("queries, heads", ((1, 4), (3, 4), (40, 8), (1, 2)))
@pytest.mark.parametrize("dim", (64, 256))
def test_there_is_memory_for_the_parts_of_all_blocks(queries, heads, dim):
    """A block has a part of its own at both ends of its share; a tile has up to 64 rows."""
    with fake_gpu.launches() as seen:
        decoding(queries, heads, dim=dim)()
    recipe, (_, operands, numbers) = seen[-1]
    blocks = recipe.args[1].blocks * 132
    partial, partial_lse = operands[8:10]
    assert numbers[5] == blocks
    assert partial.shape == (2 * blocks, min(64, queries * heads // 2), dim) and partial_lse.shape == partial.shape[:2]


@pytest.mark.parametrize("queries", (1, 2, 3))
@pytest.mark.parametrize("options, masked", ((dict(), True), (dict(causal=False), False),
                                             (dict(causal=False, window_size=(None, 0)), True)))
def test_several_queries_see_different_keys(queries, options, masked):
    recipe, _ = fake_gpu.seen_by(decoding(queries, **options))[-1]
    assert recipe.args[0].edges == (masked and queries > 1)


@pytest.mark.parametrize("planned", (False, True))
def test_rows_that_no_sequence_has(planned):
    """With a plan they are NaN: it may be of other sequences than the call. Without one they are not written."""
    call = decoding(ragged=True, queries=3, return_lse=True, out=torch.ones(6, 4, 128, dtype=BF16))
    with fake_gpu.launches():
        lengths, cu = call.keywords["cache_seqlens"], call.keywords["cu_seqlens_q"]
        plan = tkq.plan_decode(lengths, 4, 2, 128, cu_seqlens_q=cu, total_q=6) if planned else None
        o, lse = call(plan=plan)
    assert o.isnan().all() if planned else (o == 1).all()
    assert not planned or lse.isnan().all()


# ---- latent attention -----------------------------------------------------------------------------------------------


def latent(queries=1, heads=16, batch=2, page=64, topk=0, low=False, **options):
    q = torch.zeros(batch, queries, heads, LATENT, dtype=BF16)
    cache = torch.zeros(8, page, 656, dtype=torch.uint8) if low else torch.zeros(8, page, LATENT, dtype=BF16)
    given = dict(block_table=torch.zeros(batch, 9, dtype=INT)[:, :4], cache_seqlens=every_other(batch))
    if topk:
        given = dict(indices=torch.zeros(batch, queries, 2 * topk, dtype=INT)[..., :topk])
    return functools.partial(tkq.mla_decode, q, cache, softmax_scale=0.1, **given | options)


LATENT_KINDS = [dict(queries=2), dict(heads=128), dict(heads=128, queries=2), dict(heads=64, queries=3), dict(page=16),
                dict(topk=48), dict(topk=48, queries=2), dict(topk=48, topk_length=every_other(2)), dict(low=True),
                dict(topk=48, queries=2, topk_length=every_other(2, 2)), dict(low=True, topk=48),
                dict(return_lse=True), dict(batch_invariant=True), dict(causal=False, queries=2)]


@pytest.mark.parametrize("kind", LATENT_KINDS, ids=" ".join)
def test_kernels_of_latent_attention_are_given_what_they_take(kind):
    with fake_gpu.launches() as seen:
        latent(**kind)()
    assert misfits(seen) == []


def test_latent_calls_that_differ_in_one_thing_are_launched_apart():
    assert fake_gpu.apart(latent(), *(latent(**kind) for kind in LATENT_KINDS))


@pytest.mark.parametrize("queries, heads, topk", ((1, 16, 0), (2, 128, 0), (3, 64, 0), (3, 16, 3000), (2, 128, 3000)))
@pytest.mark.parametrize("fixed", (False, True))
def test_there_is_memory_for_the_parts_of_latent_attention(queries, heads, topk, fixed):
    """Blocks that go together have their tiles in one part. With lists each query is a sequence."""
    with fake_gpu.launches() as seen:
        latent(queries, heads, topk=topk, batch_invariant=fixed)()
    _, (_, operands, numbers) = seen[-1]
    rows, sequences = (heads, 2 * queries) if topk else (queries * heads, 2)
    parts, together = numbers[3:]
    tiles = -(-rows // 64)
    keys = topk or 4 * 64
    slots = sequences * -(-tiles // together) * -(-keys // 1024) if fixed else 2 * parts
    assert operands[6].shape == (slots, together * min(64, rows), 512) and operands[7].shape == operands[6].shape[:2]
    assert parts == max(1, 132 // together)


@pytest.mark.parametrize("name, call", (
    ("block_table", latent(block_table=every_other(2, 4))),
    ("indices", latent(topk=48, indices=every_other(2, 1, 48)))))
def test_pages_and_lists_lie_side_by_side(name, call):
    with pytest.raises(ValueError, match=f"mla_decode: {name}: strides are"):
        call()


def test_a_list_of_one_query_has_no_edge():
    for topk, queries, causal in ((0, 1, False), (0, 2, True), (48, 2, False)):
        recipe, _ = fake_gpu.seen_by(latent(queries, topk=topk))[-1]
        assert recipe.args[0].edges == causal


@pytest.mark.parametrize("heads, page, blocks", ((64, 64, 1), (128, 64, 2), (128, 32, 0), (192, 64, 1)))
def test_blocks_that_go_together_have_keys_loaded_for_them(heads, page, blocks):
    recipe, _ = fake_gpu.seen_by(latent(heads=heads, page=page))[-1]
    assert recipe.args[1].multicast == blocks


# ---- what goes into a cache, and results that are merged ------------------------------------------------------------


def appended(low=False, dim=64, places=5, turned=False, **options):
    k, v = torch.zeros(2, places, 3, dim, dtype=BF16)[:, :, 1:] if not turned else torch.zeros(
        2, places, dim, 2, dtype=BF16).mT
    caches = torch.zeros(2, 8, 16, 2, dim).to(E4M3 if low else BF16)
    return functools.partial(tkq.kv_append, k, v, *caches, slot_mapping=every_other(places), **options)


ANGLES = dict(cos=torch.zeros(9, 64)[:, :32].t().contiguous().t(), sin=torch.zeros(9, 64)[:, ::2],
              positions=every_other(5, dtype=torch.int64))
APPENDED = [dict(turned=True), dict(low=True), dict(ANGLES), dict(ANGLES, interleaved=True),
            dict(ANGLES, q=torch.zeros(5, 64, 4, dtype=BF16).mT), dict(ANGLES, positions=every_other(5)),
            dict(low=True, k_scale=torch.ones(2), v_scale=torch.ones(2)),
            dict(low=True, k_scale=torch.ones(8, 16, 2), v_scale=torch.ones(8, 16, 2))]


@pytest.mark.parametrize("kind", [{}, *APPENDED], ids=" ".join)
def test_the_kernel_of_kv_append_is_given_what_it_takes(kind):
    with fake_gpu.launches() as seen:
        appended(**kind)()
    assert len(seen) == 1 and misfits(seen) == []


def test_appending_calls_that_differ_in_one_thing_are_launched_apart():
    assert fake_gpu.apart(appended(), *(appended(**kind) for kind in APPENDED))


def test_scales_that_are_written_are_of_rows_of_a_warp():
    k, v = (torch.zeros(1, 2, dim, dtype=BF16) for dim in (64, 264))
    caches = [torch.zeros(8, 16, 2, dim).to(E4M3) for dim in (64, 272)]
    caches[1] = caches[1][..., :264]
    scales = dict(k_scale=torch.zeros(8, 16, 2), v_scale=torch.zeros(8, 16, 2))
    with pytest.raises(NotImplementedError, match="k has rows of 64, v of 264; .* are up to 256"):
        tkq.kv_append(k, v, *caches, torch.zeros(1, dtype=INT), **scales)


def test_scales_that_are_written_lie_apart_from_the_rest():
    call, scale = appended(low=True), torch.zeros(8, 16, 2)
    slots = scale.view(INT).view(-1)[:5]
    with pytest.raises(ValueError, match="kv_append: k_scale shares memory with slot_mapping"):
        call(k_scale=scale, v_scale=torch.zeros(8, 16, 2), slot_mapping=slots)
    with pytest.raises(ValueError, match="kv_append: v_scale: is .* elements may share memory"):
        call(k_scale=scale, v_scale=torch.zeros(8, 16, 1).expand(8, 16, 2))


def test_keys_of_a_cache_are_counted():
    of = lambda *shape, dtype=BF16: torch.empty(shape, device="meta", dtype=dtype)
    for pages, fits in (((1 << 31) // 16, False), ((1 << 31) // 16 - 1, True)):
        caches = [of(pages, 16, 1, 8) for _ in range(2)]
        call = functools.partial(tkq.kv_append, of(1, 1, 8), of(1, 1, 8), *caches, of(1, dtype=INT))
        if fits:
            call()
        else:
            with pytest.raises(NotImplementedError, match="k_cache has 134217728 pages of 16; supported are fewer"):
                call()


@pytest.mark.parametrize("shape", ((5, 4, 64), (2, 5, 4, 64)))
def test_the_kernel_of_merge_state_is_given_what_it_takes(shape):
    turned = lambda: torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=BF16).mT
    lse = lambda: torch.zeros(*shape[:-3], *shape[-3:-1], 2)[..., 0].mT
    with fake_gpu.launches() as seen:
        tkq.merge_state(turned(), lse(), turned(), lse())
    assert len(seen) == 1 and misfits(seen) == []


def test_room_that_int32_does_not_count():
    q, of = torch.zeros(1, 1, 1, 64, dtype=BF16), functools.partial(torch.zeros, dtype=INT)
    cache = torch.zeros(1, 1, 1, 64, dtype=BF16).expand(1, 1 << 30, 1, 64)
    with pytest.raises(NotImplementedError, match="has room for 1073741824 keys of a sequence"):
        tkq.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=of(1))


def test_pages_lie_side_by_side():
    with pytest.raises(ValueError, match="flash_attn_with_kvcache: block_table: strides are"):
        decoding(block_table=every_other(2, 4))()


def test_strides_of_a_cache_without_pages_are_looked_at():
    """A launch takes it as it is."""
    cache = torch.zeros(0, 16, 2, 132, dtype=BF16)[..., :128]
    q, call = torch.zeros(2, 1, 4, 128, dtype=BF16), decoding()
    with fake_gpu.launches() as seen, pytest.raises(ValueError, match="k_cache: strides are .* multiple of 8 elements"):
        call.func(q, cache, cache, **call.keywords)
    assert not seen


def test_a_plan_lies_apart_from_the_lengths():
    memory = torch.zeros(4096, dtype=INT)
    lengths, cu = torch.zeros(2, dtype=INT), memory[1:4]
    words = tkq.plan_decode(lengths, 4, 2, 64, cu_seqlens_q=torch.zeros(3, dtype=INT), total_q=6).numel()
    with pytest.raises(ValueError, match="plan_decode: out shares memory with cu_seqlens_q"):
        tkq.plan_decode(lengths, 4, 2, 64, cu_seqlens_q=cu, total_q=6, out=memory[:words])
    with pytest.raises(ValueError, match="plan_decode: out: strides are"):
        tkq.plan_decode(lengths, 4, 2, 64, cu_seqlens_q=cu.clone(), total_q=6, out=every_other(words))

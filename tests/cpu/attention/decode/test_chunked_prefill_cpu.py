"""Chunked prefill where there is no GPU: which calls it has, how copies are cut, its tasks, and its machine code."""
import math
import random
from dataclasses import replace

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.emulation.chunked import FIELDS, function
from tests.helpers.emulation.contract import misfit
from tests.helpers.process.machine_code import entry_of
from tkq.attention.decode import words
from tkq.attention.decode.catalog import shipped
from tkq.attention.decode.check import Call, Options
from tkq.attention.decode.chunked import launch
from tkq.attention.decode.chunked.plan import (
    DIMS,
    LEAST_TASKS,
    MANY_ROWS,
    TILE_ROWS,
    box_rows,
    cache_plan,
    groups_apart,
    many_queries,
    packed_heads,
    plan,
    producer_warps,
    tile_queries,
)
from tkq.attention.decode.chunked.spec import BOXES, CacheSpec
from tkq.attention.decode.planned import Planned
from tkq.attention.forward.config import SHARED_BYTES
from tkq.attention.forward.spec import AttentionSpec
from tkq.reference import decode as reference
from tkq.runtime.compile import build
from tkq.testing import sass

BF16 = torch.bfloat16


@pytest.mark.parametrize("heads, queries, sequences, many", [
    ((32, 8), 2048, 1, True), ((32, 8), 8 * 64, 8, True), ((32, 8), 8 * 63, 8, False), ((32, 8), 64, 1, False),
    ((32, 8), 353, 1, True), ((32, 8), 352, 1, False), ((8, 8), 4096, 16, True), ((8, 8), 4095, 16, False),
    ((64, 1), 190, 1, False), ((64, 1), 200, 1, True), ((32, 8), 0, 0, False)])
def test_which_calls_have_many_queries(heads, queries, sequences, many):
    assert many_queries((128, 128), heads, queries, sequences) == many
    assert not many_queries((96, 96), heads, queries, sequences) and not many_queries((128, 64), heads, queries, 1)
    rows = queries * heads[0] // heads[1]
    assert many == (rows >= MANY_ROWS * max(1, sequences) and -(-rows // TILE_ROWS) * heads[1] >= LEAST_TASKS)


@pytest.mark.parametrize("group, packed", [(1, 1), (3, 1), (4, 4), (6, 2), (8, 8), (70, 2), (128, 64), (96, 32)])
def test_heads_of_a_tile(group, packed):
    assert packed_heads(group) == packed and group % packed == 0
    assert tile_queries(group) * packed == TILE_ROWS


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("causal, left", [(True, False), (False, False), (True, True)])
def test_configurations(dims, causal, left):
    """Boxes divide tiles, whatever the page; shared memory is what the forward's takes."""
    spec = AttentionSpec("bf16", dims[0], causal, head_dim_v=dims[1], left=left, varlen=True)
    config = plan(spec, CacheSpec(False))
    assert config.check(*dims).shared_bytes(*dims) <= SHARED_BYTES and config.cluster == 1 and not config.overlap_tasks
    assert config.tile_rows == TILE_ROWS and config.schedule == "dynamic"
    for page in (None, 8, 16, 24, 40, 64, 96, 128, 256, 1000):
        box = box_rows(config.kv, page)
        assert config.kv % box == 0 and box in BOXES and (page is None or page % box == 0)
        cache = cache_plan(spec, page, False, True)
        assert cache.box == box and config.kv // box <= 16 and 1 <= producer_warps(config.kv // box) <= 4
        several = box < config.kv
        assert plan(spec, cache).check(*dims) == replace(config, stagger=several and not config.ping_pong)
        assert cache.row_groups == (several and dims[0] > 64)
    assert box_rows(config.kv, None) == config.kv


@pytest.mark.parametrize("page, groups, stagger, warps", [
    (None, False, False, 1), (8, True, True, 4), (16, True, True, 4), (24, True, True, 4), (32, True, True, 2),
    (64, True, True, 1), (128, False, False, 1), (192, True, True, 1), (256, False, False, 1)])
def test_tiles_of_several_boxes(page, groups, stagger, warps):
    """Copies of whole rows and consumers that begin in turns, where no page has all of a tile's rows; a plain
    cache and whole tiles have neither. Pages at other distances are copied by 64 columns."""
    spec = AttentionSpec("bf16", 128, True, False, varlen=True, pack=4)
    cache, apart = (cache_plan(spec, page, True, multiples) for multiples in (True, False))
    assert cache == CacheSpec(page is not None, True, math.gcd(128, page or 128), groups)
    assert plan(spec, cache).stagger == stagger and producer_warps(128 // cache.box) == warps
    assert apart == replace(cache, row_groups=False) and plan(spec, apart) == plan(spec, cache)
    assert not plan(replace(spec, left=True), cache).stagger  # they take turns all the time


def test_which_calls_it_serves():
    """Not with fixed splits, float8, pages that are no multiple of 8 rows, or sequences of q that lie apart."""
    def call(page=16, dtype=BF16, q=None, paged=True, cu=None, sinks=None):
        q = torch.empty(2, 1600, 8, 128, dtype=BF16, device="meta") if q is None else q
        k = torch.empty(2 if not paged else 600, page, 2, 128, device="meta").to(dtype)
        ints = lambda *shape: torch.empty(*shape, dtype=torch.int32, device="meta")
        return Call(q, k, k, ints(2), ints(2, 300) if paged else None, sinks, cu_seqlens_q=cu)

    serves = lambda call, **options: launch.serves(call, Options(**options), call.q)
    assert serves(call()) and serves(call(page=24)) and serves(call(page=5000, paged=False))
    assert serves(call(page=4099, paged=False))
    assert not serves(call(), batch_invariant=True)
    assert not serves(call(page=12)) and not serves(call(page=1)) and not serves(call(page=0))
    assert not serves(call(dtype=torch.float8_e4m3fn))
    apart = torch.empty(2, 1610, 8, 128, dtype=BF16, device="meta")[:, :1600]
    assert not serves(call(q=apart)) and serves(call(q=apart[:1]))
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    assert serves(call(q=apart[0], cu=cu)) and not serves(call(q=apart[0, :100], cu=cu))
    assert not serves(call(sinks=torch.empty(8, dtype=torch.float16, device="meta")))
    found = launch.kernel_of(call(page=24), Options(left=600, softcap=3.0))
    assert found.args[0] == AttentionSpec("bf16", 128, True, False, left=True, softcap=True, varlen=True, pack=4,
                                          long_window=True)
    assert found.args[1] == CacheSpec(True, False, 8, True)


@pytest.mark.parametrize("shape, stride, apart", [
    ((600, 16, 2, 128), (4096, 256, 128, 1), 2), ((600, 24, 2, 128), (2 * 6144, 256, 128, 1), 6),
    ((600, 16, 2, 128), (4096, 128, 2048, 1), 4), ((600, 16, 2, 128), (17 * 256, 256, 128, 1), None),
    ((600, 16, 2, 128), (0, 256, 128, 1), 0), ((1, 16, 2, 128), (7, 256, 128, 1), None),
    ((600, 16, 1, 128), (4096, 0, 128, 1), None), ((1 << 20, 16, 1, 64), (1 << 20, 8, 64, 1), None),
    ((1 << 17, 16, 1, 64), ((1 << 20) - 64, 8, 64, 1), 16383)])
def test_pages_in_groups_of_rows(shape, stride, apart):
    """One behind the other, K and V between each other, heads first; not a row more, nor more than TMA counts."""
    assert groups_apart(shape, stride) == apart


def test_pages_a_multiple_of_8_rows_apart():
    """K's and V's alike."""
    k, v = torch.zeros(30, 2, 16, 2, 128, dtype=BF16).unbind(1)
    assert launch.multiples_apart(k, v) and launch.multiples_apart(k, v[..., :64])
    assert not launch.multiples_apart(k, v.contiguous())
    apart = torch.zeros(30, 17, 2, 128, dtype=BF16)[:, :16]
    assert not launch.multiples_apart(apart, apart)


@pytest.mark.parametrize("paged, ragged, window, more", [
    (True, False, (None, None), {}), (True, True, (100, None), dict(return_lse=True)), (False, False, (5, 3), {}),
    (False, True, (None, None), dict(sinks=torch.zeros(8), softcap=3.0)),
    (True, False, (None, None), dict(return_lse=True, causal=False, sinks=torch.zeros(8, dtype=BF16)))])
def test_what_is_launched(paged, ragged, window, more):
    """Tensors are what the kernel is compiled for: types, ranks, sizes that go together, strides and addresses."""
    q = torch.zeros(2, 8, 1600, 128, dtype=BF16).transpose(1, 2)
    q = torch.zeros(1, 8, 3200, 128, dtype=BF16)[0].transpose(0, 1) if ragged else q.contiguous()
    k, v = torch.zeros(300 if paged else 2, 2, 16 if paged else 4099, 2, 128, dtype=BF16).unbind(1)
    ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
    options = dict(cache_seqlens=ints(2), block_table=ints(2, 290)[:, :280] if paged else None, window_size=window,
                   cu_seqlens_q=ints(3) if ragged else None, **(dict(causal=window[1] is None) | more))
    with fake_gpu.launches() as seen, torch.no_grad():
        tkq.flash_attn_with_kvcache(q, k, v, **options)
    recipe, args = seen[-1]
    assert recipe.builder.endswith(":ChunkedPrefill")
    sizes, fakes = {}, build._made(recipe)[1]
    for fake, given in zip(flat(fakes), flat(args), strict=True):
        assert (fake is None) == (given is None)
        if isinstance(given, torch.Tensor):
            assert not misfit(fake, given, sizes)
        else:
            assert given is None or isinstance(given, float) == (type(fake).__name__ == "Float32")


def flat(arguments):
    return [x for a in arguments for x in (flat(a) if isinstance(a, tuple) else [a])]


def test_a_box_that_no_copy_has():
    with pytest.raises(NotImplementedError, match="box is 12"):
        CacheSpec(box=12)


def sizes_of(of, sequences, rows, page, pages):
    """`state.Sizes` as the kernel's host function has them."""
    packed, ragged = packed_heads(of.group), of.total >= 0
    return torch.tensor([
        of.batch(sequences), of.total if ragged else rows, 1 if ragged else -(-rows // tile_queries(of.group)),
        of.heads_q // packed, of.group // packed, of.heads_kv, of.group, of.queries, of.tiles, 264, page, pages,
        page * pages, -1], dtype=torch.int32)


def test_tasks_of_sequences(monkeypatch):
    """Each tile of each head once; those with the most keys of a section first."""
    run, generator = function(False, monkeypatch), random.Random(0)
    for _ in range(20):
        lengths = [generator.choice((0, 1, 700, 5000, 70000)) for _ in range(generator.choice((1, 2, 5)))]
        heads_kv, group, rows = (generator.choice(x) for x in ((1, 2, 8), (1, 3, 4, 8), (1, 200, 2048)))
        of = Planned.made((128, 128), (heads_kv * group, heads_kv), (len(lengths), rows), False)
        sizes = sizes_of(of, len(lengths), rows, 16, 5000)
        seqlens = torch.tensor(lengths, dtype=torch.int32)
        made = reference.plan_decode(seqlens, None, of, 264)
        heads, tiles = int(sizes[3]), int(sizes[2])
        found = torch.full((len(lengths) * heads * tiles, FIELDS), -7, dtype=torch.int32)
        run(made, (seqlens, seqlens, sizes, found))
        tasks = [tuple(t) for t in found.tolist()]
        assert sorted(t[1:4] for t in tasks) == [(b, h, i) for b in range(len(lengths)) for h in range(heads)
                                                 for i in range(tiles)]
        for end, b, _, _, rows_q, rows_k, fine in tasks:
            assert (end, rows_q, rows_k, fine) == ((b + 1) * rows, rows, lengths[b], 1)
        order = [t[3] for t in tasks if t[1:3] == (0, 0)]
        assert order == sorted(order, reverse=True)


def test_tasks_of_sequences_that_lie(monkeypatch):
    seqlens = torch.tensor([100, -1, 90000, 50], dtype=torch.int32)
    of = Planned.made((128, 128), (8, 2), (4, 300), False)
    made = reference.plan_decode(seqlens, None, of, 264)
    seqlens[3] += 1
    sizes = sizes_of(of, 4, 300, 16, 5000)
    found = torch.full((4 * 2 * int(sizes[2]), FIELDS), -7, dtype=torch.int32)
    function(False, monkeypatch)(made, (seqlens, seqlens, sizes, found))
    assert {(t[1], t[6]) for t in found.tolist()} == {(0, 1), (1, 0), (2, 0), (3, 0)}


def test_tasks_of_ragged_queries(monkeypatch):
    """All queries of all sequences for each head, none twice, with the keys that a tile's last one sees."""
    run, generator = function(True, monkeypatch), random.Random(1)
    for _ in range(20):
        many = [generator.choice((0, 1, 31, 32, 33, 2000)) for _ in range(generator.choice((1, 3, 6)))]
        many[0] = 1200
        lengths = [generator.choice((n, n + 5000, n // 2)) for n in many]
        heads_kv, group = generator.choice((2, 8)), generator.choice((4, 6, 8))
        cu = torch.tensor([0, *many], dtype=torch.int32).cumsum(0).int()
        total = int(cu[-1]) + 3
        of = Planned.made((128, 128), (heads_kv * group, heads_kv), (total,), True, sequences=len(many))
        if of.queries != tile_queries(group):
            continue
        sizes, seqlens = sizes_of(of, len(many), 0, 16, 5000), torch.tensor(lengths, dtype=torch.int32)
        made = reference.plan_decode(seqlens, cu, of, 264)
        heads = int(sizes[3])
        found = torch.full((of.batch(len(many)) * heads, FIELDS), -7, dtype=torch.int32)
        run(made, (seqlens, cu, sizes, found))
        seen = []
        for end, b, head, tile, rows_q, rows_k, fine in found.tolist():
            assert fine == 1 and tile == 0
            if rows_q:
                assert rows_k == max(lengths[b] - (int(cu[b + 1]) - end), 0)
                seen += [(head, b, row) for row in range(end - rows_q, end)]
        assert len({*seen}) == len(seen) and sorted(seen) == [
            (h, b, row) for h in range(heads) for b in range(len(many)) for row in range(int(cu[b]), int(cu[b + 1]))]


def test_ragged_tasks_of_other_starts(monkeypatch):
    cu, moved = (torch.tensor(x, dtype=torch.int32) for x in ([0, 800, 2300], [0, 801, 2300]))
    seqlens = torch.tensor([1000, 2000], dtype=torch.int32)
    of = Planned.made((128, 128), (8, 2), (2300,), True, sequences=2)
    assert of.queries == 32
    made = reference.plan_decode(seqlens, cu, of, 264)
    sizes = sizes_of(of, 2, 0, 16, 5000)
    found = torch.full((of.batch(2) * 2, FIELDS), -7, dtype=torch.int32)
    function(True, monkeypatch)(made, (seqlens, moved, sizes, found))
    wrong = {(t[0] - t[4], t[1]) for t in found.tolist() if not t[6]}
    assert wrong == {(row, 0) for row in range(0, 800, 32)} | {(800, 1)}


def test_plans_of_many_ragged_queries():
    """Tiles of 128 rows, and those of the decode kernel where splits are fixed, or queries are few."""
    made = lambda total, *given: Planned.made((128, 128), (32, 8), (total,), True, *given)
    assert made(2048).queries == 32 and made(2048).tiles == 2
    assert made(2048, (-1, True)).queries == 16 and made(2048, (), 64).queries == 16
    assert made(2048).words(1) == words.size(65, 8, 2) + 3 * 65
    assert Planned.made((96, 96), (32, 8), (2048,), True).queries == 16


@pytest.mark.parametrize("shown", [s for s in shipped() if "chunked" in s.name and s.quick], ids=lambda s: s.name)
@pytest.mark.machine_code(recipe=lambda shown: shown.recipe)
def test_the_machine_code(shown, machine_code):
    """No local memory; wgmma is not serialised; registers as planned; copies by TMA."""
    [kernel] = sass.assert_sass(machine_code, shown.expectation)
    _, cache, config = shown.recipe.args
    assert {n for _, n in kernel.setmaxreg} == {*config.registers}
    assert not kernel.count("LDL") and not kernel.count("STL") and kernel.stack == 0
    places = 4  # the first K; the loop's K and V; the last V
    assert cache.row_groups and kernel.count("UTMALDG.5D") == places * (
        config.kv // cache.box // producer_warps(config.kv // cache.box))


def test_softmax_lies_under_products():
    """In the loop without masks, exponentials come between the wait for S and that for P @ V, as in the forward."""
    shown = next(s for s in shipped() if "chunked" in s.name and s.quick)
    [code] = sass.by_address(entry_of(shown.recipe).path).values()
    lines = list(code.values())
    chains = [i for i, line in enumerate(lines) if "DEPBAR.LE gsb0, 0x1" in line]
    assert len(chains) == 2  # with masks and without
    for i in chains:
        end = next(j for j in range(i, len(lines)) if "DEPBAR.LE gsb0, 0x0" in lines[j])
        assert sum("MUFU.EX2" in line for line in lines[i:end]) >= 8
        assert not any("HGMMA" in line for line in lines[i:end])


@pytest.mark.parametrize("box", [16, 128])
def test_blocks_with_all_keys_ask_once(box):
    """Between S and its exponentials, in the loop without masks, they select no scores and take one branch, as of a
    plain cache: behind the vote whether a max moves, which the block's word is a part of."""
    shown = next(s for s in shipped() if s.name == f"chunked_prefill-bf16-d128-pack4-paged{box}")
    [code] = sass.by_address(entry_of(shown.recipe).path).values()
    lines = list(code.values())
    begin = [i for i, line in enumerate(lines) if "DEPBAR.LE gsb0, 0x1" in line][-1]
    vote = next(j for j in range(begin, len(lines)) if "VOTE.ANY" in lines[j])
    asked = lines[begin:vote]
    assert sum("LDS" in line for line in asked) == 1 and not any("FSEL" in line or "BRA" in line for line in asked)
    assert "BRA" in lines[vote + 1]

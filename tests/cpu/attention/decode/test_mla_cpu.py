"""MLA decoding where there is no GPU: which tasks are merged, CPU tensors, and what is refused."""
import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import cutlass.cute as cute
import pytest
import torch

import tkq
from tests.helpers.emulation.mla import shared_tasks
from tkq.attention.decode import words
from tkq.attention.decode.plan import row_tiles, tiles_together
from tkq.attention.decode.planned import Planned
from tkq.attention.mla import scores
from tkq.attention.mla.config import MlaConfig
from tkq.attention.mla.plan import multicast, plan
from tkq.attention.mla.spec import MlaSpec
from tkq.reference import decode as reference
from tkq.reference import mla as latent

BF16 = torch.bfloat16


@pytest.mark.parametrize("fixed, latent", [(False, False), (True, False), (False, True)])
def test_tasks_that_are_merged(monkeypatch, fixed, latent):
    """All tasks whose key blocks several parts have, each once, with as many splits: counted by hand."""
    parts, generator = 20, random.Random(0)
    function = shared_tasks(fixed, parts, monkeypatch)
    for _ in range(40):
        lengths = [generator.choice((0, 1, 63, 64, 65, generator.randrange(20000), -4, 1 << 20))
                   for _ in range(generator.choice((1, 2, 7, 40)))]
        of = Planned(generator.choice((16, 128)), 1, 64, generator.choice((1, 3)), -1, fixed,
                     together=8 if latent else 1, latent=latent)
        seqlens, sizes = torch.tensor(lengths, dtype=torch.int32), of.sizes(len(lengths), parts)
        plan, most, tasks = reference.plan_decode(seqlens, None, of, parts), 20000 // 1024 + 2, len(lengths) * of.tiles
        found = torch.zeros(tasks if fixed else parts, 4, dtype=torch.int32)
        partial = torch.zeros(most * tasks if fixed else 2 * parts, 1, 1)
        function(plan, (seqlens, partial, found), (*sizes[:8], 20000, *sizes[9:]))
        merged = sorted(tuple(row[:3]) for row in found.tolist() if row[2] > 1)
        assert merged == _shared(lengths, of, plan, parts, fixed)


def test_tiles_that_go_together():
    """All tiles have a block; at most as many are left over as there are rounds."""
    for queries, heads in itertools.product(range(1, 9), range(1, 129)):
        tiles, together = row_tiles(queries, heads), tiles_together(576, queries, heads)
        rounds = Planned(heads, 1, 64, queries, together=together).tiles
        assert 1 <= together <= 16 and 0 <= rounds * together - tiles < rounds
    assert tiles_together(576, 1, 128) == 2 and tiles_together(128, 8, 128) == 1
    assert Planned(128, 1, 64, together=2).parts(132) == 66 and Planned(128, 1, 64, together=16).parts(3) == 1


def test_tiles_that_tma_loads():
    """Pages of whole tiles alone; for two blocks where each has a tile of queries."""
    found = {(page, heads): plan(MlaSpec("bf16"), page, row_tiles(1, heads), tiles_together(576, 1, heads)).multicast
             for page in (1, 32, 64, 96, 192) for heads in (16, 128, 192)}
    assert all(found[page, heads] == 0 for page in (1, 32, 96) for heads in (16, 128, 192))
    assert all(found[page, 16] == 1 == found[page, 192] and found[page, 128] == 2 for page in (64, 192))
    assert multicast(64, 17, 9) == 1 and multicast(64, 34, 17) == 1 and multicast(64, 18, 9) == 1


def test_sums_are_rescaled_rarely_where_blocks_share_tiles():
    def of(page, heads, **spec):
        return plan(MlaSpec("bf16", **spec), page, row_tiles(1, heads), tiles_together(576, 1, heads))

    shared = MlaConfig(multicast=2, rise=8, scores_in_flight=1, branch_free=True, lazy_row_max=True,
                       partials_in_fragments=True)
    assert of(64, 128) == shared == of(128, 128, lse=True)
    assert of(64, 16) == MlaConfig(multicast=1) and of(16, 128) == MlaConfig() == of(64, 128, sparse=True)
    assert of(64, 128, float8=True) == replace(shared, multicast=0)


@pytest.mark.parametrize("rise", [-1, 16])
def test_a_config_refuses_by_name(rise):
    with pytest.raises(ValueError, match=f"rise is {rise}, allowed are 0 to 15"):
        MlaConfig(rise=rise)
    with pytest.raises(ValueError, match="lazy_row_max is True, rise is 0"):
        MlaConfig(lazy_row_max=True)


class Words(list):
    """Of (row, column), as a tensor of them."""

    def __init__(self, rows, columns):
        super().__init__([None] * columns for _ in range(rows))

    def __setitem__(self, at, value):
        self[at[0]][at[1]] = value

    def __getitem__(self, at):
        return super().__getitem__(at) if isinstance(at, int) else self[at[0]][at[1]]


def test_each_row_has_its_own_factor(monkeypatch):
    """Of P's stage, from the threads that have the row; nothing is said by them where no thread waits for it."""
    correct = Words(64, 2)
    for free, thread in itertools.product((False, True), range(128)):
        monkeypatch.setattr(scores.tk, "first_row", lambda t=thread: t // 32 * 16 + t % 32 // 4)
        row = thread // 32 * 16 + thread % 32 // 4
        regs = SimpleNamespace(pair=SimpleNamespace(stage=1),
                               correct=SimpleNamespace(tensor=[row + 0.5, row + 8 + 0.5]))
        of = SimpleNamespace(config=MlaConfig(branch_free=free))
        scores.Scores.tell(of, SimpleNamespace(correct=correct), regs)
        assert (correct[row, 1] is not None) == free
    assert all(correct[row] == [None, row + 0.5] for row in range(64))


@pytest.mark.parametrize("row, column", list(itertools.product(range(2), range(16))))
def test_one_score_is_enough_to_rise(monkeypatch, row, column):
    """By more than 2^8 above the number so far, in any of a thread's places; any lane's answer is the warp's."""
    monkeypatch.setattr(cute.arch, "fmax", max)
    monkeypatch.setattr(cute.arch, "vote_any_sync", bool)
    monkeypatch.setattr(scores.cutlass, "Boolean", bool)
    monkeypatch.setattr(scores, "Float32", float)
    s, of = Words(2, 16), SimpleNamespace(config=MlaConfig(rise=8, lazy_row_max=True))
    for r, j in itertools.product(range(2), range(16)):
        s[r, j] = -math.inf
    regs = SimpleNamespace(s=SimpleNamespace(rows_view=s), max=SimpleNamespace(tensor=[3.0, 3.0]))
    for score, wanted in ((22.0, False), (22.5, True), (-math.inf, False)):
        s[row, column] = score
        assert scores.Scores.risen(of, SimpleNamespace(scale=0.5), regs) is wanted


def test_sequences_of_two_parts():
    """Those of the GPU tests, on an H200's 66 pairs of SMs."""
    of = Planned.made((576, 512), (128, 1), (33, 1), False)
    plan = reference.plan_decode(torch.full((33,), 1500, dtype=torch.int32), None, of, 66)
    assert [splits for _, _, splits in _shared([1500] * 33, of, plan, 66, False)] == [2] * 33


def test_float8_rows_are_of_each_block_alone():
    for heads in (16, 128):
        found = plan(MlaSpec("bf16", float8=True), 64, row_tiles(1, heads), tiles_together(576, 1, heads))
        assert found.cluster == 1 and not found.multicast


def _shared(lengths, of, plan, parts, fixed):
    """(sequence, tile, splits) of tasks that more than one part, or more than one fixed split, have keys of."""
    found, part, overhead = [], plan[words.PART].item(), plan[words.OVERHEAD].item()
    begins = plan[words.prefix(len(lengths)):].tolist()
    for b, length in enumerate(lengths):
        blocks = max(1, -(-max(length, 0) // 64))
        for tile in range(of.tiles):
            if fixed:
                splits = -(-blocks // of.split)
            else:
                first = begins[b] + tile * ((begins[b + 1] - begins[b]) // of.tiles) + overhead
                splits = len({(first + i) // part for i in range(blocks)})
            if splits > 1 and 0 <= length <= 20000:
                found.append((b, tile, splits))
    return found


def _call(**changed):
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g).to(BF16)
    given = dict(q=new(2, 3, 5, 576), kv_cache=new(9, 8, 576),
                 block_table=torch.tensor([[3, 1, 8], [0, -1, 2]], dtype=torch.int32),
                 cache_seqlens=torch.tensor([17, 24], dtype=torch.int32), softmax_scale=0.1)
    return given | changed


def test_cpu_tensors():
    """The definition, row by row."""
    given = _call()
    o, lse = tkq.mla_decode(**given, return_lse=True)
    q, rows = given["q"].float(), [given["kv_cache"].float()[[3, 1, 8]].flatten(0, 1)[:17],
                                   given["kv_cache"].float()[[0, 2]].flatten(0, 1)]
    for b, length in enumerate((17, 24)):
        for i in range(3):
            seen = length - 2 + i
            keys = rows[b][:seen] if b == 0 else torch.cat((rows[b][:8], rows[b][8:seen - 8]))
            scores = q[b, i] @ keys.T * 0.1
            torch.testing.assert_close(lse[b, :, i], scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(o[b, i].float(), scores.softmax(-1) @ keys[:, :512], rtol=0.02, atol=0.02)
    cache = given["kv_cache"].unsqueeze(2)
    again = tkq.mla_decode(**_call(kv_cache=cache, causal=False))
    assert again.shape == (2, 3, 5, 512) and not torch.equal(again, o) and torch.equal(again[:, 2], o[:, 2])


def test_lengths_that_lie_give_nan():
    lengths = torch.tensor([25, 0], dtype=torch.int32)
    o, lse = tkq.mla_decode(**_call(cache_seqlens=lengths), return_lse=True)
    assert o[0].isnan().all() and not o[1].any() and (lse[1] == -math.inf).all()


def _lists(**changed):
    """As `_call`, with lists of the 72 rows of the cache."""
    g = torch.Generator().manual_seed(1)
    rows = torch.randint(-1, 72, (2, 3, 11), generator=g).int()
    given = dict(indices=rows, topk_length=torch.tensor([[11, 0, 1], [7, 3, 11]], dtype=torch.int32))
    return _call(block_table=None, cache_seqlens=None) | given | changed


@pytest.mark.parametrize("planned", [False, True])
def test_lists_of_rows(planned):
    """The definition, query by query; -1 is skipped, and what is listed twice counts twice."""
    given = _lists()
    given["indices"][0, 0, 1:3] = torch.tensor([5, 5])
    given["indices"][1, 1, :3] = -1
    lengths = given["topk_length"]
    plan = tkq.plan_decode(lengths.flatten(), 5, 1, 576, head_dim_v=512) if planned else None
    o, lse = tkq.mla_decode(**given, plan=plan, return_lse=True)
    q, rows = given["q"].float(), given["kv_cache"].float().flatten(0, 1)
    for b, i in itertools.product(range(2), range(3)):
        keys = [rows[n] for n in given["indices"][b, i, :lengths[b, i]].tolist() if n >= 0]
        if not keys:
            assert not o[b, i].any() and (lse[b, :, i] == -math.inf).all()
            continue
        scores = q[b, i] @ torch.stack(keys).T * 0.1
        torch.testing.assert_close(lse[b, :, i], scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(o[b, i].float(), scores.softmax(-1) @ torch.stack(keys)[:, :512], rtol=0.02,
                                   atol=0.02)
    assert not o[0, 1].any() and not o[1, 1].any()
    assert torch.equal(tkq.mla_decode(**given, causal=False), o)


def test_lengths_of_lists():
    """None are all; one for each sequence is for all of its queries."""
    whole, one = tkq.mla_decode(**_lists(topk_length=None)), torch.tensor([4, 11], dtype=torch.int32)
    assert torch.equal(whole, tkq.mla_decode(**_lists(topk_length=torch.full((2, 3), 11, dtype=torch.int32))))
    found = tkq.mla_decode(**_lists(topk_length=one))
    assert torch.equal(found, tkq.mla_decode(**_lists(topk_length=one[:, None].expand(2, 3))))
    assert not torch.equal(found[0], whole[0]) and torch.equal(found[1], whole[1])


@pytest.mark.parametrize("index, length", [(72, 11), (-2, 11), (0, 12), (0, -1)])
def test_lists_that_lie_give_nan(index, length):
    """Of their own query alone; indices behind a list's end say nothing."""
    given = _lists(topk_length=torch.full((2, 3), 11, dtype=torch.int32))
    given["topk_length"][1, 2], given["indices"][1, 2, 10], given["topk_length"][0, 0] = length, index, 10
    given["indices"][0, 0, 10] = 1 << 30
    o, lse = tkq.mla_decode(**given, return_lse=True)
    bad = torch.zeros(2, 3, dtype=torch.bool)
    bad[1, 2] = True
    assert torch.equal(o.isnan().all(-1).all(-1), bad) and torch.equal(lse.isnan().all(1), bad)
    assert not o[~bad].isnan().any()


@pytest.mark.parametrize("words, changed", [
    ("block_table is given, and indices", dict(block_table=torch.zeros(2, 3, dtype=torch.int32))),
    ("cache_seqlens is given, and indices", dict(cache_seqlens=torch.zeros(2, dtype=torch.int32))),
    ("block_table is None, and so is indices", dict(indices=None, topk_length=None)),
    ("topk_length is given, indices is None", dict(
        indices=None, block_table=torch.zeros(2, 3, dtype=torch.int32), cache_seqlens=torch.zeros(2).int())),
    ("indices: shape is", dict(indices=torch.zeros(2, 11, dtype=torch.int32))),
    ("indices: strides are", dict(indices=torch.zeros(11, 3, 2, dtype=torch.int32).permute(2, 1, 0))),
    (r"topk_length: shape is \(6,\)", dict(topk_length=torch.zeros(6, dtype=torch.int32))),
    ("plan: shape is", dict(plan=torch.zeros(2075, dtype=torch.int32))),
])
def test_what_is_refused_of_lists(words, changed):
    with pytest.raises(ValueError, match=f"mla_decode: {words}"):
        tkq.mla_decode(**_lists(**changed))


@pytest.mark.parametrize("error, words, changed", [
    (NotImplementedError, "q has rows of 512", dict(q=torch.zeros(2, 3, 5, 512, dtype=BF16))),
    (ValueError, "kv_cache", dict(kv_cache=torch.zeros(9, 8, 2, 576, dtype=BF16))),
    (ValueError, "kv_cache", dict(kv_cache=torch.zeros(9, 576, dtype=BF16))),
    (TypeError, "kv_cache is torch.float16", dict(kv_cache=torch.zeros(9, 8, 576, dtype=torch.float16))),
    (ValueError, "block_table", dict(block_table=torch.zeros(3, 3, dtype=torch.int32))),
    (ValueError, "last dimension must be contiguous", dict(block_table=torch.zeros(3, 2, dtype=torch.int32).T)),
    (ValueError, "cache_seqlens", dict(cache_seqlens=torch.zeros(3, dtype=torch.int32))),
    (ValueError, "plan", dict(plan=torch.zeros(3, dtype=torch.int32))),
    (ValueError, "0 heads", dict(q=torch.zeros(2, 3, 0, 576, dtype=BF16))),
    (ValueError, "softmax_scale", dict(softmax_scale=0.0)),
    (ValueError, "stride 1 must be", dict(kv_cache=torch.zeros(9, 8, 580, dtype=BF16)[..., :576])),
    (ValueError, "out", dict(out=torch.zeros(2, 3, 5, 576, dtype=BF16))),
])
def test_what_is_refused(error, words, changed):
    with pytest.raises(error, match=f"mla_decode: .*{words}"):
        tkq.mla_decode(**_call(**changed))


def test_a_scale_is_needed():
    given = _call()
    del given["softmax_scale"]
    with pytest.raises(TypeError, match="softmax_scale"):
        tkq.mla_decode(**given)


def test_a_spec_refuses_by_name():
    with pytest.raises(NotImplementedError, match="dtype is 'fp32'"):
        MlaSpec("fp32")
    with pytest.raises(NotImplementedError, match="edges is True, and sparse"):
        MlaSpec("bf16", edges=True, sparse=True)


    with pytest.raises(NotImplementedError, match="dtype is 'fp16', float8 is True"):
        MlaSpec("fp16", float8=True)


def _float8(**changed):
    """Rows of 656 bytes, and what they mean, which is few enough for bf16."""
    rows = (torch.randn(9, 8, 576, generator=torch.Generator().manual_seed(2)) * 5).to(BF16)
    cache = latent.packed(rows)
    cache.view(torch.float32)[..., 128:132] = torch.tensor([0.5, 2.0, 1.0, 4.0])  # scales
    return cache, latent.unpacked(cache)


@pytest.mark.parametrize("given", [_call, _lists])
def test_float8_rows(given):
    """They are what e4m3, scales and bf16 mean; the same result as of a cache in bf16 that has the same numbers."""
    cache, means = _float8()
    raw = cache.view(torch.float8_e4m3fn)[3, 2]
    assert torch.equal(means[3, 2, 130:135], raw[130:135].float() * 2) and torch.equal(means, means.to(BF16).float())
    assert torch.equal(means[3, 2, 512:], cache[3, 2, 528:].view(BF16).float())
    o, lse = tkq.mla_decode(**given(kv_cache=cache), return_lse=True)
    wanted = tkq.mla_decode(**given(kv_cache=means.to(BF16)), return_lse=True)
    assert torch.equal(o, wanted[0]) and torch.equal(lse, wanted[1]) and not o.isnan().any()
    assert torch.equal(tkq.mla_decode(**given(kv_cache=cache[:, :, None])), o)


@pytest.mark.parametrize("dtype, columns", [(torch.bfloat16, 576), (torch.uint8, 656)])
def test_a_cache_of_no_pages(dtype, columns):
    """Keys of a page -1 are skipped, also where there is no other."""
    lengths, table = torch.tensor([3, 0], dtype=torch.int32), torch.full((2, 1), -1, dtype=torch.int32)
    q, empty = torch.randn(2, 1, 4, 576).bfloat16(), torch.zeros(0, 4, columns, dtype=dtype)
    for given in (dict(block_table=table, cache_seqlens=lengths), dict(indices=table[:, None])):
        o, lse = tkq.mla_decode(q, empty, softmax_scale=0.1, return_lse=True, **given)
        assert not o.any() and (lse == -math.inf).all()


def test_rows_are_quantised_by_groups():
    rows = torch.randn(5, 576, generator=torch.Generator().manual_seed(3))
    rows[:, 128:256] *= 1000
    means = latent.unpacked(latent.packed(rows))
    for first in range(0, 512, 128):
        group, found = rows[:, first:first + 128], means[:, first:first + 128]
        assert (found - group).norm() < 0.04 * group.norm() and not torch.equal(found, group)
    assert torch.equal(means[:, 512:], rows[:, 512:].to(BF16).float())


@pytest.mark.parametrize("error, words, changed", [
    (NotImplementedError, "q is torch.float16, kv_cache is torch.uint8", dict(
        q=torch.zeros(2, 3, 5, 576, dtype=torch.float16))),
    (ValueError, "kv_cache: shape is", dict(kv_cache=torch.zeros(9, 8, 576, dtype=torch.uint8))),
    (ValueError, "stride 1 must be a multiple of 16", dict(
        kv_cache=torch.zeros(9, 8, 660, dtype=torch.uint8)[..., :656])),
    (ValueError, "begins at an address", dict(kv_cache=torch.zeros(9, 8, 672, dtype=torch.uint8)[..., 8:664])),
])
def test_what_is_refused_of_float8_rows(error, words, changed):
    with pytest.raises(error, match=f"mla_decode: .*{words}"):
        tkq.mla_decode(**_call(**{"kv_cache": _float8()[0]} | changed))


def test_lists_are_copied_row_by_row():
    """Also from pages of whole tiles, which TMA would load."""
    assert plan(MlaSpec("bf16", sparse=True), 64, 2, 2).multicast == 0

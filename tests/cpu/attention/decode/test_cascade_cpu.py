"""cascade_attention where there is no GPU: CPU tensors against whole sequences, plans, and what is refused."""
import itertools
import math

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.emulation.contract import misfit
from tkq.attention.decode.cascade import sharing
from tkq.attention.decode.plan import row_tiles
from tkq.runtime.compile import build

BF16, INT = torch.bfloat16, torch.int32


def _cache(lengths, prefix, page=4, dtype=BF16):
    """q of two queries each, caches, lengths and a table, whose first pages are everybody's."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 48, page, 2, 64).to(dtype)
    table = torch.randperm(48)[:len(lengths) * 8].view(len(lengths), 8).to(INT)
    table[:, :prefix // page] = table[0, :prefix // page].clone()
    return torch.randn(len(lengths), 2, 4, 64).to(dtype), k, v, torch.tensor(lengths, dtype=INT), table


@pytest.mark.parametrize("prefix, cascade", list(itertools.product((0, 1, 3, 4, 5, 16),
                                                                   (True, False, None))))
@pytest.mark.parametrize("options", [{}, dict(sinks=torch.linspace(-1, 2, 4), softcap=5.0), dict(causal=False),
                                     dict(softmax_scale=0.3, batch_invariant=True)])
def test_it_is_attention_of_whole_sequences(prefix, cascade, options):
    """Of prefixes around a page's end; a sequence whose first query sees the prefix alone."""
    q, k, v, lengths, table = _cache([prefix + 1, prefix + 9, 30], prefix)
    want, of = tkq.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, return_lse=True,
                                           **options)
    o, lse = tkq.cascade_attention(q, k, v, cache_seqlens=lengths, block_table=table, prefix_len=prefix,
                                   cascade=cascade, return_lse=True, **options)
    torch.testing.assert_close(o, want, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse, of, rtol=1e-5, atol=1e-5)


def test_ragged_queries():
    """Rows of no sequence are NaN, whichever way it goes."""
    _, k, v, lengths, table = _cache([12, 9, 30], 8)
    starts, q = torch.tensor([1, 4, 4, 12], dtype=INT), torch.randn(13, 4, 64).to(BF16)
    given = dict(block_table=table, cu_seqlens_q=starts, return_lse=True)
    want, of = tkq.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **given)
    for cascade in (True, False):
        plan = tkq.plan_cascade(lengths, 4, 2, 64, prefix_len=8, page_size=4, cu_seqlens_q=starts, total_q=13,
                                cascade=cascade)
        out = torch.zeros_like(q)
        o, lse = tkq.cascade_attention(q, k, v, plan=plan, out=out, **given)
        assert o is out and bool(plan.shared) == cascade
        torch.testing.assert_close(o[1:12], want[1:12], rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(lse[:, 1:12], of[:, 1:12], rtol=1e-5, atol=1e-5)
        assert o[[0, 12]].isnan().all()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("ragged", [False, True])
def test_a_plan_is_traced_by_jit(ragged):
    """Whose sizes are tensors, as the number of rows would be."""
    lengths, cu = torch.tensor([12, 30], dtype=INT), torch.tensor([0, 1, 4], dtype=INT)
    own = dict(cu_seqlens_q=cu, total_q=4) if ragged else dict(max_seqlen_q=2)

    def run(lengths):
        plan = tkq.plan_cascade(lengths, 4, 2, 64, prefix_len=8, page_size=4, cascade=True, **own)
        return plan.seqlens, plan.plan, plan.prefix_seqlens, plan.prefix_plan

    program = torch.jit.trace(run, lengths, check_trace=False)
    assert all(map(torch.equal, program(lengths), run(lengths)))


@pytest.mark.parametrize("cascade", [True, False])
def test_lengths_and_pages_that_lie(cascade):
    """A sequence whose first query does not see the prefix; one of no key; a page that is not there."""
    q, k, v, lengths, table = _cache([30, 8, 0, 30, -4], 8)
    table[3, 6] = 48
    o = tkq.cascade_attention(q, k, v, cache_seqlens=lengths, block_table=table, prefix_len=8, cascade=cascade)
    assert o[[1, 3, 4]].isnan().all() and o[[0, 2]].isfinite().all()
    plan = tkq.plan_cascade(lengths, 4, 2, 64, prefix_len=8, page_size=4, max_seqlen_q=2, cascade=cascade)
    assert plan.seqlens.tolist() == ([22, -1, 0, 22, -1] if cascade else [30, -1, 0, 30, -1])
    with pytest.raises(ValueError, match="a length is negative"):
        tkq.check_plan(plan.plan)
    table[0, 1] = 48
    o = tkq.cascade_attention(q, k, v, cache_seqlens=lengths, block_table=table, prefix_len=8, cascade=cascade)
    assert o[0].isnan().all() and (not cascade or o.isnan().all())


def test_a_float8_cache():
    q, k, v, lengths, table = _cache([12, 30], 8)
    low, scales = (k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)), torch.rand(48, 4, 2) + 0.5
    given = dict(cache_seqlens=lengths, block_table=table, k_descale=scales, v_descale=scales.flip(0))
    want = tkq.flash_attn_with_kvcache(q, *low, **given)
    o = tkq.cascade_attention(q, *low, prefix_len=8, cascade=True, **given)
    torch.testing.assert_close(o, want, rtol=2**-6, atol=2**-6)
    with pytest.raises(NotImplementedError, match="k_descale is .2, 2., of sequences"):
        tkq.cascade_attention(q, *low, prefix_len=8, **given | dict.fromkeys(("k_descale", "v_descale"),
                                                                              torch.ones(2, 2)))


def test_a_query_of_packed_projections_is_taken():
    """q whose sequences do not follow each other in memory."""
    _, k, v, lengths, table = _cache([12, 30], 8)
    q = torch.randn(2, 5, 4, 64).to(BF16)[:, :2]
    given = dict(cache_seqlens=lengths, block_table=table, prefix_len=8, cascade=True)
    assert torch.equal(tkq.cascade_attention(q, k, v, **given), tkq.cascade_attention(q.contiguous(), k, v, **given))


def test_nothing_to_do():
    q, k, v, lengths, table = _cache([12, 30], 8)
    for batch, rows in ((0, 2), (2, 0)):
        o, lse = tkq.cascade_attention(q[:batch, :rows], k, v, cache_seqlens=lengths[:batch], block_table=table[:batch],
                                       prefix_len=8, cascade=True, return_lse=True)
        assert o.shape == (batch, rows, 4, 64) and lse.shape == (batch, 4, rows)


@pytest.mark.parametrize("queries, options, merges", [
    (1, {}, True), (3, dict(batch_invariant=True, return_lse=True), True), (5, dict(cu_seqlens_q=True), True),
    (900, {}, False)])
def test_what_is_launched(queries, options, merges):
    """The prefix, what is behind it, and their merge, also of what lies in parts but where chunked prefill had the
    prefix: tensors are what the kernels are compiled for."""
    q, (k, v) = torch.zeros(2, queries, 32, 128, dtype=BF16), torch.zeros(2, 300, 16, 8, 128, dtype=BF16)
    given = dict(block_table=torch.zeros(2, 150, dtype=INT), cache_seqlens=torch.full((2,), 2300, dtype=INT))
    options = dict(options)
    if options.pop("cu_seqlens_q", False):
        q, options["cu_seqlens_q"] = q[0], torch.tensor([0, 2, 5], dtype=INT)
    with fake_gpu.launches() as seen, torch.no_grad():
        tkq.cascade_attention(q, k, v, prefix_len=1030, cascade=True, **given, **options)
    names = [recipe.builder.partition(":")[2] for recipe, _ in seen[-3:]]
    assert names == ["Decode" if merges else "ChunkedPrefill"] * 2 + ["MergeState"]
    assert seen[-1][0].args[0].parts == merges == getattr(seen[-3][0].args[0], "in_parts", False)
    for recipe, (first, others, *_) in seen[-3:]:
        fakes, sizes = build._made(recipe)[1], {}
        for fake, x in zip((fakes[0], *fakes[1]), (first, *others), strict=True):
            assert (fake is None) == (x is None) and (x is None or not misfit(fake, x, sizes))


def test_the_prefix_of_few_queries_takes_the_kernel_of_many():
    """Over a float8 cache: with batch_invariant a sequence's bits are those in any batch."""
    k, v = torch.zeros(2, 300, 16, 8, 128).to(torch.float8_e4m3fn)
    found = set()
    for batch in (2, 3):
        given = dict(block_table=torch.zeros(batch, 150, dtype=INT),
                     cache_seqlens=torch.full((batch,), 2300, dtype=INT))
        with fake_gpu.launches() as seen, torch.no_grad():
            tkq.cascade_attention(torch.zeros(batch, 1, 32, 128, dtype=BF16), k, v, prefix_len=1030, cascade=True,
                                  batch_invariant=True, **given)
        found.add(tuple(recipe for recipe, _ in seen[-3:]))
    (kernels,) = found
    assert [recipe.args[0].few for recipe in kernels[:2]] == [False, True]


# ---- the choice -----------------------------------------------------------------------------------------------------

SIZES = [(heads, dims) for heads in ((8, 8), (32, 8), (64, 1)) for dims in ((64, 64), (128, 128), (192, 128))]


@pytest.mark.parametrize("heads, dims", SIZES)
def test_a_longer_prefix_and_twice_the_batch_pay_as_well(heads, dims):
    """And nothing pays for one sequence, no prefix, or queries that fill tiles of their own."""
    for batch, queries in itertools.product((1, 2, 3, 16, 100, 256), (1, 2, 7, 64)):
        found = [sharing.pays(shared, batch, queries, heads, dims) for shared in (0, 64, 1024, 16384, 1 << 18, 1 << 22)]
        assert found == sorted(found) and not found[0]
        tiles = row_tiles(queries, heads[0] // heads[1])
        if batch == 1 or batch * tiles == row_tiles(batch * queries, heads[0] // heads[1]):
            assert not any(found)
        else:
            assert found[-1]
        for shared in (1024, 16384):
            if sharing.pays(shared, batch, queries, heads, dims):
                assert sharing.pays(shared, 2 * batch, queries, heads, dims)
        ragged = sharing.pays(16384, batch, batch * queries, heads, dims, ragged=True)
        assert not ragged or sharing.pays(16384, batch, queries, heads, dims)  # which knows less, and promises less


# Microseconds of the prefix read once and by each sequence, by (sequences, keys of the prefix): python -m
# bench.studies.cascade on an H200, 29 November 2026, commit 6809244a. 32 query heads, 8 K/V heads, D 128, one query.
MEASURED = {(1, 128): (15.1, 6.6), (1, 1024): (17.5, 8.3), (1, 8192): (28.2, 16.0),
            (4, 128): (16.5, 8.0), (4, 1024): (21.2, 9.2), (4, 8192): (33.3, 26.1),
            (16, 128): (21.6, 11.5), (16, 1024): (26.3, 20.0), (16, 8192): (41.9, 85.7),
            (64, 128): (37.6, 25.0), (64, 1024): (42.9, 58.2), (64, 8192): (70.8, 339.4),
            (256, 128): (98.6, 89.9), (256, 1024): (115.3, 224.6), (256, 8192): (193.1, 1366.4)}


@pytest.mark.parametrize("batch, shared", MEASURED)
def test_the_faster_way_is_chosen(batch, shared):
    once, each = MEASURED[batch, shared]
    assert sharing.pays(shared, batch, 1, (32, 8), (128, 128)) == (once < each)


def test_what_the_plan_decides():
    lengths = torch.full((64,), 9000, dtype=INT)
    of = dict(num_heads_q=32, num_heads_kv=8, head_dim=128, page_size=16)
    assert tkq.plan_cascade(lengths, **of, prefix_len=8199).shared == 8192
    assert tkq.plan_cascade(lengths, **of, prefix_len=8199, cascade=False).shared == 0
    assert tkq.plan_cascade(lengths, **of, prefix_len=16).shared == 0
    assert tkq.plan_cascade(lengths, **of, prefix_len=16, cascade=True).shared == 16
    assert tkq.plan_cascade(lengths, **of, prefix_len=15, cascade=True).shared == 0
    assert tkq.plan_cascade(lengths[:1], **of, prefix_len=8199).shared == 0
    assert tkq.plan_cascade(lengths, **of, prefix_len=8199, batch_invariant=True).shared == 0
    assert tkq.plan_cascade(lengths, **of, prefix_len=8199, batch_invariant=True, cascade=True).shared == 8192
    assert tkq.plan_cascade(lengths, **of, prefix_len=(1 << 30) - 1, max_seqlen_q=1 << 16, cascade=False
                            ).seqlens.eq(-1).all()


@pytest.mark.parametrize("error, words, changed", [
    (NotImplementedError, "window_size is .3, None.; a window over a shared prefix", dict(window_size=(3, None))),
    (ValueError, "prefix_len is 33, block_table has room for 32", dict(prefix_len=33)),
    (TypeError, "prefix_len: got NoneType, expected an int", dict(prefix_len=None)),
    (TypeError, "plan: got .*allowed are None and CascadePlans", dict(plan=torch.zeros(3, dtype=INT))),
    (ValueError, "block_table: shape is", dict(block_table=torch.zeros(3, 8, dtype=INT))),
    (ValueError, "block_table: has 1 dimensions", dict(block_table=torch.zeros(8, dtype=INT))),
    (ValueError, "q: has 3 dimensions", dict(q=torch.zeros(2, 4, 64, dtype=BF16))),
    (ValueError, "stride 1 must be a multiple of 8", dict(k_cache=torch.zeros(48, 4, 132, dtype=BF16)[..., :128]
                                                          .unflatten(2, (2, 64)))),
    (NotImplementedError, "ragged queries are causal", dict(
        q=torch.zeros(5, 4, 64, dtype=BF16), cu_seqlens_q=torch.tensor([0, 1, 5], dtype=INT), causal=False)),
    (NotImplementedError, "head_dim is 40", dict(q=torch.zeros(2, 1, 4, 40, dtype=BF16),
                                                 k_cache=torch.zeros(48, 4, 2, 40, dtype=BF16))),
    (NotImplementedError, "q requires a gradient", dict(q=torch.zeros(2, 1, 4, 64, dtype=BF16, requires_grad=True)))])
def test_what_is_refused(error, words, changed):
    q, k, v, lengths, table = _cache([12, 30], 8)
    given = dict(q=q, k_cache=k, v_cache=v, cache_seqlens=lengths, block_table=table, prefix_len=8) | changed
    with pytest.raises(error, match=f"cascade_attention: .*{words}"):
        tkq.cascade_attention(**given)


def test_plans_that_do_not_fit():
    q, k, v, lengths, table = _cache([12, 30], 8)
    of = dict(num_heads_q=4, num_heads_kv=2, head_dim=64, prefix_len=8, max_seqlen_q=2, cascade=True)
    plan, given = tkq.plan_cascade(lengths, **of, page_size=4), dict(block_table=table)
    for more in (dict(cache_seqlens=lengths), dict(prefix_len=8), dict(cascade=True)):
        with pytest.raises(ValueError, match=f"{next(iter(more))} is given, and plan"):
            tkq.cascade_attention(q, k, v, plan=plan, **given, **more)
    with pytest.raises(ValueError, match="plan is for pages of 8"):
        tkq.cascade_attention(q, k, v, plan=tkq.plan_cascade(lengths, **of, page_size=8), **given)
    with pytest.raises(ValueError, match="plan: shape is"):
        tkq.cascade_attention(q[:, :1].expand(-1, 40, -1, -1).contiguous(), k, v, plan=plan, **given)
    with pytest.raises(TypeError, match="plan.seqlens: dtype is torch.int64"):
        tkq.cascade_attention(q, k, v, plan=plan._replace(seqlens=plan.seqlens.long()), **given)
    with pytest.raises(ValueError, match="plan_cascade: total_q is None"):
        tkq.plan_cascade(lengths, **of, page_size=4, cu_seqlens_q=torch.zeros(3, dtype=INT))
    with pytest.raises(ValueError, match="plan_cascade: num_heads_q is 3"):
        tkq.plan_cascade(lengths, **of | dict(num_heads_q=3), page_size=4)
    assert not math.isnan(tkq.cascade_attention(q, k, v, plan=plan, **given).float().sum())


def test_a_part_whose_sum_is_infinite_has_all_weight():
    """As a sink's may be: its o is 0."""
    o = torch.randn(1, 2, 1, 8).bfloat16()
    lse, infinite = torch.randn(1, 1, 2), torch.full((1, 1, 2), torch.inf)
    for given in ((torch.zeros_like(o), infinite, o, lse), (o, lse, torch.zeros_like(o), infinite)):
        found, total = tkq.merge_state(*given)
        assert torch.equal(found, torch.zeros_like(o)) and torch.equal(total, infinite)
    ones = torch.ones_like(o)
    assert torch.equal(tkq.merge_state(ones, infinite, 3 * ones, infinite)[0], 2 * ones)

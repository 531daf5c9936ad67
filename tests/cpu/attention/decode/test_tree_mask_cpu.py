"""Tree masks where there is no GPU: CPU tensors, the kernel's own bits, and what is refused."""
import pytest
import torch

import tkq
from tests.helpers.attention import trees
from tests.helpers.emulation.decode import TreeBitsOnCpu, function
from tkq.attention.decode.check import Call, Options
from tkq.attention.decode.launch import spec_of

BF16, INT = torch.bfloat16, torch.int32


def _cache(queries, lengths):
    torch.manual_seed(0)
    table = torch.randperm(60).view(3, 20).to(INT)
    k, v = torch.randn(2, 60, 4, 2, 64).to(BF16)
    return torch.randn(3, queries, 4, 64).to(BF16), k, v, torch.tensor(lengths, dtype=INT), table


@pytest.mark.parametrize("queries, lengths", [(1, [30, 1, 0]), (7, [30, 7, 8]), (64, [80, 64, 70]), (5, [3, 0, 5])])
@pytest.mark.parametrize("options", [{}, dict(sinks=torch.linspace(-1, 2, 4), softcap=5.0)])
def test_trees(queries, lengths, options):
    """Each query sees its ancestors, itself and all that came before: some sequences have fewer keys than queries."""
    q, k, v, lengths, table = _cache(queries, lengths)
    masks = trees.masks(3, queries)
    o, lse = tkq.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, tree_mask=masks,
                                         return_lse=True, **options)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (c[table[b].long()].flatten(0, 1)[:length] for c in (k, v))
        want, of = trees.attention(q[b], keys, values, trees.visible(masks[b], length), **options)
        torch.testing.assert_close(o[b].double(), want, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(lse[b].double(), of, rtol=1e-5, atol=1e-5)


def test_a_chain_is_causal():
    q, k, v, lengths, table = _cache(64, [80, 64, 70])
    chain = trees.packed(torch.ones(64, 64).tril().bool().expand(3, 64, 64))
    given = dict(cache_seqlens=lengths, block_table=table)
    want = tkq.flash_attn_with_kvcache(q, k, v, **given)
    for causal in (True, False):
        assert torch.equal(tkq.flash_attn_with_kvcache(q, k, v, tree_mask=chain, causal=causal, **given), want)


def test_the_kernels_bits(monkeypatch):
    """32 bits from any start, of any mask: 1 before the first; behind the last nothing is asked."""
    torch.manual_seed(0)
    masks = torch.cat((torch.randint(-(1 << 63), (1 << 63) - 1, (300,)), torch.tensor([0, -1, 1, 1 << 62, -(1 << 63)])))
    starts = torch.randint(-140, 64, (len(masks),), dtype=INT)
    starts[:8] = torch.tensor([-65, -64, -33, -32, -31, -1, 0, 63])
    found = torch.zeros(len(masks), dtype=INT)
    function(TreeBitsOnCpu(), monkeypatch)(masks, (starts, found))
    for mask, start, word in zip(masks.tolist(), starts.tolist(), found.tolist()):
        for i in range(32):
            if start + i < 64:
                want = start + i < 0 or mask >> (start + i) & 1
                assert bool(word >> i & 1) == bool(want), (mask, start, i)


def test_a_tree_is_another_kernel():
    q, k, v, lengths, table = _cache(5, [30, 7, 8])
    of = lambda tree: spec_of(Call(q, k, v, lengths, table, tree_mask=tree), Options())
    assert of(trees.masks(3, 5)).tree and not of(trees.masks(3, 5)).edges
    assert of(None).edges and not of(None).tree
    low = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    assert spec_of(Call(q[:, :2], *low, lengths, table), Options()).few
    assert not spec_of(Call(q[:, :2], *low, lengths, table, tree_mask=trees.masks(3, 2)), Options()).few


@pytest.mark.parametrize("error, words, queries, changed", [
    (NotImplementedError, "tree_mask is .3, 65., supported are up to 64 queries", 65, {}),
    (ValueError, "tree_mask: shape is .3, 4., expected .3, 5.", 5, dict(tree_mask=trees.masks(3, 4))),
    (TypeError, "tree_mask: dtype is torch.int32", 5, dict(tree_mask=torch.zeros(3, 5, dtype=INT))),
    (NotImplementedError, "tree_mask is given, and window_size", 5, dict(window_size=(3, None))),
    (NotImplementedError, "tree_mask is given, and cu_seqlens_q", 5, dict(
        q=torch.zeros(5, 4, 64, dtype=BF16), cu_seqlens_q=torch.tensor([0, 1, 2, 5], dtype=INT)))])
def test_what_is_refused(error, words, queries, changed):
    q, k, v, lengths, table = _cache(queries, [80, 64, 70])
    mask = torch.ones(3, queries, dtype=torch.int64)
    given = dict(q=q, cache_seqlens=lengths, block_table=table, tree_mask=mask) | changed
    with pytest.raises(error, match=f"flash_attn_with_kvcache: .*{words}"):
        tkq.flash_attn_with_kvcache(k_cache=k, v_cache=v, **given)

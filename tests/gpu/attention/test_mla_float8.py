"""mla_decode over float8 rows of 656 bytes on the GPU, against float64 of what they mean: NaN wherever no key
is."""
import pytest
import torch

import tkq
from tests.helpers.attention import mla, mla_sparse
from tests.helpers.attention.kv_cache import ENDS, queries
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.reference.mla import packed, unpacked


def float8(rows):
    """Rows as bytes, of groups that differ in size; those of NaN are NaN in all: e4m3, scales and rotated columns."""
    wide = rows.clone()
    for group in range(4):
        wide[..., 128 * group:128 * group + 128] *= (0.02, 1.0, 3.0, 0.7)[group]
    return packed(wide)


def means(cache):
    """As kernels take them: rounded to bf16, which lse shows."""
    return unpacked(cache).bfloat16().double()


@pytest.mark.parametrize("page, rows, heads", [(64, 1, 128), (16, 1, 16), (1, 2, 37), (256, 3, 20)])
def test_pages(page, rows, heads):
    """With gaps between rows, and other ones between pages."""
    lengths = [*ENDS, 63, 64, 65, 257]
    made = mla.make(lengths, page)
    cache, keys = float8(made.k), []
    for b, length in enumerate(lengths):
        pages = made.table[b, :-(-length // page)].long()
        k = means(cache[pages]).flatten(0, 1)[:length]
        keys.append((k, k[..., :512]))
    made = made._replace(k=mla.apart(cache), keys=keys)
    with poisoned():
        mla.compare(queries(len(lengths), rows, heads, 576), made, f"pages of {page}")


@pytest.mark.parametrize("lengths, heads", [([40000], 128), ([3000, 2999, 1] * 50, 16)])
def test_work_that_blocks_share(lengths, heads):
    made = mla.make(lengths, 64)
    cache = float8(made.k)
    some = [0, len(lengths) - 1]
    with poisoned():
        o, lse = mla.call(queries(len(lengths), 1, heads, 576), made._replace(k=cache))
    assert not o.isnan().any()
    keys = [means(cache[made.table[b, :-(-lengths[b] // 64)].long()]).flatten(0, 1)[:lengths[b]] for b in some]
    mla.judge_all(o[some], lse[some], queries(len(lengths), 1, heads, 576)[some],
                  made._replace(keys=[(k, k[..., :512]) for k in keys]), "shared")


@pytest.mark.parametrize("rows, heads, topk, lengths", [
    (1, 128, 700, None), pytest.param(2, 16, 129, "queries", marks=pytest.mark.slow)])
def test_lists(rows, heads, topk, lengths):
    lists = mla_sparse.with_ends(mla_sparse.make(8, rows, topk, 64, lengths), [0, 1, 63, 64, 65, 129])
    lists = lists._replace(cache=mla.apart(float8(lists.cache)))
    with poisoned():
        mla_sparse.compare(queries(8, rows, heads, 576), lists)


def test_lists_that_lie_give_nan():
    """Of their own query alone."""
    q, lists = queries(2, 1, 16, 576), mla_sparse.make(2, 1, 300, 64, None)
    indices = lists.indices.clone()
    indices[1, 0, 200] = lists.cache.shape[0] * 64
    lengths = torch.full((2,), 300, device="cuda", dtype=torch.int32)
    plan = tkq.plan_decode(lengths, 16, 1, 576, head_dim_v=512)
    cache = float8(lists.cache)
    whole, _ = mla_sparse.call(q, lists._replace(cache=cache))
    with poisoned():
        o = tkq.mla_decode(q, cache, softmax_scale=mla.SCALE, indices=indices, plan=plan)
    assert o[1].isnan().all()
    torch.testing.assert_close(o[0], whole[0], rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="neither -1 nor one"):
        tkq.check_plan(plan)


def test_every_number_of_e4m3():
    """Each of the 254 codes that are numbers in each column's place, of one key: its value is it, times its scale, in
    bf16."""
    cache = packed(torch.zeros(4, 64, 576, device="cuda"))
    codes = (torch.arange(256, device="cuda").view(4, 64, 1) + torch.arange(512, device="cuda") * 7) % 256
    cache[..., :512] = codes.masked_fill(codes % 128 == 127, 0).to(torch.uint8)  # without NaN
    cache[..., 512:528] = torch.tensor([1.5, 0.25, 1e-3, 3e4], device="cuda").view(torch.uint8)
    rows = torch.arange(256, device="cuda", dtype=torch.int32).view(256, 1, 1)
    q = torch.zeros(256, 1, 3, 576, device="cuda", dtype=torch.bfloat16)
    o = tkq.mla_decode(q, cache, softmax_scale=1.0, indices=rows)
    assert torch.equal(o, unpacked(cache).view(256, 1, 1, 576)[..., :512].bfloat16().expand(256, 1, 3, 512))

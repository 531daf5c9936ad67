"""Gradients of tkq.flex_attention on the GPU against float64: the gallery, block sizes, groups of heads, empty rows,
lse's gradient."""
import math

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import tkq
from tests.gpu.attention.test_flex_attention import BF16, FP16, B, H, make, mask_of
from tests.helpers.attention import flex_gallery as gallery
from tests.helpers.attention.gradients import rounded_once
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.testing import assert_2x


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


def gradients(function, q, k, v, do, dlse):
    """Of function(q, k, v), which gives (o, lse)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]  # of the same strides
    o, lse = function(*leaves)
    lse = lse.masked_fill(lse == -math.inf, 0)  # a row that sees nothing has no gradient
    return torch.autograd.grad((o, lse) if dlse is not None else (o,), leaves,
                               (do.to(o.dtype), dlse.to(lse.dtype)) if dlse is not None else (do.to(o.dtype),))


def check(q, k, v, score_mod=None, mask_mod=None, block_mask=None, what="", **how):
    """Of one call: dq, dk, dv by the 2x rule beside PyTorch at q's dtype. how: scale, do, with_lse."""
    (batch, heads, Sq, _), Sk, scale, do = q.shape, k.shape[2], how.get("scale"), how.get("do")
    g = torch.Generator("cuda").manual_seed(3)
    if do is None:
        do = torch.randn((*q.shape[:3], v.shape[3]), device="cuda", generator=g).to(q.dtype)
    dlse = torch.randn(q.shape[:3], device="cuda", generator=g) if how.get("with_lse") else None
    block_mask = mask_of(mask_mod, Sq, Sk, batch, heads) if block_mask is None else block_mask
    seen = gallery.visible(mask_mod, batch, heads, Sq, Sk, "cuda")
    ours = gradients(lambda *x: tkq.flex_attention(*x, score_mod, block_mask, scale, heads != k.shape[1],
                                                   True), q, k, v, do, dlse)
    dense = lambda *x: gallery.dense(*x, score_mod, seen, scale, x[0].dtype)
    true, low = (gradients(dense, *(x.to(dtype) for x in (q, k, v)), do, dlse) for dtype in (torch.float64, q.dtype))
    for name, a, b, c in zip(("dq", "dk", "dv"), ours, true, low):
        if Sq < 16:  # of all heads: of 3 queries of one, PyTorch is right by luck (dS and results alone are rounded)
            assert_2x(*(x.flatten(0, 2) for x in (a, b, c)), 1, f"{what} {name}", block=None)
            continue
        # rows of a head together: one that sees a single key has a gradient of 0, by PyTorch exactly
        for of_head in zip(*(x.flatten(0, 1) for x in (a, b, c))):
            assert_2x(*of_head, 1, f"{what} {name}")
    return ours


@pytest.mark.parametrize("name, D", [("causal", 128), ("document", 128), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in (
        *((name, 128) for name in ("softcap", "relative_bias", "natten", "alibi_causal", "causal_score", "t5_bias")),
        *((name, 256) for name in ("document", "relative_bias", "alibi_causal", "causal_score"))))])
def test_gallery(name, D):
    S = 576
    score_mod, mask_mod = gallery.gallery(B, H, S, "cuda", torch.Generator("cuda").manual_seed(1))[name]
    check(*make(S, S, D), score_mod, mask_mod, what=name)


@pytest.mark.parametrize("D", (128, 256))
@pytest.mark.parametrize("Sq, Sk", [(3, 200), (200, 3), (129, 640), (1000, 1000)])
def test_lengths(Sq, Sk, D):
    check(*make(Sq, Sk, D), mask_mod=gallery.causal)


WIDTHS = 128, pytest.param(256, marks=pytest.mark.slow)


@pytest.mark.parametrize("D", WIDTHS)
def test_no_mask(D):
    check(*make(200, 330, D))


@pytest.mark.slow
@pytest.mark.parametrize("D", (128, 256))
def test_lists_without_a_function(D):
    """Some blocks are said to need a mask, others to be full, and there is none: all of either are seen. Scores depend
    on their places."""
    S, blocks = 512, lambda b, h, q, kv: q // 128 >= kv // 128
    of = mask_of(gallery.causal, S, S)
    mask = BlockMask.from_kv_blocks(of.kv_num_blocks, of.kv_indices, of.full_kv_num_blocks, of.full_kv_indices, 128,
                                    None, (S, S))
    assert (mask.q_num_blocks == 1).all() and mask.full_q_num_blocks.max() == 3
    check(*make(S, S, D), gallery.alibi(torch.full((H,), 0.05, device="cuda")), blocks, mask)


@pytest.mark.parametrize("D, dtype", [(64, FP16), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in ((64, BF16), (128, FP16), (192, FP16)))])
def test_dtypes_and_dims(D, dtype):
    check(*make(700, 700, D, dtype), mask_mod=gallery.causal)


@pytest.mark.parametrize("D, Dv, tile", [(96, 72, 128), (136, 200, 256)])
def test_odd_dims(D, Dv, tile):
    q, k, v = make(300, 300, tile)
    check(q[..., :D], k[..., :D], v[..., :Dv], mask_mod=gallery.causal)


@pytest.mark.parametrize("size, D", [((64, 64), 128), *(
    pytest.param(size, D, marks=pytest.mark.slow) for size, D in (
        ((128, 256), 128), ((192, 192), 128), ((64, 64), 256), ((128, 192), 256)))])
def test_block_sizes(size, D):
    mask_mod = gallery.document(torch.arange(700, device="cuda") // 150)
    check(*make(700, 700, D), mask_mod=mask_mod, block_mask=mask_of(mask_mod, 700, 700, size=size))


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("name", ("causal", "alibi_causal", "softcap"))
@pytest.mark.sampled(when=lambda name, dim: (name, dim) in (("causal", 128), ("softcap", 64), ("causal", 256),
                                                            ("softcap", 256)))
def test_equal_accuracy(name, dim):
    """The rule by which speeds are compared: dS is rounded once, with and without a slope. Of a rounded P it would have
    1.22 times the error."""
    S = 1024
    score_mod, mask_mod = gallery.gallery(1, 2, S, "cuda")[name]
    q, k, v = make(S, S, dim, heads=(1, 2, 2))
    do, (wq, wk, wv) = torch.randn_like(q), (x.double() for x in (q, k, v))
    s = (wq @ wk.mT * dim**-0.5).requires_grad_()
    logits = s * 1.0 if score_mod is None else gallery.over_all(score_mod, gallery.grid(1, 2, S, S, "cuda"), s)
    slope, = torch.autograd.grad(logits.sum(), s)
    p = logits.detach().masked_fill(~gallery.visible(mask_mod, 1, 2, S, S, "cuda"), -math.inf).softmax(-1)
    given = [x.double().transpose(1, 2) for x in (do, q, k, v, p @ wv)]
    like = [x.transpose(1, 2) for x in rounded_once(*given, p, dim**-0.5, slope)]
    dense = lambda *x: gallery.dense(*x, score_mod, p > 0)
    true = gradients(dense, wq, wk, wv, do, None)
    ours = gradients(lambda *x: tkq.flex_attention(*x, score_mod, mask_of(mask_mod, S, S, 1, 2), return_lse=True),
                     q, k, v, do, None)
    for what, a, b, c in zip(("dq", "dk", "dv"), ours, true, like):
        found, theirs, rounding = (((x.double() - b).norm() / b.norm()).item() for x in (a, c, b.to(BF16)))
        assert found <= 1.05 * theirs + 0.1 * rounding, f"{what}: error {found:.2e}, rounded once {theirs:.2e}"


@pytest.mark.parametrize("D", (128, 256))
def test_far_from_a_softcap(D):
    """Scores far below it, far above, both in a tile: of the kernel that `test_equal_accuracy` has."""
    q, k, v = make(576, 576, D, scale=4.0)
    k[:, 0] *= 0.02
    k[:, 1, ::3] *= 0.02
    check(q, k, v, gallery.softcap(8.0), gallery.causal)


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("score_mod", (
    pytest.param(lambda score, b, h, q, kv: score + 2.0 * kv, id="bias"),
    pytest.param(lambda score, b, h, q, kv: torch.tanh(score) + 2.0 * kv, id="slope", marks=pytest.mark.slow)))
def test_scores_that_grow_behind_the_last_key(score_mod, D):
    """There is no key, but a score in the kernel, beside which exp overflows."""
    check(*make(300, 201, D), score_mod)


@pytest.mark.parametrize("D", WIDTHS)
def test_a_score_that_is_used_in_several_places(D):
    """Its slope is the sum of what each use gives."""
    check(*make(300, 300, D), lambda score, b, h, q, kv: score * torch.sigmoid(score) - 0.3 * score.abs())


@pytest.mark.slow
@pytest.mark.parametrize("D", (128, 256))
def test_large_slopes(D):
    """P times a slope far above 16-bit numbers, and so small that it is none of them."""
    sizes = torch.tensor([1e-6, 30.0, 1e4, 1.0], device="cuda")
    check(*make(300, 300, D, scale=0.02), lambda score, b, h, q, kv: score * sizes[h], gallery.causal)


@pytest.mark.slow
@pytest.mark.parametrize("D", (128, 256))
def test_keys_and_values_alone(D):
    """Without a gradient of queries: those of the call that has one."""
    q, k, v = make(300, 300, D)
    score_mod, mask = gallery.alibi(torch.rand(H, device="cuda")), mask_of(gallery.causal, 300, 300)
    do, leaves = torch.randn_like(q), [x.requires_grad_() for x in (k, v)]
    found = torch.autograd.grad(tkq.flex_attention(q, k, v, score_mod, mask), leaves, do)
    q.requires_grad_()
    wanted = torch.autograd.grad(tkq.flex_attention(q, k, v, score_mod, mask), leaves, do)
    for a, b in zip(found, wanted):
        assert (a.double() - b.double()).norm() < 1e-3 * b.double().norm()


@pytest.mark.slow  # `test_empty_rows_and_keys` has a head without tiles every day
def test_heads_without_tiles():
    """The first of the query heads that share a K/V head sees nothing, and the last heads nothing either."""
    check(*make(300, 300, heads=(B, 6, 3)), mask_mod=lambda b, h, q, kv: (q >= kv) & ((h == 1) | (h == 2)))


@pytest.mark.parametrize("D", WIDTHS)
def test_groups_and_lse(D):
    """One mask for all query heads of a K/V head; each with its own."""
    check(*make(500, 500, D, heads=(B, 8, 2)), mask_mod=gallery.causal, with_lse=True)
    check(*make(500, 500, D, heads=(B, 8, 2)), mask_mod=lambda b, h, q, kv: (q - kv).abs() < 64 * (h + 1))


def framed(x):
    """The same, in the midst of NaN, at an address that is a multiple of 16 bytes."""
    around = torch.full([n + 16 for n in x.shape], math.nan, dtype=x.dtype, device=x.device)
    inside = around[tuple(slice(8, 8 + n) for n in x.shape)]
    return inside.copy_(x)


@pytest.mark.parametrize("D", (128, 256))
def test_strides_and_scale(D):
    """(B, S, H, D) in memory, slices of a packed tensor; columns apart; a gradient of o whose strides are 0 or others.
    Gradients lie as their tensors do."""
    g = torch.Generator("cuda").manual_seed(0)
    packed = torch.randn(B, 500, 8 + 2 + 2, D, device="cuda", generator=g).to(BF16)
    q, k, v = (x.transpose(1, 2) for x in packed.split((8, 2, 2), 2))
    dq, dk, dv = check(q, k, v, mask_mod=gallery.causal, scale=0.2)
    assert all(x.transpose(1, 2).is_contiguous() for x in (dq, dk, dv))
    odd = torch.randn(3, B, 4, 300, D + 3, device="cuda", generator=g).to(BF16)[..., 1:D + 1]  # copied
    do = torch.randn(B, 4, D, 300, device="cuda", generator=g).to(BF16).mT
    check(*odd, mask_mod=gallery.causal, scale=0.01, do=do)
    check(*odd, mask_mod=gallery.causal, do=torch.randn(4, 1, 1, device="cuda").to(BF16).expand(B, 4, 300, D))


@pytest.mark.parametrize("D", (128, 256))
def test_nan_behind_every_end(D):
    """Of rows, columns, heads and batches of all that is read; lengths that fill no tile."""
    q, k, v = (framed(x) for x in make(300, 200, D))
    check(q, k, v, mask_mod=gallery.causal, do=framed(torch.randn_like(q)))


def test_broadcast_masks():
    """Lists of one for all heads, or all batches, or both; lists of others are copies."""
    q, k, v = make(500, 500)
    wanted = check(q, k, v, mask_mod=gallery.causal)
    for batch, heads in ((None, None), (B, None), (None, H)):
        found = check(q, k, v, mask_mod=gallery.causal, block_mask=mask_of(gallery.causal, 500, 500, batch, heads))
        for a, b in zip(found[1:], wanted[1:]):  # dk, dv: bit for bit
            assert torch.equal(a, b)


def test_lists_of_some_heads():
    """Heads whose lists differ, one list for all batches: each its own."""
    q, k, v = make(500, 500)
    mask = mask_of(gallery.causal, 500, 500, None, H)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        getattr(mask, name)[:, 1] = 0  # a head that sees nothing
    def mask_mod(b, h, q, kv):
        return (q >= kv) & (h != 1)

    check(q, k, v, mask_mod=mask_mod, block_mask=mask)


@pytest.mark.parametrize("D", WIDTHS)
def test_empty_rows_and_keys(D):
    """Rows that see nothing, keys that no row sees, a head of its own."""
    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q > 150) & (h != 1) & (kv > 140)

    dq, dk, dv = check(*make(600, 600, D), mask_mod=mask_mod)
    assert (dq[:, :, :151] == 0).all() and (dk[:, :, :140] == 0).all() and (dv[:, 1] == 0).all()


def test_what_changed_in_between_is_refused():
    q, k, v = (x.requires_grad_() for x in make(200, 200))
    slopes = torch.rand(H, device="cuda")
    o = tkq.flex_attention(q, k, v, gallery.alibi(slopes), mask_of(gallery.causal, 200, 200))
    slopes.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()

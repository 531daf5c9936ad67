"""Labels, positions and offsets of groups that no caller means, and losses in which no label counts: what PyTorch does,
or what the documentation says. The GPU's twin: `tests/gpu/runtime/test_bad_indices.py`."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.ops.bad_indices import CUTS, labels, positions, risen
from tkq.losses.ops import cross_entropy_and_gradient

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def gradients(loss, leaves, factor):
    return [loss.detach(), *torch.autograd.grad((loss * factor).sum(), leaves)]


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", ["none", "all 0", "some 0"])
@pytest.mark.parametrize("counting", [0, 1, 4])
def test_a_linear_layer_where_few_labels_count_or_none(dtype, reduction, weights, counting):
    """NaN where torch has NaN, 0 where it has 0; none where all rows are ignored, whatever the caller divides by."""
    weight = None if weights == "none" else torch.ones(96).mul_(weights == "some 0").index_fill_(0, torch.tensor(5), 0)
    x, w = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)).to(dtype).requires_grad_() for n in (8, 96))
    target = torch.full((8,), -100)
    target[2:2 + counting] = torch.tensor([5, 7, 5, 5])[:counting]
    wide = [t.detach().double().requires_grad_() for t in (x, w)]

    def found(factor):
        loss = tkq.linear_cross_entropy(x, w, target, class_weight=weight, reduction=reduction)
        return gradients(loss, (x, w), factor)

    for factor in (1.0, -2.5):
        right = F.cross_entropy(F.linear(*wide), target, None if weight is None else weight.double(),
                                reduction=reduction)
        for mine, wanted in zip(found(factor), gradients(right, wide, factor)):
            assert torch.equal(mine.isnan(), wanted.isnan())
            limit = 0.03 * wanted.nan_to_num().abs().max().item()
            assert torch.allclose(mine.double().nan_to_num(), wanted.nan_to_num(), atol=limit, rtol=0.03)
    if not counting:
        for factor in (torch.inf, torch.nan):
            assert not any(gradient.any() for gradient in found(factor)[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", ["none", "all 0"])
@pytest.mark.parametrize("counting", [0, 1])
def test_rows_where_no_label_counts(dtype, reduction, weights, counting):
    weight = None if weights == "none" else torch.zeros(96)
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    target = torch.full((8,), -100)
    target[2:2 + counting] = 5
    wide = x.detach().double().requires_grad_()
    right = gradients(F.cross_entropy(wide, target, None if weight is None else weight.double(), reduction=reduction),
                      (wide,), 1.0)
    mine = [gradients(tkq.cross_entropy(x, target, weight=weight, reduction=reduction), (x,), 1.0)]
    if reduction != "none":
        mine.append(cross_entropy_and_gradient(x.detach(), target, weight=weight, reduction=reduction))
    for found in mine:
        for a, b in zip(found, right):
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.allclose(a.double().nan_to_num(), b.nan_to_num(), atol=0.03)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("ignore_index", [-100, -1, 1 << 40, 3, -(1 << 63)])
def test_labels(index, ignore_index):
    """NaN in the loss and the gradient of a row whose label is bad, nothing else changed; labels of any strides."""
    target, bad = labels(17, index, 48)
    target = torch.stack((target, target), 1)[:, 0]
    wrong = bad & (target.long() != ignore_index)
    clean = torch.where(wrong, ignore_index, target.long())
    x = torch.randn(48, 17, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = dict(ignore_index=ignore_index, reduction="none", weight=torch.rand(17) + 0.1)
    loss, gradient = gradients(tkq.cross_entropy(x, target, **given), (x,), 1.0)
    right, of_right = gradients(tkq.cross_entropy(x, clean, **given), (x,), 1.0)
    assert torch.equal(loss.isnan(), wrong) and torch.equal(loss[~wrong], right[~wrong])
    assert gradient[wrong].isnan().all() and torch.equal(gradient[~wrong], of_right[~wrong])
    assert not gradient[target.long() == ignore_index].any()
    loss, gradient = cross_entropy_and_gradient(x.detach(), target, ignore_index=ignore_index)
    assert loss.isnan() and torch.equal(gradient.isnan().all(-1), wrong)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_positions(index):
    cos, sin = tkq.rope_cos_sin(64, 16, device="cpu")
    ids = positions(40, index)
    x = torch.randn(1, 40, 2, 16).requires_grad_()
    y = tkq.rope(x, cos, sin, position_ids=ids[None])
    bad = (ids < 0) | (ids >= 64)
    gradient, = torch.autograd.grad(y, x, torch.ones_like(y))
    for found in (y[0], gradient[0]):
        assert found[bad].isnan().all() and not found[~bad].isnan().any()
    far = tkq.rope(x, cos, sin, seqlen_offsets=torch.tensor([(1 << 63) - 1]))
    assert far.isnan().all()
    with pytest.raises(ValueError, match=r"cos: got shape \(0, 8\)"):
        tkq.rope(x, cos[:0], sin[:0], position_ids=ids[None])


def one_by_one(cu, token, sequences):
    """The bisection of the kernel."""
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cu[middle] <= token else (low, middle)
    return low


@pytest.mark.parametrize("cuts", CUTS)
def test_tokens_of_sequences_that_fall(cuts):
    cos, sin = tkq.rope_cos_sin(64, 16, device="cpu")
    x, cu = torch.randn(300, 2, 16), torch.tensor([*cuts, cuts[-1]], dtype=torch.int32)
    for offset in (0, (1 << 31) - 1):
        y = tkq.rope(x, cos, sin, cu_seqlens=cu, seqlen_offsets=offset)
        for token in range(0, 300, 7):
            s = one_by_one(cu.tolist(), token, 5)
            begin, end = cu[s].item(), cu[s + 1].item()
            if not begin <= token < end:
                assert torch.equal(y[token], x[token])
            elif token - begin + offset >= 64:
                assert y[token].isnan().all()
            else:
                turned = tkq.rope(x[None, token:token + 1], cos, sin, seqlen_offsets=token - begin + offset)
                assert torch.allclose(y[token], turned[0, 0])


@pytest.mark.parametrize("cuts", CUTS)
def test_offsets_of_groups(cuts):
    a, b = torch.randn(304, 8).bfloat16().requires_grad_(), torch.randn(5, 8, 8).bfloat16().requires_grad_()
    bad, right = torch.tensor(cuts, dtype=torch.int32), risen(cuts, 304)
    last = int(right[-1])
    one, other = (tkq.grouped_gemm(a, b, offsets) for offsets in (bad, right))
    assert torch.equal(one[:last], other[:last])
    pairs = zip(*(torch.autograd.grad(c[:last].sum(), (a, b)) for c in (one, other)))
    assert all(torch.equal(*pair) for pair in pairs)
    y = torch.randn(304, 8).bfloat16()
    assert torch.equal(*(tkq.grouped_gemm(a.detach().t(), y, offsets) for offsets in (bad, right)))
    begins = [0, *right.tolist()]
    for g in range(5):
        part = slice(begins[g], begins[g + 1])
        wanted = a.detach()[part].float() @ b.detach()[g].float()
        assert torch.allclose(one[part].float(), wanted, atol=0.1, rtol=0.02)

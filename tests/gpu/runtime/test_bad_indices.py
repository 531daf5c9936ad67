"""Labels, positions, offsets of groups and cu_seqlens that no caller means, on the GPU: what the documentation says
comes out, and nothing outside the tensors is touched: they lie at the ends of their mappings. The same under
compute-sanitizer: `test_sanitizer.py`."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.losses.cases import class_weights
from tests.helpers.ops.bad_indices import CUTS, labels, positions, risen
from tests.helpers.sanitizer.guard_pages import guarded
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward.varlen_ops import attention_varlen_backward
from tkq.losses.ops import cross_entropy_and_gradient
from tkq.reference import pointwise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ENDS = pytest.mark.parametrize("where", ["front", "end"])


def same(a, b, what=""):
    assert torch.equal(a.isnan(), b.isnan()), f"{what}: NaN is elsewhere"
    assert torch.equal(a.nan_to_num(), b.nan_to_num()), what


# ---- labels ---------------------------------------------------------------------------------------------------------


def without(bad, target, ignore_index):
    """Labels with an ignored row for each that is bad."""
    return torch.where(bad, ignore_index, target.long())


@ENDS
@pytest.mark.parametrize("dtype, V, index", [
    (BF16, 1000, torch.int64), (BF16, 1000, torch.int32),
    pytest.param(FP32, 1000, torch.int64, marks=pytest.mark.slow), (FP16, 7, torch.int64),
    (BF16, 50257, torch.int64), (BF16, 131072, torch.int64)])
def test_labels(dtype, V, index, where):
    """A row's loss and gradient are NaN where its label is bad; other rows are what they are without it."""
    g = torch.Generator("cuda").manual_seed(0)
    logits = guarded(torch.randn(48, V, device="cuda", generator=g).to(dtype), where)
    target, bad = (x.cuda() for x in labels(V, index, 48))
    weight = guarded(class_weights(V), where)
    for ignore_index in (-100, -1, 1 << 40):
        wrong = bad & (target.long() != ignore_index)
        clean = without(wrong, target, ignore_index)
        for given in ({}, dict(weight=weight, label_smoothing=0.1, z_loss=1e-3, softcap=20.0)):
            given = dict(ignore_index=ignore_index, **given)
            x = logits.detach().requires_grad_()
            with poisoned():
                loss = tkq.cross_entropy(x, target, reduction="none", **given)
                gradient, = torch.autograd.grad(loss, x, torch.ones_like(loss))
                wanted = tkq.cross_entropy(x, clean, reduction="none", **given)
                of_wanted, = torch.autograd.grad(wanted, x, torch.ones_like(wanted))
            same(loss, wanted.masked_fill(wrong, torch.nan), f"loss {given}")
            same(gradient, of_wanted.masked_fill(wrong[:, None], torch.nan), f"gradient {given}")
            assert tkq.cross_entropy(x, target, **given).isnan()


@ENDS
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype, V", [(BF16, 1000), (BF16, 8), (FP16, 7), (BF16, 50257)])
@pytest.mark.sampled(when=lambda reduction, V: reduction == "mean" or V == 1000)
def test_labels_at_once(dtype, V, reduction, where):
    """cross_entropy_and_gradient, over the logits: with a label of -100 and ignore_index -1 too."""
    g = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(48, V, device="cuda", generator=g).to(dtype)
    weight = guarded(class_weights(V), where)
    for index in (torch.int32, torch.int64) if V == 1000 else (torch.int64,):
        target, bad = (x.cuda() for x in labels(V, index, 48))
        for given in ({}, dict(weight=weight, label_smoothing=0.1)):
            wrong = bad & (target != -1)
            logits = guarded(rows, where)
            loss, gradient = cross_entropy_and_gradient(logits, target, ignore_index=-1, reduction=reduction,
                                                        inplace=True, **given)
            assert loss.isnan() and gradient.data_ptr() == logits.data_ptr()
            # of a mean with weights, of which a bad label has none, all rows are NaN but those that are ignored
            all_of = given and reduction == "mean"
            expected = (target != -1) if all_of else wrong
            assert torch.equal(gradient.isnan().all(-1), expected) and torch.equal(gradient.isnan().any(-1), expected)
            assert not gradient[target == -1].any()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_labels_of_a_linear_layer(dtype, reduction, weighted):
    g = torch.Generator("cuda").manual_seed(0)
    x = guarded(torch.randn(48, 64, device="cuda", generator=g).to(dtype), "end").requires_grad_()
    w = guarded(torch.randn(1000, 64, device="cuda", generator=g).to(dtype), "end").requires_grad_()
    target, bad = (t.cuda() for t in labels(1000, torch.int64, 48))
    wrong, weight = bad & (target != -1), guarded(class_weights(1000), "end") if weighted else None
    loss = tkq.linear_cross_entropy(x, w, target, ignore_index=-1, reduction=reduction, class_weight=weight)
    dx, dw = torch.autograd.grad(loss.sum(), (x, w))
    assert torch.equal(loss.isnan(), wrong) if reduction == "none" else loss.isnan()
    expected = (target != -1) if weighted and reduction == "mean" else wrong
    assert torch.equal(dx.isnan().all(-1), expected) and torch.equal(dx.isnan().any(-1), expected)
    assert not dx[target == -1].any() and dw.isnan().all()


def as_torch(dtype, reduction, weight, target, factor):
    """(ours, PyTorch's in float64) of (loss, dx, dweight), where the loss is multiplied by factor."""
    g = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(n, 64, device="cuda", generator=g).to(dtype).requires_grad_() for n in (len(target), 96))
    loss = tkq.linear_cross_entropy(x, w, target, class_weight=weight, reduction=reduction)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    of_torch = F.cross_entropy(F.linear(*wide), target, None if weight is None else weight.double(),
                               reduction=reduction)
    return [(one.detach(), *torch.autograd.grad((one * factor).sum(), of))
            for one, of in ((loss, (x, w)), (of_torch, wide))]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", ["none", "all 0", "one 0"])
@pytest.mark.parametrize("counting", [0, 1, 700])
@pytest.mark.sampled(when=lambda dtype, reduction: dtype == BF16 or reduction == "mean")
def test_a_linear_layer_where_few_labels_count_or_none(dtype, reduction, weights, counting):
    """Of 2048 rows in chunks of 512: as torch, NaN where it has NaN, 0 where it has 0."""
    weight = None if weights == "none" else torch.ones(96, device="cuda").mul_(weights == "one 0")
    if weight is not None:
        weight[5] = 0
    target = torch.full((2048,), -100, device="cuda")
    target[600:600 + counting] = 5
    for factor in (1.0, -2.5):
        found, wanted = as_torch(dtype, reduction, weight, target, factor)
        for name, mine, right in zip(("loss", "dx", "dweight"), found, wanted):
            assert torch.equal(mine.isnan(), right.isnan()), f"{name}, times {factor}: NaN is elsewhere"
            limit = 0.03 * right.nan_to_num().abs().max().item()
            assert torch.allclose(mine.double().nan_to_num(), right.nan_to_num(), rtol=0.05, atol=limit), name
    if not counting:  # a division by no labels at all, done by the caller
        _, dx, dw = as_torch(dtype, reduction, weight, target, torch.inf)[0]
        assert not dx.any() and not dw.any()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", ["none", "all 0"])
@pytest.mark.sampled(when=lambda dtype, reduction, weights: dtype == FP32 if weights == "none" else dtype == BF16)
def test_all_rows_ignored_is_as_torch(dtype, reduction, weights):
    weight = None if weights == "none" else torch.zeros(96, device="cuda")
    x = torch.randn(40, 96, device="cuda").to(dtype).requires_grad_()
    for some in (False, True):
        target = torch.full((40,), -100, device="cuda")
        target[3] = 5 if some else -100
        wide = x.detach().double().requires_grad_()
        right = F.cross_entropy(wide, target, None if weight is None else weight.double(), reduction=reduction)
        loss = tkq.cross_entropy(x, target, weight=weight, reduction=reduction)
        found = [(loss, torch.autograd.grad(loss.sum(), x)[0])]
        if reduction != "none":
            found.append(cross_entropy_and_gradient(x.detach(), target, weight=weight, reduction=reduction))
        of_right, = torch.autograd.grad(right.sum(), wide)
        for loss, gradient in found:
            assert torch.equal(loss.isnan(), right.isnan()) and torch.equal(gradient.isnan(), of_right.isnan())
            assert torch.allclose(gradient.double().nan_to_num(), of_right.nan_to_num(), atol=0.01)


# ---- positions ------------------------------------------------------------------------------------------------------


def near(found, wanted):
    assert torch.equal(found.isnan().cpu(), wanted.isnan())
    assert torch.allclose(found.float().cpu().nan_to_num(), wanted.float().nan_to_num(), atol=0.05)


@ENDS
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_positions(index, where):
    """NaN where a position is not in the table, forward and backward."""
    cos, sin = (guarded(t, where) for t in tkq.rope_cos_sin(64, 64, device="cuda"))
    ids = positions(64, index).cuda()
    for shape, given in (((1, 64, 3, 64), dict(position_ids=ids[None])), ((64, 2, 3, 64), dict(seqlen_offsets=ids))):
        x = guarded(torch.randn(shape, device="cuda").to(BF16), where).requires_grad_()
        y = tkq.rope(x, cos, sin, **given)
        gradient, = torch.autograd.grad(y, x, torch.ones_like(y))
        bad = (ids < 0) | (ids >= 64)
        rows = y.isnan().all(-1).all(-1)
        assert torch.equal(rows[0] if "position_ids" in given else rows[:, 0], bad)
        assert torch.equal(gradient.isnan(), y.isnan())
        turn = [None, ids.cpu()[None]] if "position_ids" in given else [ids.cpu(), None]
        near(y.detach(), pointwise.rope(x.detach().cpu(), cos.cpu(), sin.cpu(), 0, *turn))


@pytest.mark.parametrize("cuts", CUTS)
def test_positions_in_sequences(cuts):
    """As on the CPU, bit by bit where NaN is."""
    cos, sin = (guarded(t, "end") for t in tkq.rope_cos_sin(64, 64, device="cuda"))
    cu = guarded(torch.tensor([*cuts, cuts[-1]], device="cuda", dtype=torch.int32), "end")
    x = guarded(torch.randn(300, 3, 64, device="cuda").to(BF16), "end")
    offsets = torch.tensor([0, 2**31 - 1, -3, 5, -2**63], device="cuda")
    for offset in (0, 7, 2**31 - 1, offsets):
        of = (0, offset.cpu()) if isinstance(offset, torch.Tensor) else (offset, None)
        y = tkq.rope(x, cos, sin, cu_seqlens=cu, seqlen_offsets=offset)
        near(y, pointwise.rope(x.cpu(), cos.cpu(), sin.cpu(), *of, None, cu.cpu()))


def test_a_table_without_rows_is_refused():
    empty, x = torch.empty(0, 32, device="cuda"), torch.randn(1, 4, 2, 64, device="cuda")
    for given in (dict(position_ids=torch.zeros(4, device="cuda", dtype=torch.int64)),
                  dict(seqlen_offsets=torch.zeros(1, device="cuda", dtype=torch.int64))):
        with pytest.raises(ValueError, match="cos"):
            tkq.rope(x, empty, empty, **given)


# ---- offsets of groups ----------------------------------------------------------------------------------------------


@ENDS
@pytest.mark.parametrize("cuts", CUTS)
def test_offsets_of_groups(cuts, where):
    """As the offsets that they mean, bit by bit; rows of no group are not written."""
    g = torch.Generator("cuda").manual_seed(0)
    a = guarded(torch.randn(304, 136, device="cuda", generator=g).to(BF16), where).requires_grad_()
    y = guarded(torch.randn(304, 264, device="cuda", generator=g).to(BF16), where)
    for groups in (5, 45):  # of 45, more than a warp counts at a time
        b = guarded(torch.randn(groups, 136, 264, device="cuda", generator=g).to(BF16), where).requires_grad_()
        numbers = [*cuts, *[n // 3 for n in cuts] * 8]
        bad = guarded(torch.tensor(numbers, device="cuda", dtype=torch.int32)[:groups].repeat(2)[:groups], where)
        right = risen(bad.tolist(), 304).cuda()
        last = int(right[-1])
        with poisoned():
            found, wanted = tkq.grouped_gemm(a, b, bad), tkq.grouped_gemm(a, b, right)
            along_k = tkq.grouped_gemm(a.detach().t(), y, bad), tkq.grouped_gemm(a.detach().t(), y, right)
        assert torch.equal(found[:last], wanted[:last]) and torch.equal(*along_k)
        gradients = [torch.autograd.grad(c[:last].float().square().sum(), (a, b)) for c in (found, wanted)]
        assert all(torch.equal(*pair) for pair in zip(*gradients))
        assert not gradients[0][0][last:].any()
        of_cpu = tkq.grouped_gemm(a.detach().cpu(), b.detach().cpu(), bad.cpu())
        assert torch.allclose(found[:last].float().cpu(), of_cpu[:last].float(), atol=0.3, rtol=0.03)


@pytest.mark.parametrize("cuts", CUTS)
def test_offsets_of_float8_groups(cuts):
    x, y = (torch.randn(304, n, device="cuda").to(BF16) for n in (128, 256))
    b, sb = tkq.quantize_fp8(torch.randn(5 * 256, 128, device="cuda").to(BF16), "row")
    b, sb = b.view(5, 256, 128).transpose(1, 2), sb.view(5, 1, 256)
    a, sa = tkq.quantize_fp8(x, "row")
    a, sa = guarded(a, "end"), guarded(sa, "end")
    xt, sx = tkq.quantize_fp8(x, "1x128", transpose=True)[2:]
    yt, sy = tkq.quantize_fp8(y, "1x128", transpose=True)[2:]
    bad, right = (torch.tensor(n, device="cuda", dtype=torch.int32) for n in (cuts, risen(cuts, 304).tolist()))
    last = int(right[-1])
    found, wanted = (tkq.grouped_gemm(a, b, o, scale_a=sa, scale_b=sb) for o in (bad, right))
    assert torch.equal(found[:last], wanted[:last])
    found, wanted = (tkq.grouped_gemm(xt, yt.t(), o, scale_a=sx, scale_b=sy.t()) for o in (bad, right))
    assert torch.equal(found, wanted)


# ---- packed sequences -----------------------------------------------------------------------------------------------


def attention(tensors, cu, used, longest, **options):
    q, k, v, do = tensors
    with poisoned():
        o, lse = tkq.flash_attn_varlen(q, k, v, cu, cu, longest, longest, return_lse=True, seqused_q=used,
                                       seqused_k=used, **options)
        lengths, options = Lengths(cu, cu, used, used, longest, longest), Options(options.get("causal", False))
        gradients = attention_varlen_backward((do, q, k, v, o, lse, None), None, lengths, options)
        again = attention_varlen_backward((do, q, k, v, o, lse, None), None, lengths, options, deterministic=True)
    return (o, lse, *again[:3]), gradients[:3]


@pytest.mark.parametrize("dim, heads, longest, causal, in_use, where", [
    (128, 2, 300, True, False, "end"), (128, 2, 4096, True, False, "front"), (128, 2, 8200, True, True, "end"),
    (256, 2, 300, True, False, "end"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (128, 2, 0, False, True, "front"), (64, 4, 900, True, True, "end")))])
def test_cu_seqlens(dim, heads, longest, causal, in_use, where):
    """As those that they mean, bit by bit; more sequences than a warp looks at together; longest: what is said."""
    g = torch.Generator("cuda").manual_seed(0)
    tensors = [guarded(torch.randn(300, n, dim, device="cuda", generator=g).to(BF16), where)
               for n in (heads, 2, 2, heads)]
    for i, cuts in enumerate(CUTS):
        numbers = [*cuts, *[n // 3 for n in cuts] * 9] if i % 2 else cuts
        bad = guarded(torch.tensor([*numbers, numbers[-1]], device="cuda", dtype=torch.int32), where)
        right = risen(bad.tolist()).cuda()
        used = plain = None
        if in_use:
            used = torch.tensor([1 << 30, -3, -(1 << 31), 20], device="cuda", dtype=torch.int32)
            used = used.repeat(20)[:len(bad) - 1].contiguous()
            plain = used.clamp(0, 300)
        found, loose = attention(tensors, bad, used, longest, causal=causal)
        wanted, of_wanted = attention(tensors, right, plain, longest, causal=causal)
        for name, mine, theirs in zip(("o", "lse", "dq", "dk", "dv"), found, wanted):
            assert torch.equal(mine, theirs), f"{name} {cuts}"
        for name, mine, theirs in zip(("dq", "dk", "dv"), loose, of_wanted):
            limit = 0.02 * theirs.abs().max().item() + 1e-6
            assert torch.allclose(mine.float(), theirs.float(), rtol=0.05, atol=limit), f"{name} {cuts}"


@pytest.mark.parametrize("dim, causal, in_use, where", [(128, True, False, "end"), (64, False, True, "front")])
def test_cu_seqlens_of_float8(dim, causal, in_use, where):
    """As those that they mean, bit by bit; descales lie at the ends of their mappings, too."""
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (guarded(torch.randn(300, n, dim, device="cuda", generator=g).to(torch.float8_e4m3fn), where)
               for n in (4, 2, 2))
    for i, cuts in enumerate(CUTS):
        numbers = [*cuts, *[n // 3 for n in cuts] * 9] if i % 2 else cuts
        bad = guarded(torch.tensor([*numbers, numbers[-1]], device="cuda", dtype=torch.int32), where)
        right, used, plain = risen(bad.tolist()).cuda(), None, None
        descale = guarded(torch.rand(len(bad) - 1, 2, device="cuda", generator=g), where)
        if in_use:
            used = torch.tensor([1 << 30, -3, -(1 << 31), 20], device="cuda", dtype=torch.int32)
            used = guarded(used.repeat(20)[:len(bad) - 1].contiguous(), where)
            plain = used.clamp(0, 300)
        with poisoned():
            found, wanted = (tkq.flash_attn_fp8_varlen(
                q, k, v, cu, cu, 300, 300, q_descale=descale, k_descale=descale, v_descale=descale, causal=causal,
                seqused_q=of, seqused_k=of, return_lse=True) for cu, of in ((bad, used), (right, plain)))
        for name, mine, theirs in zip(("o", "lse"), found, wanted):
            same(mine, theirs, f"{name} {cuts}")


def test_a_longest_that_is_none():
    """max_seqlen says what kernel is chosen, and nothing else."""
    tensors = [torch.randn(3000, n, 128, device="cuda").to(BF16) for n in (2, 2, 2, 2)]
    cu = torch.tensor([0, 1, 2900, 3000], device="cuda", dtype=torch.int32)
    wanted, _ = attention(tensors, cu, None, 2899, causal=True)
    for longest in (0, 1, 100000):
        found, _ = attention(tensors, cu, None, longest, causal=True)
        for name, mine, theirs in zip(("o", "lse", "dq", "dk", "dv"), found, wanted):
            limit = 0.02 * theirs.float().abs().max().item()
            assert torch.allclose(mine.float(), theirs.float(), rtol=0.02, atol=limit), f"{name} {longest}"

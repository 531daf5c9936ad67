"""linear_cross_entropy on the GPU: numerics by the 2x rule over several chunks, memory, and the GEMM that adds."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.losses.cases import DTYPES, EVERYTHING, as_type, class_weights
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.gemm.dense.ops import run as gemm
from tkq.losses.plan import chunk_rows
from tkq.reference import losses as reference
from tkq.reference.losses import Terms
from tkq.runtime.call import debug
from tkq.testing import assert_2x

REDUCTIONS = ["mean", "sum", "none"]


def make(M=1300, V=1000, K=128, dtype="bf16", seed=0):
    """More than two chunks, the last one short."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(M, K, device="cuda", generator=g).to(DTYPES[dtype])
    weight = (torch.randn(V, K, device="cuda", generator=g) / K**0.5).to(DTYPES[dtype])
    target = torch.randint(V, (M,), device="cuda", generator=g)
    target[1::5] = -100
    return x.requires_grad_(), weight.requires_grad_(), target


def in_type(x, weight, target, dloss, terms, dtype):
    """(loss, dx, dweight), computed in dtype from logits, and with a gradient of the logits, rounded to x's type: what
    PyTorch does for the layer and its loss one after the other."""
    wide = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
    logits = F.linear(*wide)
    rounded = (logits.to(x.dtype).to(dtype) - logits).detach()
    z = logits + rounded
    z.register_hook(lambda g: g.to(x.dtype).to(dtype))
    loss = reference.cross_entropy(z, target, as_type(terms, dtype))
    return loss.detach(), *torch.autograd.grad(loss, wide, dloss.to(dtype).expand(loss.shape))


def exactly(x, weight, target, dloss, terms):
    """The same in float64 with nothing rounded but the logits, which are what the loss is of."""
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    logits = F.linear(*wide)
    z = logits + (logits.to(x.dtype).double() - logits).detach()
    loss = reference.cross_entropy(z, target, as_type(terms, torch.float64))
    return loss.detach(), *torch.autograd.grad(loss, wide, dloss.double().expand(loss.shape))


def check(x, weight, target, dloss=None, what="", class_weight=None, **options):
    terms = Terms(class_weight, **options)
    with poisoned():
        loss = tkq.linear_cross_entropy(x, weight, target, class_weight=class_weight, **options)
        dloss = torch.tensor(1.0, device="cuda") if dloss is None else dloss
        found = torch.autograd.grad(loss, (x, weight), dloss.expand(loss.shape))
    truth = exactly(x, weight, target, dloss, terms)
    peer = in_type(x, weight, target, dloss, terms, torch.float32)
    # logits that round to the other neighbour: an accumulation in another order moves some of them by an ulp
    ulp = torch.finfo(x.dtype).eps * 8
    assert torch.allclose(loss.double(), truth[0], rtol=1e-5, atol=ulp), f"{what} {(loss - truth[0]).abs().max()}"
    chunks = -(-x.shape[0] // chunk_rows(x.shape[0], weight.shape[0], 2))
    for name, mine, right, theirs in zip(("dx", "dweight"), found, truth[1:], peer[1:]):
        assert mine.dtype == x.dtype and mine.shape == right.shape
        # dweight is rounded twice for each chunk; and both once more where the backward multiplies
        rounded = 2 * chunks if name == "dweight" else 2
        assert_2x(mine, right, theirs.to(x.dtype), ulps=rounded, what=f"{what} {name} {options}", bias_ulps=0.5)
    return loss, found


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_types_and_reductions(dtype, reduction):
    case = make(dtype=dtype)
    check(*case, reduction=reduction)
    check(*case, torch.tensor(-2.5, device="cuda"), reduction=reduction)
    if reduction == "none":
        check(*case, torch.randn(1300, device="cuda"), reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_options(reduction):
    check(*make(), reduction=reduction, **EVERYTHING)
    check(*make(), reduction=reduction, class_weight=class_weights(1000), label_smoothing=0.1)


@pytest.mark.parametrize("V", [
    1, 8, 100, 1001, 50257, *(pytest.param(V, marks=pytest.mark.slow) for V in (2, 7, 32001))])
def test_any_number_of_classes(V):
    for M in (1, 5, 700):
        x, weight, target = make(M, V, 64)
        check(x, weight, target, what=f"M {M}")
    check(x, weight, target, reduction="none")


def test_a_second_backward_and_only_what_is_asked_for():
    for reduction in REDUCTIONS:
        x, weight, target = make()
        loss = tkq.linear_cross_entropy(x, weight, target, reduction=reduction).sum()
        first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        copies = [g.clone() for g in first]
        second = torch.autograd.grad(loss, (x, weight))
        for a, b, c in zip(first, copies, second):
            assert torch.equal(a, b), "what was handed out stays what it was"
            assert torch.allclose(a.float(), c.float(), rtol=0.02, atol=0.01 * a.float().abs().max().item())
        only_x, = torch.autograd.grad(
            tkq.linear_cross_entropy(x, weight.detach(), target, reduction=reduction).sum(), x)
        only_weight, = torch.autograd.grad(
            tkq.linear_cross_entropy(x.detach(), weight, target, reduction=reduction).sum(), weight)
        assert torch.equal(only_x, first[0]) and torch.equal(only_weight, first[1])
        with torch.no_grad():
            alone = tkq.linear_cross_entropy(x, weight, target, reduction=reduction).sum()
        assert torch.allclose(alone, loss, rtol=1e-5)


def test_parameters_collect_gradients():
    x, weight, target = make()
    parameter = torch.nn.Parameter(weight.detach().clone())
    for _ in range(2):
        tkq.linear_cross_entropy(x, parameter, target).backward()
    once, = torch.autograd.grad(tkq.linear_cross_entropy(x, weight, target), weight)
    assert torch.allclose(parameter.grad.float(), 2 * once.float(), rtol=0.01)


def test_rows_that_lie_apart_and_leading_dimensions():
    x, weight, target = make(600, 1000, 64)
    wanted = check(x, weight, target)
    wide = torch.full((600, 72), float("nan"), device="cuda", dtype=x.dtype)
    for first in (0, 8, 3):  # the last one: not what TMA takes
        wide[:, first:first + 64] = x.detach()
        loss, _ = check(wide[:, first:first + 64].requires_grad_(), weight, target, what=f"from {first}")
        assert torch.allclose(loss, wanted[0], rtol=1e-4)
        wide = torch.full_like(wide, float("nan")).detach()
    loss = tkq.linear_cross_entropy(x.view(3, 200, 64), weight, target.view(3, 200), reduction="none")
    assert loss.shape == (3, 200)
    gradient, = torch.autograd.grad(loss.mean(), x)
    assert gradient.shape == x.shape and gradient.isfinite().all()


def test_all_ignored_no_rows_and_out_of_range():
    x, weight, target = make(600)
    loss = tkq.linear_cross_entropy(x, weight, torch.full_like(target, -100))
    assert loss.isnan() and not any(g.any() for g in torch.autograd.grad(loss, (x, weight)))
    loss = tkq.linear_cross_entropy(x[:0], weight, target[:0], reduction="sum")
    assert loss == 0 and not torch.autograd.grad(loss, weight)[0].any()
    target[7] = 1000
    assert tkq.linear_cross_entropy(x, weight, target).isnan()
    with debug.checks(), pytest.raises(IndexError, match="target: 1000"):
        tkq.linear_cross_entropy(x, weight, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_same_bits_every_time(reduction):
    x, weight, target = make(V=1001)

    def run():
        loss = tkq.linear_cross_entropy(x, weight, target, reduction=reduction, softcap=10.0)
        return loss.detach(), *torch.autograd.grad(loss.sum(), (x, weight))

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_torch_compile():
    x, weight, target = make(600)

    def f(x, weight):
        return tkq.linear_cross_entropy(x * 2, weight, target)

    loss = torch.compile(f, fullgraph=True)(x, weight)
    assert torch.allclose(loss, f(x, weight), rtol=1e-6)
    for mine, wanted in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(f(x, weight), (x, weight))):
        assert torch.allclose(mine.float(), wanted.float(), rtol=0.02, atol=1e-6)


def peak(call):
    """Bytes in use at most, above those before; after one call that compiles and warms up."""
    for _ in range(2):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.slow
def test_memory():
    """Above the inputs and their gradients: at most 15 % of what the layer and its loss take one after the other."""
    x, weight, target = make(8192, 128256, 4096)
    gradients = sum(t.numel() * t.element_size() for t in (x, weight))

    def ours():
        return torch.autograd.grad(tkq.linear_cross_entropy(x, weight, target), (x, weight))

    def unfused():
        return torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), (x, weight))

    mine, theirs = peak(ours) - gradients, peak(unfused) - gradients
    assert mine <= 0.15 * theirs, f"{mine / 1e6:.0f} MB, PyTorch {theirs / 1e6:.0f} MB"
    x.requires_grad_(False)
    weight.requires_grad_(False)
    assert peak(lambda: tkq.linear_cross_entropy(x, weight, target)) <= 0.15 * theirs


# ---- the GEMM that adds ---------------------------------------------------------------------------------------------


def integers(*shape, pitch=None, seed=0):
    """Small whole numbers, whose products and sums are exact, in rows `pitch` apart with zeros between."""
    g = torch.Generator("cuda").manual_seed(seed)
    rows, cols = shape
    memory = torch.zeros(rows, pitch or cols, device="cuda", dtype=torch.bfloat16)
    memory[:, :cols] = torch.randint(-3, 4, shape, device="cuda", generator=g)
    return memory[:, :cols]


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.sampled(each_value=True)
def test_gemm_accumulates(out, first):
    """first: 1: results where TMA does not reach."""
    for m, n, k in ((130, 264, 64), (1000, 512, 200), (64, 128, 8), (300, 1000, 13)):
        a, b = integers(k, m, pitch=-(-m // 8) * 8).t(), integers(k, n, seed=1)
        c = torch.randint(-9, 10, (m + 2, n + 8), device="cuda").to(out)
        before = c.clone()
        gemm(a, b, c[1:-1, first:first + n], accumulate=True)
        wanted = before.clone()
        wanted[1:-1, first:first + n] += (a.double() @ b.double()).to(out)
        assert torch.equal(c, wanted), (m, n, k)


@pytest.mark.parametrize("k", [1, 7, 8, 100, 1001])
def test_gemm_with_any_k_and_padded_rows(k):
    """K contiguous with zeros behind it; and results with padding behind their rows."""
    pitch = -(-k // 8) * 8
    for m, n in ((5, 64), (300, 264), (513, 1000)):
        a, b = integers(m, k, pitch=pitch), integers(k, n, seed=1)
        c = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        gemm(a, b, c)
        assert torch.equal(c, (a.double() @ b.double()).to(c.dtype)), (m, n, k)
        if k in (8, 1001):
            x, w = integers(m, 64), integers(k, 64, seed=2)
            padded = torch.full((m, pitch + 8), float("nan"), device="cuda", dtype=torch.bfloat16)
            padded[:, k:pitch] = 0  # this much may be overwritten, with zeros
            gemm(x, w.t(), padded[:, :k], writable_padding=True)
            assert torch.equal(padded[:, :k], (x.double() @ w.double().t()).to(c.dtype))
            assert not padded[:, k:pitch].any() and padded[:, pitch:].isnan().all()

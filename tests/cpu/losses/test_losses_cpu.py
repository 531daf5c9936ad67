"""cross_entropy and linear_cross_entropy where no GPU is needed: what they mean, their gradients, what they refuse."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tkq.losses import launch, ops
from tkq.reference import losses as reference
from tkq.reference.losses import Terms
from tkq.runtime.call import debug

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
REDUCTIONS = ["none", "mean", "sum"]


def case(M=9, V=17, dtype=torch.float32, weighted=False, seed=0, index=torch.int64):
    """Logits, targets with two rows ignored, class weights or None."""
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(M, V, generator=g)).to(dtype)
    target = torch.randint(V, (M,), generator=g, dtype=index)
    target[1::5] = -100
    return logits, target, torch.rand(V, generator=g) + 0.1 if weighted else None


def gradients(loss, *inputs, seed=1):
    """For a random incoming gradient."""
    g = torch.randn(loss.shape, generator=torch.Generator().manual_seed(seed), dtype=loss.dtype)
    return torch.autograd.grad(loss, inputs, g)


# ---- what it means --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_it_is_torchs(reduction, weighted, smoothing, index):
    logits, target, weight = case(weighted=weighted, index=index)
    logits.requires_grad_()
    options = dict(weight=weight, reduction=reduction, label_smoothing=smoothing)
    ours = tkq.cross_entropy(logits, target, **options)
    theirs = F.cross_entropy(logits, target.long(), **options)
    assert ours.dtype == torch.float32 and torch.allclose(ours, theirs, atol=1e-5)
    for mine, wanted in zip(gradients(ours, logits), gradients(theirs, logits)):
        assert torch.allclose(mine, wanted, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_16_bits_are_computed_in_float32(dtype):
    logits, target, _ = case(dtype=dtype)
    loss = tkq.cross_entropy(logits.requires_grad_(), target)
    wide = logits.detach().float().requires_grad_()
    wanted = F.cross_entropy(wide, target)
    assert loss.dtype == torch.float32 and torch.allclose(loss, wanted, atol=1e-6)
    mine, = torch.autograd.grad(loss, logits)
    wanted, = torch.autograd.grad(wanted, wide)
    assert mine.dtype == dtype and torch.allclose(mine.float(), wanted, rtol=1e-6 + torch.finfo(dtype).eps, atol=1e-7)


def test_ignore_index_may_be_a_class():
    logits, target, _ = case()
    target[3] = 0
    ours = tkq.cross_entropy(logits, target, ignore_index=0, reduction="none")
    assert ours[3] == 0
    target = target.where(target >= 0, 0)
    assert torch.allclose(tkq.cross_entropy(logits, target, ignore_index=0),
                          F.cross_entropy(logits, target, ignore_index=0))


@pytest.mark.parametrize("reduction, value", [("mean", float("nan")), ("sum", 0.0)])
def test_all_ignored_and_no_rows(reduction, value):
    logits, target, _ = case()
    logits.requires_grad_()
    loss = tkq.cross_entropy(logits, torch.full_like(target, -100), reduction=reduction)
    assert torch.equal(loss.isnan(), torch.tensor(value != value)) and (value != value or loss == value)
    assert not torch.autograd.grad(loss, logits)[0].any()
    empty = tkq.cross_entropy(logits[:0], target[:0], reduction=reduction)
    assert torch.equal(empty.isnan(), torch.tensor(value != value))
    assert tkq.cross_entropy(logits[:0], target[:0], reduction="none").shape == (0,)


def test_leading_dimensions_and_one_row():
    logits, target, _ = case(M=12)
    for shape in ((12,), (3, 4), (2, 3, 2)):
        loss = tkq.cross_entropy(logits.view(*shape, -1), target.view(shape), reduction="none")
        assert torch.equal(loss, F.cross_entropy(logits, target, reduction="none").view(shape))
    assert tkq.cross_entropy(logits[0], target[0], reduction="none").shape == ()
    permuted = logits.view(3, 4, -1).transpose(0, 1)
    assert torch.allclose(tkq.cross_entropy(permuted, target.view(3, 4).t()), tkq.cross_entropy(logits, target))


def test_z_loss_and_softcap():
    logits, target, _ = case()
    logits = 5 * logits
    z = 7 * torch.tanh(logits / 7)
    rows = F.cross_entropy(z, target, reduction="none") + 0.01 * z.logsumexp(-1).square() * (target >= 0)
    ours = tkq.cross_entropy(logits, target, z_loss=0.01, softcap=7.0, reduction="none")
    assert torch.allclose(ours, rows, atol=1e-5)
    assert torch.allclose(tkq.cross_entropy(logits, target, z_loss=0.01, softcap=7.0), rows.sum() / (target >= 0).sum())


def test_a_target_out_of_range_is_nan_in_its_row_or_an_error_when_asked_for():
    logits, target, weight = case(weighted=True)
    target[4], target[6] = 17, -1
    loss = tkq.cross_entropy(logits.requires_grad_(), target, weight=weight, reduction="none")
    expected = torch.zeros(9, dtype=torch.bool).index_fill(0, torch.tensor([4, 6]), True)
    assert torch.equal(loss.isnan(), expected)
    grad, = torch.autograd.grad(loss.nansum(), logits)
    assert torch.equal(grad.isnan().all(-1), expected) and torch.equal(grad.isnan().any(-1), expected)
    assert tkq.cross_entropy(logits, target).isnan()
    with debug.checks():
        with pytest.raises(IndexError, match=r"target: 17 at \(4,\), allowed are 0 to 16 and ignore_index = -100"):
            tkq.cross_entropy(logits, target)
        with debug.checks(False):
            tkq.cross_entropy(logits, target)
        with pytest.raises(IndexError, match="target: 17"):
            tkq.cross_entropy(logits.detach(), target)
    tkq.cross_entropy(logits, target)


# ---- gradients in double precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("terms", [
    {}, dict(label_smoothing=0.1), dict(z_loss=0.1), dict(softcap=5.0),
    dict(label_smoothing=0.3, z_loss=0.01, softcap=3.0, ignore_index=2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_formula_in_double_precision(reduction, terms, weighted):
    logits, target, weight = case(dtype=torch.float64, weighted=weighted)
    target[target < 0] = terms.get("ignore_index", -100)
    terms = Terms(weight=None if weight is None else weight.double(), reduction=reduction, **terms)
    logits.requires_grad_()
    loss = reference.cross_entropy(logits, target, terms)
    dloss = torch.randn(loss.shape, dtype=torch.float64)
    wanted, = torch.autograd.grad(loss, logits, dloss)
    ours = reference.cross_entropy_backward(logits.detach(), target, dloss, terms)
    assert torch.allclose(ours, wanted, rtol=1e-11, atol=1e-13)


def test_gradcheck():
    logits, target, weight = case(M=4, V=5, dtype=torch.float64, weighted=True)
    terms = Terms(weight.double(), label_smoothing=0.2, z_loss=0.05, softcap=4.0)
    assert torch.autograd.gradcheck(lambda x: reference.cross_entropy(x, target, terms), logits.requires_grad_())


def test_a_class_weight_that_requires_a_gradient_is_refused():
    logits, target, weight = case(weighted=True)
    with pytest.raises(NotImplementedError, match="weight requires a gradient"):
        tkq.cross_entropy(logits, target, weight=weight.requires_grad_())


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("options", [{}, dict(reduction="sum", softcap=3.0), dict(label_smoothing=0.1, z_loss=0.1)])
def test_loss_and_gradient_at_once(inplace, options):
    logits, target, _ = case(dtype=torch.bfloat16)
    loss = tkq.cross_entropy(logits.requires_grad_(), target, **options)
    wanted, = torch.autograd.grad(loss, logits)
    given = logits.detach().clone()
    found, gradient = ops.cross_entropy_and_gradient(given, target, inplace=inplace, **options)
    assert torch.equal(found, loss) and torch.equal(gradient, wanted) and (gradient is given) == inplace
    with pytest.raises(ValueError, match="reduction: got 'none'"):
        ops.cross_entropy_and_gradient(given, target, reduction="none")


def test_a_backward_of_logits_that_a_gradient_was_written_over_is_an_error():
    logits, target, _ = case()
    logits = torch.tanh(logits.requires_grad_())
    _, gradient = tkq.cross_entropy_and_gradient(logits, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.backward(gradient)


def test_the_launch_says_so_too(monkeypatch):
    monkeypatch.setattr(launch, "total", lambda *_: None)
    monkeypatch.setattr(launch, "part_forward", lambda *given: given[-1].data.zero_())  # as a kernel does
    target = torch.zeros(6, dtype=torch.int64)
    for logits in (torch.ones(6, 4), torch.ones(2, 6, 4).transpose(0, 1)[:, 0], torch.ones(3, 2, 4).transpose(0, 1)):
        for inplace in (True, False):
            logits.fill_(1)
            saved = torch.ones((), requires_grad=True) * logits  # keeps logits for its backward
            launch.both(logits, target.view(logits.shape[:-1]), Terms(), inplace)
            if inplace:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    saved.sum().backward()
            else:
                saved.sum().backward()
            assert logits.any() != inplace


# ---- what is refused ------------------------------------------------------------------------------------------------

X, T = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
BAD = [
    (TypeError, "logits: got str", ("x", T), {}),
    (TypeError, "logits: dtype is torch.float64", (X.double(), T), {}),
    (TypeError, "target: got list", (X, [0, 1]), {}),
    (TypeError, "target: dtype is torch.float32.*probabilities", (X, X), {}),
    (TypeError, "target: dtype is torch.uint8", (X, T.to(torch.uint8)), {}),
    (ValueError, r"target: shape is \(3,\), expected \(2\)", (X, torch.zeros(3, dtype=torch.int64)), {}),
    (ValueError, r"target: shape is \(1, 2\)", (X, T[None]), {}),
    (ValueError, r"logits: got shape \(\)", (torch.tensor(1.0), T), {}),
    (ValueError, r"logits: got shape \(2, 0\)", (torch.ones(2, 0), T), {}),
    (ValueError, r"logits: strides are \(1, 2\).*contiguous", (torch.ones(4, 2).t(), T), {}),
    (NotImplementedError, "V = 524289.*524288", (torch.ones(1, 524289), T[:1]), {}),
    (TypeError, "weight: got list", (X, T), dict(weight=[1.0] * 4)),
    (TypeError, "weight: dtype is torch.int64", (X, T), dict(weight=torch.ones(4, dtype=torch.int64))),
    (ValueError, r"weight: shape is \(5,\), expected \(4\)", (X, T), dict(weight=torch.ones(5))),
    (ValueError, r"weight: strides are \(2,\)", (X, T), dict(weight=torch.ones(8)[::2])),
    (ValueError, "weight: is on meta", (X, T), dict(weight=torch.ones(4, device="meta"))),
    (ValueError, "target: is on meta", (X, T.to("meta")), {}),
    (ValueError, "reduction: got 'max', allowed are 'none', 'mean', 'sum'", (X, T), dict(reduction="max")),
    (ValueError, "label_smoothing: got 1.5, allowed are numbers from 0 to 1", (X, T), dict(label_smoothing=1.5)),
    (ValueError, "label_smoothing: got -0.1", (X, T), dict(label_smoothing=-0.1)),
    (TypeError, "label_smoothing: got str", (X, T), dict(label_smoothing="a")),
    (TypeError, "z_loss: got str", (X, T), dict(z_loss="a")),
    (TypeError, "softcap: got str", (X, T), dict(softcap="a")),
    (ValueError, "softcap: got 0.0, allowed are finite numbers above 0", (X, T), dict(softcap=0.0)),
    (ValueError, "softcap: got -1", (X, T), dict(softcap=-1)),
    (TypeError, "ignore_index: got float", (X, T), dict(ignore_index=1.0)),
    (ValueError, "ignore_index: got 1180591620717411303424, allowed are integers from -2", (X, T),
     dict(ignore_index=1 << 70)),
    (ValueError, "ignore_index: got 9223372036854775808", (X, T), dict(ignore_index=1 << 63)),
    (TypeError, "z_loss: got a Tensor", (X, T), dict(z_loss=torch.ones(3))),
    (TypeError, "softcap: got a Tensor", (X, T), dict(softcap=torch.ones(3))),
]


@pytest.mark.parametrize("error, says, args, options", BAD)
@pytest.mark.parametrize("grad", [False, True])
def test_bad_input_is_named(error, says, args, options, grad):
    logits, target = args
    if grad and isinstance(logits, torch.Tensor):
        logits = logits.detach().requires_grad_()
    with pytest.raises(error, match=says):
        tkq.cross_entropy(logits, target, **options)


OVERLAPPING = [torch.randn(1, 17).expand(6, 17), torch.randn(40)[:37].unfold(0, 17, 4),
               torch.randn(3, 1, 17).expand(3, 2, 17)]


def test_logits_of_inference_mode_are_not_written_over_outside_of_it():
    with torch.inference_mode():
        made = torch.randn(3, 8)
        tkq.cross_entropy_and_gradient(made.clone(), torch.tensor([1, 2, 3]), inplace=True)
    copy = made.clone()
    with pytest.raises(RuntimeError, match="cross_entropy_and_gradient: logits: was made under torch.inference_mode"):
        tkq.cross_entropy_and_gradient(made, torch.tensor([1, 2, 3]), inplace=True)
    assert torch.equal(made, copy)


@pytest.mark.parametrize("logits", OVERLAPPING)
def test_logits_that_share_memory_are_not_written_over(logits):
    target, before = torch.zeros(logits.shape[:-1], dtype=torch.int64), logits.clone()
    with pytest.raises(ValueError, match="cross_entropy_and_gradient: logits: is .* share memory; not allowed"):
        tkq.cross_entropy_and_gradient(logits, target, inplace=True)
    every = logits.as_strided((logits.untyped_storage().nbytes() // 4,), (1,)).clone().requires_grad_()
    shared = (every * 1).as_strided(logits.shape, logits.stride())
    with pytest.raises(ValueError, match="cross_entropy: logits: is .* share memory; not allowed in place"):
        tkq.cross_entropy(shared, target, inplace_backward=True)
    assert torch.equal(logits, before)
    tkq.cross_entropy(logits, target, inplace_backward=True)  # nothing is written: no gradient is recorded
    tkq.cross_entropy(shared, target).backward()
    tkq.cross_entropy_and_gradient(logits, target)


@pytest.mark.parametrize("logits", [torch.randn(6, 20)[:, :17], torch.randn(2, 3, 17).transpose(0, 1),
                                    torch.randn(2, 3, 40)[:, :, 3:20], torch.randn(6, 17)[::2], torch.randn(1, 0, 17),
                                    torch.randn(1, 17).expand(1, 17), torch.randn(17)])
def test_logits_that_lie_apart_are_written_over(logits):
    target, copy = torch.zeros(logits.shape[:-1], dtype=torch.int64), logits.clone()
    _, wanted = tkq.cross_entropy_and_gradient(copy, target)
    _, gradient = tkq.cross_entropy_and_gradient(logits, target, inplace=True)
    assert gradient is logits and torch.equal(gradient, wanted)


# ---- torch's machinery ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_opcheck(reduction):
    logits, target, weight = case(weighted=True)
    for x in (logits.requires_grad_(), torch.randn(9, 20)[:, :17].requires_grad_(), torch.randn(9, 17).bfloat16()):
        torch.library.opcheck(torch.ops.tkq.cross_entropy,
                              (x, target, weight, -100, reduction, 0.1, 0.01, 5.0, False))
    saved = torch.zeros(launch.saved_size(9, reduction))
    dloss = torch.randn(9 if reduction == "none" else ())
    torch.library.opcheck(torch.ops.tkq.cross_entropy_backward,
                          (logits.detach(), target, dloss, saved, weight, -100, reduction, 0.1, 0.01, 5.0))


def test_torch_compile_keeps_it_whole():
    logits, target, _ = case()
    logits.requires_grad_()

    def f(x):
        return tkq.cross_entropy(x * 2, target, label_smoothing=0.1, inplace_backward=True)

    loss = torch.compile(f, backend="aot_eager", fullgraph=True)(logits)
    assert torch.allclose(loss, f(logits))
    assert torch.allclose(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(f(logits), logits)[0])


def test_a_second_derivative_is_refused():
    logits, target, _ = case()
    loss = tkq.cross_entropy(logits.requires_grad_(), target).square()
    grad, = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="cross_entropy: second derivatives"):
        grad.sum().backward()


@pytest.mark.parametrize("logits, stride", [
    (torch.empty(4, 16), (16, 1)), (torch.empty(4, 24)[:, :23], (24, 1)), (torch.empty(4, 48)[:, :16], (16, 1)),
    (torch.empty(2, 3, 72)[..., :65], (216, 72, 1)), (torch.empty(5), (1,)),
    (torch.empty(1, 16).expand(4, 16), (16, 1)),
    (torch.empty(3, 2, 72).transpose(0, 1)[..., :65], (195, 65, 1))])
def test_where_a_gradients_rows_lie(logits, stride):
    assert launch.gradient_stride(logits) == stride


# ---- of a linear layer ----------------------------------------------------------------------------------------------


def layer(M=9, V=17, K=16, dtype=torch.bfloat16, weighted=False):
    _, target, weight = case(M, V, weighted=weighted)
    g = torch.Generator().manual_seed(2)
    x, w = torch.randn(M, K, generator=g).to(dtype), torch.randn(V, K, generator=g).to(dtype)
    return x.requires_grad_(), w.requires_grad_(), target, weight


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1, z_loss=0.01, softcap=5.0)])
@pytest.mark.parametrize("weighted", [False, True])
def test_linear_is_both_together(dtype, reduction, options, weighted):
    x, w, target, weight = layer(dtype=dtype, weighted=weighted)
    ours = tkq.linear_cross_entropy(x, w, target, class_weight=weight, reduction=reduction, **options)
    wide = [t.detach().float().requires_grad_() for t in (x, w)]
    logits = F.linear(*wide)
    theirs = reference.cross_entropy(logits + (logits.to(dtype).float() - logits).detach(), target, Terms(
        weight, reduction=reduction, **options))
    assert ours.dtype == torch.float32 and ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-5)
    for mine, wanted in zip(gradients(ours, x, w), gradients(theirs, *wide)):
        assert mine.dtype == dtype
        assert (mine - wanted).abs().max() <= 8 * torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_backward_gives_the_same(reduction):
    x, w, target, _ = layer()
    loss = tkq.linear_cross_entropy(x, w, target, reduction=reduction).sum()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(3 * loss, (x, w))
    for a, b, c in zip(first, copies, second):
        assert torch.equal(a, b), "what was handed out stays what it was"
        assert torch.allclose(3 * a.float(), c.float(), rtol=0.03, atol=1e-2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("which", ["x", "weight"])
def test_only_what_is_asked_for(reduction, which):
    x, w, target, _ = layer()
    both = torch.autograd.grad(tkq.linear_cross_entropy(x, w, target, reduction=reduction).sum(), (x, w))
    (w if which == "x" else x).requires_grad_(False)
    alone, = torch.autograd.grad(tkq.linear_cross_entropy(x, w, target, reduction=reduction).sum(),
                                 x if which == "x" else w)
    assert torch.equal(alone, both[which == "weight"])


def test_linear_leading_dimensions_no_rows_and_no_gradient():
    x, w, target, _ = layer(M=12)
    loss = tkq.linear_cross_entropy(x.view(3, 4, -1), w, target.view(3, 4))
    grad, = torch.autograd.grad(loss, x)
    assert grad.shape == x.shape
    assert torch.equal(loss, tkq.linear_cross_entropy(x, w, target))
    with torch.no_grad():
        assert torch.equal(loss, tkq.linear_cross_entropy(x, w, target))
    none = tkq.linear_cross_entropy(x.view(3, 4, -1), w, target.view(3, 4), reduction="none")
    assert none.shape == (3, 4)
    empty = tkq.linear_cross_entropy(x[:0], w, target[:0], reduction="sum")
    assert empty == 0 and not torch.autograd.grad(empty, w)[0].any()


@pytest.mark.parametrize("error, says, change", [
    (TypeError, "x: dtype is torch.float32", lambda x, w, t: (x.float(), w, t)),
    (TypeError, "weight: got str", lambda x, w, t: (x, "w", t)),
    (ValueError, r"weight: is \(17, 8\)", lambda x, w, t: (x, w[:, :8], t)),
    (ValueError, "weight: is .* float16|weight: is", lambda x, w, t: (x, w.half(), t)),
    (ValueError, "weight: has 1 dimensions", lambda x, w, t: (x, w[0], t)),
    (ValueError, "K is 12, allowed are multiples of 8", lambda x, w, t: (x[:, :12], w[:, :12], t)),
    (ValueError, r"weight: got shape \(0, 16\)", lambda x, w, t: (x, w[:0], t)),
    (ValueError, "weight: strides are", lambda x, w, t: (x, torch.ones(16, 17).bfloat16().t(), t)),
    (ValueError, r"target: shape is \(8,\)", lambda x, w, t: (x, w, t[1:])),
    (TypeError, "target: dtype", lambda x, w, t: (x, w, t.float()))])
def test_linear_bad_input_is_named(error, says, change):
    x, w, target, _ = layer()
    with pytest.raises(error, match=says):
        tkq.linear_cross_entropy(*change(x, w, target))


def test_linear_checks_targets_when_asked():
    x, w, target, _ = layer()
    target[2] = 99
    assert tkq.linear_cross_entropy(x, w, target).isnan()
    with debug.checks(), pytest.raises(IndexError, match="target: 99"):
        tkq.linear_cross_entropy(x, w, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_opcheck(reduction):
    x, w, target, weight = layer(weighted=True)
    torch.library.opcheck(torch.ops.tkq.linear_cross_entropy,
                          (x, w, target, weight, -100, reduction, 0.1, 0.01, 5.0, True, True),
                          test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_torch_compile(reduction):
    x, w, target, _ = layer()

    def f(x, w):
        return tkq.linear_cross_entropy(x * 2, w, target, reduction=reduction).sum()

    loss = torch.compile(f, backend="aot_eager", fullgraph=True)(x, w)
    for mine, wanted in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(f(x, w), (x, w))):
        assert torch.equal(mine, wanted)


def test_forward_mode_is_refused():
    logits, target, _ = case()
    x, w, index, _ = layer()
    with torch.autograd.forward_ad.dual_level():
        for name, call in (("x", lambda d: tkq.softmax(d)), ("logits", lambda d: tkq.cross_entropy(d, target)),
                           ("x", lambda d: tkq.linear_cross_entropy(x.detach() + d[:, :16].bfloat16(), w, index))):
            dual = torch.autograd.forward_ad.make_dual(logits, torch.ones_like(logits))
            with pytest.raises(NotImplementedError, match=f"{name} carries a tangent"):
                call(dual)

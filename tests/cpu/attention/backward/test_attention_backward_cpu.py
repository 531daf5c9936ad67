"""Attention's gradients without a GPU: the formula against autograd, the autograd glue, what is refused, the fake."""
import itertools
import math

import pytest
import torch

import tkq
from tkq import reference
from tkq.attention import autograd
from tkq.attention.arguments import Options
from tkq.attention.backward import ops
from tkq.attention.backward.ops import attention_backward
from tkq.reference import attention_backward as reference_attention

SHAPES = ((17, 33), (33, 17), (16, 16), (1, 40), (40, 1), (5, 0), (0, 5))


def inputs(rows=17, keys=33, heads=4, kv_heads=2, dim=64, dtype=torch.float64, batch=2, dim_v=None):
    make = lambda s, h, d: torch.randn(batch, s, h, d, dtype=torch.float64).to(dtype)
    return make(rows, heads, dim), make(keys, kv_heads, dim), make(keys, kv_heads, dim_v or dim)


def forward(q, k, v, causal, scale=None, window_size=(None, None), softcap=0.0, sinks=None):
    """o and lse by plain differentiable operations, 0 and -inf (or the sink) where a row sees nothing."""
    group = q.shape[2] // k.shape[2]
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2))
    s = s * (q.shape[3] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    mask = reference_attention.seen(q.shape[1], k.shape[1], causal, window_size)
    some = mask.any(-1)
    s = s.masked_fill(~mask & some[:, None], -math.inf)
    lse = s.logsumexp(-1).masked_fill(~some, -math.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None].expand(lse.shape[1:]))
    p = (s - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp() * some[:, None]
    return torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(group, 2)), lse


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("window_size", ((None, None), (7, None), (None, 3), (5, 0), (0, 9)))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_formula_is_the_derivative(causal, window_size, shape):
    q, k, v = (x.requires_grad_() for x in inputs(*shape))
    do, dlse = torch.randn(*q.shape, dtype=q.dtype), torch.randn(2, 4, shape[0], dtype=q.dtype)
    if 0 in shape:
        o, lse = torch.zeros_like(q), torch.full((2, 4, shape[0]), -math.inf, dtype=q.dtype)
        want = [torch.zeros_like(x) for x in (q, k, v)]
    else:
        o, lse = forward(q, k, v, causal, 0.3, window_size)
        seen = torch.isfinite(lse)
        want = torch.autograd.grad((o * do).sum() + (lse[seen] * dlse[seen]).sum(), (q, k, v))
    found = reference_attention.flash_attn_backward(
        *(x.detach() for x in (do, q, k, v, o, lse, dlse)), causal, 0.3, window_size)
    for name, a, b in zip(("dq", "dk", "dv"), found, want):
        assert a.shape == b.shape and torch.allclose(a, b, atol=1e-10), name


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("softcap", (0.0, 1.5))
@pytest.mark.parametrize("shape", ((17, 33), (33, 17)))
def test_the_formula_with_a_softcap_sinks_and_narrow_values(causal, softcap, shape):
    q, k, v = (x.requires_grad_() for x in inputs(*shape, dim_v=24))
    sinks = torch.randn(4, dtype=q.dtype, requires_grad=True)
    o, lse = forward(q, k, v, causal, 0.3, (20, None), softcap, sinks)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    want = torch.autograd.grad((o * do).sum() + (lse * dlse).sum(), (q, k, v, sinks))
    found = reference_attention.flash_attn_backward(
        *(x.detach() for x in (do, q, k, v, o, lse, dlse)), causal, 0.3, (20, -1), softcap, sinks.detach())
    for name, a, b in zip(("dq", "dk", "dv", "dsinks"), found, want):
        assert a.shape == b.shape and torch.allclose(a, b, atol=1e-10), name


def test_seen_is_the_definition():
    mask = reference_attention.seen(5, 8, window_size=(2, 1))
    for i in range(5):
        assert mask[i].nonzero().flatten().tolist() == [j for j in range(8) if i + 3 - 2 <= j <= i + 3 + 1]


# ---- the glue --------------------------------------------------------------------------------------


def low(*shape, **options):
    return inputs(*shape, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("used", ("o", "lse", "both"))
def test_gradients_flow(causal, used):
    q, k, v = (x.requires_grad_() for x in low())
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    losses = []
    ours = tkq.flash_attn(q, k, v, causal=causal, softmax_scale=0.2, return_lse=True)
    for o, lse in (ours, forward(*wide, causal, 0.2)):
        losses.append((o.double().square().sum() if used != "lse" else 0) + (
            lse.double().square().sum() if used != "o" else 0))
    for x, w in zip(torch.autograd.grad(losses[0], (q, k, v), allow_unused=True),
                    torch.autograd.grad(losses[1], wide, allow_unused=True)):
        # v has no part in lse: the wide graph has no gradient for it, the formula one of zeros
        w = torch.zeros_like(x, dtype=torch.float64) if w is None else w
        assert (x.double() - w).norm() <= 0.02 * w.norm() + 1e-6


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_all_that_is_differentiable(dtype):
    q, k, v = low(dim_v=32)
    sinks = torch.randn(4).to(dtype)
    options = False, 0.2, (9, 4), 3.0
    wide = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    o, lse = forward(*wide[:3], *options, wide[3])
    wanted = torch.autograd.grad(o.square().sum() + lse.square().sum(), wide)
    o, lse = o.detach().to(q.dtype), lse.detach().float()
    found = attention_backward((2 * o, q, k, v, o, lse, 2 * lse), sinks, Options(False, 0.2, 9, 4, 3.0))
    for x, g, w in zip((q, k, v, sinks), found, wanted):
        assert g.dtype == x.dtype and (g.double() - w).norm() <= 0.02 * w.norm() + 1e-6


@pytest.mark.parametrize("needs", [n for n in itertools.product((0, 1), repeat=3) if any(n)])
def test_exactly_the_gradients_that_are_needed(needs, monkeypatch):
    asked = []
    real = autograd.attention_backward
    monkeypatch.setattr(autograd, "attention_backward", lambda *a, **kw: asked.append(kw["needs"]) or real(*a, **kw))
    x = [t.requires_grad_(bool(n)) for t, n in zip(low(), needs)]
    o = tkq.flash_attn(*x, causal=True)
    o.float().sum().backward()
    assert asked == [(*map(bool, needs), False)]
    assert [t.grad is not None for t in x] == list(map(bool, needs))


def test_nothing_needed_is_nothing_done():
    q, k, v = low()
    lse = torch.zeros(2, 4, 17)
    tensors = q, q, k, v, q, lse, None
    assert attention_backward(tensors, needs=(False,) * 3 + (True,)) == (None,) * 4
    assert attention_backward(tensors, torch.zeros(4), needs=(False,) * 4) == (None,) * 4


# ---- what is refused -------------------------------------------------------------------------------


def arguments():
    q, k, v = low()
    o, lse = reference.flash_attn(q, k, v)
    return dict(do=torch.randn_like(o), q=q, k=k, v=v, o=o, lse=lse)


def gradients(do, q, k, v, o, lse, dlse=None, sinks=None, **options):
    return attention_backward((do, q, k, v, o, lse, dlse), sinks, Options(**options))


@pytest.mark.parametrize("name, change, error, words", [
    ("do", lambda x: x.float(), TypeError, ("do", "float32")),
    ("do", lambda x: x[:, :5], ValueError, ("do", "(2, 5, 4, 64)", "17")),
    ("o", lambda x: x.half(), TypeError, ("o", "float16", "bfloat16")),
    ("k", lambda x: x[0], ValueError, ("k", "4")),
    ("k", lambda x: x[..., :32], ValueError, ("k", "64")),
    ("v", lambda x: x[:, 1:], ValueError, ("v", "33")),
    ("lse", lambda x: x.double(), TypeError, ("lse", "float64")),
    ("lse", lambda x: x[:, :2], ValueError, ("lse", "(2, 4, 17)")),
    ("lse", lambda x: x.to("meta"), ValueError, ("lse", "meta")),
    ("dlse", lambda _: torch.zeros(2, 4, 16), ValueError, ("dlse", "(2, 4, 17)")),
    ("softmax_scale", lambda _: 0.0, ValueError, ("softmax_scale", "0.0")),
    ("softmax_scale", lambda _: "1", TypeError, ("softmax_scale", "str")),
    ("left", lambda _: -2, ValueError, ("window", "-2")),
    ("softcap", lambda _: -1.0, ValueError, ("softcap", "-1.0")),
    ("softcap", lambda _: "1", TypeError, ("softcap", "str")),
    ("sinks", lambda _: torch.zeros(3), ValueError, ("sinks", "(3,)")),
    ("sinks", lambda _: torch.zeros(4).double(), TypeError, ("sinks", "float64")),
    ("q", lambda x: x.requires_grad_(), NotImplementedError, ("attention_backward", "q", "grad")),
])
def test_bad_input_is_named(name, change, error, words):
    given = arguments()
    given[name] = change(given.get(name))
    with pytest.raises(error) as caught:
        gradients(**given)
    assert all(w in str(caught.value) for w in words), str(caught.value)


def test_unsupported_head_dim_is_named():
    for dim in (44, 252):
        q, k, v = low(dim=dim)
        with pytest.raises(NotImplementedError, match=f"head_dim is {dim}, supported are multiples of 8 from 8 to 256"):
            attention_backward((q, q, k, v, q, torch.zeros(2, 4, 17), None))
    q, k, v = low(dim_v=20)
    with pytest.raises(NotImplementedError, match="head_dim_v is 20"):
        attention_backward((q, q, k, v, q, torch.zeros(2, 4, 17), None))


def test_heads_that_do_not_divide():
    q, k, v = low(heads=3)
    with pytest.raises(ValueError, match="3 heads"):
        attention_backward((q, q, k, v, q, torch.zeros(2, 3, 17), None))


def test_layouts_that_tma_takes():
    x = low()[0]
    packed = torch.zeros(2, 17, 12, 64, dtype=x.dtype)
    good = (x, packed[:, :, 4:8], x[:, :, :1].expand(-1, -1, 4, -1), x[:, ::2], x.transpose(1, 2))
    assert all(map(ops.takes, good))
    storage = torch.zeros(x.numel() + 4, dtype=x.dtype)
    bad = (torch.zeros(2, 17, 4, 128, dtype=x.dtype)[..., ::2], torch.zeros(2, 17, 4, 68, dtype=x.dtype)[..., :64],
           storage[4:].view_as(x), torch.zeros(1, 1, 1, 1, dtype=x.dtype).expand(x.shape))
    assert not any(map(ops.takes, bad))
    with pytest.raises(ValueError, match="q: strides are .* 16 bytes"):
        ops._check_layout("q", bad[0])


# ---- tracing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", ((True, True, True, False), (True, False, False, True), (False, True, True, True)))
def test_opcheck(needs):
    a = arguments()
    tensors = a["do"], a["q"], a["k"], a["v"], a["o"], a["lse"]
    sinks = torch.zeros(4) if needs[3] else None
    torch.library.opcheck(torch.ops.tkq.flash_attn_backward.default,
                          (*tensors, None, sinks, True, None, -1, 3, 0.0, False, *needs))


def test_traces_under_compile():
    a = arguments()
    f = torch.compile(lambda do: gradients(**{**a, "do": do}, causal=True)[:3], fullgraph=True, backend="eager")
    for got, want in zip(f(a["do"]), gradients(**a, causal=True)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("used", ("o", "both"))
@pytest.mark.parametrize("frozen", (False, True))
def test_gradients_through_the_op_traced_and_not(used, frozen):
    q, k, v = low()
    leaves = [q, v] if frozen else [q, k, v]
    for x in leaves:
        x.requires_grad_()

    def loss(q, k, v):
        o, lse = tkq.flash_attn(q, k, v, causal=True, softmax_scale=0.2, window_size=(9, None), return_lse=True)
        return o.float().square().sum() + (lse.square().sum() if used == "both" else 0)

    want = torch.autograd.grad(loss(q, k, v), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, expected in zip(torch.autograd.grad(compiled(q, k, v), leaves), want):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("traced", (False, True))
def test_gradients_with_all_options_through_autograd(traced):
    """softcap, sinks, window, narrow values: plain eager and traced, beside autograd of plain operations."""
    leaves = [x.requires_grad_() for x in (*low(dim_v=32), torch.randn(4))]
    wide = [x.detach().double().requires_grad_() for x in leaves]

    def loss(q, k, v, sinks):
        o, lse = tkq.flash_attn(q, k, v, sinks=sinks, softcap=3.0, softmax_scale=0.2, window_size=(9, 4),
                                return_lse=True)
        return o.double().square().sum() + lse.double().square().sum()

    call = torch.compile(loss, fullgraph=True, backend="aot_eager") if traced else loss
    o, lse = forward(*wide[:3], False, 0.2, (9, 4), 3.0, wide[3])
    for x, g, w in zip(leaves, torch.autograd.grad(call(*leaves), leaves),
                       torch.autograd.grad(o.square().sum() + lse.square().sum(), wide)):
        assert g.dtype == x.dtype and (g.double() - w).norm() <= 0.02 * w.norm() + 1e-6


def test_sinks_that_need_no_gradient():
    q, k, v = (x.requires_grad_() for x in low())
    tkq.flash_attn(q, k, v, sinks=torch.randn(4)).float().sum().backward()
    sinks = torch.randn(4, requires_grad=True)
    tkq.flash_attn(q.detach(), k.detach(), v.detach(), sinks=sinks).float().sum().backward()
    assert q.grad is not None and sinks.grad is not None


def test_a_sink_of_minus_infinity_and_rows_that_see_no_key():
    q, k, v = (torch.randn(1, n, 2, 16).bfloat16() for n in (5, 3, 3))
    sinks = torch.tensor([-math.inf, 0.5], requires_grad=True)
    o, lse = tkq.flash_attn(q, k, v, causal=True, sinks=sinks, return_lse=True)
    dsinks, = torch.autograd.grad(o.float().sum() + lse[:, :, 2:].sum(), sinks)
    assert dsinks[0] == 0 and dsinks.isfinite().all()

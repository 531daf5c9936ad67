"""flash_attn without a GPU: the reference path, what it refuses, its fake."""
import math

import pytest
import torch

import tkq
from tkq import reference
from tkq.attention import arguments


def qkv(batch=2, rows=17, keys=33, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16):
    make = lambda s, h: torch.randn(batch, s, h, dim).to(dtype)
    return make(rows, heads), make(keys, kv_heads), make(keys, kv_heads)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("shape", ((17, 33), (33, 17), (16, 16), (1, 40), (40, 1), (5, 0), (0, 5)))
def test_reference_is_the_definition(causal, shape):
    rows, keys = shape
    q, k, v = [x.double() for x in qkv(rows=rows, keys=keys)]
    o, lse = reference.flash_attn(q, k, v, causal, 0.3)
    for b in range(2):
        for h in range(4):
            for i in range(rows):
                n = keys if not causal else max(min(i + keys - rows + 1, keys), 0)
                if n == 0:
                    assert o[b, i, h].abs().max() == 0 and lse[b, h, i] == -math.inf
                    continue
                s = 0.3 * (k[b, :n, h // 2] @ q[b, i, h])
                assert torch.allclose(lse[b, h, i].double(), s.logsumexp(0), atol=1e-5)
                assert torch.allclose(o[b, i, h], s.softmax(0) @ v[b, :n, h // 2])


def test_reference_agrees_with_torch():
    q, k, v = qkv(rows=48, keys=48, kv_heads=4)
    heads_first = [x.transpose(1, 2).float() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    o, _ = reference.flash_attn(q.float(), k.float(), v.float(), True)
    assert torch.allclose(o, want.transpose(1, 2), atol=1e-5)


def test_public_function_on_cpu():
    q, k, v = qkv()
    o = tkq.flash_attn(q, k, v, causal=True)
    o2, lse = tkq.flash_attn(q, k, v, causal=True, return_lse=True)
    assert o.shape == q.shape and o.dtype == q.dtype and o.is_contiguous() and torch.equal(o, o2)
    assert lse.shape == (2, 4, 17) and lse.dtype == torch.float32


def strided(x, last):
    return torch.zeros(*x.shape[:-1], x.shape[-1] * last, dtype=x.dtype)[..., ::last]


@pytest.mark.parametrize("change, error, words", [
    (lambda q, k, v: (q.float(), k, v), TypeError, ("q", "float32", "bf16")),
    (lambda q, k, v: (q, k.half(), v), TypeError, ("k", "float16", "bfloat16")),
    (lambda q, k, v: (q, k, v.half()), TypeError, ("v", "float16")),
    (lambda q, k, v: ([1], k, v), TypeError, ("q", "list")),
    (lambda q, k, v: (q[0], k, v), ValueError, ("q", "4")),
    (lambda q, k, v: (q, k[:, :, 0], v), ValueError, ("k", "4")),
    (lambda q, k, v: (q, k[:1], v), ValueError, ("k", "B = 2")),
    (lambda q, k, v: (q, k[..., :32], v), ValueError, ("k", "D = 64")),
    (lambda q, k, v: (q, k, v[:, :-1]), ValueError, ("v", "k's sizes")),
    (lambda q, k, v: (q, k, v[:, :, :1]), ValueError, ("v", "k's sizes")),
    (lambda q, k, v: (q[:, :, :3], k, v), ValueError, ("3 heads", "multiple")),
    (lambda q, k, v: (q[..., :44], k[..., :44], v), NotImplementedError, ("head_dim", "44", "multiples of 8")),
    (lambda q, k, v: (q, k, v[..., :36]), NotImplementedError, ("head_dim_v", "36", "multiples of 8")),
    (lambda q, k, v: (*[x.repeat(1, 1, 1, 5)[..., :264] for x in (q, k)], v), NotImplementedError, ("head_dim", "264")),
    (lambda q, k, v: (q, k, v.to("meta")), ValueError, ("v", "meta")),
])
def test_bad_input_is_named(change, error, words):
    args = change(*qkv())
    with pytest.raises(error) as caught:
        tkq.flash_attn(*args)
    assert all(w in str(caught.value) for w in words), str(caught.value)


@pytest.mark.parametrize("causal", ["no", None, 2])
def test_bad_causal_is_named(causal):
    with pytest.raises(TypeError, match=f"flash_attn: causal: got {causal!r}, allowed are True and False"):
        tkq.flash_attn(*qkv(), causal=causal)


@pytest.mark.parametrize("scale", (0.0, -1.0, math.inf, math.nan))
def test_bad_scale_is_named(scale):
    with pytest.raises(ValueError, match="softmax_scale"):
        tkq.flash_attn(*qkv(), softmax_scale=scale)


@pytest.mark.parametrize("scale", ("0.1", torch.tensor(0.1)))
def test_a_scale_that_is_no_number_is_named(scale):
    with pytest.raises(TypeError, match="softmax_scale"):
        tkq.flash_attn(*qkv(), softmax_scale=scale)


@pytest.mark.parametrize("make, words", [
    (lambda x: strided(x, 2), ("last dimension", "contiguous")),
    (lambda x: torch.zeros(2, 17, 4, 68, dtype=x.dtype)[..., :64], ("stride 2", "multiple of 8")),
    (lambda x: torch.zeros(x.numel() + 4, dtype=x.dtype)[4:].view_as(x), ("16 bytes", "clone")),
])
def test_layouts_that_tma_cannot_take_are_named(make, words):
    with pytest.raises(ValueError) as caught:
        arguments.check_layouts("flash_attn", q=make(qkv()[0]))
    assert all(w in str(caught.value) for w in ("q", *words)), str(caught.value)
    q, k, v = qkv()
    with pytest.raises(ValueError, match=f"flash_attn: q: .*{words[0]}"):  # on the CPU as on the GPU
        tkq.flash_attn(make(q), k, v)
    assert tkq.flash_attn(make(q)[:, :0], k, v).shape[1] == 0  # nothing is read


def test_layouts_that_tma_takes():
    x = qkv()[0]
    packed = torch.zeros(2, 17, 12, 64, dtype=x.dtype)
    for good in (x, packed[:, :, 4:8], x[:, :, :1].expand(-1, -1, 4, -1), x[:, ::2], x.transpose(1, 2)):
        arguments.check_layouts("flash_attn", q=good)


def test_gradient_is_fine_where_it_is_off():
    q, k, v = qkv()
    with torch.no_grad():
        assert tkq.flash_attn(q.requires_grad_(), k, v).shape == q.shape


def test_opcheck():
    sinks = torch.zeros(4)
    for options in ((None, True, None, -1, -1, 0.0, True, False), (sinks, False, 0.1, 3, 5, 20.0, False, True)):
        torch.library.opcheck(torch.ops.tkq.flash_attn.default, (*qkv(), *options))


def test_traces_under_compile():
    q, k, v = qkv()
    f = torch.compile(lambda q, k, v: tkq.flash_attn(q, k, v, causal=True) * 2, fullgraph=True, backend="eager")
    assert torch.equal(f(q, k, v), tkq.flash_attn(q, k, v, causal=True) * 2)


def test_traces_with_a_scale_that_varies():
    call = lambda q, k, v, scale: tkq.flash_attn(q, k, v, softmax_scale=scale)
    f, x = torch.compile(call, fullgraph=True, dynamic=True, backend="eager"), qkv()
    for scale in (0.3, 0.4):
        assert torch.equal(f(*x, scale), call(*x, scale))


ROWS = 1 << 30
MANY = {"flash_attn": lambda q, k: tkq.flash_attn(q, k, k),
        "flash_attn_varlen": lambda q, k: tkq.flash_attn_varlen(
            q[0], k[0], k[0], *[torch.tensor([0, 1], dtype=torch.int32)] * 2, 1, 1),
        "flex_attention": lambda q, k: tkq.flex_attention(*(x.transpose(1, 2) for x in (q, k, k))),
        "flash_attn_fp8": lambda q, k: tkq.flash_attn_fp8(
            q.to(torch.float8_e4m3fn), *[k[:, :1].to(torch.float8_e4m3fn).expand(k.shape)] * 2)}


@pytest.mark.parametrize("name", MANY)
def test_rows_that_int32_does_not_count(name):
    """Which may be few in memory."""
    with pytest.raises(NotImplementedError, match="fewer than 2.30 rows"):
        MANY[name](torch.zeros(1, 8, 1, 64).bfloat16(), torch.zeros(1, 1, 1, 64).bfloat16().expand(1, ROWS, 1, 64))


def test_shapes_that_no_memory_has():
    """On the meta device nothing is computed."""
    x = torch.empty(1, 1 << 26, 8, 64, dtype=torch.bfloat16, device="meta")
    o, lse = tkq.flash_attn(x, x, x, return_lse=True)
    assert o.shape == x.shape and lse.shape == (1, 8, 1 << 26)
    y = x.transpose(1, 2)
    o, lse = tkq.flex_attention(y, y, y, lambda s, *at: s * 2, return_lse=True)
    assert o.shape == y.shape and o.stride() == y.stride() and lse.shape == (1, 8, 1 << 26)

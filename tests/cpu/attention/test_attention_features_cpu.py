"""Windows, softcap, sinks and varlen on the CPU: the reference is the definition; what is refused."""
import math

import pytest
import torch

import tkq
from tkq import reference

FEATURES = [
    dict(), dict(causal=True), dict(left=3), dict(right=2), dict(left=5, right=0), dict(left=0, right=4),
    dict(left=200), dict(right=200), dict(left=7, causal=True), dict(softcap=2.0), dict(causal=True, softcap=0.5),
    dict(sinks=True),
    dict(left=4, right=1, softcap=3.0, sinks=True, causal=False)]


def qkv(batch=2, rows=17, keys=33, heads=4, kv_heads=2, dim=16, dim_v=16, dtype=torch.float64):
    g = torch.Generator().manual_seed(rows * 100 + keys)
    make = lambda s, h, d: torch.randn(batch, s, h, d, generator=g, dtype=torch.float64).to(dtype)
    return make(rows, heads, dim), make(keys, kv_heads, dim), make(keys, kv_heads, dim_v)


def one_row(q, k, v, i, rows, scale, causal=False, left=-1, right=-1, softcap=0.0, sink=None):
    """(o, lse) of query i of one head, key by key. q (D,), k (Sk, D), v (Sk, Dv)."""
    own, total, o = i + len(k) - rows, 0.0, torch.zeros(v.shape[1], dtype=v.dtype)
    for j in range(len(k)):
        if (causal and j > own) or (left >= 0 and j < own - left) or (right >= 0 and j > own + right):
            continue
        s = scale * (k[j] @ q).item()
        weight = math.exp(softcap * math.tanh(s / softcap) if softcap else s)
        total, o = total + weight, o + weight * v[j]
    if sink is not None:
        total += math.exp(sink)
    return (o / total, math.log(total)) if total else (o, -math.inf)


@pytest.mark.parametrize("options", FEATURES, ids=str)
@pytest.mark.parametrize("shape", ((17, 33), (33, 17), (16, 16), (1, 40), (40, 1), (5, 0), (0, 5)))
def test_reference_is_the_definition(options, shape):
    rows, keys = shape
    q, k, v = qkv(rows=rows, keys=keys, dim_v=8)
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64) if options.get("sinks") else None
    o, lse = reference.flash_attn(q, k, v, softmax_scale=0.3, **{**options, "sinks": sinks})
    assert o.shape == (2, rows, 4, 8) and lse.shape == (2, 4, rows)
    plain = {name: x for name, x in options.items() if name != "sinks"}
    for b in range(2):
        for h in range(4):
            sink = sinks[h].item() if sinks is not None else None
            for i in range(rows):
                want, want_lse = one_row(q[b, i, h], k[b, :, h // 2], v[b, :, h // 2], i, rows, 0.3, **plain, sink=sink)
                assert torch.allclose(o[b, i, h], want, atol=1e-12)
                assert lse[b, h, i].item() == pytest.approx(want_lse, abs=1e-6)


def test_reference_agrees_with_torch():
    q, k, v = qkv(rows=48, keys=48, kv_heads=4, dtype=torch.float32)
    seen = torch.ones(48, 48, dtype=torch.bool).tril(3).triu(-6)
    want = torch.nn.functional.scaled_dot_product_attention(*[x.transpose(1, 2) for x in (q, k, v)], attn_mask=seen)
    o, _ = reference.flash_attn(q, k, v, left=6, right=3)
    assert torch.allclose(o, want.transpose(1, 2), atol=1e-5)


LENGTHS = [(5, 7), (0, 3), (4, 0), (1, 1), (0, 0), (9, 4)]


def varlen(dtype=torch.bfloat16, spare=3, dim_v=16):
    """(q, k, v, cu_q, cu_k), with ``spare`` rows behind the last sequence."""
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in zip(*LENGTHS))
    q, k, v = qkv(1, int(cu_q[-1]) + spare, int(cu_k[-1]) + spare, dim_v=dim_v, dtype=dtype)
    return q[0], k[0], v[0], cu_q, cu_k


@pytest.mark.parametrize("options", FEATURES, ids=str)
@pytest.mark.parametrize("used", (False, True))
def test_varlen_is_each_sequence_by_itself(options, used):
    q, k, v, cu_q, cu_k = varlen(torch.float64, dim_v=8)
    sinks = torch.linspace(-1, 2, 4) if options.get("sinks") else None
    options = {**options, "sinks": sinks}
    seqused_q, seqused_k = (torch.tensor(n, dtype=torch.int32) if used else None
                            for n in ([4, 0, 2, 1, 0, 9], [3, 3, 0, 0, 0, 1]))
    o, lse = reference.flash_attn_varlen(q, k, v, cu_q, cu_k, seqused_q, seqused_k, **options)
    nothing = torch.full((4,), -math.inf) if sinks is None else sinks
    inside = torch.zeros(q.shape[0], dtype=torch.bool)
    for s, (rows, keys) in enumerate(LENGTHS):
        rows, keys = (rows, keys) if not used else (min(rows, int(seqused_q[s])), min(keys, int(seqused_k[s])))
        a, c = int(cu_q[s]), int(cu_k[s])
        want = reference.flash_attn(q[None, a:a + rows], k[None, c:c + keys], v[None, c:c + keys], **options)
        assert torch.equal(o[a:a + rows], want[0][0]) and torch.equal(lse[:, a:a + rows], want[1][0])
        inside[a:a + rows] = True
    assert o[~inside].abs().max() == 0 and (lse[:, ~inside] == nothing[:, None]).all()


def test_public_functions_on_cpu():
    q, k, v = qkv(dim=64, dim_v=32, dtype=torch.bfloat16)
    sinks = torch.randn(4)
    o, lse = tkq.flash_attn(q, k, v, window_size=(4, None), softcap=5.0, sinks=sinks, return_lse=True)
    want = reference.flash_attn(q, k, v, left=4, softcap=5.0, sinks=sinks)
    assert torch.equal(o, want[0]) and torch.equal(lse, want[1]) and o.shape == (2, 17, 4, 32)
    assert torch.equal(tkq.flash_attn(q, k, v, window_size=[-1, 0]), tkq.flash_attn(q, k, v, causal=True))
    assert torch.equal(tkq.flash_attn(q, k, v, causal=True, window_size=(3, 5)),
                       tkq.flash_attn(q, k, v, window_size=(3, 0), deterministic=True))
    x = varlen()
    o, lse = tkq.flash_attn_varlen(*x, 9, 7, causal=True, return_lse=True)
    want = reference.flash_attn_varlen(*x, causal=True)
    assert torch.equal(o, want[0]) and torch.equal(lse, want[1])
    assert torch.equal(tkq.flash_attn_varlen(*x, 1, 1, causal=True), o)


@pytest.mark.parametrize("options, error, words", [
    (dict(window_size=3), TypeError, ("window_size", "3", "left, right")),
    (dict(window_size=(1, 2, 3)), TypeError, ("window_size", "(1, 2, 3)")),
    (dict(window_size=(-2, 0)), ValueError, ("window_size", "-2")),
    (dict(window_size=(1.5, 0)), TypeError, ("window_size", "1.5")),
    (dict(window_size=(True, 0)), TypeError, ("window_size", "True")),
    (dict(window_size=(0, 1 << 30)), ValueError, ("window_size", "2^30")),
    (dict(softcap=-1.0), ValueError, ("softcap", "-1")),
    (dict(softcap=math.inf), ValueError, ("softcap", "inf")),
    (dict(softcap="1"), TypeError, ("softcap", "str")),
    (dict(sinks=[0.0]), TypeError, ("sinks", "list")),
    (dict(sinks=torch.zeros(4, dtype=torch.float64)), TypeError, ("sinks", "float64")),
    (dict(sinks=torch.zeros(4, dtype=torch.float16)), TypeError, ("sinks", "float16", "bf16")),
    (dict(sinks=torch.zeros(3)), ValueError, ("sinks", "(3,)", "(4)")),
    (dict(sinks=torch.zeros(4, device="meta")), ValueError, ("sinks", "meta")),
    (dict(softmax_scale=0.0), ValueError, ("softmax_scale", "0.0")),
])
def test_bad_options_are_named(options, error, words):
    for call in (lambda: tkq.flash_attn(*qkv(dtype=torch.bfloat16), **options),
                 lambda: tkq.flash_attn_varlen(*varlen(), 9, 7, **options)):
        with pytest.raises(error) as caught:
            call()
        assert all(w in str(caught.value) for w in words), str(caught.value)


def ints(*n, dtype=torch.int32):
    return torch.tensor(n, dtype=dtype)


@pytest.mark.parametrize("change, error, words", [
    (dict(q=torch.zeros(2, 3, 4, 16, dtype=torch.bfloat16)), ValueError, ("q", "4 dimensions")),
    (dict(k=torch.zeros(17, 2, 8, dtype=torch.bfloat16)), ValueError, ("k", "D = 16")),
    (dict(v=torch.zeros(5, 2, 16, dtype=torch.bfloat16)), ValueError, ("v", "k's sizes")),
    (dict(cu_seqlens_q=[0, 5]), TypeError, ("cu_seqlens_q", "list")),
    (dict(cu_seqlens_q=ints(0, 5, dtype=torch.int64)), TypeError, ("cu_seqlens_q", "int64", "int32")),
    (dict(cu_seqlens_k=ints(0, 5)), ValueError, ("cu_seqlens_q", "cu_seqlens_k", "7", "2")),
    (dict(cu_seqlens_k=torch.zeros(1, 7, dtype=torch.int32)), ValueError, ("cu_seqlens_k", "dimensions")),
    (dict(cu_seqlens_q=ints(), cu_seqlens_k=ints()), ValueError, ("cu_seqlens_q", "one more")),
    (dict(seqused_k=ints(1, 2)), ValueError, ("seqused_k", "(2,)", "(6)")),
    (dict(seqused_q=torch.zeros(6)), TypeError, ("seqused_q", "float32")),
    (dict(cu_seqlens_q=torch.zeros(7, dtype=torch.int32, device="meta")), ValueError, ("cu_seqlens_q", "meta")),
    (dict(max_seqlen_q=1.0), TypeError, ("max_seqlen_q", "float")),
    (dict(max_seqlen_k=-1), ValueError, ("max_seqlen_k", "-1")),
])
def test_bad_sequences_are_named(change, error, words):
    q, k, v, cu_q, cu_k = varlen()
    args = dict(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=9, max_seqlen_k=7)
    with pytest.raises(error) as caught:
        tkq.flash_attn_varlen(**{**args, **change})
    assert all(w in str(caught.value) for w in words), str(caught.value)


def test_opcheck_varlen():
    x, used = varlen(), torch.tensor([4, 0, 2, 1, 0, 9], dtype=torch.int32)
    for sinks, *options in ((None, None, None, 9, 7, True, None, -1, -1, 0.0, True, False),
                            (torch.zeros(4), used, used, 9, 7, False, 0.1, 3, 5, 20.0, False, True)):
        torch.library.opcheck(torch.ops.tkq.flash_attn_varlen.default, (*x[:3], sinks, *x[3:], *options))


def test_traces_under_compile():
    x, sinks = varlen(), torch.randn(4)
    call = lambda *x: tkq.flash_attn_varlen(*x, 9, 7, causal=True, window_size=(5, None), sinks=sinks, softcap=3.0) * 2
    f = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(f(*x), call(*x))
    dense = lambda *x: tkq.flash_attn(*x, window_size=(5, 2), sinks=sinks, softcap=3.0, return_lse=True)[1]
    y = qkv(dtype=torch.bfloat16)
    assert torch.equal(torch.compile(dense, fullgraph=True, backend="eager")(*y), dense(*y))

"""flash-attention's names: each against softmax(q k) v in float64, new keys in their slots, what is refused."""
import itertools

import numpy
import pytest
import torch

from tests.helpers.attention.interface import attended, step
from tkq import flash_attn_interface as fa

BF16 = torch.bfloat16


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, dtype=dtype)


def close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, atol=0.02, rtol=0.02)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("causal", [False, True])
def test_dense(causal):
    qkv = randn(2, 9, 3, 4, 16)
    q, k, v = qkv.unbind(2)
    want = torch.stack([attended(*x, causal) for x in zip(q, k, v)])
    close(fa.flash_attn_func(q, k, v, 0.0, None, causal), want)
    close(fa.flash_attn_func(q, k, v, causal=causal, window_size=(-1, -1), num_splits=4, pack_gqa=True), want)
    close(fa.flash_attn_qkvpacked_func(qkv, causal=causal), want)
    o, lse, none = fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=causal, return_attn_probs=True)
    close(o, want)
    assert lse.shape == (2, 4, 9) and none is None
    close(fa.flash_attn_func(q, k, v, softmax_scale=0.25, causal=causal), want)


def test_gradients_reach_what_is_packed():
    qkv = randn(1, 5, 3, 2, 16).requires_grad_()
    dqkv, = torch.autograd.grad(fa.flash_attn_qkvpacked_func(qkv, causal=True).float().square().sum(), qkv)
    x = qkv.detach().double().requires_grad_()
    want, = torch.autograd.grad(attended(*x[0].unbind(1), True).square().sum(), x)
    torch.testing.assert_close(dqkv.double(), want, atol=0.06, rtol=0.06)


def test_packed_sequences():
    qkv, cuts = randn(12, 3, 2, 16), [0, 4, 4, 12]
    cu = torch.tensor(cuts, dtype=torch.int32)
    q, k, v = qkv.unbind(1)
    want = torch.cat([attended(q[a:b], k[a:b], v[a:b], True) for a, b in itertools.pairwise(cuts)])
    close(fa.flash_attn_varlen_func(q, k, v, cu, cu, 8, 8, 0.0, None, True), want)
    close(fa.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 8, 8, causal=True), want)
    o, lse, none = fa.flash_attn_varlen_qkvpacked_func(qkv, cu, 8, causal=True, return_attn_probs=True)
    close(o, want)
    assert lse.shape == (2, 12) and none is None


def paged():
    """Caches of 6 pages of 4 keys, in any order, and where the keys of two sequences are in them."""
    table = torch.tensor([[5, 0, 3], [1, 4, -1]], dtype=torch.int32)
    return randn(6, 4, 2, 64), randn(6, 4, 2, 64), dict(block_table=table), lambda s, i: (int(table[s, i // 4]), i % 4)


def rows():
    """Rows of a larger batch's caches."""
    given = dict(cache_batch_idx=torch.tensor([2, 0]))
    return randn(3, 12, 2, 64), randn(3, 12, 2, 64), given, lambda s, i: (2 - 2 * s, i)


@pytest.mark.parametrize("caches", [paged, rows])
@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_new_keys(caches, interleaved, queries):
    k_cache, v_cache, given, where = caches()
    q, k, v = randn(2, queries, 4, 64), randn(2, queries, 2, 64), randn(2, queries, 2, 64)
    lengths, rotary = [6, 3], None
    if interleaved is not None:
        angles = randn(16, 16, dtype=torch.float32)
        rotary = angles.cos(), angles.sin(), interleaved
        given |= dict(rotary_cos=rotary[0], rotary_sin=rotary[1], rotary_interleaved=interleaved)
    want, keys, values = step(q, (k_cache, v_cache), (k, v), lengths, where, rotary)
    o = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
                                   causal=True, **given)
    close(o, want)
    torch.testing.assert_close(k_cache, keys, atol=0.02, rtol=0.01)
    assert torch.equal(v_cache, values)


def test_a_cache_as_it_is():
    q, k, v = randn(2, 1, 4, 64), randn(2, 7, 2, 64), randn(2, 7, 2, 64)
    for length, given in ((7, {}), (5, dict(cache_seqlens=5))):
        want = torch.stack([attended(a, b[:length], c[:length], False) for a, b, c in zip(q, k, v)])
        o, lse = fa.flash_attn_with_kvcache(q, k, v, **given, return_softmax_lse=True)
        close(o, want)
        assert lse.shape == (2, 4, 1)


def test_keys_without_a_slot_are_not_written():
    k_cache, v_cache = torch.zeros(2, 2, 4, 1, 64, dtype=BF16)
    k = torch.ones(2, 1, 1, 64, dtype=BF16)
    for lengths in ([4, -1], [4, 2 ** 31 - 1], [-1, -3]):
        k = torch.ones(2, 2, 1, 64, dtype=BF16)
        fa.flash_attn_with_kvcache(k, k_cache, v_cache, k, k, cache_seqlens=torch.tensor(lengths, dtype=torch.int32))
        assert not k_cache.any() and not v_cache.any()


def test_rows_of_no_cache_are_nan():
    q, cache = randn(3, 1, 2, 64), randn(2, 4, 1, 64)
    o = fa.flash_attn_with_kvcache(q, cache, cache, cache_batch_idx=torch.tensor([1, -1, 2]))
    assert o[0].isfinite().all() and o[1:].isnan().all()


def kvcache(**given):
    cache = torch.zeros(2, 4, 1, 64, dtype=BF16)
    return fa.flash_attn_with_kvcache(torch.zeros(2, 2, 1, 64, dtype=BF16), cache, cache, **given)


ONE = torch.zeros(2, 1, 1, 64, dtype=BF16)
ANGLES = dict(rotary_cos=torch.ones(4, 32), rotary_sin=torch.ones(4, 32))


@pytest.mark.parametrize("error, words, call", [
    (NotImplementedError, "flash_attn_func: dropout_p is 0.1", lambda x: fa.flash_attn_func(x, x, x, 0.1)),
    (NotImplementedError, "flash_attn_func: alibi_slopes", lambda x: fa.flash_attn_func(x, x, x, alibi_slopes=x)),
    (NotImplementedError, "flash_attn_varlen_func: block_table", lambda x: fa.flash_attn_varlen_func(
        x, x, x, x, x, 1, 1, block_table=x)),
    (NotImplementedError, "cache_leftpad", lambda x: kvcache(cache_leftpad=x)),
    (NotImplementedError, "2 queries and 1 new keys", lambda x: kvcache(k=ONE, v=ONE, cache_seqlens=1, **ANGLES)),
    (ValueError, "qkv has the shape", lambda x: fa.flash_attn_qkvpacked_func(x)),
    (ValueError, "block_table: shape", lambda x: kvcache(block_table=torch.zeros(2, dtype=torch.int32))),
    (ValueError, "a page or more", lambda x: kvcache(
        k=ONE, v=ONE, cache_seqlens=1, block_table=torch.zeros(2, 0, dtype=torch.int32))),
    (TypeError, "k_cache: dtype", lambda x: fa.flash_attn_with_kvcache(
        ONE, *[torch.zeros(2, 4, 1, 64).to(torch.float8_e4m3fn)] * 2)),
    (ValueError, "k is given alone", lambda x: kvcache(k=ONE)),
    (ValueError, "cache_seqlens is None", lambda x: kvcache(k=ONE, v=ONE)),
    (ValueError, "rotary_cos and rotary_sin are given", lambda x: kvcache(**ANGLES)),
    (ValueError, "cache_batch_idx and block_table", lambda x: kvcache(cache_batch_idx=x, block_table=x)),
    (TypeError, "cache_seqlens is a float", lambda x: kvcache(cache_seqlens=1.0)),
    (TypeError, "cache_seqlens: dtype", lambda x: kvcache(cache_seqlens=torch.zeros(2))),
    (TypeError, "dropout_p is a Tensor", lambda x: fa.flash_attn_func(x, x, x, torch.tensor(0.0))),
    (TypeError, "dropout_p is a bool", lambda x: fa.flash_attn_func(x, x, x, False)),
    (ValueError, "cache_seqlens is 1099511627776", lambda x: kvcache(cache_seqlens=2 ** 40)),
    (ValueError, "cache_seqlens is -1", lambda x: kvcache(cache_seqlens=-1)),
    (TypeError, "flash_attn_func: return_attn_probs: got 1", lambda x: fa.flash_attn_qkvpacked_func(
        x[:, :, :1].expand(1, 4, 3, 2, 64), return_attn_probs=1)),
    (TypeError, "flash_attn_varlen_func: return_attn_probs: got None", lambda x: fa.flash_attn_varlen_func(
        x, x, x, x, x, 1, 1, return_attn_probs=None)),
    (TypeError, "kvcache: return_softmax_lse: got 1", lambda x: kvcache(return_softmax_lse=1)),
    (TypeError, "kvcache: return_softmax_lse: got 1", lambda x: kvcache(
        k=ONE, v=ONE, cache_seqlens=1, return_softmax_lse=1)),
    (TypeError, "kvcache: rotary_interleaved: got 0", lambda x: kvcache(rotary_interleaved=0)),
    (ValueError, "kvcache: rotary_sin is given alone", lambda x: kvcache(
        k=ONE, v=ONE, cache_seqlens=1, **ANGLES | dict(rotary_cos=None))),
    (ValueError, "kvcache: k: shape is .2, 1, 2, 64.", lambda x: kvcache(
        k=torch.cat((ONE, ONE), 2), v=ONE, cache_seqlens=1)),
    (TypeError, "q: got int", lambda x: fa.flash_attn_with_kvcache(3, x, x))])
def test_what_is_refused(error, words, call):
    with pytest.raises(error, match=words):
        call(torch.zeros(1, 4, 2, 2, 64, dtype=BF16))


@pytest.mark.parametrize("window", [*itertools.product((-1, None), repeat=2)])
@pytest.mark.parametrize("kind", [tuple, list])
def test_no_window_is_none_however_it_is_written(window, kind):
    """Several queries would all be rotated by cache_seqlens, which is not supported; with a window by their own."""
    cache, new = torch.zeros(2, 2, 4, 1, 64, dtype=BF16), torch.ones(2, 2, 1, 64, dtype=BF16)
    given = dict(k=new, v=new, cache_seqlens=1, **ANGLES)
    with pytest.raises(NotImplementedError, match="2 queries and 2 new keys, neither causal or a window"):
        fa.flash_attn_with_kvcache(new, *cache, window_size=kind(window), **given)
    assert not cache.any()
    fa.flash_attn_with_kvcache(new, *cache, window_size=kind((0, None)), **given)
    fa.flash_attn_with_kvcache(new, *cache, window_size=kind(window), causal=True, **given)


@pytest.mark.parametrize("error, wrong", [
    (TypeError, dict(causal="x")), (TypeError, dict(window_size=torch.tensor([1, 1]))),
    (ValueError, dict(softcap=-1.0)), (ValueError, dict(softmax_scale=0.0)), (TypeError, dict(return_softmax_lse=1)),
    (NotImplementedError, dict(q=torch.zeros(2, 1, 1, 64, dtype=BF16, requires_grad=True), **ANGLES)),
    (ValueError, dict(q=torch.zeros(2, 1, 1, 65, dtype=BF16)[..., 1:]))])
def test_a_refused_call_leaves_the_caches_as_they_are(error, wrong):
    cache = torch.zeros(2, 2, 4, 1, 64, dtype=BF16)
    given = dict(q=ONE, k_cache=cache[0], v_cache=cache[1], k=ONE + 1, v=ONE + 1, cache_seqlens=numpy.int64(1))
    with pytest.raises(error):
        fa.flash_attn_with_kvcache(**{**given, **wrong})
    assert not cache.any()
    fa.flash_attn_with_kvcache(**given)
    assert cache.any()

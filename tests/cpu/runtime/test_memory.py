"""Tensors that share memory: found as by a set of addresses, and refused by every op that writes to one of them."""
import contextlib
import itertools
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tkq
from tkq.runtime.call import memory
from tkq.runtime.call.memory import shared

BF16, F8, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32


def addresses(x):
    places = [range(x.data_ptr(), x.data_ptr() + n * s * x.itemsize, s * x.itemsize) if s else [x.data_ptr()]
              for n, s in zip(x.shape, x.stride())]
    first = x.data_ptr() * (len(places) - 1)
    return {sum(place) - first + byte for place in itertools.product(*places) for byte in range(x.itemsize)}


def test_windows_of_one_memory():
    """Of 500 pairs, half of one matrix: those are said to meet that do."""
    draw, memory = random.Random(0), torch.zeros(24, 16)
    window = lambda x: x[(i := draw.randrange(x.shape[0])):draw.randint(i + 1, x.shape[0]):draw.choice((1, 1, 2)),
                         (j := draw.randrange(x.shape[1])):draw.randint(j + 1, x.shape[1])]
    kinds = [lambda: window(memory), lambda: window(memory.view(12, 32)), lambda: window(memory.mT),
             lambda: memory.view(-1).view(BF16)[(i := draw.randrange(700)):i + 9]]
    met = 0
    for n in range(500):
        x, y = kinds[0](), kinds[0 if n % 2 else draw.randrange(4)]()
        meet, found = bool(addresses(x) & addresses(y)), shared(x, y)
        met += meet
        assert found == meet, (x.shape, x.stride(), y.shape, y.stride(), x.data_ptr() - y.data_ptr())
    assert 100 < met < 400


def test_memory_of_no_tensor():
    x = torch.zeros(4, 4)
    assert shared(x, torch.from_numpy(x.numpy())) and not shared(x, x[:0]) and not shared(x, x.clone())
    assert not shared(*torch.zeros(2, 4, device="meta").unbind())


def randn(*shape):
    return torch.randn(*shape).bfloat16()


def decode(call, **more):
    q, pages = randn(2, 1, 4, 64), randn(2, 8, 16, 2, 64)
    given = dict(k_cache=pages[0], v_cache=pages[1], block_table=torch.arange(8, dtype=I32).view(2, 4),
                 cache_seqlens=torch.tensor([20, 40], dtype=I32), **more)
    within = pages[1].view(-1)[:q.numel()].view(q.shape)
    return [lambda: call(q, out=q, **given), lambda: call(q, out=within, **given)]


def mla():
    q, cache = randn(2, 1, 4, 576), randn(2, 16, 576)
    given = dict(block_table=torch.tensor([[0], [1]], dtype=I32), cache_seqlens=torch.tensor([9, 3], dtype=I32),
                 softmax_scale=0.1)
    return [lambda: tkq.mla_decode(q, cache, out=q[..., :512], **given)]


def plan():
    lengths = torch.zeros(4096, dtype=I32)
    words = tkq.plan_decode(lengths[:2], 4, 2, 64).numel()
    return [lambda: tkq.plan_decode(lengths[:2], 4, 2, 64, out=lengths[:words])]


def append():
    k, v, slots = randn(3, 2, 64), randn(3, 2, 64), torch.tensor([1, 5, 9])
    pages, scales = torch.zeros(6, 8, 2, 64, dtype=BF16), torch.zeros(6, 8, 2)
    call = lambda k_cache, v_cache, k=k, **more: tkq.kv_append(k, v, k_cache, v_cache, slots, **more)
    float8 = [x.to(F8) for x in (pages[:4], pages[:4])]
    return [lambda: call(pages[:4], pages[:4].view(4, 8, 2, 64)), lambda: call(pages[:4], pages[2:]),
            lambda: call(pages[:4], pages[:4].clone(), k=pages.view(-1, 2, 64)[:3]),
            lambda: call(*float8, k_scale=scales[:4], v_scale=scales[2:])]


def linear():
    q, k, v = randn(2, 1, 2, 64), randn(2, 1, 2, 64), randn(2, 1, 2, 64)
    state, beta = torch.zeros(2, 2, 64, 64), torch.rand(2, 1, 2)
    return [lambda: tkq.linear_attn_step(q, k, v, None, state, out=v),
            lambda: tkq.gated_delta_rule_step(q, k, v, state[..., 0, 0].view(2, 1, 2), beta, state)]


def ssd():
    x, B, C = randn(2, 2, 64), randn(2, 1, 64), randn(2, 1, 64)
    state, dt, A = torch.zeros(2, 2, 64, 64), torch.rand(2, 2), -torch.rand(2)
    return [lambda: tkq.ssd_step(state, x, dt, A, B, C, out=x),
            lambda: tkq.ssd_step(state, x, state[0, 0, :2, :2], A, B, C)]


def convolution():
    states = randn(2, 8, 4)
    x = randn(2, 8)
    return [lambda: tkq.causal_conv1d_step(states[..., 0], states, randn(8, 4)),
            lambda: tkq.causal_conv1d_step(x, states, randn(8, 4), out=x),
            lambda: tkq.causal_conv1d_step(randn(2, 8), states, randn(8, 4), out=states[:, :, 1])]


def gemm():
    a, b = randn(8, 8), randn(8, 8)
    return [lambda: tkq.gemm(a, b, out=a), lambda: tkq.gemm(a, b, out=b), lambda: tkq.gemm(a, a, bias=b[0], out=b)]


CALLS = {"flash_attn_with_kvcache": lambda: decode(tkq.flash_attn_with_kvcache),
         "cascade_attention": lambda: decode(tkq.cascade_attention, prefix_len=16), "mla_decode": mla,
         "plan_decode": plan, "kv_append": append, "linear_attn_step": linear, "ssd_step": ssd,
         "causal_conv1d_step": convolution, "gemm": gemm}


class Watched(TorchDispatchMode):
    """Changes nothing; calls take the dispatcher's way."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", [contextlib.nullcontext, Watched])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_written_lies_apart(name, way):
    for call in CALLS[name]():
        with way(), pytest.raises(ValueError, match="shares memory with"):
            call()


class Named(torch.Tensor):
    """A subclass, which takes the dispatcher's way."""


@pytest.mark.parametrize("other", [torch._neg_view, lambda x: x.as_subclass(Named)])
def test_out_in_a_pool(other):
    """Where q is no plain tensor: nothing is computed, and the pool stays as it is."""
    q, k, v, pool = randn(2, 1, 2, 32), randn(2, 1, 2, 32), randn(2, 1, 2, 32), torch.zeros(5, 2, 32, 32, dtype=BF16)
    within = pool.view(-1)[:v.numel()].view(v.shape)
    with pytest.raises(ValueError, match="linear_attn_step: state shares memory with out"):
        tkq.linear_attn_step(other(q), k, v, None, pool, out=within)
    assert not pool.any()


def step(q, v, out):
    return tkq.linear_attn_step(q, q, v, None, torch.zeros(2, 2, 32, 32), out=out)


def space(q, v, out):
    return tkq.ssd_step(torch.zeros(2, 2, 32, 32), q[:, 0], torch.ones(2, 2), -torch.ones(2), v[:, 0], v[:, 0],
                        out=out[:, 0])


def decoded(q, v, out):
    return tkq.flash_attn_with_kvcache(q, k_cache=v, v_cache=v, cache_seqlens=torch.ones(2, dtype=I32), out=out)


@pytest.mark.parametrize("call", [step, space, decoded])
@pytest.mark.parametrize("sign", [False, True])
def test_out_begins_at_16_bytes(call, sign):
    """Also where a copy would write it."""
    q, v, out = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64), torch.zeros(257).bfloat16()[1:].view(2, 1, 2, 64)
    if call is not decoded:
        q, v, out = q[..., :32], v[..., :32], out[..., :32]
    q = torch._neg_view(q.bfloat16()) if sign else q.bfloat16()
    with pytest.raises(ValueError, match="out: begins at an address that is not a multiple of 16 bytes"):
        call(q, v.bfloat16(), out)
    assert not out.any()


def test_what_may_lie_side_by_side():
    """Keys and values between each other, by pages and by columns."""
    slots, k, v = torch.tensor([1, 5, 9]), randn(3, 2, 64), randn(3, 2, 64)
    pages, columns = torch.zeros(4, 2, 8, 2, 64, dtype=BF16), torch.zeros(4, 8, 2, 128, dtype=BF16)
    for caches in (pages.unbind(1), columns.split(64, -1)):
        tkq.kv_append(k, v, *caches, slots)
        assert all(torch.equal(cache.flatten(0, 1)[slots], x) for cache, x in zip(caches, (k, v), strict=True))


def test_one_address_and_other_strides_are_no_same_place():
    x = torch.zeros(8, 8)
    assert memory.same_place(x, x.view(8, 8)) and not memory.same_place(x, x.t())

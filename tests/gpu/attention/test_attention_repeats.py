"""500 repeats of attention, forward and backward, bit for bit: ten at a time on two streams, while most of the memory
is taken. Of the backward dq is so only where it is asked for."""
import pytest
import torch

import tkq
from tests.helpers.attention.gradients import make
from tests.helpers.attention.varlen_gradients import MANY, MIXED, cumulated
from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward.ops import attention_backward
from tkq.attention.backward.varlen_ops import attention_varlen_backward

pytestmark = [pytest.mark.slow, pytest.mark.alone]
BF16 = torch.bfloat16
REPEATS, AT_ONCE, ROOM = 500, 10, 4 << 30
MORE = (*MIXED, *MANY, (1100, 1300))


@pytest.fixture(autouse=True)
def little_memory():
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(max(free - ROOM, 0), dtype=torch.uint8, device="cuda")
    yield
    del taken
    torch.cuda.empty_cache()


def repeat(call, added_up=()):
    """call() gives tensors, or None. added_up: the places of those that are added up in whatever order."""
    want = call()
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for n in range(REPEATS // AT_ONCE):
        found = []
        for i in range(AT_ONCE):
            with torch.cuda.stream(streams[i % 2]):
                found.append(call())
        torch.cuda.synchronize()
        for again in found:
            for place, (a, b) in enumerate(zip(again, want, strict=True)):
                if place in added_up:
                    assert (a.float() - b.float()).norm() <= 1e-3 * b.float().norm(), f"repeat {n}, result {place}"
                else:
                    assert a is b is None or torch.equal(a, b), f"repeat {n}, result {place}"


def packed(lengths, heads, kv_heads, dim, dim_v=None):
    """q, k, v, do, cu_q, cu_k"""
    g = torch.Generator("cuda").manual_seed(len(lengths))
    cu_q, cu_k = (cumulated(n) for n in zip(*lengths))
    new = lambda cu, h, d: torch.randn(int(cu[-1]), h, d, device="cuda", generator=g).to(BF16)
    dim_v = dim_v or dim
    return (new(cu_q, heads, dim), new(cu_k, kv_heads, dim), new(cu_k, kv_heads, dim_v), new(cu_q, heads, dim_v), cu_q,
            cu_k)


@pytest.mark.parametrize("rows, keys, heads, dim, options", (
    (1, 4097, (32, 4), 128, {}), (3, 300, (16, 2), 64, dict(causal=True)), (700, 700, (8, 8), 128, dict(sinks=True)),
    (700, 700, (16, 2), 64, dict(sinks=True, window_size=(127, None))), (1024, 8300, (8, 2), 128, {}),
    (1024, 8300, (8, 2), 128, dict(causal=True)), (1024, 2111, (8, 2), 64, {}),
    (700, 900, (8, 4), 256, dict(causal=True, softcap=50.0))), ids=str)
def test_forward(rows, keys, heads, dim, options):
    q, k, v, _ = make(2, rows, keys, *heads, dim, BF16)
    sinks = torch.randn(heads[0], device="cuda").to(BF16 if dim == 64 else torch.float32)
    options = {"causal": options.get("sinks", False), **options, "sinks": sinks if options.get("sinks") else None}
    repeat(lambda: tkq.flash_attn(q, k, v, return_lse=True, **options))


@pytest.mark.parametrize("dims, causal, longest", (
    ((128, 128), True, 900), ((128, 128), True, 8300), ((128, 128), False, 8300), ((64, 64), True, 900),
    ((256, 256), True, 900), ((192, 128), True, 900)), ids=str)
def test_forward_of_packed_sequences(dims, causal, longest):
    q, k, v, _, *cu = packed(MORE, 8, 2, *dims)
    repeat(lambda: tkq.flash_attn_varlen(q, k, v, *cu, longest, longest, causal=causal, return_lse=True))


@pytest.mark.parametrize("dim, heads, keys, options, deterministic", (
    (128, (8, 8), 1111, Options(True), False), (128, (8, 8), 2111, Options(True), False),
    (128, (8, 8), 2111, Options(), False), (64, (8, 8), 2111, Options(True), False),
    *((128, (8, 2), keys, Options(True), False) for keys in (1111, 2111, 8300)), (128, (8, 2), 2111, Options(), False),
    (128, (8, 2), 1111, Options(True, softcap=20.0), False), (128, (8, 2), 1111, Options(True), True),
    (128, (8, 2), 1111, Options(False, None, 100, 0), True), (256, (4, 2), 1111, Options(True), True)), ids=str)
def test_backward(dim, heads, keys, options, deterministic):
    """Each form that the plan chooses: tasks of persistent blocks, with dQ made by idle warps, and by themselves. With
    the sinks' gradient."""
    q, k, v, do = make(2, 1024, keys, *heads, dim, BF16)
    causal, _, left, right, softcap = options
    sinks = torch.randn(heads[0], device="cuda")
    o, lse = tkq.flash_attn(q, k, v, causal=causal, window_size=(left, right), softcap=softcap, return_lse=True)
    tensors = do, q, k, v, o, torch.logaddexp(lse, sinks[:, None]), None
    repeat(lambda: attention_backward(tensors, sinks, options, deterministic=deterministic),
           () if deterministic else (0,))


@pytest.mark.parametrize("dim, heads, longest, options, deterministic", (
    (128, (8, 8), 900, Options(True), False), (128, (8, 8), 4096, Options(True), False),
    (128, (8, 8), 4096, Options(), False), (128, (8, 8), 8300, Options(True), False),
    (128, (8, 8), 8300, Options(), False), (128, (8, 2), 4096, Options(True), False),
    (64, (8, 2), 900, Options(True), False), (64, (8, 8), 900, Options(True), False),
    (128, (8, 8), 512, Options(True), False), (128, (8, 2), 512, Options(), False),
    (64, (8, 2), 512, Options(True), False), (128, (8, 2), 900, Options(True), True),
    (256, (4, 2), 900, Options(True), True)), ids=str)
def test_backward_of_packed_sequences(dim, heads, longest, options, deterministic):
    q, k, v, do, *cu = packed(MORE, *heads, dim)
    sinks = torch.randn(heads[0], device="cuda")
    o, lse = tkq.flash_attn_varlen(q, k, v, *cu, longest, longest, causal=options.causal, return_lse=True)
    tensors, lengths = (do, q, k, v, o, torch.logaddexp(lse, sinks[:, None]), None), Lengths(*cu, None, None, longest,
                                                                                           longest)
    repeat(lambda: attention_varlen_backward(tensors, sinks, lengths, options, deterministic=deterministic),
           () if deterministic else (0,))

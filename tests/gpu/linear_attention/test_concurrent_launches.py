"""Concurrent launches of a backward, on streams of their own: the same bits as one after the other."""
import pytest
import torch

import tkq
from tkq.linear_attention.split import concurrent

BF16 = torch.bfloat16
LONG = 300_000_000  # clocks: 150 ms


def linear(S=1500, H=3):
    """linear_attn's arguments: each launch has few blocks."""
    torch.manual_seed(S)
    q, k, v = (torch.randn(1, S, H, 128, device="cuda", dtype=BF16) for _ in range(3))
    return q, k, v, -torch.rand(1, S, H, device="cuda")


def ssd(S=1500, H=6):
    torch.manual_seed(S)
    x, dt = torch.randn(1, S, H, 64, device="cuda", dtype=BF16), torch.rand(1, S, H, device="cuda")
    B, C = (torch.randn(1, S, 1, 128, device="cuda", dtype=BF16) for _ in range(2))
    return x, dt, -torch.rand(H, device="cuda"), B, C, torch.rand(H, device="cuda")


CALLS = {"linear_attn": (linear, tkq.linear_attn), "mamba2_ssd": (ssd, tkq.mamba2_ssd)}


def gradients(function, given, do):
    leaves = [x.detach().requires_grad_() for x in given]
    return torch.autograd.grad(function(*leaves), leaves, do)


def one_after_the_other(monkeypatch, function, given, do):
    with monkeypatch.context() as m:
        m.setattr(concurrent, "_worth", lambda given: None)
        return gradients(function, given, do)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits(name, monkeypatch):
    """In each of many runs, on the default stream and on another, with memory that is used again by others between."""
    make, function = CALLS[name]
    given, seen = make(), []
    do = torch.randn_like(given[0])
    want, on_streams = one_after_the_other(monkeypatch, function, given, do), concurrent._on_streams
    monkeypatch.setattr(concurrent, "_on_streams", lambda *x: seen.append(len(x[0])) or on_streams(*x))
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for i in range(40):
        with torch.cuda.stream(other if i % 2 else torch.cuda.current_stream()):
            found = gradients(function, given, do)
            assert all(torch.equal(x, y) for x, y in zip(found, want)), i
            del found
            waste = [torch.full_like(do, torch.nan) for _ in range(8)]
            del waste
        torch.cuda.current_stream().wait_stream(other)
    assert seen == [3] * 40


@pytest.mark.parametrize("late", ["what came before", "what is beside"])
def test_streams_wait_for_each_other(late, monkeypatch):
    """Where all memory and streams are there, so that nothing else waits: the GPU is still at it when the call is
    back."""
    given, beside = ssd(), concurrent._beside
    leaves = [x.requires_grad_() for x in given]
    o = tkq.mamba2_ssd(*leaves)
    do, arrives = torch.randn_like(o), torch.zeros_like(o)

    def delayed(*asked):
        streams = beside(*asked)
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG)
        return streams

    want = torch.autograd.grad(o, leaves, do, retain_graph=True)
    torch.autograd.grad(o, leaves, arrives, retain_graph=True)
    torch.cuda.synchronize()
    if late == "what is beside":
        monkeypatch.setattr(concurrent, "_beside", delayed)
    else:
        torch.cuda._sleep(LONG)
    arrives.copy_(do)
    found = torch.autograd.grad(o, leaves, arrives)
    assert not torch.cuda.current_stream().query()
    assert all(torch.equal(x, y) for x, y in zip(found, want))


@pytest.mark.parametrize("name", CALLS)
def test_in_a_cuda_graph(name, monkeypatch):
    make, function = CALLS[name]
    given = make()
    do = torch.randn_like(given[0])
    gradients(function, given, do)
    graph, seen, on_streams = torch.cuda.CUDAGraph(), [], concurrent._on_streams
    with monkeypatch.context() as m, torch.cuda.graph(graph):
        m.setattr(concurrent, "_on_streams", lambda *x: seen.append(len(x[0])) or on_streams(*x))
        found = gradients(function, given, do)
    assert seen == [3]
    for x in (*given, do):
        x.copy_(x.flip(0).roll(1, 1) if x.dim() > 1 else x * 0.5)
    for _ in range(3):
        graph.replay()
    want = one_after_the_other(monkeypatch, function, given, do)
    assert all(torch.equal(x, y) for x, y in zip(found, want))


def test_those_that_are_wanted():
    """One alone, or two."""
    q, k, v, g = linear()
    do = torch.randn_like(v)
    whole = gradients(tkq.linear_attn, (q, k, v, g), do)
    for wanted in ((0,), (1,), (2,), (0, 1), (1, 2), (1, 3)):
        leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate((q, k, v, g))]
        found = torch.autograd.grad(tkq.linear_attn(*leaves), [leaves[i] for i in wanted], do)
        exact = 3 in wanted  # sums beside outputs have operands in two parts, and outputs with them
        for i, x in zip(wanted, found):
            if exact or i == 1:
                assert torch.equal(x, whole[i]), wanted
            else:
                assert (x - whole[i]).norm() <= 2**-7 * whole[i].norm(), wanted

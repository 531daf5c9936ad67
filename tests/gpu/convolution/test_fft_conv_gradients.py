"""fft_conv's gradients on the GPU: what is around tensors that are parts of larger ones; one gradient at a time; in a
CUDA graph."""
import math

import pytest
import torch

import tkq
from tests.helpers.fft_conv import make
from tests.helpers.sanitizer.nan_fill import poisoned


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


@pytest.mark.parametrize("L", [1016, 4088, 8184, 20000, 262136])
def test_nan_behind_the_ends_of_what_gradients_read(L):
    """Of u, of dy, of filters."""
    given, wide = make(3, 2, L, L), torch.full((2, 4, 3, L + 8), math.nan, device="cuda", dtype=torch.bfloat16)
    taps = torch.full((3, L + 8), math.nan, device="cuda")
    u, k = given["u"].detach(), given["k"].detach()
    wide[0, :3, :2, :L], wide[1, :3, :2, :L], taps[:2, :L] = u, u.flip(0), k

    def gradients(u, k, dy):
        leaves = [x.detach().requires_grad_() for x in (u, k)]
        return torch.autograd.grad(tkq.fft_conv(*leaves), leaves, dy)

    want = gradients(u, k, u.flip(0))
    found = gradients(wide[0, :3, :2, :L], taps[:2, :L], wide[1, :3, :2, :L])
    for ours, theirs in zip(found, want, strict=True):
        assert ours.isfinite().all() and torch.equal(ours, theirs)


@pytest.mark.parametrize("L, which", [
    (333, "all"), (20001, "none"), (140000, "none"), pytest.param(32760, "all", marks=pytest.mark.slow),
    pytest.param(4088, "all", marks=pytest.mark.slow), pytest.param(140000, "all", marks=pytest.mark.slow)])
def test_nan_behind_the_ends_of_gates(L, which):
    """Of tokens, of heads, of sequences. which: gradients that are asked for, which have gates as operands and read u
    and dy as such."""
    given = make(2, 2, L, 333, gates="pre post", d=True)
    leaves = {n: t.detach() for n, t in given.items()}
    wide = torch.full((4, 3, 3, L + 8), math.nan, device="cuda", dtype=torch.bfloat16)
    for n, of in enumerate((leaves["u"], leaves["pre_gate"], leaves["post_gate"], leaves["u"].flip(0))):
        wide[n, :2, :2, :L] = of
    parts = dict(zip(("u", "pre_gate", "post_gate", "dy"), wide[:, :2, :2, :L]))

    def call(u, pre, post, dy):
        of = [x.detach().requires_grad_(which == "all") for x in (u, leaves["k"], leaves["d"], pre, post)]
        y = tkq.fft_conv(*of[:3], True, *of[3:])
        return y.detach(), *(torch.autograd.grad(y, of, dy) if which == "all" else ())

    want = call(*(x.contiguous() for x in parts.values()))
    for i, (ours, theirs) in enumerate(zip(call(*parts.values()), want, strict=True)):
        assert ours.isfinite().all() and torch.equal(ours, theirs), f"result {i}"


@pytest.mark.parametrize("L", [20000, 32768])
def test_gradients_of_whole_sequences_in_a_cuda_graph(L):
    """Captured once, replayed on other numbers."""
    given = make(3, 2, L, L)
    u, k = (given[name].detach() for name in "uk")
    dy = u.flip(0)

    def gradients():
        leaves = [x.detach().requires_grad_() for x in (u, k)]
        return torch.autograd.grad(tkq.fft_conv(*leaves), leaves, dy)

    before = gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    for x in (u, k, dy):
        x.copy_(x.flip(-1) * 0.5)
    graph.replay()
    for ours, want, old in zip(found, gradients(), before, strict=True):
        assert torch.equal(ours, want) and not torch.equal(want, old)


@pytest.mark.parametrize("L", [4088, 20000])
def test_one_gradient(L):
    """Of u, of k or of d alone: what it is where all are asked for."""
    given = make(3, 2, L, L, d=True)
    leaves = given["u"], given["k"], given["d"]
    dy = leaves[0].detach().flip(0)
    for i, want in enumerate(torch.autograd.grad(tkq.fft_conv(*leaves), leaves, dy)):
        alone = [x.detach().requires_grad_(j == i) for j, x in enumerate(leaves)]
        found, = torch.autograd.grad(tkq.fft_conv(*alone), alone[i], dy)
        assert found.dtype == want.dtype and (found - want).norm() <= 2**-8 * want.norm(), "ukd"[i]

"""The gradients of flash_attn_varlen on a GPU: each sequence beside float64, and nothing of what lies outside."""
import itertools
import math

import pytest
import torch

import tkq
from tests.helpers.attention.varlen_gradients import LONGER, MANY, MIXED, Problem, cumulated
from tkq.attention.arguments import Options
from tkq.attention.backward.varlen_ops import attention_varlen_backward

BF16 = torch.bfloat16


@pytest.mark.parametrize("dim, options", (
    (128, Options()), (128, Options(causal=True)), (64, Options(causal=True)), (256, Options(causal=True)),
    (128, Options(left=70, right=0)), (128, Options(left=33, right=65)),
    pytest.param(64, Options(softcap=20.0), marks=pytest.mark.slow)), ids=str)
def test_mixed_lengths(dim, options):
    Problem(MIXED, 4, 2, dim, options=options).judge("mixed")
    Problem(MIXED, 4, 2, dim, spare=200, options=options).judge("rows behind the last sequence")
    Problem(MIXED[::-1], 3, 3, dim, spare=1, options=options).judge("the other way round")
    Problem(((0, 0), (0, 5), (3, 0)), 3, 3, dim, options=options).judge("no row sees a key")
    Problem(((700, 700),), 3, 1, dim, options=options).judge("one sequence")
    Problem(MANY, 2, 1, dim, options=options).judge("many short ones")


@pytest.mark.parametrize("heads, kv_heads", ((4, 4), (4, 2)))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.sampled(when=lambda causal: causal)
def test_what_is_planned_for_each_length(causal, heads, kv_heads):
    """Whatever the lengths are."""
    for longest in (512, 900, 4096, 8300):
        for lengths in (MIXED, ((300, 2100), (1, 1), (641, 500))):
            problem = Problem(lengths, heads, kv_heads, 128, spare=20, longest=longest, options=Options(causal))
            problem.judge(f"up to {longest}")


@pytest.mark.parametrize("causal", (False, True))
def test_longer_sequences(causal):
    Problem(LONGER, 2, 1, 128, options=Options(causal)).judge("longer")
    Problem(LONGER[::-1], 2, 2, 128, longest=4097, options=Options(causal)).judge("longer")


def large(q, k, v, do):
    return q * 20, k, v, do


def dominated(q, k, v, do):
    k = k.clone()
    if len(q) and len(k):
        k[0] = 30 * q.unflatten(1, (k.shape[1], -1)).mean((0, 2))
    return q, k, v, do * 1e4


def doubled(q, k, v, do):
    k = k.clone()
    k[1::2] = k[:len(k) - 1:2].clone()
    return q, k, v * 1000, do


@pytest.mark.parametrize("dim, causal, deterministic", ((64, True, False), (128, True, False), (128, False, True),
                                                        (256, True, True)))
def test_hard_data(dim, causal, deterministic):
    """Groups of heads; in each sequence by itself."""
    for change, longest in itertools.product((large, dominated, doubled), (512, 900)):
        problem = Problem(MIXED, 4, 2, dim, change=change, longest=longest, options=Options(causal))
        problem.judge(f"{change.__name__} {longest}", deterministic)


@pytest.mark.parametrize("deterministic, windows", (
    (False, ((100, 3), (0, 200))),
    pytest.param(False, ((-1, 5),), marks=pytest.mark.slow),
    pytest.param(True, ((-1, 5), (100, 3), (0, 200)), marks=pytest.mark.slow)))
def test_everything_at_once(deterministic, windows):
    for left, right in windows:
        Problem(MIXED, 8, 2, 192, dim_v=128, spare=77, in_use=True, sinks=torch.float32, dlse=True,
                options=Options(False, None, left, right, 20.0)).judge("all", deterministic)


@pytest.mark.parametrize("dim, causal, deterministic", (
    (128, True, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (128, False, False), (128, False, True), (128, True, True), (64, True, False)))))
def test_what_is_not_in_use_is_not_looked_at(dim, causal, deterministic):
    """It is NaN; its own gradient is 0."""
    for longest in (512, 900):
        problem = Problem(MIXED, 4, 2, dim, spare=50, in_use=True, longest=longest, options=Options(causal))
        problem.judge(f"in use {longest}", deterministic)


@pytest.mark.parametrize("dim, dim_v, causal", ((96, 96, False), (96, 96, True), (64, 128, True), (40, 40, True)))
def test_brief_ones_narrower_than_their_tiles(dim, dim_v, causal):
    """dQ goes from block to block in tiles of 64 or 128 columns."""
    Problem(MIXED, 4, 2, dim, dim_v=dim_v, spare=20, longest=512, options=Options(causal)).judge(f"{dim}, {dim_v}")


@pytest.mark.parametrize("longest", (512, 900))
def test_no_key_is_in_use(longest):
    """No block of the main kernel has anything to do: dQ is still made, with and without an accumulator."""
    problem = Problem(MIXED, 4, 2, 128, in_use=True, longest=longest, options=Options(True))
    problem.lengths = problem.lengths._replace(seqused_k=torch.zeros_like(problem.lengths.seqused_k))
    problem.tensors[4].zero_()
    problem.tensors[5].fill_(-math.inf)
    for _ in range(20):
        assert all(x.abs().max() == 0 for x in problem.run()[:3])


@pytest.mark.parametrize("dim, causal", (
    pytest.param(64, True, marks=pytest.mark.slow), (128, False), (128, True), (256, True)))
def test_deterministic(dim, causal):
    problem = Problem((*MIXED, *MANY), 4, 4 if dim == 256 else 2, dim, options=Options(causal))
    first = problem.judge("deterministic", True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(problem.run(True)[:3], first))


def test_an_expanded_gradient_of_lse():
    """As of lse.sum()."""
    problem = Problem(MIXED, 4, 4, 128, dlse=True, longest=4096, options=Options(True))
    problem.judge("dlse")
    *tensors, dlse = problem.tensors
    ones = torch.ones(1, 1, device="cuda").expand(dlse.shape)
    a, b = (attention_varlen_backward((*tensors, x), None, problem.lengths, problem.options)
            for x in (ones, ones.contiguous()))
    assert torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) and near(a[0], b[0])


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("longest", (512, 900))
@pytest.mark.sampled(when=lambda dim, longest: dim == 128 and longest == 900)
def test_fp16(dim, longest):
    Problem(MIXED, 4, 2, dim, torch.float16, longest=longest, options=Options(causal=True)).judge(f"fp16 {longest}")


def step(q, k, v, do, cu, longest=1000):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = tkq.flash_attn_varlen(*leaves, cu, cu, longest, longest, causal=True)
    return torch.autograd.grad(o, leaves, do)


def near(a, b):
    return (a.float() - b.float()).norm() <= 1e-3 * b.float().norm()


@pytest.mark.parametrize("longest", (512, 1000))
def test_graph_with_lengths_that_change(longest):
    """Captured once, replayed with other sequences: nothing waits for their lengths. Which may be longer than said."""
    sets = []
    for lengths in ((300, 5, 0, 64, 1000), (1, 900, 70, 128, 2)):
        sets.append((*(torch.randn(1400, 4, 128, device="cuda").to(BF16) for _ in range(4)), cumulated(lengths)))
    want = [step(*x, longest) for x in sets]
    fixed, stream = [x.clone() for x in sets[0]], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*fixed, longest)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*fixed, longest)
    for x, w in zip(sets, want):
        for dst, src in zip(fixed, x):
            dst.copy_(src)
        graph.replay()
        assert torch.equal(out[1], w[1]) and torch.equal(out[2], w[2]) and near(out[0], w[0])


def test_equal_lengths_are_those_of_flash_attn():
    q, k, v, do = (torch.randn(3, 256, 4, 128, device="cuda").to(BF16) for _ in range(4))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(tkq.flash_attn(*leaves, causal=True), leaves, do)
    found = step(*(x.flatten(0, 1) for x in (q, k, v, do)), cumulated((256,) * 3))
    for a, b in zip(found, want):
        assert near(a, b.flatten(0, 1))

"""The gradients of flash_attn_varlen on a GPU: each sequence beside float64, and nothing of what lies outside."""
import math

import pytest
import torch

import tkq
from tests.rule import assert_2x
from tkq import reference_attention_backward as reference_attention
from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward_varlen_ops import attention_varlen_backward

BF16 = torch.bfloat16
MIXED = ((1, 1), (0, 0), (513, 513), (64, 64), (1, 900), (0, 70), (65, 0), (113, 203), (300, 100), (129, 127), (2, 63))
MANY = tuple((n, n) for n in (3, 70, 1, 128, 64, 0, 5) * 12)
NAMES = "dq", "dk", "dv"


def cumulated(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def one_sequence(q, k, v, do, dlse, sinks, options, dtype):
    """o, lse and the gradients (of q, k, v and sinks) of one sequence, by autograd of plain operations in dtype."""
    causal, _, left, right, softcap = options
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    sink = None if sinks is None else sinks.detach().to(dtype).requires_grad_()
    wq, wk, wv = (x.transpose(0, 1) for x in (
        leaves[0], *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:])))
    s = wq @ wk.transpose(-1, -2) * q.shape[-1] ** -0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    mask = reference_attention.seen(q.shape[0], k.shape[0], causal, (left, right), q.device)
    some = mask.any(-1)
    none = torch.full((), -math.inf, dtype=dtype, device=q.device)
    if sink is not None:
        s = torch.cat([torch.where(mask, s, none), sink[:, None, None].expand(*s.shape[:2], 1)], -1)
        lse = s.logsumexp(-1)
    else:
        s = torch.where(mask | ~some[:, None], s, none)
        lse = torch.where(some, s.logsumexp(-1), none) if k.shape[0] else none.expand(s.shape[:2])
    o = ((s.softmax(-1)[..., :k.shape[0]] * some[:, None]) @ wv).transpose(0, 1)
    loss = (o.double() * do.double()).sum()
    if dlse is not None:
        loss = loss + torch.where(torch.isfinite(lse), lse.double() * dlse.double(), 0.0).sum()
    inputs = leaves if sink is None else [*leaves, sink]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return o.detach(), lse.detach(), [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]


class Problem:
    """Packed tensors, NaN wherever no sequence has a row in use, and what their gradients should be."""

    def __init__(self, lengths, heads, kv_heads, dim, dtype=BF16, dim_v=None, spare=0, in_use=False, sinks=False,
                 dlse=False, options=Options()):  # noqa: B008  (a tuple of numbers)
        g = torch.Generator("cuda").manual_seed(len(lengths))
        self.options, dim_v = options, dim_v or dim
        cu = [cumulated(n) for n in zip(*lengths)]
        used = [torch.tensor([n - n // 3 for n in x], device="cuda", dtype=torch.int32) for x in zip(*lengths)]
        self.lengths = Lengths(*cu, *(used if in_use else (None, None)), 900, 900)
        rows, keys = (int(x[-1]) + spare for x in cu)
        nan = lambda n, h, d: torch.full((n, h, d), math.nan, device="cuda", dtype=dtype)
        q, do = nan(rows, heads, dim), nan(rows, heads, dim_v)
        k, v = nan(keys, kv_heads, dim), nan(keys, kv_heads, dim_v)
        o, lse = torch.zeros_like(do), torch.full((heads, rows), -math.inf, device="cuda")
        self.sinks = torch.randn(heads, device="cuda", generator=g) if sinks else None
        if sinks:
            lse.copy_(self.sinks[:, None].expand_as(lse))
        dlse = torch.randn(heads, rows, device="cuda", generator=g) if dlse else None
        self.tensors = do, q, k, v, o, lse, dlse
        self.true = [torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in (q, k, v)]
        self.low = [torch.zeros_like(x) for x in self.true]
        self.dsinks = torch.zeros(heads, dtype=torch.float64, device="cuda")
        for s in range(len(lengths)):
            a, c = (int(x[s]) for x in cu)
            b, d = (x + (int(u[s]) if in_use else n) for x, u, n in zip((a, c), used, lengths[s]))
            self.fill(slice(a, b), slice(c, d), g)

    def fill(self, rows, keys, g):
        do, q, k, v, o, lse, dlse = self.tensors
        for x, part in ((q, rows), (do, rows), (k, keys), (v, keys)):
            x[part] = torch.randn(x[part].shape, device="cuda", generator=g).to(x.dtype)
        given = q[rows], k[keys], v[keys], do[rows], None if dlse is None else dlse[:, rows], self.sinks, self.options
        if rows.stop > rows.start:
            one_o, one_lse, true = one_sequence(*given, torch.float64)
            o[rows], lse[:, rows] = one_o.to(o.dtype), one_lse.float()
            for to, x in ((self.true, true), (self.low, one_sequence(*given, q.dtype)[2])):
                for full, part, piece in zip(to, (rows, keys, keys), x):
                    full[part] = piece.double()
            if self.sinks is not None:
                self.dsinks += true[3]

    def run(self, deterministic=False):
        poison = torch.full((16 << 20,), math.nan, device="cuda")  # what torch.empty is likely to give next
        del poison
        return attention_varlen_backward(self.tensors, self.sinks, self.lengths, self.options,
                                         deterministic=deterministic)

    def judge(self, what="", deterministic=False):
        found = self.run(deterministic)
        for name, a, b, c in zip(NAMES, found, self.true, self.low):
            judged = torch.where((a.double() - b).abs() <= 1e-5, b.to(a.dtype), a)  # sums that cancel; NaN stays
            assert_2x(judged, b, c.to(a.dtype), 1, f"{what} {name}")
        if self.sinks is not None:
            assert (found[3].double() - self.dsinks).abs().max() <= 1e-2 * self.dsinks.abs().max(), what
        return found


@pytest.mark.parametrize("dim, options", (
    (128, Options()), (128, Options(causal=True)), (64, Options(causal=True)), (256, Options(causal=True)),
    (128, Options(left=70, right=0)), (128, Options(left=33, right=65)), (64, Options(softcap=20.0))), ids=str)
def test_mixed_lengths(dim, options):
    Problem(MIXED, 4, 2, dim, options=options).judge("mixed")
    Problem(MIXED, 4, 2, dim, spare=200, options=options).judge("rows behind the last sequence")
    Problem(MIXED[::-1], 3, 3, dim, spare=1, options=options).judge("the other way round")
    Problem(((0, 0), (0, 5), (3, 0)), 3, 3, dim, options=options).judge("no row sees a key")
    Problem(((700, 700),), 3, 1, dim, options=options).judge("one sequence")
    Problem(MANY, 2, 1, dim, options=options).judge("many short ones")


@pytest.mark.parametrize("deterministic", (False, True))
def test_everything_at_once(deterministic):
    for left, right in ((-1, 5), (100, 3), (0, 200)):
        Problem(MIXED, 8, 2, 192, dim_v=128, spare=77, in_use=True, sinks=True, dlse=True,
                options=Options(False, None, left, right, 20.0)).judge("all", deterministic)


@pytest.mark.parametrize("causal", (False, True))
def test_what_is_not_in_use_is_not_looked_at(causal):
    """It is NaN; its own gradient is 0."""
    for deterministic in (False, True):
        Problem(MIXED, 4, 2, 128, spare=50, in_use=True, options=Options(causal)).judge("in use", deterministic)


def test_no_key_is_in_use():
    """No block of the main kernel has anything to do: dQ is still made after its accumulator has been zeroed."""
    problem = Problem(MIXED, 4, 2, 128, in_use=True, options=Options(True))
    problem.lengths = problem.lengths._replace(seqused_k=torch.zeros_like(problem.lengths.seqused_k))
    problem.tensors[4].zero_()
    problem.tensors[5].fill_(-math.inf)
    for _ in range(20):
        assert all(x.abs().max() == 0 for x in problem.run()[:3])


@pytest.mark.parametrize("dim, causal", ((64, True), (128, False), (128, True), (256, True)))
def test_deterministic(dim, causal):
    problem = Problem((*MIXED, *MANY), 4, 2, dim, options=Options(causal))
    first = problem.judge("deterministic", True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(problem.run(True)[:3], first))


def test_fp16():
    Problem(MIXED, 4, 2, 128, torch.float16, options=Options(causal=True)).judge("fp16")


def step(q, k, v, do, cu):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = tkq.flash_attn_varlen(*leaves, cu, cu, 1000, 1000, causal=True)
    return torch.autograd.grad(o, leaves, do)


def near(a, b):
    return (a.float() - b.float()).norm() <= 1e-3 * b.float().norm()


def test_graph_with_lengths_that_change():
    """Captured once, replayed with other sequences: nothing waits for their lengths."""
    sets = []
    for lengths in ((300, 5, 0, 64, 1000), (1, 900, 70, 128, 2)):
        sets.append((*(torch.randn(1400, 4, 128, device="cuda").to(BF16) for _ in range(4)), cumulated(lengths)))
    want = [step(*x) for x in sets]
    fixed, stream = [x.clone() for x in sets[0]], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*fixed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*fixed)
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

"""flash_attn and flash_attn_varlen through autograd on a GPU: the kernels' own forward and backward together, by the
public functions, eager and compiled."""
import pytest
import torch

import tkq
from tests.helpers.attention.gradients import forward, low_precision_gradients, make, rounding_of_sinks
from tests.helpers.attention.varlen_gradients import MIXED, Problem
from tkq.attention.arguments import Options
from tkq.reference import attention_backward as reference_attention
from tkq.testing import assert_2x

NAMES = "dq", "dk", "dv", "dsinks"
BF16 = torch.bfloat16


def near(a, b):
    return (a.float() - b.float()).norm() <= 1e-3 * b.float().norm()


def judge(found, true, low, what):
    assert len(found) == len(true) == len(low)
    for name, a, b, c in zip(NAMES, found, true, low):
        assert_2x(a, b, c.to(a.dtype), 1, f"{what} {name}")


@pytest.mark.parametrize("options", (
    dict(causal=True, sinks=True), dict(window_size=(100, 0)), dict(causal=True, deterministic=True),
    *(pytest.param(more, marks=pytest.mark.slow) for more in (dict(softcap=20.0), dict(window_size=(-1, 30))))),
    ids=str)
def test_dense(options):
    q, k, v, do = make(2, 333, 417, 4, 2, 128, BF16)
    sinks = torch.randn(4, device="cuda") if options.get("sinks") else None
    leaves = [x.requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    o = tkq.flash_attn(q, k, v, **{**options, "sinks": sinks})
    found = torch.autograd.grad(o, leaves, do)
    causal, softcap = options.get("causal", False), options.get("softcap", 0.0)
    window_size = options.get("window_size", (-1, -1))
    q, k, v, *rest = (x.detach() for x in leaves)
    sinks = rest[0] if rest else None
    true_o, true_lse, _ = forward(q, k, v, causal, 128**-0.5, window_size, softcap, sinks)
    true = reference_attention.flash_attn_backward(
        *(x.double() for x in (do, q, k, v)), true_o, true_lse, None, causal, None, window_size, softcap,
        None if sinks is None else sinks.double())
    low = low_precision_gradients(q, k, v, do, None, causal, None, window_size, softcap, sinks)
    if sinks is not None:
        # of this o: its rounding, summed over all rows to one number a head, is above or below PyTorch's by chance
        true = [*true[:3], dsinks_of(o.detach(), true_lse, do, sinks)]
        near = (found[3] - true[3]).abs() <= rounding_of_sinks(do, o, true_lse, None, sinks)
        found = [*found[:3], torch.where(near, true[3].float(), found[3])]
    judge(found, true, low, str(options))


def dsinks_of(o, lse, do, sinks):
    """In float64."""
    of_rows = (o.double() * do.double()).sum(-1).transpose(1, 2)
    return -(torch.exp(sinks.double()[:, None] - lse) * of_rows).sum((0, 2))


def test_sinks_alone():
    """Their gradient is the same, whether others are wanted or not."""
    q, k, v, do = make(2, 333, 417, 4, 2, 128, BF16)
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    alone, = torch.autograd.grad(tkq.flash_attn(q, k, v, causal=True, sinks=sinks), sinks, do)
    q.requires_grad_()
    both = torch.autograd.grad(tkq.flash_attn(q, k, v, causal=True, sinks=sinks), (sinks, q), do)
    assert alone.shape == (4,) and torch.equal(alone, both[0]) and alone.abs().min() > 0


@pytest.mark.parametrize("more, options", (
    pytest.param({}, Options(True, softcap=20.0), marks=pytest.mark.slow),
    pytest.param({}, Options(True, None, 70), marks=pytest.mark.slow),
    pytest.param(dict(sinks=torch.float32), Options(True), marks=pytest.mark.slow),
    (dict(in_use=True), Options(True)), (dict(deterministic=True), Options(True))), ids=str)
def test_packed(more, options):
    """NaN beyond what is in use; the loss takes only rows that are."""
    more = dict(more)
    deterministic = more.pop("deterministic", False)
    problem = Problem(MIXED, 4, 2, 128, spare=20, options=options, **more)
    do, q, k, v = problem.tensors[:4]
    causal, _, left, right, softcap = options
    leaves = [x.requires_grad_() for x in (q, k, v, *([] if problem.sinks is None else [problem.sinks]))]
    lengths = problem.lengths
    o = tkq.flash_attn_varlen(q, k, v, *lengths[:2], 900, 900, causal=causal, window_size=(left, right),
                              softcap=softcap, sinks=problem.sinks, seqused_q=lengths.seqused_q,
                              seqused_k=lengths.seqused_k, deterministic=deterministic)
    found = torch.autograd.grad(o, leaves, do)
    with torch.no_grad():
        true = [*problem.true, *([] if problem.sinks is None else [problem.dsinks])]
        low = [*problem.low, *([] if problem.sinks is None else [problem.low_dsinks])]
        judge(found, true, low, f"{more} {options}")


def loss_of(o):
    return o.float().square().sum()


def test_a_compiled_step():
    leaves = [x.requires_grad_() for x in make(2, 300, 333, 4, 2, 128, BF16)[:3]]
    call = lambda q, k, v: loss_of(tkq.flash_attn(q, k, v, causal=True))
    want = torch.autograd.grad(call(*leaves), leaves)
    found = torch.autograd.grad(torch.compile(call, fullgraph=True)(*leaves), leaves)
    assert torch.equal(found[1], want[1]) and torch.equal(found[2], want[2]) and near(found[0], want[0])


def test_a_compiled_step_of_packed_sequences():
    g = torch.Generator("cuda").manual_seed(0)
    leaves = [torch.randn(700, 4, 128, device="cuda", generator=g).to(BF16).requires_grad_() for _ in range(3)]
    cu = torch.tensor([0, 300, 300, 365, 700], device="cuda", dtype=torch.int32)
    call = lambda q, k, v: loss_of(tkq.flash_attn_varlen(q, k, v, cu, cu, 335, 335, causal=True))
    want = torch.autograd.grad(call(*leaves), leaves)
    found = torch.autograd.grad(torch.compile(call, fullgraph=True)(*leaves), leaves)
    assert torch.equal(found[1], want[1]) and torch.equal(found[2], want[2]) and near(found[0], want[0])

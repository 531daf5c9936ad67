"""Packed sequences of linear attention and the delta rule against the recurrences in float64, beside the same launches
in plain PyTorch. Whatever stands in tokens of other sequences, or of none, reaches nothing."""
import itertools
import math

import pytest
import torch

import tkq
from tests.gpu.linear_attention.test_linear_forward import BF16, make
from tests.helpers.channel_launches import launched as channels_launched
from tests.helpers.linear_launches import launched, of_gradients
from tests.helpers.one_sign import bias_of_one_sign
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention import gradients
from tkq.linear_attention.channels import gradients as channel_gradients
from tkq.linear_attention.channels.launch import ChannelGiven
from tkq.linear_attention.delta import channel_gradients as channel_delta_gradients
from tkq.linear_attention.delta import gradients as delta_gradients
from tkq.linear_attention.launch import Given, launch
from tkq.reference.linear_attention import gated_delta_rule_backward, linear_attn_backward
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x

F32 = torch.float32
LENGTHS = 0, 1, 63, 64, 65, 0, 130
CUTS = (0, *itertools.accumulate(LENGTHS))
S, N = CUTS[-1] + 13, len(LENGTHS)  # tokens behind the last sequence
OPS = "linear_attn", "gated_delta_rule"
EVERY = pytest.mark.parametrize("op", [*OPS, *(f"{op} of columns" for op in OPS), "mamba2_ssd"])


def cu_of(cuts=CUTS, dtype=torch.int32):
    return torch.tensor(cuts, device="cuda", dtype=dtype)


def tensors_of(op, gate="token", K=64, V=64, dtype=BF16, decay=0.1, S=S, N=N):
    """The tensors of a call, its states last; two heads of v share one of q and k. An op may be "of columns": its
    gates. Mamba-2's: x, dt, A, B, C, D, z, dt_bias."""
    q, k, v, g = make(1, S, 2, 4, K, V, gate, dtype, decay)
    states, decays = torch.randn(N, 4, K, V, device="cuda"), -decay * torch.rand(1, S, 4, K, device="cuda")
    if op == "mamba2_ssd":
        A, D, bias = torch.randn(3, 4, device="cuda")
        return v, decays[..., 0], -A.exp(), k, q, D, v.flip(1), bias - 2, states.mT.contiguous()
    beta = (torch.rand(1, S, 4, device="cuda"),) * op.startswith("gated_delta_rule")
    return q, k, v, decays if op.endswith("columns") else g, *beta, states


def of(tokens, x):
    """Of these tokens; what is of heads alone as it is."""
    return x[:, tokens] if x.dim() > 1 else x


def incoming_of(given):
    """Gradients of o and the states."""
    return torch.randn_like(given[2] if given[2].dim() > 1 else given[0]), torch.randn_like(given[-1])


def spoilt(x, *parts):
    """A copy with NaN in these tokens."""
    x = x.clone()
    for part in parts if x.dim() > 1 else ():
        x[:, part] = math.nan
    return x


def behind(x, end=CUTS[-1]):
    """NaN in tokens of no sequence."""
    return None if x is None else spoilt(x, slice(end, None))


def call(op, tensors, cu, **more):
    *tensors, initial = tensors
    if op == "mamba2_ssd":
        return tkq.mamba2_ssd(*tensors, initial, True, return_final_states=True, cu_seqlens=cu, **more)
    op, *_ = op.split()
    return getattr(tkq, op)(*tensors, initial_state=initial, output_final_state=True, cu_seqlens=cu, **more)


def with_gradients(op, given, cu, incoming):
    """[o, the states, gradients of what there is]."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    results = call(op, leaves, cu)
    wanted = [x for x in leaves if x is not None]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, wanted, incoming)]


# ---- launches ---------------------------------------------------------------------------------------------------


def check_launch(given, scale=0.3):
    """What stands behind the sequences is NaN for the kernel; what it makes of it is 0."""
    end = int(given.cu.max())
    names = "q", "k", "v", "g", "beta", "x", "inverse"
    with poisoned():
        found = launch(given._replace(**{name: behind(getattr(given, name), end) for name in names}), scale)
    wide = {name: x.double() for name, x in given._asdict().items() if isinstance(x, torch.Tensor) and name != "cu"}
    exact, peer = launched(given._replace(**wide), scale), launched(given, scale)
    room = 1 + given.q.shape[1] / 16  # tensor cores cut off what they add to a sum of fp32
    for name in ("o", "dv", "inverse"):
        mine, want = getattr(found, name), getattr(exact, name)
        assert (mine is None) == (want is None), name
        if want is not None:
            assert name == "inverse" or not mine[:, end:].any()
            assert_2x(*(x[:, :end] for x in (mine, want, getattr(peer, name))), what=name)
    if given.x is not None:
        assert given.beta is None or not found.dots[:, end:].any()  # beta's gradient
        assert_2x(*(x[0, :end] for x in (found.dots, exact.dots, peer.dots)), ulps=room, bias_ulps=room, what="dots")
    if given.final is not None:
        assert_2x(*(x.flatten(0, 2) for x in (found.state, exact.state, peer.state)), ulps=room, bias_ulps=room,
                  what="states")


@pytest.mark.parametrize("gate", ["none", "head", "token"])
@pytest.mark.parametrize("K, V, cu", [(64, 64, torch.int32), (128, 128, torch.int64), (96, 80, torch.int32)])
@pytest.mark.sampled(when=lambda gate, K: gate == "token" and K != 96)
def test_forward(gate, K, V, cu):
    q, k, v, g, initial = tensors_of("linear_attn", gate, K, V)
    check_launch(Given(q, k, v, g, initial=initial, final=F32, cu=cu_of(dtype=cu)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.sampled(when=lambda reverse, strict, dot: strict != dot and reverse)
def test_launches_of_gradients(reverse, strict, dot):
    q, k, v, g, initial = tensors_of("linear_attn", V=128)
    check_launch(Given(q, k, v, g, initial=initial, final=F32, x=torch.randn_like(v) if dot else None, reverse=reverse,
                       strict=strict, cu=cu_of()))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gate, K, V", [("token", 128, 128), ("none", 64, 64), ("token", 96, 80)])
@pytest.mark.sampled(when=lambda K, reverse: K == 128 and reverse)
def test_launches_of_the_delta_rule(reverse, gate, K, V):
    q, k, v, g, beta, initial = tensors_of("gated_delta_rule", gate, K, V)
    given = Given(q, k, v, g, beta, initial, F32, cu=cu_of())
    check_launch(of_gradients(given, reverse))
    if not reverse:
        check_launch(given)


# ---- the ops ----------------------------------------------------------------------------------------------------


def check_op(monkeypatch, op, given, cu):
    """Results and gradients, tokens outside spoilt."""
    end = int(cu.max())
    incoming = incoming_of(given)
    with poisoned():
        o, states, *found = with_gradients(op, [behind(x, end) for x in given[:-1]] + [given[-1]], cu,
                                           (behind(incoming[0], end), incoming[1]))
    delta, columns = op.startswith("gated_delta_rule"), op.endswith("columns")
    module = (channel_delta_gradients if delta else channel_gradients) if columns else (
        delta_gradients if delta else gradients)
    backward, of_launch = gated_delta_rule_backward if delta else linear_attn_backward, launched
    wide = [None if x is None else x.double() for x in given]
    q, k, v, g, *beta, initial = wide
    want = recurrence(q, k, v, g, None, initial, cu, *beta)
    want = [*want, *(x for x in backward(*(x.double() for x in incoming), *wide, None, cu) if x is not None)]
    q, k, v, g, *beta, initial = given
    scale, call = q.shape[3]**-0.5, Given
    if columns:
        of_launch, call = channels_launched, ChannelGiven
    keeps = {"updates": True} if delta and not columns else {}  # a forward with gradients keeps corrected values
    peer = of_launch(call(q, k, v, g, *(beta or [None]), initial, F32, cu=cu, **keeps), scale)
    saved = (delta_gradients.DeltaSaved if delta else gradients.Saved)(*given, cu)
    with monkeypatch.context() as m:
        for each in {module, channel_gradients} if columns else {module}:
            m.setattr(each, "launch", of_launch)
        of_peer = [x for x in module.backward(saved, scale, *incoming) if x is not None]
    room = 1 + q.shape[1] / 16  # tensor cores cut off what they add to a sum of fp32
    # an error of u or du, of 16 bits, is in the gradients of all tokens before it: they may have one sign

    def bias(exact, other):
        return room if op == "linear_attn" else bias_of_one_sign(exact, other, room)

    for i, (mine, exact, other) in enumerate(zip((o, states, *found), want, (peer.o, peer.state, *of_peer))):
        mine, exact, other = (x[:, :end] if x.dim() > 1 and x.shape[:2] == (1, q.shape[1]) else x
                              for x in (mine, exact, other))
        assert_2x(*(x.reshape(-1, exact.shape[-1]) for x in (mine, exact, other)), what=f"{op} {i}",
                  **dict(ulps=room, bias_ulps=bias(exact, other)) if mine.dtype == F32 else {})
    for x in (o, *found):
        assert x.dim() == 1 or x.shape[:2] != (1, q.shape[1]) or not x[:, end:].any()


@pytest.mark.parametrize("op, gate", [("linear_attn", "token"), ("linear_attn", "head"), ("linear_attn", "none"),
                                      ("gated_delta_rule", "token"), ("gated_delta_rule", "none"),
                                      ("linear_attn of columns", ""), ("gated_delta_rule of columns", "")])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.sampled(when=lambda gate, dtype: dtype == BF16 and gate in ("token", ""))
def test_results_and_gradients(monkeypatch, op, gate, dtype):
    check_op(monkeypatch, op, tensors_of(op, gate or "token", dtype=dtype), cu_of())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("decay", [0.0, 20.0])
def test_hard_decays(monkeypatch, op, decay):
    """Also resets, at the ends of sequences and in their middle."""
    given = tensors_of(op, decay=decay)
    given[3][:, [CUTS[3] - 1, CUTS[3], CUTS[4], CUTS[6] + 70]] = -60.0
    check_op(monkeypatch, op, given, cu_of())


@pytest.mark.parametrize("op", OPS)
def test_identical_keys(monkeypatch, op):
    given = list(tensors_of(op))
    given[1] = given[1][:, :1].expand_as(given[1]).contiguous()
    check_op(monkeypatch, op, given, cu_of())


@pytest.mark.parametrize("op", OPS)
def test_many_sequences(monkeypatch, op):
    """More than a warp looks at together, most of them of a few tokens."""
    lengths = [i % 7 for i in range(70)]
    check_op(monkeypatch, op, tensors_of(op, S=sum(lengths), N=70), cu_of((0, *itertools.accumulate(lengths))))


@EVERY
def test_no_sequence_reaches_another(op):
    """NaN in one, in all that is its: others have the same bits, forward and backward, before it and behind it."""
    given, cu = tensors_of(op), cu_of()
    incoming = incoming_of(given)
    want = with_gradients(op, given, cu, incoming)
    for n in (2, 4):
        at = slice(CUTS[n], CUTS[n + 1])
        bad = [spoilt(x, at) for x in (*given[:-1], incoming[0])]
        initial, dstates = given[-1].clone(), incoming[1].clone()
        initial[n] = dstates[n] = math.nan
        found = with_gradients(op, [*bad[:-1], initial], cu, (bad[-1], dstates))
        for mine, clean in zip(found, want):
            mine, clean = mine.clone(), clean.clone()
            for x in (mine, clean):
                if x.dim() > 1:
                    x[(slice(None), at) if x.shape[:2] == (1, S) else n] = 0
            assert mine.dim() == 1 or torch.equal(mine, clean)  # heads' parameters have all sequences' gradients


@pytest.mark.parametrize("op", OPS)
def test_a_sequence_is_as_it_is_alone(op):
    """Bit by bit, wherever it lies; but for gradients that torch sums, in an order that all tokens decide."""
    given, cu = tensors_of(op), cu_of()
    incoming = incoming_of(given)
    names = ("o", "states", "q", "k", "v", "g", *("beta",) * (op == "gated_delta_rule"), "initial_state")
    found = with_gradients(op, given, cu, incoming)
    for n, (a, e) in enumerate(itertools.pairwise(CUTS)):
        if a < e:
            alone = with_gradients(op, [*(x[:, a:e] for x in given[:-1]), given[-1][n:n + 1]], cu_of((0, e - a)),
                                   (incoming[0][:, a:e], incoming[1][n:n + 1]))
            for name, all_of, one in zip(names, found, alone):
                mine = all_of[:, a:e] if all_of.shape[:2] == (1, S) else all_of[n:n + 1]
                if name in ("g", "beta"):
                    torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-5 * one.abs().max().item())
                else:
                    assert torch.equal(mine, one), name


@pytest.mark.parametrize("op", OPS)
def test_one_sequence_is_a_batch_of_one(op):
    given = tensors_of(op, N=1)
    o, state = call(op, given, cu_of((0, S)))
    want, last = call(op, given, None)
    assert_close = torch.testing.assert_close
    assert_close(o, want, rtol=2**-7, atol=2**-10)
    assert_close(state, last, rtol=1e-4, atol=1e-4)


@EVERY
def test_tokens_before_the_first_sequence(op):
    cu, given = cu_of((70, 100, 100, 230)), tensors_of(op, N=3)
    spoilt_ones = [spoilt(x, slice(0, 70), slice(230, None)) for x in given[:-1]]
    incoming = incoming_of(given)
    with poisoned():
        found = with_gradients(op, [*spoilt_ones, given[-1]], cu, incoming)
    want = with_gradients(op, [*(of(slice(70, 230), x) for x in given[:-1]), given[-1]], cu_of((0, 30, 30, 160)),
                          (incoming[0][:, 70:230], incoming[1]))
    for mine, theirs in zip(found, want):
        if mine.shape[:2] == (1, S):
            assert not mine[:, :70].any() and not mine[:, 230:].any()
            mine = mine[:, 70:230]
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


@EVERY
def test_no_tokens_and_no_sequences(op):
    *tensors, initial = tensors_of(op)
    o, states = call(op, [*tensors, initial], cu_of((0,) * (N + 1)))
    assert not o.any() and torch.equal(states, initial)
    o, states = call(op, [*(of(slice(0), x) for x in tensors), initial], cu_of((0,) * (N + 1)))
    assert o.shape[1] == 0 and torch.equal(states, initial)
    with poisoned():
        o, states = call(op, [*tensors, initial[:0]], cu_of((0,)))
    assert not o.any() and states.shape == (0, 4, 64, 64)


@pytest.mark.parametrize("op", OPS)
def test_the_same_bits(op):
    given, cu = tensors_of(op), cu_of()
    incoming = incoming_of(given)
    first = with_gradients(op, given, cu, incoming)
    for _ in range(5):
        assert all(map(torch.equal, with_gradients(op, given, cu, incoming), first))


@pytest.mark.parametrize("op", OPS)
def test_nothing_waits_for_the_gpu(op):
    given, cu = tensors_of(op), cu_of()
    incoming = incoming_of(given)
    with_gradients(op, given, cu, incoming)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with_gradients(op, given, cu, incoming)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@EVERY
def test_in_a_cuda_graph(op):
    """Sequences that change between replays."""
    given, cu = tensors_of(op), cu_of()
    incoming = incoming_of(given)
    with_gradients(op, given, cu, incoming)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = with_gradients(op, given, cu, incoming)
    for cuts in ((0, 100, 100, 101, 101, 300, 301, 333), CUTS):
        cu.copy_(cu_of(cuts))
        graph.replay()
        assert all(map(torch.equal, found, with_gradients(op, given, cu, incoming)))


@pytest.mark.parametrize("op", OPS)
def test_states_with_v_first(op):
    *tensors, initial = given = tensors_of(op, V=128)
    o, states = call(op, given, cu_of())
    again, turned = call(op, [*tensors, initial.mT.contiguous()], cu_of(), state_v_first=True)
    assert turned.is_contiguous() and torch.equal(again, o) and torch.equal(turned.mT, states)


@pytest.mark.parametrize("op", OPS)
def test_compiled_in_one_graph(op):
    given, cu = [x.requires_grad_() for x in tensors_of(op)], cu_of()
    ours = lambda cu, *x: call(op, x, cu)
    dy = [torch.randn_like(y) for y in ours(cu, *given)]
    compiled = torch.compile(ours, fullgraph=True)
    for cuts in (CUTS, (0, 100, 100, 101, 101, 300, 301, 333)):
        found, want = (torch.autograd.grad(f(cu_of(cuts), *given), given, dy) for f in (compiled, ours))
        assert all(map(torch.equal, found, want))

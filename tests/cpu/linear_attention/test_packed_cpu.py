"""Packed sequences and pools of states, where no GPU is needed: which token is of which sequence, how gradients are
made of launches, what the ops return on the CPU and what they refuse."""
import itertools
import math

import pytest
import torch
from torch.nn.functional import normalize

import tkq
from tests.helpers.channel_launches import launched as channels_launched
from tests.helpers.emulation import fake_gpu
from tests.helpers.linear_launches import launched
from tests.helpers.ops.bad_indices import CUTS
from tkq.linear_attention import gradients
from tkq.linear_attention.channels import gradients as channels
from tkq.linear_attention.delta import channel_gradients
from tkq.linear_attention.delta import gradients as delta_gradients
from tkq.linear_attention.packed_sequences import token_sequences
from tkq.reference.linear_attention import edges, gated_delta_rule_backward, linear_attn_backward
from tkq.reference.linear_attention import linear_attn as recurrence

LENGTHS, CHUNKS = (0, 1, 9, 0, 16, 5), (0, 1, 0, 63, 65, 64)  # of sequences, before which is no token, and 7 behind
CU, CU_OF_CHUNKS = ((0, *itertools.accumulate(lengths)) for lengths in (LENGTHS, CHUNKS))
S, N = CU[-1] + 7, len(LENGTHS)
OPS = "linear_attn", "gated_delta_rule"


def make(op, dtype=torch.float64, gate="token", K=32, V=48, states=N, S=S):
    """The tensors of a call, its states last; two heads of v share one of q and k."""
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = (normalize(torch.randn(1, S, 2, K, dtype=torch.float64), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(1, S, 4, V, dtype=torch.float64).to(dtype)
    g = {"none": None, "head": -torch.rand(4, dtype=wide), "token": -torch.rand(1, S, 4, dtype=wide),
         "column": -torch.rand(1, S, 4, K, dtype=wide)}[gate]
    more = (torch.rand(1, S, 4, dtype=wide),) * (op == "gated_delta_rule")
    return q, k, v, g, *more, torch.randn(states, 4, K, V, dtype=wide)


def cu(dtype=torch.int32, cuts=CU):
    return torch.tensor(cuts, dtype=dtype)


# ---- which token is of which sequence ---------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [*CUTS, (0, 0, 300), (40, 100, 100, 250), (300, 300), (7,)])
def test_sequences_of_tokens(cuts):
    """Of each token: by the rule itself, number by number."""
    of, total = token_sequences(torch.tensor(cuts), 300), 300
    most, begins = 0, []
    for cut in cuts:
        most = max(most, min(max(cut, 0), total))
        begins.append(most)
    assert edges(torch.tensor(cuts), total).tolist() == begins
    for t in range(total):
        mine = [n for n, (a, e) in enumerate(itertools.pairwise(begins)) if a <= t < e]
        assert len(mine) <= 1 and bool(of.inside[t]) == bool(mine)
        assert of.of[t] == (mine[0] if mine else len(cuts) - 1)
        if mine:
            assert of.end[t] == begins[mine[0] + 1]


def test_sums_stay_in_their_sequence():
    of, x = token_sequences(cu(), S), torch.randn(1, S, 3, dtype=torch.float64)
    x[0, CU[4] + 5, 1] = math.nan  # of the sixth token
    x[0, CU[-1]:] = math.nan
    found = of.suffix_sums(x)
    for a, e in itertools.pairwise(CU):
        torch.testing.assert_close(found[:, a:e], x[:, a:e].flip(1).cumsum(1).flip(1), equal_nan=True)
    assert not found[:, CU[-1]:].any() and found.isnan().sum() == 6
    of_tokens = of.of_tokens(torch.arange(1.0, N + 1)[:, None])[:, 0]
    assert of_tokens.tolist() == [n + 1 for n, length in enumerate(LENGTHS) for _ in range(length)] + [0] * 7


@pytest.mark.parametrize("cuts", [CU_OF_CHUNKS, (3, 64, 64, 190), (0, 300), (130, 131), (0,)])
def test_sums_of_columns_stay_in_their_sequence(cuts):
    """Also where a sequence has several chunks of the tokens, and a chunk several sequences. NaN in tokens of none."""
    of, given = token_sequences(torch.tensor(cuts), 300), torch.randn(2, 1, 300, 4, 3, dtype=torch.float64)
    at_end = torch.randn(len(cuts) - 1, 4, 3, dtype=torch.float64)
    x = (given[0] - given[1]).flatten(2)
    want = (of.suffix_sums(x) + of.of_tokens(at_end.flatten(1))).view(1, 300, 4, 3)
    given[:, :, ~of.inside] = math.nan
    torch.testing.assert_close(channels.of_gates(list(given), at_end, torch.tensor(cuts)), want)


def test_tokens_of_no_sequence_have_no_sums():
    found = token_sequences(torch.tensor((40, 100, 100, 250)), 300).suffix_sums(torch.ones(1, 300, 1))[0, :, 0]
    assert not found[:40].any() and not found[250:].any()
    assert torch.equal(found[40:250], torch.cat((torch.arange(60.0, 0, -1), torch.arange(150.0, 0, -1))))


# ---- gradients --------------------------------------------------------------------------------------------------


def reference_of(op):
    return linear_attn_backward if op == "linear_attn" else gated_delta_rule_backward


@pytest.mark.parametrize("op, gate", [("linear_attn", "none"), ("linear_attn", "head"), ("linear_attn", "token"),
                                      ("gated_delta_rule", "none"), ("gated_delta_rule", "token"),
                                      ("linear_attn", "column"), ("gated_delta_rule", "column")])
@pytest.mark.sampled(when=lambda gate: gate != "none")
def test_gradients_are_made_of_launches(monkeypatch, op, gate):
    """NaN in tokens of no sequence, and in what comes in for them."""
    module = gradients if op == "linear_attn" else delta_gradients
    if gate == "column":
        for each in (channels, channel_gradients):
            monkeypatch.setattr(each, "launch", channels_launched)
        module = channels if op == "linear_attn" else channel_gradients
    monkeypatch.setattr(gradients, "launch", launched)
    monkeypatch.setattr(delta_gradients, "launch", launched)
    end, starts = CU_OF_CHUNKS[-1], cu(cuts=CU_OF_CHUNKS)
    given = make(op, gate=gate, S=end + 7)
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[-1])
    want = reference_of(op)(do, dstate, *given, 0.3, starts)
    for x in (do, *given[:-1]):
        if x is not None and x.dim() > 1:
            x[:, end:] = math.nan
    saved = (gradients.Saved if op == "linear_attn" else delta_gradients.DeltaSaved)(*given, starts)
    for mine, exact in zip(module.backward(saved, 0.3, do, dstate), want):
        assert mine is exact is None or torch.allclose(mine, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("op", OPS)
def test_the_reference_of_the_gradients(op):
    leaves = [x.requires_grad_() for x in make(op)]
    q, k, v, g, *beta, initial = leaves
    o, states = recurrence(q, k, v, g, 0.3, initial, cu(), *beta)
    do, dstates = torch.randn_like(o), torch.randn_like(states)
    want = torch.autograd.grad((o, states), leaves, (do, dstates))
    found = reference_of(op)(do, dstates, *(x.detach() for x in leaves), 0.3, cu())
    assert all(map(torch.allclose, found, want))


# ---- the ops ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype, gate", [(torch.int32, "token"), (torch.int64, "token"), (torch.int32, "column")])
def test_sequences_one_by_one(op, dtype, gate):
    *tensors, initial = given = [x.requires_grad_() for x in make(op, torch.bfloat16, gate)]
    call = getattr(tkq, op)
    o, states = call(*tensors, initial_state=initial, output_final_state=True, cu_seqlens=cu(dtype))
    do, dstates = torch.randn_like(o), torch.randn_like(states)
    found = torch.autograd.grad((o, states), given, (do, dstates))
    assert not o[:, CU[-1]:].any() and not any(x[:, CU[-1]:].any() for x in found[:-1])
    for n, (a, e) in enumerate(itertools.pairwise(CU)):
        one = [x[:, a:e].detach().requires_grad_() for x in tensors] + [initial[n:n + 1].detach().requires_grad_()]
        results = call(*one[:-1], initial_state=one[-1], output_final_state=True)
        wanted = torch.autograd.grad(results, one, (do[:, a:e], dstates[n:n + 1]))
        pairs = (o[:, a:e], results[0]), (states[n:n + 1], results[1]), (found[-1][n:n + 1], wanted[-1]), *(
            (x[:, a:e], y) for x, y in zip(found[:-1], wanted))
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_states_with_v_first(op):
    *tensors, initial = make(op, torch.bfloat16)
    call, turned = getattr(tkq, op), initial.mT.contiguous().requires_grad_()
    o, states = call(*tensors, initial_state=initial, output_final_state=True, cu_seqlens=cu())
    again, of_turned = call(*tensors, initial_state=turned, output_final_state=True, cu_seqlens=cu(),
                            state_v_first=True)
    assert of_turned.is_contiguous() and of_turned.shape == (N, 4, 48, 32)
    torch.testing.assert_close(of_turned, states.mT)
    torch.testing.assert_close(again, o)
    gradient, = torch.autograd.grad(of_turned.sum(), turned)
    assert gradient.shape == turned.shape and gradient.any()


INDICES = 3, -1, 0, 7, -(1 << 31), (1 << 31) - 1  # of a pool of 7


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype, v_first, packed, index, gate", [
    (torch.float32, False, True, torch.int32, "token"), (torch.bfloat16, True, True, torch.int64, "token"),
    (torch.float32, True, False, torch.int32, "token"), (torch.bfloat16, False, True, torch.int32, "column")])
def test_a_pool(op, dtype, v_first, packed, index, gate):
    *tensors, pool = make(op, torch.bfloat16, gate, states=7)
    if not packed:
        tensors = [x.expand(N, *x.shape[1:]) for x in tensors]
    pool = (pool.mT.contiguous() if v_first else pool).to(dtype)
    before, version = pool.clone(), pool._version
    given = dict(output_final_state=True, cu_seqlens=cu() if packed else None, state_v_first=v_first)
    indices = torch.tensor(INDICES, dtype=index)
    call = getattr(tkq, op)
    o, same = call(*tensors, initial_state=pool, state_indices=indices, **given)
    first = torch.stack([before[i] if 0 <= i < 7 else torch.zeros_like(before[0]) for i in INDICES])
    want, states = call(*tensors, initial_state=first, **given)
    assert same is pool and pool._version > version
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(pool[[3, 0]], states[[0, 2]].to(dtype))
    assert torch.equal(pool[[1, 2, 4, 5, 6]], before[[1, 2, 4, 5, 6]])
    alone = call(*tensors, initial_state=before, state_indices=indices, **given | dict(output_final_state=False))
    assert torch.equal(alone, o) and torch.equal(before, pool)


@pytest.mark.parametrize("op", OPS)
def test_a_pool_in_a_compiled_program(op):
    *tensors, pool = make(op, torch.bfloat16, states=7)
    indices = torch.tensor(INDICES, dtype=torch.int32)
    def step(pool, *tensors):
        return getattr(tkq, op)(*tensors, initial_state=pool, cu_seqlens=cu(), state_indices=indices)
    theirs = pool.clone()
    want, found = step(theirs, *tensors), torch.compile(step, fullgraph=True, backend="aot_eager")(pool, *tensors)
    assert torch.equal(found, want) and torch.equal(pool, theirs)
    schema = getattr(torch.ops.tkq, f"{op}_pool").default
    torch.library.opcheck(schema, (*tensors, pool, None, cu(), indices, False))


@pytest.mark.parametrize("op", OPS)
def test_what_autograd_may_not_see_of_a_pool(op):
    *tensors, pool = make(op, torch.bfloat16, states=7)
    given = dict(initial_state=pool, cu_seqlens=cu(), state_indices=torch.tensor(INDICES, dtype=torch.int32))
    tensors[0].requires_grad_()
    call = getattr(tkq, op)
    with pytest.raises(NotImplementedError, match="state_indices: with a tensor that requires a gradient"):
        call(*tensors, **given)
    with torch.no_grad():
        call(*tensors, **given)
    tensors[0].requires_grad_(False)
    factor = torch.zeros(1, requires_grad=True)
    loss = (factor * pool).sum()  # keeps the pool, which is written over
    call(*tensors, **given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("changed, error, words", [
    (dict(cu_seqlens=torch.tensor([0.0, 7.0])), TypeError, "cu_seqlens: dtype is torch.float32"),
    (dict(cu_seqlens=torch.zeros(0, dtype=torch.int32)), ValueError, "cu_seqlens: has no number"),
    (dict(cu_seqlens=torch.zeros(2, 2, dtype=torch.int32)), ValueError, "cu_seqlens: has 2 dimensions"),
    (dict(cu_seqlens=torch.zeros(14, dtype=torch.int32)[::2]), ValueError, "cu_seqlens: strides are"),
    (dict(cu_seqlens=torch.zeros(65535, dtype=torch.int32)), NotImplementedError,
     "cu_seqlens: has 65534 sequences, supported are up to 65533"),
    (dict(q=torch.zeros(2, S, 2, 32).bfloat16(), k=torch.zeros(2, S, 2, 32).bfloat16(),
          v=torch.zeros(2, S, 4, 48).bfloat16()), ValueError, "q: has 2 sequences, with cu_seqlens allowed is 1"),
    (dict(initial_state=torch.zeros(N + 1, 4, 32, 48)), ValueError, r"initial_state: shape is \(7, 4, 32, 48\)"),
    (dict(state_v_first=True), ValueError, r"initial_state: shape is \(6, 4, 32, 48\), expected \(6, 4, 48, 32\)"),
    (dict(state_v_first=True, state_indices=torch.zeros(N, dtype=torch.int32)), ValueError,
     r"initial_state: shape is \(6, 4, 32, 48\), expected \(any, 4, 48, 32\)"),
    (dict(state_indices=torch.zeros(2, dtype=torch.int32)), ValueError, r"state_indices: shape is \(2,\)"),
    (dict(state_indices=torch.zeros(N)), TypeError, "state_indices: dtype is torch.float32"),
    (dict(state_indices=torch.zeros(N, dtype=torch.int32), initial_state=None), ValueError,
     "initial_state: is None, with state_indices expected is the pool"),
    (dict(state_indices=torch.zeros(N, dtype=torch.int32), initial_state=torch.zeros(1, 4, 32, 48).expand(
        5, 4, 32, 48)), ValueError, "initial_state: .* elements may share memory"),
])
@pytest.mark.parametrize("op", OPS)
def test_what_is_refused(op, changed, error, words):
    names = ("q", "k", "v", "g", *("beta",) * (op == "gated_delta_rule"), "initial_state")
    given = dict(zip(names, make(op, torch.bfloat16)), cu_seqlens=cu())
    if "q" in changed:  # the tokens' others, too
        given |= {name: given[name].expand(2, -1, -1) for name in ("g", "beta") if name in given}
    with pytest.raises(error, match=f"{op}: {words}"):
        getattr(tkq, op)(**given | changed)


def test_the_kernels_of_calls():
    """cu_seqlens and a pool decide it, whatever came before."""
    *tensors, pool = make("linear_attn", torch.bfloat16, K=64, V=64)
    indices = torch.zeros(N, dtype=torch.int32)
    with fake_gpu.launches() as seen, torch.no_grad():
        for dtype in (None, torch.int32, torch.int64):
            tkq.linear_attn(*tensors, cu_seqlens=dtype and cu(dtype))
        tkq.linear_attn(*tensors, initial_state=pool, cu_seqlens=cu(), state_indices=indices)
        tkq.linear_attn(*tensors, initial_state=pool[:1].bfloat16(), state_indices=indices[:1].long())
    assert [(r.args[0].packed, r.args[0].pool, r.args[0].final) for r, _ in seen] == [
        (None, None, None), ("int32", None, None), ("int64", None, None), ("int32", "int32", "fp32"),
        (None, "int64", "bf16")]
    others = seen[-2][1][1]  # behind q
    assert others[5] is others[6] is pool


@pytest.mark.parametrize("op", ["linear_attn", "gated_delta_rule"])
def test_a_negated_pool_is_refused_by_name(op):
    q, k, v = torch.randn(3, 1, 8, 2, 32).bfloat16()
    given = (None,) if op == "linear_attn" else (None, torch.rand(1, 8, 2))
    with pytest.raises(ValueError, match=f"{op}: initial_state: is a view with a pending negation"):
        getattr(tkq, op)(q, k, v, *given, initial_state=torch._neg_view(torch.zeros(3, 2, 32, 32)),
                         state_indices=torch.tensor([0]))


def test_a_pool_that_shares_memory_with_what_is_read_is_refused():
    q, k, v = torch.randn(3, 1, 20, 2, 64).bfloat16()
    g, beta = -torch.rand(1, 20, 2), torch.rand(1, 20, 2)
    pool = torch.randn(4, 2, 64, 64).bfloat16()
    shared = pool.view(-1)[:v.numel()].view(v.shape)
    index = torch.tensor([1], dtype=torch.int32)
    for call in (lambda: tkq.linear_attn(q, k, shared, g, initial_state=pool, state_indices=index),
                 lambda: tkq.gated_delta_rule(q, k, shared, g, beta, initial_state=pool, state_indices=index)):
        before = pool.clone()
        with pytest.raises(ValueError, match="initial_state shares memory with v"):
            call()
        assert torch.equal(pool, before)
    with pytest.raises(TypeError, match="initial_state: got list"):
        tkq.linear_attn(q, k, v, g, initial_state=[1.0], state_indices=index)

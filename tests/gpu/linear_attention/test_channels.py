"""Gates for each column of k: the launches against the same in float64, beside the same in plain PyTorch, rounded as
the kernels round; the ops and their gradients against the recurrence in float64.

A kernel takes longer to compile than all that is asked of it, and there is one for each pass, size, dtype and state.
So there is a set of all ten passes without states at K = V = 64, which have other tests' sizes, too, and one with
states at 128, where a thread has 32 tokens of a gate's columns, not 16, and V two warpgroups. What depends on neither
(lengths, decays, resets, inverses, graphs, traces, bits) is asked of one of the sets. Six kernels of other widths have
among them the smallest and the largest ones of K and V, ends within a tile, and each swizzle; fp16, whose factors are
unpacked in their own way, has two, one of each way to put factors. Beta of bf16 goes with widths."""
import math

import pytest
import torch
from torch.nn.functional import normalize

import tkq
from tests.helpers.channel_launches import Chunk, launched
from tests.helpers.one_sign import bias_of_one_sign
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.channels import gradients
from tkq.linear_attention.channels.launch import ChannelGiven, launch
from tkq.linear_attention.delta import channel_gradients as delta_gradients
from tkq.linear_attention.delta.gradients import DeltaSaved
from tkq.linear_attention.gradients import Saved
from tkq.reference.linear_attention import gated_delta_rule_backward, linear_attn_backward
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x

BF16, F32 = torch.bfloat16, torch.float32
# The launches that the ops and their gradients are made of: what decides them beside their tensors. keys: gates of the
# columns of q and k, final: a state comes out, where one goes in.
DELTA = dict(keys=True, beta=True)
PASSES = {
    "o": dict(keys=True, final=True), "dv": dict(keys=True, final=True, reverse=True),
    "dq": dict(dot=True, final=True), "dk": dict(dot=True, reverse=True, less=True),
    "delta": dict(**DELTA, final=True), "updates": dict(**DELTA, updates=True),
    "du": dict(**DELTA, final=True, reverse=True),
    "dq_and_w": dict(dot=True, pairs=True, final=True), "dk_of_both": dict(pairs=True, reverse=True, less=True)}


def make(B, S, H, HV, K, V, dtype=BF16, decay=0.1):
    torch.manual_seed(0)
    q, k = (normalize(torch.randn(B, S, H, K, device="cuda"), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(B, S, HV, V, device="cuda").to(dtype)
    return q, k, v, -decay * torch.rand(B, S, HV, K, device="cuda")


def beta_of(v, dtype=F32):
    return torch.rand(v.shape[:3], device="cuda").to(dtype)


def state_of(q, v, dtype=F32):
    return torch.randn(len(q), v.shape[2], q.shape[3], v.shape[3], device="cuda").to(dtype)


def given_of(name, q, k, v, g, beta=None, states=False, narrow=False):
    """What a pass takes, of these tensors. Gates of the columns of values have v's in the places of q and k."""
    of = dict(PASSES[name])
    keys, dot, final, pairs, less = (of.pop(x, False) for x in ("keys", "dot", "final", "pairs", "less"))
    if of.pop("beta", False):
        of["beta"] = beta_of(v) if beta is None else beta
    if keys:
        first, second = (k, q) if name == "du" else (k if name == "updates" else q, k)
        given = ChannelGiven(first, second, v, g, **of)
    else:
        given = ChannelGiven(v, v.flip(1), k, g, x=q if dot else None, of_values=True, narrow=narrow, **of)
        if less:
            given = given._replace(less=torch.randn_like(g))
        if pairs:
            given = given._replace(second=v.roll(1, 1), v2=q if given.reverse else None,
                                   rest=torch.randn_like(g) if given.reverse else None)
    if not states:
        return given
    initial = state_of(q, v) if keys else state_of(v, q.repeat_interleave(v.shape[2] // q.shape[2], 2))
    return given._replace(initial=initial, final=F32 if final else None)


def check(given, scale=0.3):
    with poisoned():
        found = launch(given, scale)
    peer = launched(given, scale)
    exact = launched(given._replace(**{name: x.double() for name, x in given._asdict().items()
                                       if isinstance(x, torch.Tensor)}), scale)
    room = 1 + given.q.shape[1] / 16  # tensor cores cut off what they add to a sum of fp32
    for what, mine, want, other in zip(("o", "state", "dots", "dv"), found, exact, peer):
        assert (mine is None) == (want is None)
        if want is not None:
            rows = [x.flatten(0, -2) for x in (mine, want, other)]
            # of sums over all tokens behind one, which the rounding of each of these is in
            bias = bias_of_one_sign(*rows[1:], room) if what == "dots" and given.less is not None else room
            wide = dict(ulps=room, bias_ulps=bias) if mine.dtype == F32 else {}
            assert_2x(*rows, what=what, **wide)
    return found


# ---- launches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PASSES)
def test_lengths(name):
    for S in (1, 63, 64, 65, 300):
        check(given_of(name, *make(2, S, 2, 4, 64, 64)))


@pytest.mark.parametrize("name, K, V", [("o", 128, 256), ("dq", 96, 80), *(
    pytest.param(*each, marks=pytest.mark.slow)
    for each in (("dv", 48, 112), ("delta", 96, 80), ("du", 32, 32), ("dk_of_both", 48, 112)))])
def test_widths(name, K, V):
    """By one product for a chunk, by one for 16 tokens, by levels."""
    for decay in (0.1, 5.0, 20.0):
        q, k, v, g = make(1, 200, 2, 2, K, V, decay=decay)
        check(given_of(name, q, k, v, g, beta_of(v, BF16), narrow=not PASSES[name].get("keys")))


@pytest.mark.parametrize("dtype", [BF16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_decays(dtype):
    """Also where decays are zero within a chunk."""
    for decay in (0.0, 0.5, 3.0, 20.0, 200.0):
        given = make(1, 260, 1, 3, 64, 64, dtype, decay)
        for name in ("o", "delta", "dk", "dq_and_w", "dk_of_both") if dtype == BF16 else ("delta", "dk"):
            check(given_of(name, *given))


def test_resets():
    """Of all columns, of every other one, in one token of a level's each half."""
    q, k, v, g = make(1, 300, 2, 2, 64, 64)
    g[:, ::37], g[:, 5::41, :, ::2] = -math.inf, -math.inf
    g[:, 200:264, 0] = -40.0 * torch.rand(64, 64, device="cuda")
    for name in ("o", "delta", "dq", "dq_and_w", "dk_of_both"):
        check(given_of(name, q, k, v, g))


def test_chunks_of_all_kinds():
    """Some by one product, some by one for each block of 16 tokens, some by levels: decays at the bounds between them,
    or beyond one in one token; columns that grow; NaN reaches what is behind it, and nothing before."""
    q, k, v, g = make(1, 300, 2, 2, 64, 64)
    g[:, :64], g[:, 64:128] = -1.29, -5.15
    g[:, 100:110, :, 5], g[:, 150, 1], g[:, 230, :, 3] = 0.5, -30.0, -42.0
    for name in ("o", "dv", "delta", "updates", "du"):
        check(given_of(name, q, k, v, g))
    g[:, 205, 0, 7] = math.nan
    with poisoned():
        o = launch(given_of("o", q, k, v, g), 0.3).o
    assert not o[:, :205].isnan().any() and o[:, 205:, 0].isnan().all() and not o[:, :, 1].isnan().any()


def test_chunks_of_values_of_both_kinds():
    """Some by one product, some by levels: decays of half a chunk at the bound between them, or beyond it, by one token
    or by all, or a gate that lets a column grow."""
    q, k, v, g = make(1, 330, 2, 2, 64, 64)
    g[:, 64:128], g[:, 128:192] = -1.29, -1.31
    g[:, 230, :, 3], g[:, 270, 0, 5] = -50.0, 0.1
    for name in ("dq", "dk", "dq_and_w", "dk_of_both"):
        check(given_of(name, q, k, v, g))


def test_hard_inverses():
    """Beta 2 where keys are identical, 1 elsewhere."""
    for decay in (0.0, 0.1, 20.0):
        q, k, v, g = make(1, 256, 2, 2, 64, 64, decay=decay)
        identical = k[:, :1].expand_as(k).contiguous()
        correlated = normalize(identical.float() + 0.3 * torch.randn(k.shape, device="cuda") / 8, dim=-1).to(k.dtype)
        for keys, beta in ((k, 1.0), (identical, 2.0), (correlated, 1.0)):
            check(given_of("delta", q, keys, v, g, torch.full(v.shape[:3], beta, device="cuda")))


def test_columns_alike_are_a_gate_of_tokens():
    """Within rounding, with the kernels of gates of tokens."""
    q, k, v, g = make(1, 300, 2, 2, 64, 64)
    g = g[..., :1].expand(-1, -1, -1, 64).contiguous()
    beta = beta_of(v)
    for mine, other in ((tkq.linear_attn(q, k, v, g), tkq.linear_attn(q, k, v, g[..., 0])),
                        (tkq.gated_delta_rule(q, k, v, g, beta), tkq.gated_delta_rule(q, k, v, g[..., 0], beta))):
        torch.testing.assert_close(mine, other, rtol=2**-6, atol=2**-6 * other.abs().max().item())


def test_nothing_behind_the_end_counts():
    """NaN in the rows behind each tensor's own."""
    def behind(x):
        wide = torch.full((1, 200, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype)
        wide[:, :100] = x
        return wide[:, :100]
    given = make(1, 100, 2, 2, 128, 128)
    for name in ("o", "dq"):
        mine = given_of(name, *given, states=True)
        found = launch(mine, 0.125)
        again = launch(mine._replace(**{x: behind(getattr(mine, x)) for x in "qkvg"}), 0.125)
        assert torch.equal(found.o, again.o) and torch.equal(found.state, again.state)


# ---- ops and gradients ----------------------------------------------------------------------------------------------


BOTH = pytest.mark.parametrize("delta", [False, True])
# Of the delta rule's passes the others are parts: with states at 128 columns, every day, these alone.
OF_128 = pytest.mark.parametrize("delta", [pytest.param(False, marks=pytest.mark.slow), True])


def tensors(delta, S, size=64, states=False, B=1, decay=0.1):
    """Of a call: q, k, v, g, beta with the delta rule, the state or None."""
    q, k, v, g = make(B, S, 2, 4, size, size, decay=decay)
    return q, k, v, g, *(beta_of(v),) * delta, state_of(q, v) if states else None


def results(given, do, dstate):
    """(o, the state or None, gradients by autograd through the op), of q, k, v, g[, beta], initial state. dstate: None
    where no state is asked for."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    op = tkq.linear_attn if len(given) == 5 else tkq.gated_delta_rule
    found = op(*leaves[:-1], None, leaves[-1], dstate is not None)
    (o, state), dy = (found, [do, dstate]) if dstate is not None else ((found, None), [do])
    wanted = [x for x in leaves if x is not None]
    of = iter(torch.autograd.grad([o] if state is None else [o, state], wanted, dy))
    return o.detach(), None if state is None else state.detach(), *(None if x is None else next(of) for x in leaves)


BF16_ROUNDING = 2**15  # in units of fp32


def check_op(monkeypatch, *given):
    q, _, v, *_, initial = given
    do, dstate = torch.randn_like(v), None if initial is None else state_of(q, v)
    with poisoned():
        found = results(given, do, dstate)
    wide = [None if x is None else x.double() for x in (do, dstate, *given)]
    beta, scale = given[4] if len(given) == 6 else None, q.shape[3]**-0.5
    want = [*recurrence(*wide[2:6], initial_state=wide[-1], beta=None if beta is None else beta.double())]
    of, saved, exactly = ((gradients, Saved, linear_attn_backward) if beta is None else
                          (delta_gradients, DeltaSaved, gated_delta_rule_backward))
    want += exactly(*wide, scale)
    first = launched(ChannelGiven(*given[:4], beta, initial, F32), scale)
    with monkeypatch.context() as m:
        for module in (gradients, delta_gradients):
            m.setattr(module, "launch", launched)
        peer = [first.o, first.state, *of.backward(saved(*given), scale, do, dstate)]
    room = 1 + q.shape[1] / 16
    for name, mine, exact, other in zip(("o", "state", *saved._fields), found, want, peer):
        assert (mine is None) == (exact is None or (name == "state" and initial is None)), name
        if mine is not None:
            mine, exact, other = (x.reshape(-1, exact.shape[-1]) for x in (mine, exact, other))
            # an error of u or du, of 16 bits, is in the gradients of all tokens before it: they may have one sign
            wide = dict(ulps=room, bias_ulps=bias_of_one_sign(exact, other, room)) if mine.dtype == F32 else {}
            if name == "initial":  # its largest elements may be of one token: of one rounding, which may be any size
                wide["ulps"] += BF16_ROUNDING
                assert (mine - exact).norm() <= 1.25 * (other - exact).norm(), name
            assert_2x(mine, exact, other, what=name, **wide)


@BOTH
def test_gradients(monkeypatch, delta):
    for S in (1, 64, 65, 300):
        check_op(monkeypatch, *tensors(delta, S, B=2))


@OF_128
def test_gradients_with_states(monkeypatch, delta):
    """By one product for a chunk, by one for 16 tokens, by levels."""
    for decay in (0.1, 5.0, 20.0):
        check_op(monkeypatch, *tensors(delta, 130, 128, True, decay=decay))


@OF_128
def test_gradients_of_gates_are_as_good_at_any_length(delta):
    """Errors of the tokens behind do not add up: at the first ones as at the last, a few roundings. By one product and
    by levels."""
    for decay in (1.0, 5.0):
        q, k, v, g = make(1, 4096, 1, 1, 64, 64, decay=decay)
        given = q, k, v, g, *(beta_of(v),) * delta, None
        do = torch.randn_like(v)
        found = results(given, do, None)[5]
        exactly = gated_delta_rule_backward if delta else linear_attn_backward
        want = exactly(do.double(), None, *(None if x is None else x.double() for x in given), 0.125)[3]
        for tokens in (slice(64), slice(-64, None)):
            assert (found[:, tokens] - want[:, tokens]).norm() < 2**-6 * want[:, tokens].norm()


def relative(x, exact):
    return ((x.double() - exact).norm() / exact.norm()).item()


@BOTH
def test_gradients_by_one_product_are_as_exact_as_by_levels(monkeypatch, delta):
    """Relative errors of chunks by one product, beside those of the same in plain PyTorch by levels: of q, k and gates
    not larger. Without the delta rule, whose corrected values are of 16 bits, those of gates less than a tenth."""
    *given, initial = tensors(delta, 300, decay=1.0)
    do, scale = torch.randn_like(given[2]), 0.125
    found = results((*given, initial), do, None)[2:]
    of, saved, exactly = ((delta_gradients, DeltaSaved, gated_delta_rule_backward) if delta else
                          (gradients, Saved, linear_attn_backward))
    want = exactly(do.double(), None, *(x.double() for x in given), None, scale)
    with monkeypatch.context() as m:
        for module in (gradients, delta_gradients):
            m.setattr(module, "launch", launched)
        m.setattr(Chunk, "near", lambda self: self.decays[..., :1, :] < 0)
        levels = of.backward(saved(*given, initial), scale, do)
    for i, most in ((0, 1.05), (1, 1.05), (3, 1.05 if delta else 0.1)):
        mine, theirs = relative(found[i], want[i]), relative(levels[i], want[i])
        assert mine <= most * theirs, (saved._fields[i], mine, theirs)


@BOTH
def test_outputs_have_the_error_of_their_rounding(delta):
    """Relative errors of o where a chunk, or a block of 16, is one product: of scores whose rows were rounded once it
    would be 3.3e-3, with the delta rule 4.0e-3."""
    for decay in (0.5, 5.0):
        *given, _ = tensors(delta, 640, decay=decay)
        o = (tkq.gated_delta_rule if delta else tkq.linear_attn)(*given)
        wide = [x.double() for x in given]
        want, _ = recurrence(*wide[:4], beta=wide[4] if delta else None)
        assert relative(o, want) < (3.55e-3 if delta else 2.65e-3), decay


@OF_128
def test_two_calls_are_one(delta):
    *given, initial = tensors(delta, 256, 128, True)
    op = tkq.gated_delta_rule if delta else tkq.linear_attn
    o, state = op(*given, None, initial, True)
    first, middle = op(*(x[:, :128] for x in given), None, initial, True)
    second, last = op(*(x[:, 128:] for x in given), None, middle, True)
    assert torch.equal(torch.cat((first, second), 1), o) and torch.equal(last, state)


@OF_128
def test_the_same_bits(delta):
    given = tensors(delta, 700, 128, True, B=2)
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[-1])
    first = results(given, do, dstate)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(results(given, do, dstate), first))


@BOTH
def test_no_tokens(delta):
    given = tensors(delta, 0, states=True)
    dstate = torch.randn_like(given[-1])
    o, state, *_, of_state = results(given, torch.zeros_like(given[2]), dstate)
    assert o.shape == given[2].shape and torch.equal(state, given[-1])
    torch.testing.assert_close(of_state, dstate)


@pytest.mark.slow  # test_packed.py compiles a graph of each rule every day, test_every_op.py each function
@BOTH
def test_compiled_in_one_graph(delta):
    *given, _ = (x if x is None else x.requires_grad_() for x in tensors(delta, 65))
    op = tkq.gated_delta_rule if delta else tkq.linear_attn
    compiled, do = torch.compile(op, fullgraph=True), torch.randn_like(given[2])
    found, want = (torch.autograd.grad(f(*given), given, do) for f in (compiled, op))
    assert all(torch.equal(a, b) for a, b in zip(found, want))


@BOTH
def test_in_a_cuda_graph(delta):
    given = tensors(delta, 130)
    do = torch.randn_like(given[2])
    results(given, do, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(given, do, None)
    for x in (*given[:-1], do):
        x.copy_(x.flip(1) * 0.5)
    graph.replay()
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, results(given, do, None)))


# ---- more columns than a launch takes ---------------------------------------------------------------------------


def test_halves_of_columns():
    """Of 256 columns, as two calls of 128, whose sums and gradients they are; in either order of a state's memory."""
    q, k, v, g = make(1, 200, 1, 2, 256, 128)
    initial, do = state_of(q, v), torch.randn_like(v)

    def call(part, v_first=False):
        leaves = [x[..., part].detach().contiguous().requires_grad_() for x in (q, k, g)] + [
            v.detach().requires_grad_(), initial[:, :, part].detach().contiguous().requires_grad_()]
        a, b, c, d, e = leaves
        o, state = tkq.linear_attn(a, b, d, c, 0.1, e.mT if v_first else e, True, state_v_first=v_first)
        state = state.mT if v_first else state
        return o, state, *torch.autograd.grad((o, state), leaves, (do, torch.ones_like(state)))

    found, turned = call(slice(None)), call(slice(None), True)
    one, two = call(slice(128)), call(slice(128, None))
    assert all(torch.equal(*pair) for pair in zip(found, turned))
    sums = lambda i: one[i] + two[i]
    side = lambda i, dimension: torch.cat((one[i], two[i]), dimension)
    want = sums(0), side(1, 2), side(2, 3), side(3, 3), side(4, 3), sums(5), side(6, 2)
    assert all(torch.equal(*pair) for pair in zip(found, want))

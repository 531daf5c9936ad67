"""Gates for each column of k: the launches against the same in float64, beside the same in plain PyTorch, rounded as
the kernels round; the ops and their gradients against the recurrence in float64."""
import math

import pytest
import torch
from torch.nn.functional import normalize

import tkq
from tests.helpers.channel_launches import launched
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.channels import gradients
from tkq.linear_attention.channels.launch import ChannelGiven, launch
from tkq.linear_attention.delta import channel_gradients as delta_gradients
from tkq.linear_attention.delta.gradients import DeltaSaved
from tkq.linear_attention.gradients import Saved
from tkq.reference.linear_attention import gated_delta_rule_backward, linear_attn_backward
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x

BF16 = torch.bfloat16
ANY = 2.0**60  # ulps: no bound
WAYS = {"forward": {}, "reversed": dict(reverse=True)}
DELTA = {"forward": {}, "reversed": dict(reverse=True), "updates": dict(updates=True)}
VALUES = WAYS | {"strict": dict(strict=True), "strict reversed": dict(strict=True, reverse=True)}


def make(B, S, H, HV, K, V, dtype=BF16, decay=0.1):
    torch.manual_seed(0)
    q, k = (normalize(torch.randn(B, S, H, K, device="cuda"), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(B, S, HV, V, device="cuda").to(dtype)
    return q, k, v, -decay * torch.rand(B, S, HV, K, device="cuda")


def beta_of(v, dtype=torch.float32):
    return torch.rand(v.shape[:3], device="cuda").to(dtype)


def state_of(q, v, dtype=torch.float32):
    return torch.randn(len(q), v.shape[2], q.shape[3], v.shape[3], device="cuda").to(dtype)


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
            wide = dict(ulps=room, bias_ulps=room) if mine.dtype == torch.float32 else {}
            assert_2x(*(x.flatten(0, -2) for x in (mine, want, other)), what=what, **wide)
    return found


def of_keys(q, k, v, g, **more):
    return ChannelGiven(q, k, v, g, final=torch.float32, **more)


def of_values(q, k, v, g, dot=False, **more):
    """The same tensors as a launch with gates of the columns of values has them: v's in the places of q and k."""
    return ChannelGiven(v, v.flip(1), k, g, final=torch.float32, x=q if dot else None, of_values=True, **more)


# ---- launches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("S", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("way", WAYS)
def test_lengths(S, way):
    q, k, v, g = make(2, S, 2, 4, 128, 128)
    check(of_keys(q, k, v, g, initial=state_of(q, v), **WAYS[way]))


@pytest.mark.parametrize("S", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("way", DELTA)
@pytest.mark.sampled(when=lambda way, S: way == "forward" or S in (65, 300))
def test_lengths_of_the_delta_rule(S, way):
    q, k, v, g = make(2, S, 2, 4, 128, 64)
    first, second = (k, q) if way == "reversed" else (k if way == "updates" else q, k)
    check(of_keys(first, second, v, g, beta=beta_of(v), initial=state_of(q, v), **DELTA[way]))


@pytest.mark.parametrize("S", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("way", VALUES)
@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.sampled(when=lambda way, S, dot: (dot and S in (1, 65, 300)) or way == "forward")
def test_lengths_with_gates_of_values(S, way, dot):
    q, k, v, g = make(2, S, 2, 4, 128, 128)
    check(of_values(q, k, v, g, dot, initial=state_of(v, q.repeat_interleave(2, 2)), **VALUES[way]))


@pytest.mark.parametrize("K, V", [(32, 32), (64, 128), (128, 64), (96, 80), (48, 112), (80, 256), (128, 256)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(when=lambda K, V, way: (K, V) in ((32, 32), (96, 80), (48, 112)) or way == "forward")
def test_widths(K, V, way):
    check(of_keys(*make(1, 200, 2, 2, K, V), **WAYS[way]))


@pytest.mark.parametrize("K, V", [(32, 32), (64, 128), (96, 80), (48, 112), (128, 256)])
@pytest.mark.parametrize("way", DELTA)
@pytest.mark.sampled(when=lambda K, V, way: (K, V) in ((32, 32), (96, 80), (48, 112)))
def test_widths_of_the_delta_rule(K, V, way):
    q, k, v, g = make(1, 130, 2, 2, K, V)
    first, second = (k, q) if way == "reversed" else (k if way == "updates" else q, k)
    check(of_keys(first, second, v, g, beta=beta_of(v, BF16), **DELTA[way]))


@pytest.mark.parametrize("K, V", [(32, 32), (64, 128), (96, 80), (48, 112), (80, 128)])
@pytest.mark.parametrize("way", VALUES)
@pytest.mark.sampled(when=lambda K, V, way: (K, V) == (96, 80) or way == "reversed")
def test_widths_with_gates_of_values(K, V, way):
    check(of_values(*make(1, 130, 2, 2, K, V), True, **VALUES[way]))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("decay", [0.0, 3.0, 20.0, 200.0])
def test_decays(dtype, decay):
    """Also where decays are zero within a chunk."""
    q, k, v, g = make(1, 260, 1, 3, 64, 64, dtype, decay)
    check(of_keys(q, k, v, g))
    check(of_keys(q, k, v, g, beta=beta_of(v)))
    check(of_values(q, k, v, g, True, reverse=True))


def test_resets():
    """Of all columns, of every other one, in one token of a level's each half."""
    q, k, v, g = make(1, 300, 2, 2, 128, 64)
    g[:, ::37], g[:, 5::41, :, ::2] = -math.inf, -math.inf
    g[:, 200:264, 0] = -40.0 * torch.rand(64, 128, device="cuda")
    check(of_keys(q, k, v, g))
    check(of_keys(q, k, v, g, beta=beta_of(v)))
    check(of_values(q, k, v, g, True))


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("keys", ["random", "identical", "correlated"])
@pytest.mark.parametrize("decay", [0.0, 0.1, 20.0])
@pytest.mark.sampled(when=lambda keys, beta: (keys == "identical") == (beta == 2.0))
def test_hard_inverses(beta, keys, decay):
    q, k, v, g = make(1, 256, 2, 2, 64, 64, decay=decay)
    if keys == "identical":
        k = k[:, :1].expand_as(k).contiguous()
    elif keys == "correlated":
        k = normalize(k[:, :1].float() + 0.3 * torch.randn(k.shape, device="cuda") / 8, dim=-1).to(k.dtype)
    check(of_keys(q, k, v, g, beta=torch.full((1, 256, 2), beta, device="cuda")))


def test_columns_alike_are_a_gate_of_tokens():
    """Within rounding, with the kernels of gates of tokens."""
    q, k, v, g = make(1, 300, 2, 2, 128, 128)
    g = g[..., :1].expand(-1, -1, -1, 128).contiguous()
    beta = beta_of(v)
    for mine, other in ((tkq.linear_attn(q, k, v, g), tkq.linear_attn(q, k, v, g[..., 0])),
                        (tkq.gated_delta_rule(q, k, v, g, beta), tkq.gated_delta_rule(q, k, v, g[..., 0], beta))):
        torch.testing.assert_close(mine, other, rtol=2**-6, atol=2**-6 * other.abs().max().item())


def test_nothing_behind_the_end_counts():
    """NaN in the rows behind each tensor's own."""
    given = make(1, 100, 2, 2, 64, 64)
    def behind(x):
        wide = torch.full((1, 200, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype)
        wide[:, :100] = x
        return wide[:, :100]
    for way in (of_keys, of_values):
        o, final, *_ = launch(way(*given), 0.125)
        again, state, *_ = launch(way(*map(behind, given)), 0.125)
        assert torch.equal(o, again) and torch.equal(final, state)


# ---- ops and gradients ----------------------------------------------------------------------------------------------


def results(given, do, dstate):
    """(o, state, gradients by autograd through the op), of q, k, v, g[, beta], initial state."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    op = tkq.linear_attn if len(given) == 5 else tkq.gated_delta_rule
    o, state = op(*leaves[:-1], None, leaves[-1], True)
    pairs = [(y, dy) for y, dy in ((o, do), (state, dstate)) if dy is not None]
    wanted = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs]))
    return o.detach(), state.detach(), *(None if x is None else next(found) for x in leaves)


def check_op(monkeypatch, *given, of_state=True):
    q, _, v, *_ = given
    do, dstate = torch.randn_like(v), state_of(q, v) if of_state else None
    with poisoned():
        o, state, *found = results(given, do, dstate)
    wide = [None if x is None else x.double() for x in (do, dstate, *given)]
    beta = wide[6] if len(given) == 6 else None
    exact_o, exact_state = recurrence(*wide[2:6], initial_state=wide[-1], beta=beta)
    torch.testing.assert_close(o.double(), exact_o, rtol=2**-6, atol=2**-6 * exact_o.abs().max().item())
    torch.testing.assert_close(state.double(), exact_state, rtol=2**-6, atol=2**-6 * exact_state.abs().max().item())
    of, saved, exactly = ((gradients, Saved, linear_attn_backward) if beta is None else
                          (delta_gradients, DeltaSaved, gated_delta_rule_backward))
    want = exactly(*wide, q.shape[3]**-0.5)
    with monkeypatch.context() as m:
        for module in (gradients, delta_gradients):
            m.setattr(module, "launch", launched)
        peer = of.backward(saved(*given), q.shape[3]**-0.5, do, dstate)
    room = 1 + q.shape[1] / 16
    for name, mine, exact, other in zip(saved._fields, found, want, peer):
        assert (mine is None) == (exact is None)
        if exact is not None:
            # an error of u or du, of 16 bits, is in the gradients of all tokens before it: they may have one sign
            assert_2x(*(x.reshape(-1, exact.shape[-1]) for x in (mine, exact, other)), what=name,
                      **dict(ulps=room, bias_ulps=ANY) if mine.dtype == torch.float32 else {})
    return found


@pytest.mark.parametrize("S", [1, 64, 65, 300])
@pytest.mark.parametrize("delta", [False, True])
def test_gradients(monkeypatch, S, delta):
    q, k, v, g = make(2, S, 2, 4, 64, 64)
    check_op(monkeypatch, q, k, v, g, *((beta_of(v),) if delta else ()), state_of(q, v))


@pytest.mark.parametrize("K, V, dtype", [(128, 128, BF16), (96, 80, BF16), (64, 256, BF16), (64, 64, torch.float16)])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.sampled(when=lambda K, V: (K, V) in ((128, 128), (96, 80)))
def test_gradients_of_widths_and_types(monkeypatch, K, V, dtype, delta):
    q, k, v, g = make(1, 130, 1, 2, K, V, dtype)
    check_op(monkeypatch, q, k, v, g, *((beta_of(v, BF16),) if delta else ()), None, of_state=False)


@pytest.mark.parametrize("delta", [False, True])
def test_gradients_of_gates_are_as_good_at_any_length(delta):
    """Errors of the tokens behind do not add up: at the first ones as at the last, a few roundings."""
    q, k, v, g = make(1, 4096, 1, 1, 64, 64, decay=1.0)
    given = q, k, v, g, *((beta_of(v),) if delta else ()), None
    do = torch.randn_like(v)
    *_, found = results(given, do, None)[:6]
    exactly = gated_delta_rule_backward if delta else linear_attn_backward
    want = exactly(do.double(), None, *(None if x is None else x.double() for x in given), 0.125)[3]
    for tokens in (slice(64), slice(-64, None)):
        assert (found[:, tokens] - want[:, tokens]).norm() < 2**-6 * want[:, tokens].norm()


@pytest.mark.parametrize("delta", [False, True])
def test_two_calls_are_one(delta):
    given = make(1, 256, 2, 2, 64, 64)
    def op(q, k, v, g, state):
        if delta:
            return tkq.gated_delta_rule(q, k, v, g, g[..., 0].exp(), None, state, True)
        return tkq.linear_attn(q, k, v, g, None, state, True)

    o, state = op(*given, None)
    first, middle = op(*(x[:, :128] for x in given), None)
    second, last = op(*(x[:, 128:] for x in given), middle)
    assert torch.equal(torch.cat((first, second), 1), o) and torch.equal(last, state)


@pytest.mark.parametrize("delta", [False, True])
def test_the_same_bits(delta):
    q, k, v, g = make(2, 700, 2, 4, 128, 128)
    given = q, k, v, g, *((beta_of(v),) if delta else ()), state_of(q, v)
    do, dstate = torch.randn_like(v), state_of(q, v)
    first = results(given, do, dstate)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(results(given, do, dstate), first))


@pytest.mark.parametrize("delta", [False, True])
def test_no_tokens(delta):
    q, k, v, g = make(2, 0, 2, 4, 64, 64)
    given = q, k, v, g, *((beta_of(v),) if delta else ()), state_of(q, v)
    dstate = state_of(q, v)
    o, state, *_, of_state = results(given, torch.zeros_like(v), dstate)
    assert o.shape == v.shape and torch.equal(state, given[-1])
    torch.testing.assert_close(of_state, dstate)


@pytest.mark.parametrize("delta", [False, True])
def test_compiled_in_one_graph(delta):
    q, k, v, g = make(1, 65, 2, 4, 64, 64)
    given = [x.requires_grad_() for x in (q, k, v, g, *((beta_of(v),) if delta else ()), state_of(q, v))]
    op = tkq.gated_delta_rule if delta else tkq.linear_attn
    ours = lambda *x: op(*x[:-1], None, x[-1], True)
    compiled, dy = torch.compile(ours, fullgraph=True), [torch.randn_like(y) for y in ours(*given)]
    found, want = (torch.autograd.grad(f(*given), given, dy) for f in (compiled, ours))
    assert all(torch.equal(a, b) for a, b in zip(found, want))


@pytest.mark.parametrize("delta", [False, True])
def test_in_a_cuda_graph(delta):
    q, k, v, g = make(1, 130, 2, 4, 64, 64)
    given = q, k, v, g, *((beta_of(v),) if delta else ()), state_of(q, v)
    do, dstate = torch.randn_like(v), state_of(q, v)
    results(given, do, dstate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(given, do, dstate)
    for x in (*given, do, dstate):
        x.copy_(x.flip(1) * 0.5)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, results(given, do, dstate)))

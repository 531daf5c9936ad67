"""tkq.gated_delta_rule as Kimi's layer calls it, with gates in the rule's kernel, against float64 from the first step
on."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.channels.bounded import launch as bounded
from tkq.linear_attention.channels.bounded.config import LOWEST
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x

BF16, K = torch.bfloat16, 128
NAMES = "q", "k", "v", "g", "beta", "A_log", "dt_bias"
OPTIONS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True)


@pytest.fixture
def launches(monkeypatch):
    """How many there were of this kernel."""
    seen, launch = [], bounded.launch
    monkeypatch.setattr(bounded, "launch", lambda *given: seen.append(1) or launch(*given))
    return seen


def make(S, V=128, H=2, HV=4, B=2, scale=1.0, spread=1.0):
    """As a layer has them: q and k of any length, a projection's numbers for gates."""
    torch.manual_seed(0)
    q, k = (scale * torch.randn(B, S, H, K, device="cuda") for _ in range(2))
    v, x = torch.randn(B, S, HV, V, device="cuda"), spread * torch.randn(B, S, HV, K, device="cuda")
    given = dict(zip("qkvg", (y.to(BF16) for y in (q, k, v, x))))
    return given | dict(beta=torch.rand(B, S, HV, device="cuda"), A_log=torch.rand(HV, device="cuda"),
                        dt_bias=torch.randn(HV, K, device="cuda"))


def exact(given, bound, initial=None):
    """(o, state), and what of it the rule takes without options: q, k and gates."""
    q, k, v, g, beta, A_log, dt_bias = (given[name] for name in NAMES)
    wide = [x.double() for x in (q, k)]
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in wide)
    factor = 1.0 if A_log is None else A_log.double().exp()[:, None]
    g = bound * (factor * (g.double() + (0.0 if dt_bias is None else dt_bias.double()))).sigmoid()
    initial = None if initial is None else initial.double()
    found = recurrence(q, k, v.double(), g, beta=beta.double(), initial_state=initial)
    return found, (q.to(BF16), k.to(BF16), g.float())


def judge(given, bound, initial=None, what=""):
    want, (q, k, g) = exact(given, bound, initial)
    peer = tkq.gated_delta_rule(q, k, given["v"], g, given["beta"], None, initial, True)
    with poisoned():
        mine = tkq.gated_delta_rule(**given, initial_state=initial, output_final_state=True, gate_lower_bound=bound,
                                    **OPTIONS)
    for name, a, b, c in zip(("o", "state"), mine, want, peer):
        assert a.isfinite().all()
        assert_2x(a.flatten(0, -2), b.flatten(0, -2), c.flatten(0, -2), what=f"{name} {what}")
    return mine


@pytest.mark.parametrize("S, V, bound", [
    (1, 128, -5.0), (300, 128, -5.0), (130, 128, LOWEST), *(
        pytest.param(*each, marks=pytest.mark.slow) for each in ((65, 80, -0.5), (130, 256, LOWEST)))])
def test_results(launches, S, V, bound):
    given = make(S, V)
    initial = torch.randn(2, 4, K, V, device="cuda")
    o, state = judge(given, bound, initial, f"{S} {V} {bound}")
    again = tkq.gated_delta_rule(**given, initial_state=initial, output_final_state=True, gate_lower_bound=bound,
                                 **OPTIONS)
    assert torch.equal(again[0], o) and torch.equal(again[1], state) and len(launches) == 2
    v_first = tkq.gated_delta_rule(**given, initial_state=initial.mT.contiguous(), output_final_state=True,
                                   gate_lower_bound=bound, state_v_first=True, **OPTIONS)
    assert torch.equal(v_first[0], o) and torch.equal(v_first[1], state.mT)


def zeros():
    """A first state, as the kernel of `test_results` has one."""
    return torch.zeros(2, 4, K, 128, device="cuda")


@pytest.mark.parametrize("scale, spread", [(1e-4, 1.0), (1e5, 1.0), (1.0, 50.0)])
def test_hard_data(launches, scale, spread):
    """Rows near the eps, of zeros and of large numbers; gates that are all at one of their ends; alike keys."""
    given = make(200, scale=scale, spread=spread)
    given["q"][:, 7], given["k"][:, 70:75] = 0, 0
    given["k"][:, 100:140] = given["k"][:, 100:101]
    given["g"][:, 40:60], given["g"][:, 120:160] = 100.0, -100.0
    judge(given, -5.0, zeros(), f"{scale} {spread}")
    given["beta"][:], given["g"][:, 100:140] = 2.0, -100.0  # alike keys of which nothing decays
    judge(given, -5.0, zeros(), f"{scale} {spread}, beta 2")
    assert launches


def test_an_inverse_that_rounding_would_move(launches):
    """Alike keys, a beta near 2 and no decay: what rounding does to an inverse's elements adds up, block by block. In
    two parts errors are 0.03 by emulation, in one part 3.5 and more."""
    given = make(256)
    given["k"][:] = torch.tensor([1.0, -1.0, 0.0, 0.0], device="cuda").repeat(K // 4)  # a length of 8, without rounding
    given["g"][:], given["beta"][:] = -100.0, 1.99
    want, _ = exact(given, -5.0)
    with poisoned():
        mine = tkq.gated_delta_rule(**given, initial_state=zeros(), output_final_state=True, gate_lower_bound=-5.0,
                                    **OPTIONS)
    for name, a, b in zip(("o", "state"), mine, want):
        error = ((a.double() - b).norm() / b.norm()).item()
        assert error < 2**-4, (name, error)
    assert launches


def test_what_may_be_left_out(launches):
    """A_log, dt_bias, states; beta of bf16, doubled; slices of one packed tensor."""
    given = make(100)
    packed = torch.cat([given[name].flatten(2) for name in "qkvg"], 2)
    ends = [0, 2 * K, 4 * K, 8 * K, 12 * K]
    given |= {name: packed[..., a:b].unflatten(2, (-1, K)) for name, a, b in zip("qkvg", ends, ends[1:])}
    given |= dict(beta=given["beta"].to(BF16), A_log=None, dt_bias=None)
    o = tkq.gated_delta_rule(**given, gate_lower_bound=-3.0, allow_neg_eigval=True, **OPTIONS)
    twice = given | dict(beta=2 * given["beta"])
    want, (q, k, g) = exact(twice, -3.0)
    # a beta of fp32 and a first state of zeros: by the kernel that other tests' peers have
    peer, _ = tkq.gated_delta_rule(q, k, given["v"], g, twice["beta"].float(), None, zeros(), True)
    assert_2x(o.flatten(0, -2), want[0].flatten(0, -2), peer.flatten(0, -2), what="o")
    assert launches


def test_packed(launches):
    """Sequences of 0 to 130 tokens, with NaN where there is none: each as by itself, zeros elsewhere."""
    lengths = [0, 1, 63, 64, 130, 0, 65]
    parts = [make(max(n, 1), B=1) for n in lengths]
    parts = [{name: x[:, :n] if x.dim() > 2 else x for name, x in one.items()} for one, n in zip(parts, lengths)]
    initial = torch.randn(len(lengths), 4, K, 128, device="cuda")
    nothing = {name: torch.full_like(x[:, :1], float("nan")).expand(-1, 70, *x.shape[2:])
               for name, x in make(1, B=1).items() if x.dim() > 2}
    together = {name: torch.cat([x, *(one[name] for one in parts), x], 1) for name, x in nothing.items()}
    together |= {name: parts[0][name] for name in ("A_log", "dt_bias")}
    cu = torch.tensor([70, *(70 + sum(lengths[:n + 1]) for n in range(len(lengths)))], device="cuda")
    with poisoned():
        o, state = tkq.gated_delta_rule(**together, initial_state=initial, output_final_state=True, cu_seqlens=cu,
                                        gate_lower_bound=-5.0, **OPTIONS)
    assert launches and not o[:, :70].any() and not o[:, 70 + sum(lengths):].any()
    for n, (one, first, end) in enumerate(zip(parts, cu.tolist(), cu.tolist()[1:])):
        one |= {name: parts[0][name] for name in ("A_log", "dt_bias")}
        if first == end:
            assert torch.equal(state[n], initial[n])
            continue
        alone, last = tkq.gated_delta_rule(**one, initial_state=initial[n:n + 1], output_final_state=True,
                                           gate_lower_bound=-5.0, **OPTIONS)
        assert torch.equal(o[:, first:end], alone) and torch.equal(state[n], last[0])


def test_other_calls_take_other_kernels(launches):
    """A lower bound that is too low, gates of fp32, recorded gradients: the same results within rounding. With states,
    as other tests' kernels have them."""
    given = make(100) | dict(initial_state=zeros(), output_final_state=True)
    o, _ = tkq.gated_delta_rule(**given, gate_lower_bound=-5.0, **OPTIONS)
    assert len(launches) == 1
    others = [tkq.gated_delta_rule(**given | more, gate_lower_bound=-5.0, **OPTIONS)[0] for more in (
        dict(g=given["g"].float()), dict(v=given["v"].clone().requires_grad_()),
        dict(g=F.pad(given["g"], (0, 4))[..., :K]))]
    tkq.gated_delta_rule(**given, gate_lower_bound=-6.0, **OPTIONS)
    assert len(launches) == 1
    for other in others:
        assert (other.detach().double() - o.double()).norm() < 2**-7 * o.double().norm()

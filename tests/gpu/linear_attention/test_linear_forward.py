"""The forward of linear attention against the recurrence in float64."""
import math

import pytest
import torch

from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.launch import Given, launch
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x

BF16 = torch.bfloat16


def make(B, S, H, HV, K, V, gate, dtype=BF16, decay=0.1):  # noqa: PLR0913
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(B, S, H, K, device="cuda"), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(B, S, HV, V, device="cuda").to(dtype)
    g = {"none": None, "head": -decay * torch.rand(HV, device="cuda"),
         "token": -decay * torch.rand(B, S, HV, device="cuda")}[gate]
    return q, k, v, g


def chunked(q, k, v, g, initial):
    """As the kernel rounds it, in plain PyTorch: P, the state that queries see and the values that it takes up go
    through 16 bits; what decays faster than by 2^-150 a token does so."""
    dtype, (B, S, H, K), (HV, V) = q.dtype, q.shape, v.shape[2:]
    r = HV // H
    q, k = (x.float().repeat_interleave(r, 2).transpose(1, 2) for x in (q, k))
    v = v.float().transpose(1, 2)
    g = None if g is None else g.clamp(min=-150 * math.log(2))
    G = torch.zeros(B, HV, S, device=q.device) if g is None else (
        g.view(1, -1, 1).expand(B, -1, S) if g.dim() == 1 else g.transpose(1, 2))
    state = torch.zeros(B, HV, K, V, device=q.device) if initial is None else initial.float()
    out, narrow = [], lambda x: x.to(dtype).float()
    for s in range(0, S, 64):
        at = slice(s, s + 64)
        qc, kc, vc, Gc = q[:, :, at], k[:, :, at], v[:, :, at], G[:, :, at].cumsum(-1)
        mask = (Gc[..., :, None] - Gc[..., None, :]).clamp(max=0).exp().tril()
        p = narrow(K**-0.5 * (qc @ kc.transpose(-1, -2)) * mask)
        out.append(K**-0.5 * Gc.exp()[..., None] * (qc @ narrow(state)) + p @ vc)
        state = Gc[..., -1:, None].exp() * state + kc.transpose(-1, -2) @ narrow(
            vc * (Gc[..., -1:] - Gc).exp()[..., None])
    o = torch.cat(out, 2).transpose(1, 2) if out else v.transpose(1, 2)
    return o.to(dtype), state


def check(q, k, v, g, initial=None):
    with poisoned():
        o, final, *_ = launch(Given(q, k, v, g, None, initial, torch.float32), q.shape[-1]**-0.5)
    want, want_state = recurrence(*(x.double() for x in (q, k, v)), g, initial_state=initial)
    peer, peer_state = chunked(q, k, v, g, initial)
    assert_2x(o, want, peer, what="o")
    # tensor cores cut off what they add to a sum of fp32: an ulp for each 16 tokens at most
    assert_2x(final.flatten(0, 2), want_state.flatten(0, 2), peer_state.flatten(0, 2), ulps=1 + q.shape[1] / 16,
              bias_ulps=1 + q.shape[1] / 16, what="final state")
    return o, final


@pytest.mark.parametrize("gate", ["none", "head", "token"])
@pytest.mark.parametrize("S", [1, 63, 64, 65, 300])
def test_lengths(gate, S):
    check(*make(2, S, 2, 2, 128, 128, gate))


@pytest.mark.parametrize("K, V", [(32, 32), (64, 64), (64, 128), (128, 64), (96, 80), (48, 112), (128, 256)])
@pytest.mark.sampled(when=lambda K, V: (K, V) in ((32, 32), (96, 80), (128, 256)))
def test_widths(K, V):
    check(*make(2, 200, 2, 4, K, V, "token"))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("decay", [0.0, 3.0, 20.0, 200.0])
def test_decays(dtype, decay):
    """Also where e^G is zero within a chunk."""
    check(*make(1, 260, 1, 3, 64, 64, "token", dtype, decay))


def test_a_reset():
    q, k, v, g = make(1, 300, 2, 2, 64, 64, "token")
    g[:, ::37] = -math.inf
    check(q, k, v, g)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_states_that_go_on(dtype):
    """Two calls are one."""
    q, k, v, g = make(2, 256, 2, 4, 64, 64, "token")
    initial = torch.randn(2, 4, 64, 64, device="cuda").to(dtype)
    o, final = check(q, k, v, g, initial)
    first = [x[:, :128] for x in (q, k, v, g)]
    o1, s1, *_ = launch(Given(*first, None, initial, torch.float32), 64**-0.5)
    o2, s2, *_ = launch(Given(*(x[:, 128:] for x in (q, k, v, g)), None, s1, torch.float32), 64**-0.5)
    assert torch.equal(torch.cat([o1, o2], 1), o) and torch.equal(s2, final)


def test_no_tokens():
    q, k, v, g = make(2, 0, 2, 2, 64, 64, "token")
    initial = torch.randn(2, 2, 64, 64, device="cuda")
    o, final, *_ = launch(Given(q, k, v, g, None, initial, torch.float32), 1.0)
    assert o.shape == v.shape and torch.equal(final, initial)


def test_nothing_behind_the_end_counts():
    """NaN in the rows behind each tensor's own."""
    q, k, v, g = make(1, 100, 2, 2, 64, 64, "token")
    def behind(x):
        wide = torch.full((1, 200, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype)
        wide[:, :100] = x
        return wide[:, :100]
    o, final, *_ = launch(Given(q, k, v, g, final=torch.float32), 0.125)
    again, state, *_ = launch(Given(*map(behind, (q, k, v, g)), final=torch.float32), 0.125)
    assert torch.equal(o, again) and torch.equal(final, state)


def test_the_same_bits():
    given = make(2, 1000, 4, 8, 128, 128, "token")
    given = Given(*given, final=torch.float32)
    first = launch(given, 0.1)[:2]
    for _ in range(5):
        again = launch(given, 0.1)[:2]
        assert all(torch.equal(a, b) for a, b in zip(first, again))

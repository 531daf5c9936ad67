"""The gated delta rule's forward against the recurrence in float64, also where the inverse is far from the identity."""
import pytest
import torch
from torch.nn.functional import normalize

from tests.gpu.linear_attention.test_linear_forward import BF16, make
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.launch import Given, launch
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x


def chunked(q, k, v, g, beta, initial):
    """As the kernel rounds it, in plain PyTorch: float32 inverse, 16-bit operands."""
    dtype, (B, S, H, K), (HV, V) = q.dtype, q.shape, v.shape[2:]
    q, k = (x.float().repeat_interleave(HV // H, 2).transpose(1, 2) for x in (q, k))
    v, beta = v.float().transpose(1, 2), beta.float().transpose(1, 2)
    gates = torch.zeros_like(beta) if g is None else g.transpose(1, 2)
    state = torch.zeros(B, HV, K, V, device=q.device) if initial is None else initial.float()
    out, narrow, unit = [], lambda x: x.to(dtype).float(), torch.eye(64, device=q.device)
    for s in range(0, S, 64):
        at = slice(s, s + 64)
        qc, kc, vc, bc, G = q[:, :, at], k[:, :, at], v[:, :, at], beta[:, :, at, None], gates[:, :, at].cumsum(-1)
        n, decay = qc.shape[2], (G[..., :, None] - G[..., None, :]).clamp(max=0).exp()
        lower = (bc * decay * (kc @ kc.mT)).tril(-1)
        inverse = narrow(torch.linalg.solve_triangular(unit[:n, :n] + lower, unit[:n, :n].expand_as(lower),
                                                       upper=False))
        old, start = narrow(state), G.exp()[..., None]
        u = inverse @ narrow(bc * vc - bc * start * (kc @ old))
        p = narrow(K**-0.5 * (qc @ kc.mT) * decay.tril())
        out.append(K**-0.5 * start * (qc @ old) + p @ narrow(u))
        state = G[..., -1:, None].exp() * state + kc.mT @ narrow(u * (G[..., -1:] - G).exp()[..., None])
    return torch.cat(out, 2).transpose(1, 2).to(dtype), state


def check(q, k, v, g, beta, initial=None):
    with poisoned():
        o, final, *_ = launch(Given(q, k, v, g, beta, initial, torch.float32), q.shape[-1]**-0.5)
    want, want_state = recurrence(*(x.double() for x in (q, k, v)), g, initial_state=initial, beta=beta)
    peer, peer_state = chunked(q, k, v, g, beta, initial)
    assert_2x(o, want, peer, what="o")
    assert_2x(final.flatten(0, 2), want_state.flatten(0, 2), peer_state.flatten(0, 2), what="final state")
    return o, final


@pytest.mark.parametrize("gate", ["none", "token"])
@pytest.mark.parametrize("S", [1, 63, 64, 65, 300])
def test_lengths(gate, S):
    given = make(2, S, 2, 4, 128, 128, gate)
    check(*given, torch.rand(2, S, 4, device="cuda"))


@pytest.mark.parametrize("K, V", [(32, 32), (64, 128), (96, 80), (128, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.sampled(when=lambda K, V, dtype: (K, V, dtype) in ((96, 80, BF16), (128, 256, torch.float32)))
def test_widths(K, V, dtype):
    given = make(1, 200, 2, 2, K, V, "token")
    check(*given, torch.rand(1, 200, 2, device="cuda").to(dtype), torch.randn(1, 2, K, V, device="cuda"))


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("keys", ["random", "identical", "correlated"])
@pytest.mark.parametrize("decay", [0.0, 0.1, 20.0])
def test_hard_inverses(beta, keys, decay):
    q, k, v, g = make(1, 256, 2, 2, 128, 128, "token", decay=decay)
    if keys == "identical":
        k = k[:, :1].expand_as(k).contiguous()
    elif keys == "correlated":
        k = normalize(k[:, :1].float() + 0.3 * torch.randn(k.shape, device="cuda") / 8, dim=-1).to(k.dtype)
    check(q, k, v, g, torch.full((1, 256, 2), beta, device="cuda"))


def test_the_same_bits():
    given, beta = make(2, 1000, 4, 8, 128, 128, "token"), torch.rand(2, 1000, 8, device="cuda")
    given = Given(*given, beta, final=torch.float32)
    first = launch(given, 0.1)[:2]
    for _ in range(5):
        again = launch(given, 0.1)[:2]
        assert all(torch.equal(a, b) for a, b in zip(first, again))

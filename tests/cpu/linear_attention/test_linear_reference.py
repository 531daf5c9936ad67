"""The recurrences against sums written out, in float64."""
import pytest
import torch

from tkq.reference.linear_attention import linear_attn


def make(gate, B=2, S=70, H=2, HV=4, K=8, V=5):
    torch.manual_seed(0)
    q, k = (torch.randn(B, S, H, K, dtype=torch.float64) for _ in range(2))
    v = torch.randn(B, S, HV, V, dtype=torch.float64)
    g = {"none": None, "head": -torch.rand(HV), "token": -torch.rand(B, S, HV), "channel": -torch.rand(B, S, HV, K)}
    return q, k, v, g[gate]


@pytest.mark.parametrize("gate", ["none", "head", "token", "channel"])
def test_it_is_a_sum_over_keys(gate):
    q, k, v, g = make(gate)
    o, state = linear_attn(q, k, v, g)
    q, k = (x.repeat_interleave(2, 2) for x in (q, k))
    B, S, HV, K = q.shape
    g = torch.zeros(1, 1, 1, 1) if g is None else g.view(1, 1, -1, 1) if g.dim() == 1 else g.view(B, S, HV, -1)
    G = g.double().expand(B, S, HV, K).cumsum(1)
    for t in (0, 33, S - 1):
        decay = (G[:, t:t + 1] - G[:, :t + 1]).exp()
        weights = (q[:, t:t + 1] * decay * k[:, :t + 1]).sum(-1)
        want = K**-0.5 * (weights[..., None] * v[:, :t + 1]).sum(1)
        torch.testing.assert_close(o[:, t], want)
    kept = (k * (G[:, -1:] - G).exp())[..., None] * v[:, :, :, None]
    torch.testing.assert_close(state, kept.sum(1))


def test_sequences_one_after_the_other():
    q, k, v, g = make("token", B=1)
    initial = torch.randn(3, 4, 8, 5, dtype=torch.float64)
    o, states = linear_attn(q, k, v, g, 1.0, initial, torch.tensor([0, 20, 20, 70]))
    for n, (a, e) in enumerate(((0, 20), (20, 20), (20, 70))):
        part, state = linear_attn(*(x[:, a:e] for x in (q, k, v, g)), 1.0, initial[n:n + 1])
        torch.testing.assert_close(o[:, a:e], part)
        torch.testing.assert_close(states[n:n + 1], state)
    torch.testing.assert_close(states[1], initial[1])


def backwards(q, k, v, g, initial):
    """The reversed form, by the forward one of flipped tokens: (o, final state)."""
    flipped = [x.flip(1) for x in (q, k, v)]
    gates = torch.cat([torch.zeros_like(g[:, :1]), g[:, 1:].flip(1)], 1)
    o, state = linear_attn(*flipped, gates, 1.0, initial)
    return o.flip(1), g[:, 0].double().exp()[..., None, None] * state


def test_gradients_are_linear_attentions():
    """What `tkq.linear_attention.launch.backward` is made of."""
    q, k, v, g = (x.double().requires_grad_() for x in make("token", H=4))
    initial = torch.randn(2, 4, 8, 5, dtype=torch.float64, requires_grad=True)
    o, final = linear_attn(q, k, v, g, 1.0, initial)
    do, dfinal = torch.randn_like(o), torch.randn_like(final)
    dq, dk, dv, dg, dinitial = torch.autograd.grad((o, final), (q, k, v, g, initial), (do, dfinal))
    q, k, v, g, initial = (x.detach() for x in (q, k, v, g, initial))
    torch.testing.assert_close(linear_attn(do, v, k, g, 1.0, initial.mT)[0], dq)
    torch.testing.assert_close(backwards(v, do, q, g, dfinal.mT)[0], dk)
    got, state = backwards(k, q, do, g, dfinal)
    torch.testing.assert_close(got, dv)
    torch.testing.assert_close(state, dinitial)
    behind = ((do * o).sum(-1) - (v * dv).sum(-1)).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(behind + (final * dfinal).sum((-1, -2))[:, None], dg)


def test_the_delta_rule_by_an_inverse():
    """A chunk of 70 tokens at once, with the inverse that the kernel makes."""
    q, k, v, g = (x.double() for x in make("token", H=4))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta, initial = torch.rand(2, 70, 4, dtype=torch.float64), torch.randn(2, 4, 8, 5, dtype=torch.float64)
    o, state = linear_attn(q, k, v, g, 1.0, initial, beta=beta)
    q, k, v, G, b = (x.transpose(1, 2) for x in (q, k, v, g.cumsum(1), beta[..., None]))
    decay = (G[..., :, None] - G[..., None, :]).exp()
    lower, start = (b * decay * (k @ k.mT)).tril(-1), G.exp()[..., None]
    u = torch.linalg.solve(torch.eye(70) + lower, b * (v - start * (k @ initial)))
    want = start * (q @ initial) + ((q @ k.mT) * decay).tril() @ u
    torch.testing.assert_close(o.transpose(1, 2), want)
    last = G[..., -1:]
    torch.testing.assert_close(state, last[..., None].exp() * initial + (k * (last - G).exp()[..., None]).mT @ u)

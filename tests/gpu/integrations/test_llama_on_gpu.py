"""A Llama block made of tkq throughout, one step of training: loss and all gradients beside PyTorch in float64."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tkq
import tkq.nn
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.testing import assert_2x

B, S, H, HK, D, WIDTH, HIDDEN, V = 2, 200, 4, 2, 64, 256, 512, 1000
EPS, THETA, BF16 = 1e-5, 500000.0, torch.bfloat16


class Block(nn.Module):
    """Norms before and behind attention and after the MLP, norms of queries and keys, the loss of a linear head."""

    def __init__(self, inplace=False):
        super().__init__()
        self.inplace = inplace
        self.norms = nn.ParameterList(nn.Parameter(1 + 0.1 * torch.randn(WIDTH)) for _ in range(3))
        self.q_norm, self.k_norm = (nn.Parameter(1 + 0.1 * torch.randn(heads, D)) for heads in (H, HK))
        self.qkv, self.out, self.gate_up, self.down = (
            tkq.nn.Linear(inputs, outputs, bias=False)
            for inputs, outputs in ((WIDTH, (H + 2 * HK) * D), (H * D, WIDTH), (WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH)))
        self.turn, self.gate = tkq.nn.RotaryEmbedding(D, S, THETA), tkq.nn.SwiGLU()
        self.loss = tkq.nn.LinearCrossEntropyLoss(WIDTH, V)

    def forward(self, x, target):
        h, x = tkq.rmsnorm(x, self.norms[0], eps=EPS, prenorm=True)
        q, k, v = self.qkv(h).view(B, S, H + 2 * HK, D).split((H, HK, HK), 2)
        q, k = tkq.rmsnorm(q, self.q_norm, eps=EPS), tkq.rmsnorm(k, self.k_norm, eps=EPS)
        if self.inplace:
            q, k = (tkq.rope(t, self.turn.cos, self.turn.sin, inplace=True) for t in (q, k))
        else:
            q, k = self.turn(q, k)
        o = tkq.flash_attn(q, k, v, causal=True)
        h, x = tkq.rmsnorm(self.out(o.flatten(2)), self.norms[1], eps=EPS, residual=x, prenorm=True)
        y = self.down(self.gate(self.gate_up(h)))
        return self.loss(tkq.rmsnorm(y, self.norms[2], eps=EPS, residual=x), target)


def in_torch(m, x, target, dtype):
    """(loss, gradients of x and all parameters by name), computed in dtype without tkq."""
    p = {name: t.detach().to(dtype).requires_grad_() for name, t in m.named_parameters()}
    leaf = x.detach().to(dtype).requires_grad_()

    def norm(t, weight):
        return F.rms_norm(t, t.shape[-1:], None, EPS) * weight if weight.dim() == 2 else F.rms_norm(
            t, t.shape[-1:], weight, EPS)

    def turned(t):
        angles = torch.arange(S, device=t.device).double()[:, None] * THETA ** (
            -torch.arange(0, D, 2, device=t.device).double() / D)
        cos, sin = (a.to(torch.promote_types(dtype, torch.float32))[:, None] for a in (angles.cos(), angles.sin()))
        a, b = t.to(cos.dtype).chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(dtype)

    def linear(t, name):
        return F.linear(t, p[f"{name}.weight"])

    q, k, v = linear(norm(leaf, p["norms.0"]), "qkv").view(B, S, H + 2 * HK, D).split((H, HK, HK), 2)
    q, k = turned(norm(q, p["q_norm"])), turned(norm(k, p["k_norm"]))
    k, v = (t.repeat_interleave(H // HK, 2) for t in (k, v))
    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    h = leaf + linear(o.transpose(1, 2).flatten(2), "out")
    gate, up = linear(norm(h, p["norms.1"]), "gate_up").chunk(2, -1)
    h = h + linear(F.silu(gate) * up, "down")
    logits = linear(norm(h, p["norms.2"]), "loss.linear")
    loss = F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)).flatten(0, 1), target.flatten())
    found = torch.autograd.grad(loss, [leaf, *p.values()])
    return loss.detach(), dict(zip(("x", *p), found))


def case(inplace=False):
    torch.manual_seed(5)
    m = Block(inplace).to(device="cuda", dtype=BF16)
    g = torch.Generator("cuda").manual_seed(6)
    x = torch.randn(B, S, WIDTH, device="cuda", generator=g).to(BF16).requires_grad_()
    target = torch.randint(V, (B, S), device="cuda", generator=g)
    target[:, ::7] = -100
    return m, x, target


def judge(loss, found, m, x, target, what):
    """By the 2x rule, largest errors, their mean, and those of the mean square."""
    truth, peer = (in_torch(m, x, target, dtype) for dtype in (torch.float64, BF16))
    assert abs(loss.item() - truth[0].item()) <= 2 * abs(peer[0].item() - truth[0].item()) + 1e-3, what
    assert found.keys() == truth[1].keys()
    for name, mine in found.items():
        right, theirs = truth[1][name], peer[1][name]
        assert mine.dtype == BF16
        assert_2x(mine, right, theirs, ulps=2, what=f"{what} {name}")
        error, torchs = ((t.double() - right).norm() / right.norm() for t in (mine, theirs))
        assert error <= 1.5 * torchs + 1e-3, f"{what} {name}: {error:.2e}, PyTorch {torchs:.2e}"


def step(run, m, x, target):
    loss = run(x, target)
    found = torch.autograd.grad(loss, [x, *m.parameters()])
    return loss.detach(), dict(zip(("x", *(name for name, _ in m.named_parameters())), found))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_step(inplace):
    m, x, target = case(inplace)
    assert m.turn.cos.dtype == torch.float32 and m.turn.cos.device == x.device
    with poisoned():
        loss, found = step(m, m, x, target)
    judge(loss, found, m, x, target, "in place" if inplace else "apart")
    again, same = step(m, m, x, target)
    # attention's dq is added up in no fixed order, and what comes of it (of the first norm, x) differs with it
    assert torch.equal(loss, again) and all(
        torch.equal(found[name], same[name]) for name in ("norms.2", "down.weight", "loss.linear.weight", "norms.1"))


def test_compiled():
    """In one graph, by functionalisation and fake tensors."""
    torch._dynamo.reset()
    m, x, target = case()
    judge(*step(torch.compile(m, fullgraph=True, backend="aot_eager"), m, x, target), m, x, target, "compiled")

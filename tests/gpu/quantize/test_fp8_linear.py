"""Fp8Linear on a GPU: beside torch, and training a small transformer."""
import functools

import pytest
import torch
from torch import nn

import tkq
from tests.helpers.gemm.fp8_cases import E4M3, E5M2


def off(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("granularity", ("row", "1x128", "tensor"))
@pytest.mark.parametrize("gradient", (E4M3, E5M2))
@pytest.mark.parametrize("tokens", (256, 77))
@pytest.mark.sampled(when=lambda granularity, gradient: gradient == E4M3 or granularity == "row")
@pytest.mark.sampled(each_value=True)
def test_beside_torch(granularity, gradient, tokens):
    ours = tkq.nn.Fp8Linear(528, 784, device="cuda", dtype=torch.bfloat16, granularity=granularity, gradient=gradient)
    theirs = nn.Linear(528, 784, device="cuda", dtype=torch.bfloat16)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(tokens, 528, device="cuda", dtype=torch.bfloat16)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = ours(a), theirs(b)
    d = torch.randn_like(y)
    y.backward(d)
    z.backward(d)
    step = 0.045 if gradient == E4M3 else 0.075
    assert off(y, z) < 0.045 and off(a.grad, b.grad) < step and off(ours.weight.grad, theirs.weight.grad) < step
    assert off(ours.bias.grad, theirs.bias.grad) < 1e-2
    with torch.no_grad():
        assert ours(x[:0]).shape == (0, 784) and off(ours(x).relu_(), y.relu()) < 1e-2
    ours.zero_grad()
    ours(x[:0]).sum().backward()
    assert not ours.weight.grad.any()


class Block(nn.Module):
    def __init__(self, width, heads, linear):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, w))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, vocabulary, width, layers, linear):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(width, 4, linear) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequences(chain, batch, length, g):
    """Tokens, each drawn by what the last one and the one before that say."""
    last, before = chain
    tokens = [torch.randint(64, (batch,), device="cuda", generator=g) for _ in range(2)]
    while len(tokens) < length:
        odds = (last[tokens[-1]] + before[tokens[-2]]).softmax(-1)
        tokens.append(torch.multinomial(odds, 1, generator=g)[:, 0])
    return torch.stack(tokens, 1)


def trained(linear, steps=300):
    """Mean loss of the last 50 steps, at predicting the next token of a chain that remembers two."""
    torch.manual_seed(0)
    model = Model(64, 256, 3, linear).cuda().bfloat16()
    masters = [p.detach().float() for p in model.parameters()]  # bf16 weights alone would swallow small updates
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    g, losses = torch.Generator("cuda").manual_seed(1), []
    chain = 1.5 * torch.randn(2, 64, 64, device="cuda", generator=g)
    for _ in range(steps):
        tokens = sequences(chain, 64, 65, g)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(loss.detach())
    return torch.stack(losses)[-50:].mean().item()


@functools.cache
def in_bf16():
    """Deterministic but for torch's own kernels: its loss once for all."""
    return trained(nn.Linear)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ("row", "1x128", "tensor"))
@pytest.mark.parametrize("gradient", (E4M3, E5M2))
def test_trains_as_bf16_does(granularity, gradient):
    want = in_bf16()
    got = trained(lambda i, o: tkq.nn.Fp8Linear(i, o, granularity=granularity, gradient=gradient))
    print(f"{granularity} {gradient}: loss {got:.4f}, bf16 {want:.4f}")
    assert want < 3.7, "nothing was learned"
    assert got < want * 1.01

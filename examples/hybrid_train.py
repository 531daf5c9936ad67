"""Training a small hybrid model, three layers of the gated delta rule for each of attention, as Qwen3-Next has them: on
tkq beside eager PyTorch, from the same weights on the same synthetic language.

    python examples/hybrid_train.py [--steps 300]

Float32 weights under torch.autocast in bf16. In PyTorch the delta rule is computed in chunks of 64 tokens, in float32.
Without a GPU a smaller model makes a few steps by tkq's CPU references, and nothing is timed.
"""
import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import tkq.nn

RATE, WARM_UP, CLIP = 1e-3, 40, 1.0  # of learning, at most; steps until it is reached; the gradients' norm at most


class Sizes(NamedTuple):
    """batch, tokens: of a step."""

    words: int = 2048
    hidden: int = 512
    layers: int = 8
    heads: int = 4
    head_dim: int = 128
    batch: int = 8
    tokens: int = 1024


SMALL = Sizes(words=256, hidden=64, layers=4, heads=2, head_dim=32, batch=2, tokens=40)


# ---- the model ------------------------------------------------------------------------------------------------------


class Ops(NamedTuple):
    """What a model's layers call. mixer: of a `tkq.nn.GatedDeltaNet` and x. attention: causal, of q, k, v (B, S, H, D)
    and cos, sin of positions (S, D / 2). loss: of hidden states, the head's weight and the tokens that follow."""

    name: str
    norm: Callable
    mixer: Callable
    attention: Callable
    gated: Callable
    loss: Callable


class Attention(nn.Module):
    """Causal, with rotary positions."""

    def __init__(self, sizes):
        super().__init__()
        self.heads, width = sizes.heads, sizes.heads * sizes.head_dim
        self.qkv = nn.Linear(sizes.hidden, 3 * width, bias=False)
        self.out = nn.Linear(width, sizes.hidden, bias=False)
        for name, table in zip(("cos", "sin"), tkq.rope_cos_sin(sizes.tokens, sizes.head_dim)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x, ops):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out(ops.attention(q, k, v, self.cos, self.sin).flatten(2))


class Layer(nn.Module):
    """The last of four has attention."""

    def __init__(self, sizes, number):
        super().__init__()
        self.is_attention = number % 4 == 3
        self.mixer = Attention(sizes) if self.is_attention else tkq.nn.GatedDeltaNet(
            sizes.hidden, num_heads=sizes.heads, head_dim=sizes.head_dim)
        self.norms = nn.ParameterList(torch.ones(sizes.hidden) for _ in range(2))
        self.up = nn.Linear(sizes.hidden, 6 * sizes.hidden, bias=False)
        self.down = nn.Linear(3 * sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x, ops):
        h = ops.norm(x, self.norms[0])
        x = x + (self.mixer(h, ops) if self.is_attention else ops.mixer(self.mixer, h))
        return x + self.down(ops.gated(self.up(ops.norm(x, self.norms[1]))))


class Hybrid(nn.Module):
    """ops: which kernels it runs on, `TKQ` or `TORCH`; the parameters are the same."""

    def __init__(self, sizes):
        super().__init__()
        self.ops = TKQ
        self.embedding = nn.Embedding(sizes.words, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes, number) for number in range(sizes.layers))
        self.norm = nn.Parameter(torch.ones(sizes.hidden))
        nn.init.normal_(self.embedding.weight, std=sizes.hidden**-0.5)  # it is the head, too

    def forward(self, ids):
        """ids: (batch, tokens + 1). The loss of the last `tokens`."""
        x = self.embedding(ids[:, :-1])
        for layer in self.layers:
            x = layer(x, self.ops)
        return self.ops.loss(self.ops.norm(x, self.norm), self.embedding.weight, ids[:, 1:].contiguous())


# ---- tkq, and the same in eager PyTorch -----------------------------------------------------------------------------


def attention(q, k, v, cos, sin):
    return tkq.flash_attn(*tkq.rope_qk(q, k, cos, sin), v, causal=True)


TKQ = Ops("tkq", tkq.rmsnorm, lambda layer, x: layer(x), attention, tkq.swiglu, tkq.linear_cross_entropy)


def delta_net(layer, x):
    """What tkq.nn.GatedDeltaNet computes."""
    def mixed(project, conv, heads):
        y = F.pad(project(x).mT, (conv.kernel_size[0] - 1, 0))
        return F.silu(F.conv1d(y, conv.weight, conv.bias, groups=conv.groups)).mT.unflatten(-1, (heads, -1))

    q = mixed(layer.q_proj, layer.q_conv1d, layer.num_heads)
    k = mixed(layer.k_proj, layer.k_conv1d, layer.num_heads)
    v = mixed(layer.v_proj, layer.v_conv1d, layer.num_v_heads)
    g = -layer.A_log.exp() * F.softplus(layer.a_proj(x).float() + layer.dt_bias)
    with torch.autocast(x.device.type, enabled=False):
        o = chunked_delta_rule(q.float(), k.float(), v.float(), g, layer.b_proj(x).float().sigmoid()).to(v.dtype)
    o = F.rms_norm(o, o.shape[-1:], layer.o_norm.weight.to(o.dtype), layer.o_norm.eps)
    gate = layer.g_proj(x).unflatten(-1, o.shape[2:])
    return layer.o_proj((o * F.silu(gate)).flatten(2))


def chunked_delta_rule(q, k, v, g, beta, chunk=64):
    """The gated delta rule of normalised q and k, as many heads as v has. Within a chunk, with G the sums of g, the
    corrected values are U = (I + L)^-1 beta (V - e^G K S), L[i, j] = beta[i] e^(G[i] - G[j]) k[i] k[j] for j < i."""
    tokens = q.shape[1]
    q, k = F.normalize(q, dim=-1) * q.shape[-1]**-0.5, F.normalize(k, dim=-1)
    g, beta = g[..., None], beta[..., None]
    q, k, v, g, beta = (F.pad(x, (0, 0, 0, 0, 0, -tokens % chunk)).transpose(1, 2).unflatten(2, (-1, chunk))
                        for x in (q, k, v, g, beta))  # (B, H, chunks, 64, ..)
    G = g.cumsum(3)
    decay = (G - G.mT).tril().exp().tril()
    lower = (beta * decay * (k @ k.mT)).tril(-1)
    solved = torch.linalg.solve_triangular(lower, torch.cat((beta * v, beta * G.exp() * k), -1), upper=False,
                                           unitriangular=True)
    values, of_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores, q, k, end = (q @ k.mT) * decay, q * G.exp(), k * (G[..., -1:, :] - G).exp(), G[..., -1:, :].exp()
    state, out = 0.0 * k[:, :, 0].mT @ v[:, :, 0], []
    for n in range(q.shape[2]):
        u = values[:, :, n] - of_state[:, :, n] @ state
        out.append(q[:, :, n] @ state + scores[:, :, n] @ u)
        state = end[:, :, n] * state + k[:, :, n].mT @ u
    return torch.cat(out, 2).transpose(1, 2)[:, :tokens]


def torch_attention(q, k, v, cos, sin):
    def rotated(x):
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1).to(x.dtype)

    q, k, v = (x.transpose(1, 2) for x in (rotated(q), rotated(k), v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def torch_gated(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def torch_loss(h, weight, target):
    return F.cross_entropy(F.linear(h, weight).float().flatten(0, 1), target.flatten())


TORCH = Ops("torch", lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6), delta_net, torch_attention,
            torch_gated, torch_loss)


# ---- training -------------------------------------------------------------------------------------------------------


def language(sizes, steps, device, seed=0):
    """(steps, batch, tokens + 1): words by Zipf's law, half of the time the one that follows its predecessor always."""
    g = torch.Generator().manual_seed(seed)
    shape = steps, sizes.batch, sizes.tokens + 1
    odds = 1.0 / torch.arange(10, sizes.words + 10, dtype=torch.float64)
    drawn = torch.multinomial(odds, shape[0] * shape[1] * shape[2], replacement=True, generator=g).view(shape)
    follows, again = torch.randperm(sizes.words, generator=g), torch.rand(shape, generator=g) < 0.5
    for t in range(1, shape[2]):
        drawn[..., t] = torch.where(again[..., t], follows[drawn[..., t - 1]], drawn[..., t])
    return drawn.to(device)


def step(model, ids, optimizer):
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = model(ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def learn(model, ops, batches, weights):
    """Losses of a run from the same weights: the rate rises, then stays."""
    model.ops = ops
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights):
            p.copy_(w)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95)), []
    for i, ids in enumerate(batches):
        optimizer.param_groups[0]["lr"] = RATE * min((i + 1) / WARM_UP, 1.0)
        losses.append(step(model, ids, optimizer))
    return torch.stack(losses).tolist()


def apart(a, b, window=10):
    """How far two curves of losses are apart at most, relatively, in the mean of up to ten steps."""
    window = min(window, len(a))
    means = [[statistics.fmean(x[i:i + window]) for i in range(0, len(x) - window + 1, window)] for x in (a, b)]
    return max(abs(x - y) / y for x, y in zip(*means))


def seconds(model, batches):
    """Of a step on a GPU with each of both, in turns: medians. The weights stay."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0), {TKQ: [], TORCH: []}
    for i in range(2 + 5):
        for ops, times in found.items():
            model.ops = ops
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(model, batches[i % len(batches)], optimizer)
            torch.cuda.synchronize()
            times += [time.perf_counter() - start] if i >= 2 else []
    return {ops.name: statistics.median(times) for ops, times in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="of learning; 300, or 3 without a GPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, steps = (Sizes(), 300) if device == "cuda" else (SMALL, 3)
    steps = steps if options.steps is None else options.steps
    torch.manual_seed(0)
    model, batches = Hybrid(sizes).to(device), language(sizes, max(steps, 1), device)
    weights = [p.detach().clone() for p in model.parameters()]
    ours, theirs = (learn(model, ops, batches, weights) for ops in (TKQ, TORCH))
    print(f"losses of {len(ours)} steps: {theirs[0]:.3f} to {theirs[-1]:.3f}, with tkq {ours[0]:.3f} to "
          f"{ours[-1]:.3f}; {100 * apart(ours, theirs):.3f} % apart at most, in the mean of ten")
    if device == "cpu":
        print("No GPU: nothing was timed.")
        return
    for name, time_of_a_step in seconds(model, batches).items():
        print(f"{name:6s} {1e3 * time_of_a_step:8.2f} ms a step")


if __name__ == "__main__":
    main()

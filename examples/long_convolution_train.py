"""Training a small model of long convolutions on associative recall: pairs of a key and a value, then keys, each to be
followed by its value. On tkq beside the same through torch.fft, from the same weights on the same data.

    python examples/long_convolution_train.py [--steps 300]

It fails where the two ways' losses, means of the last tenth of the steps, are more than 1 % apart. After many more
steps the loss falls fast, and roundings alone decide when.

A layer is Hyena's: a projection to three, a short convolution, `tkq.nn.HyenaFilterConv` between two gates. Float32
weights under torch.autocast in bf16. Without a GPU a smaller model makes a few steps by tkq's CPU references.
"""
import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import tkq.nn
from tkq.reference import long_convolution

RATE, WARM_UP = 2e-3, 40
ALIKE = 0.01  # losses, relative to torch's


class Sizes(NamedTuple):
    """keys: and as many values. batch, tokens: of a step."""

    keys: int = 32
    hidden: int = 128
    layers: int = 2
    batch: int = 64
    tokens: int = 512


SMALL = Sizes(keys=4, hidden=16, batch=4, tokens=32)


class Mixer(nn.Module):
    """y = out(x1 * conv(x2 * v)), the three of one projection, each after a convolution of three tokens."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.project, self.out = nn.Linear(sizes.hidden, 3 * sizes.hidden), nn.Linear(sizes.hidden, sizes.hidden)
        self.short = tkq.nn.ShortConvolution(3 * sizes.hidden, 3, bias=True)
        self.long = tkq.nn.HyenaFilterConv(sizes.hidden, sizes.tokens)

    def forward(self, x, convolve: Callable):
        first, second, v = self.short(self.project(x)).mT.chunk(3, 1)
        return self.out(convolve(self.long, v, second, first).mT)


class Model(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.words = nn.Embedding(2 * sizes.keys, sizes.hidden)
        nn.init.normal_(self.words.weight, std=sizes.hidden**-0.5)
        self.mixers = nn.ModuleList(Mixer(sizes) for _ in range(sizes.layers))
        self.mlps = nn.ModuleList(nn.Sequential(
            nn.LayerNorm(sizes.hidden), nn.Linear(sizes.hidden, 4 * sizes.hidden), nn.GELU(),
            nn.Linear(4 * sizes.hidden, sizes.hidden)) for _ in range(sizes.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.hidden) for _ in range(sizes.layers + 1))

    def forward(self, ids, convolve: Callable):
        x = self.words(ids)
        for norm, mixer, mlp in zip(self.norms, self.mixers, self.mlps):
            x = x + mixer(norm(x), convolve)
            x = x + mlp(x)
        return F.linear(self.norms[-1](x), self.words.weight)


def on_tkq(layer, v, pre, post):
    return layer(v, pre, post)


def on_torch(layer, v, pre, post):
    """In float32."""
    return long_convolution.fft_conv(v, layer.filter(v.shape[2]), layer.d, True, pre, post).to(v.dtype)


def recall(sizes: Sizes, steps: int, device):
    """(ids, what follows each, -1 where that is not to be known): pairs in which a key has one value throughout."""
    g = torch.Generator().manual_seed(0)
    for _ in range(steps):
        values = torch.randint(sizes.keys, (sizes.batch, sizes.keys), generator=g)
        keys = torch.randint(sizes.keys, (sizes.batch, sizes.tokens // 2), generator=g)
        found = values.gather(1, keys)
        ids = torch.stack((keys, found + sizes.keys), 2).view(sizes.batch, -1)
        seen = torch.zeros(sizes.batch, sizes.keys).scatter_reduce(
            1, keys, torch.arange(sizes.tokens // 2, dtype=torch.float32).expand_as(keys), "amin", include_self=False)
        known = torch.arange(sizes.tokens // 2) > seen.gather(1, keys)
        target = torch.full_like(ids, -1)
        target[:, ::2] = torch.where(known, found + sizes.keys, -1)
        yield ids.to(device), target.to(device)


def train(sizes: Sizes, steps: int, convolve: Callable, device) -> tuple[list[float], float]:
    """The losses, and milliseconds of a step, from the tenth on."""
    torch.manual_seed(0)
    model, losses = Model(sizes).to(device), []
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.1)
    began = time.perf_counter()
    for step, (ids, target) in enumerate(recall(sizes, steps, device)):
        if step == min(10, steps - 1):
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(ids, convolve)
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses).tolist()  # waits for the GPU
    return losses, 1e3 * (time.perf_counter() - began) / (steps - min(10, steps - 1))


def apart(ours, theirs) -> float:
    """By how much the means of the last tenth differ, relative to the second."""
    last = max(1, len(ours) // 10)
    return abs(sum(ours[-last:]) / sum(theirs[-last:]) - 1)


def main(words=None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, steps = Sizes(), parser.parse_args(words).steps
    if device.type == "cpu":
        sizes, steps = SMALL, min(steps, 5)
        print(f"No GPU: {steps} steps of a smaller model by the CPU references, nothing is timed")
    found = {name: train(sizes, steps, convolve, device) for name, convolve in (("tkq", on_tkq), ("torch", on_torch))}
    for name, (losses, ms) in found.items():
        timed = f", {ms:.2f} ms a step" if device.type == "cuda" else ""
        print(f"{name}: loss {losses[0]:.3f} at first, {losses[-1]:.4f} after {steps} steps{timed}")
    by = apart(*(losses for losses, _ in found.values()))
    print(f"the last tenth's means differ by {100 * by:.2f} %")
    if by <= ALIKE:
        return 0
    print(f"failed: {100 * ALIKE:.0f} % is allowed")  # also where one is NaN
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""What reaches segments of Kimi's delta rule with bounded gates, in float64, as `bounded.reach.BoundedReach` has it."""

import torch

from tkq.linear_attention.blocks.pairs import EDGE
from tkq.linear_attention.channels.bounded.reach import AT_ONCE, SLACK
from tkq.linear_attention.channels.bounded.split import MOST_REACHED
from tkq.linear_attention.config import ALL, CHUNK
from tkq.linear_attention.split.reach import NOTHING


def of_layer(k, x, A_log, bias, bound):
    """(keys of length 1, logarithms of decays), (B, S, HO, K) float64, of a `BoundedGiven`'s."""
    k, HO = k.double(), x.shape[2]
    k = (k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(HO // k.shape[2], 2)
    return k, bound * (A_log.double().exp()[:, None] * (x.double() + bias.double().view(HO, -1))).sigmoid()


def norms(k, g, beta):
    """(B, S // 16, HO): of each 16 tokens a bound of the norm of what they make of a state, as a power of 2. k, g: as
    `of_layer` has them. beta: (B, S, HO)."""
    whole = k.shape[1] // EDGE

    def blocks(x):
        return x[:, :whole * EDGE].double().unflatten(1, (whole, EDGE))

    sizes, decays, beta = blocks(k).abs(), blocks(g).exp(), blocks(beta)
    p, w = torch.ones_like(sizes[:, :, 0]), torch.ones_like(beta[:, :, 0])
    for i in reversed(range(EDGE)):
        m = beta[:, :, i].abs() * SLACK * torch.minimum((sizes[:, :, i] * p).sum(-1), w)
        p = (p + m[..., None] * sizes[:, :, i]) * decays[:, :, i]
        w = w * (1 - beta[:, :, i]).abs().clamp(min=1.0)
    return torch.minimum((p.amax(-1).log2() + p.sum(-1).log2()) / 2, w.log2())


def reach(k, x, beta, A_log, bias, bound, count):
    """(B, count - 1, HO) int32, and how near to what is nothing the sums at edges of chunks are."""
    chunks = -(-x.shape[1] // CHUNK)
    each = -(-chunks // count)
    most = min(each // 2, MOST_REACHED) // AT_ONCE * AT_ONCE
    of_blocks = norms(*of_layer(k, x, A_log, bias, bound), beta)
    of_chunks = of_blocks[:, :x.shape[1] // CHUNK * 4].unflatten(1, (-1, 4)).sum(2)
    found, near = [], []
    for n in range(1, count):
        sums = of_chunks[:, n * each - most:n * each].flip(1).cumsum(1)
        steps = sums[:, AT_ONCE - 1::AT_ONCE]  # of a kernel's turn
        times = torch.arange(1, steps.shape[1] + 1, device=k.device).view(1, -1, 1)
        pace = steps * (steps.shape[1] / times)
        hopeful = (pace <= NOTHING).int().cummin(1).values.sum(1)  # turns after which there is another one
        reached = (sums >= NOTHING).int().cummin(1).values.sum(1) + 1
        found.append(reached.masked_fill(reached > AT_ONCE * (hopeful + 1).clamp(max=steps.shape[1]), ALL))
        near.append(torch.minimum((sums - NOTHING).abs().amin(1), (pace - NOTHING).abs().amin(1)))
    return torch.stack(found, 1).int(), torch.stack(near, 1)

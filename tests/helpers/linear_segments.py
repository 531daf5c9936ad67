"""Linear attention in segments, in plain PyTorch, as `tkq.linear_attention.split` computes it: exactly, in float64, or
rounded where the kernels round."""
import math

import torch

from tests.helpers.linear_launches import launched
from tkq.linear_attention.config import ALL, CHUNK
from tkq.linear_attention.engine.gates import LOWEST
from tkq.linear_attention.launch import Made
from tkq.reference.ssd import biased, step_sizes

OF_TOKENS = "q", "k", "v", "g", "beta", "x", "q2", "k2", "v2", "inverse", "kept", "less"


def cut(given, count):
    """The segments of a given, in the order in which they are visited."""
    tokens = given.q.shape[1]
    chunks = -(-tokens // CHUNK)
    each = -(-chunks // count) * CHUNK

    def part(x, at):
        return x if x is None or x.dim() == 1 else x[:, at]

    found = []
    for start in range(0, tokens, each):
        at = slice(start, start + each)
        steps = given.steps and given.steps._replace(dt=part(given.steps.dt, at))
        found.append(given._replace(**{name: part(getattr(given, name), at) for name in OF_TOKENS}, steps=steps))
    return found[::-1] if given.reverse else found


def in_segments(given, scale, count) -> Made:
    """As `split.launch.in_segments`; `count` segments at most."""
    parts, first, made = cut(given, count), given.initial, []
    wide = torch.promote_types(given.q.dtype, torch.float32)
    if first is None:
        V, K = given.v.shape[3], given.q.shape[3]
        heads = max(given.q.shape[2], given.v.shape[2])
        first = torch.zeros(len(given.q), heads, *((V, K) if given.state_v_first else (K, V)), dtype=wide,
                            device=given.v.device)
    starts = []
    for part in parts:
        outputs = launched(part._replace(initial=first, final=None), scale)
        made.append(outputs)
        starts.append(first.mT if given.state_v_first else first)
        first = becomes(part, scale, first.to(wide)) + adds(part, scale)
    whole, starts = (made[::-1], starts[::-1]) if given.reverse else (made, starts)

    def joined(name, sums=False):
        found = [getattr(one, name) for one in whole]
        return None if found[0] is None else sum(found) if sums else torch.cat(found, 1)

    return Made(joined("o"), None if given.final is None else first, joined("dots"), joined("dv"),
                joined("of_skip", True), joined("diagonal"), inverse=joined("inverse"),
                starts=torch.stack(starts, 1).flatten(0, 1))


def from_starts(given, scale) -> Made:
    """Of a given with starts, which are those of its segments: their outputs, and the states behind them."""
    count = len(given.starts) // len(given.q)
    starts = given.starts.unflatten(0, (-1, count)).unbind(1)
    made = [launched(part._replace(initial=start, starts=None), scale) for part, start in
            zip(cut(given, count), starts[::-1] if given.reverse else starts)]
    whole = made[::-1] if given.reverse else made

    def joined(name):
        found = [getattr(one, name) for one in whole]
        return None if found[0] is None else torch.cat(found, 1)

    state = None if given.final is None else torch.stack([one.state for one in whole], 1).flatten(0, 1)
    return Made(joined("o"), state, joined("dots"), joined("dv"), starts=given.starts)


def adds(given, scale):
    """What a segment adds to a state. The delta rule's forward makes it by chunks."""
    given = given._replace(blocks=given.blocks and given.reverse)
    return launched(given._replace(initial=None, final=torch.float32), scale).state


def becomes(given, scale, state):
    """What a segment makes of a state, without what it adds: as float32, where nothing is exact."""
    if given.beta is None:
        decay = factor(given, state.dtype)[..., None, None]
        return decay * state
    B, HV, K, _ = state.shape
    unit = torch.eye(K, dtype=state.dtype, device=state.device).expand(B, HV, K, K)
    nothing = given.v.new_zeros(*given.v.shape[:3], K)
    given = given._replace(blocks=given.blocks and given.reverse)
    transfer = launched(given._replace(v=nothing, initial=unit, final=torch.float32, updates=False, x=None),
                        scale).state
    return transfer @ state


def factor(given, dtype):
    """(B, HO): the product of the decays."""
    B, S = given.q.shape[:2]
    heads = max(given.q.shape[2], given.v.shape[2])
    if given.steps:
        d = step_sizes(biased(given.steps.dt, given.steps.bias), given.steps.softplus,
                       (given.steps.low, given.steps.high))
        g = d.to(dtype) * given.steps.A.to(dtype)
    elif given.g is None:
        g = torch.zeros(B, S, heads, dtype=dtype, device=given.v.device)
    else:
        g = given.g.to(dtype).expand(B, S, heads)
    return g.sum(1).exp()


def reach(k, g, beta, count, nothing):
    """As `split.reach.Reach` has it, in float64: (2, B * count, HO), and how near to `nothing` the bounds at edges of
    chunks are."""
    (B, S, H, _), HO = k.shape, g.shape[2]
    chunks = -(-S // CHUNK)
    each = -(-chunks // count)
    square = k.double().square().sum(-1).repeat_interleave(HO // H, 2)
    bound = (g.double() / math.log(2)).clamp(min=LOWEST) + (beta.double() * square - 1).abs().clamp(min=1.0).log2()
    found = torch.full((2, B, count, HO), ALL, dtype=torch.int32, device=k.device)
    near = torch.full(found.shape, math.inf, dtype=torch.float64, device=k.device)
    for n in range(count):
        parts = bound[:, n * each * CHUNK:(n + 1) * each * CHUNK].split(CHUNK, 1)
        parts = [part.sum(1) for part in parts if part.shape[1]]
        for way, order in enumerate((parts[::-1], parts)):
            if not parts:
                continue
            sums = torch.stack(order).cumsum(0)
            found[way, :, n] = (sums >= nothing).int().cummin(0).values.sum(0) + 1
            found[way, :, n].masked_fill_((sums >= nothing).all(0), ALL)
            near[way, :, n] = (sums - nothing).abs().amin(0)
    return found.flatten(1, 2), near.flatten(1, 2)

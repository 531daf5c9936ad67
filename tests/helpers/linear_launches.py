"""The launches of linear attention's engine in plain PyTorch, chunk by chunk as `LinearAttention` has them: exactly, in
float64, or rounded where the kernel rounds."""
import itertools
import math

import torch

from tkq.linear_attention.blocks.pairs import EDGE
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.gates import LOWEST
from tkq.linear_attention.launch import Made
from tkq.linear_attention.spec import LEAST
from tkq.reference.linear_attention import edges
from tkq.reference.ssd import biased, step_sizes

SECOND = "q2", "k2", "v2"


def of_gradients(given, reverse):
    """What gradients need of a delta rule's forward, or, reversed, the launch that takes it: v is the outputs'
    gradient, and what values lack anything."""
    forward = given._replace(updates=True)
    if not reverse:
        return forward
    inverse = launched(forward._replace(initial=None, final=None), 1.0).inverse
    return given._replace(q=given.k, k=given.q, x=torch.randn_like(given.v), reverse=True, inverse=inverse)


def launched(given, scale) -> Made:
    """As `launch.launch`. float64 stays float64, nothing is rounded; what is of 16 bits is computed in float32, its
    operands are rounded as the kernel's are, where it goes by blocks that of each block."""
    if given.cu is not None:
        return of_sequences(given, scale, launched)
    (B, S, H, _), (HV, V) = given.q.shape, given.v.shape[2:]
    heads = max(H, HV)
    wide = torch.promote_types(given.q.dtype, torch.float32)

    def of_heads(x):
        return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2).to(wide)

    q, k, v = map(of_heads, given[:3])
    g = torch.zeros(1, dtype=wide, device=v.device) if given.g is None else given.g.to(wide)
    steps, d = given.steps, None
    if steps:
        d = step_sizes(biased(steps.dt, steps.bias), steps.softplus, (steps.low, steps.high)).to(wide)
        g, d = d * steps.A.to(wide), d.transpose(1, 2)[..., None]
    g = g.clamp(min=LOWEST * math.log(2)).expand(B, S, heads).transpose(1, 2)
    beta = None if given.beta is None else given.beta.to(wide).transpose(1, 2)[..., None]
    initial = given.initial.mT if given.state_v_first and given.initial is not None else given.initial
    state = q.new_zeros(B, heads, q.shape[3], V) if initial is None else initial.to(wide)
    out, lacking, out2, own = (torch.zeros_like(v) for _ in range(4))
    inverses = v.new_zeros(B, heads, S, CHUNK) if given.inverse is None else of_heads(given.inverse)
    more = _second_of(given, of_heads)
    size = EDGE if given.blocks else CHUNK
    starts = range(0, S, size)
    for start in reversed(starts) if given.reverse else starts:
        at = slice(start, start + size)
        chunk = Chunk(given, scale, g[:, :, at].cumsum(-1), None if beta is None else beta[:, :, at],
                      inverses[:, :, at])
        if steps and not given.reverse:
            chunk.adds(d[:, :, at])
        chunk.corrects(at)
        rows = q[:, :, at], k[:, :, at], v[:, :, at]
        old = state
        out[:, :, at], state = chunk.step(*rows, old)
        parts = {name: x[:, :, at] for name, x in more.items()}
        chunk.second(rows, parts, old, (*(x[:, :, at] for x in (out, out2, own)), state))
        lacking[:, :, at] = chunk.lacking
    sums = lacking if beta is not None else out  # of gradients of corrected values
    dots = (sums * of_heads(given.x) - (out2 + own) * v).sum(-1).transpose(1, 2) if given.dot else None
    of_skip = diagonal = None
    if steps and given.dot:  # sums are of others than the token itself
        diagonal = (q * k).sum(-1, keepdim=True)
        out = out + diagonal * (scale if given.reverse else scale * d) * v
        diagonal = diagonal[..., 0].transpose(1, 2)
    if steps:
        out = d * out if given.reverse else out
        if steps.skip is not None:
            D = steps.skip.to(wide)
            out = out + D.reshape(heads, 1, -1) * v
        if steps.gated:
            out = out * torch.nn.functional.silu(of_heads(given.x))
        of_skip = (v * of_heads(given.x)).sum(2) if steps.skip_gradient else None
    out, out2 = _of_neighbours(given, out, own - out2 if given.dot else out2)
    dv = _beside(given, lacking if given.updates else out2 if beta is None else None)
    state = None if given.final is None else state.mT if given.state_v_first else state
    return Made(out.transpose(1, 2).to(given.v.dtype), state, dots, dv, of_skip, diagonal,
                inverse=inverses.transpose(1, 2).to(given.v.dtype) if given.updates else None)


def _second_of(given, of_heads):
    """Second operands, and what keys of a chunk get something of."""
    names = *SECOND, *("x",) * (given.second == "query" and given.dot)
    return {name: of_heads(x) for name, x in ((name, getattr(given, name)) for name in names) if x is not None}


def _of_neighbours(given, *outputs):
    """Outputs, summed where they are: one head's is sent to the other, rounded; the first with what is added or taken
    off."""
    if given.summed:
        both = [x.unflatten(1, (-1, 2)).unbind(2) for x in outputs]
        outputs = [x + y.to(given.v.dtype).to(x.dtype) for x, y in both]
    out, *rest = outputs
    sign = 1.0 if given.dot else -1.0
    return out if given.less is None else out + sign * given.less.transpose(1, 2).to(out.dtype), *rest


def _beside(given, found):
    """What comes out beside o."""
    there = given.beta is not None or given.q2 is not None
    return found.transpose(1, 2).to(given.v.dtype) if there and found is not None else None


def of_sequences(given, scale, launched):
    """Each by itself; zeros for tokens of none, but NaN in the sums of o times x, as the kernel leaves them. launched:
    of a batch."""
    more = (*SECOND, "less", "second", "rest")
    tensors = [name for name in ("q", "k", "v", "g", "beta", "x", "inverse", "kept", *more) if name in given._fields]
    made, cuts = [], edges(given.cu, given.q.shape[1]).tolist()
    for n, (begin, end) in enumerate(itertools.pairwise(cuts)):
        part = {name: x if x is None or x.dim() == 1 else x[:, begin:end]
                for name, x in ((name, getattr(given, name)) for name in tensors)}
        if getattr(given, "steps", None):
            part["steps"] = given.steps._replace(dt=given.steps.dt[:, begin:end])
        if getattr(given, "end", None) is not None:
            part["end"] = given.end[n:n + 1]
        initial = None if given.initial is None else given.initial[n:n + 1]
        made.append(launched(given._replace(**part, initial=initial, cu=None), scale))

    def whole(name, fill):
        parts = [getattr(one, name) for one in made]
        if parts[0] is None:
            return None
        found = parts[0].new_full((1, given.q.shape[1], *parts[0].shape[2:]), fill)
        for x, (begin, end) in zip(parts, itertools.pairwise(cuts)):
            found[:, begin:end] = x
        return found

    less = None if hasattr(given, "summed") else getattr(given, "less", None)  # of columns: sums of none are zeros
    of_none = math.nan if given.beta is less is None else 0.0
    return Made(whole("o", 0.0), None if given.final is None else torch.cat([one.state for one in made]),
                whole("dots", of_none), whole("dv", 0.0),
                None if made[0].of_skip is None else torch.cat([one.of_skip for one in made]),
                whole("diagonal", math.nan), inverse=whole("inverse", 0.0))


class Chunk:
    """One chunk of all heads."""

    def __init__(self, given, scale, sums, beta, inverse):
        """inverse: its rows of all chunks' inverses, written where they are not given."""
        self.given, self.scale, self.beta, self.total = given, scale, beta, sums[..., -1:, None].exp()
        self.in_two, self.place = given.dot and beta is None, inverse
        self.scores_in_two = self.in_two and not given.second
        self.sign = None if beta is None else torch.where(beta < 0.0, -1.0, 1.0)
        self.lacking = 0.0  # with updates: what is kept; reversed, the gradients of what values lack
        first, second = sums[..., :, None], sums[..., None, :]
        self.forward = (first - second).clamp(max=0).exp()
        self.decay = self.forward.mT if given.reverse else self.forward
        self.begun = sums[..., None].exp()
        left = (sums[..., -1:] - sums)[..., None].exp()
        self.at_query, self.to_end = (left, self.begun) if given.reverse else (self.begun, left)

    def adds(self, d):
        """Tokens add d times their values: Mamba-2's."""
        self.decay, self.to_end = self.decay * d.mT, self.to_end * d

    def corrects(self, at):
        """Where keys, or reversed queries, are what a delta rule's forward has kept, each has a factor, of beta's size,
        which the state takes up with the values, rounded once."""
        kept = self.given.kept
        if kept is None:
            return
        size = kept.to(self.decay.dtype).transpose(1, 2)[:, :, at, None].abs()
        factor = torch.where(size >= LEAST, 1.0, size)
        if self.given.reverse:
            self.decay, self.at_query = self.decay * factor, self.at_query * factor
        else:
            self.adds(factor)

    def narrow(self, x, in_two=False):
        """As an operand. in_two: in two parts, with what rounding leaves."""
        first = x.to(self.given.v.dtype).to(x.dtype)
        return first + self.narrow(x - first) if in_two else first

    def scores(self, q, k):
        p = self.scale * self.decay * (q @ k.mT)
        above = int(self.given.strict or (self.given.steps is not None and self.given.dot))
        return self.narrow(p.triu(above) if self.given.reverse else p.tril(-above), self.scores_in_two)

    def second_scores(self, q, k):
        p = self.decay * (q @ k.mT)
        return self.narrow(p.triu(1) if self.given.reverse else p.tril(-1), self.scores_in_two)

    def second(self, rows, more, old, found):
        """What second operands change, in place. rows: q, k, v. old: the state before the chunk. found: outputs, second
        outputs, what the chunk's pairs give keys, and the state behind the chunk."""
        (q, k, v), (o, o2, own, state) = rows, found
        if "q2" in more:
            q2 = more["q2"]
            o2 += self.at_query * (q2 @ self.narrow(old, self.in_two)) + self.second_scores(q2, k) @ v
            if self.given.dot:
                own += self.scores(q, k).mT @ more["x"] - self.second_scores(q2, k).mT @ v
        elif more:
            k2, v2 = more["k2"], more["v2"]
            if not self.given.dot:
                o -= self.second_scores(q, k2) @ v2
            state -= k2.mT @ self.narrow(self.to_end / self.scale * v2, self.in_two)

    def of_keys(self, keys):
        return (self.forward * (keys @ keys.mT)).tril(-1)

    def inverse(self, keys):
        tokens = keys.shape[-2]
        if self.given.inverse is not None:
            return self.place[..., :tokens]
        of_columns = self.given.updates or (self.given.blocks and self.given.reverse)
        lower = (self.beta.mT if of_columns else self.beta) * self.of_keys(keys)
        unit = torch.eye(tokens, dtype=lower.dtype, device=lower.device).expand_as(lower)
        solved = torch.linalg.solve_triangular(unit + lower, unit, upper=False)
        self.place[..., :tokens] = self.narrow(solved, self.given.blocks)
        return self.place[..., :tokens]

    def step(self, q, k, v, state):
        """(outputs, the state behind the chunk)"""
        in_two, values = self.in_two, v
        old = self.narrow(state, in_two)
        if self.beta is not None and not self.given.reverse:
            if self.given.updates or self.given.inverse is not None:
                self.lacking = self.inverse(k) @ self.narrow(v - self.begun * (k @ old))
                values = self.beta * self.lacking
                self.lacking = torch.where(self.beta.abs() >= LEAST, values, self.sign * self.lacking)
            else:
                values = self.inverse(k) @ self.narrow(self.beta * v - self.beta * self.begun * (k @ old))
            v = self.narrow(values)
        o = self.scale * self.at_query * (q @ old)
        of_others = self.given.others or (self.given.second == "pair" and self.given.dot)
        o = o if of_others else o + self.scores(q, k) @ v
        state = self.total * state + k.mT @ self.narrow(self.to_end * values, in_two)
        if self.beta is not None and self.given.reverse:
            direct, o = o, self.inverse(q).mT @ self.narrow(self.beta * o)
            self.lacking = direct - self.narrow(self.of_keys(q)).mT @ self.narrow(o)
            self.lacking = torch.where(self.beta.abs() >= LEAST, self.narrow(o) / self.beta**2,
                                       self.sign * self.lacking)
            state = state - q.mT @ self.narrow(self.begun / self.scale * o)
        return o, state

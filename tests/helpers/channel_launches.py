"""The launches of gates for each column in plain PyTorch, chunk by chunk and level by level as the kernels have them:
exactly, in float64, or rounded where the kernels round."""
import torch
from torch.nn.functional import pad

from tests.helpers.linear_launches import of_sequences
from tkq.linear_attention.channels.columns import HALVES
from tkq.linear_attention.channels.whole_of_values import MOST
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.launch import Made


def launched(given, scale, strict=False, of_pairs=False) -> Made:
    """As `launch.launch` of the channels. float64 stays float64, nothing is rounded; what is of 16 bits is computed in
    float32, its operands are rounded as the kernel's are. With of_values: strict: a token does not see itself;
    of_pairs: of two passes."""
    if given.cu is not None:
        return of_sequences(given, scale, launched)
    if given.second is not None:
        return in_pairs(given, scale)
    (B, S, H, _), (HV, V) = given.q.shape, given.v.shape[2:]
    heads = max(H, HV)
    wide = torch.promote_types(given.q.dtype, torch.float32)

    def of_heads(x):
        x = pad(x.to(wide), (0, 0, 0, 0, 0, -S % CHUNK))
        return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)

    q, k, v, decays = *map(of_heads, given[:3]), of_heads(given.g).exp()
    beta = None if given.beta is None else of_heads(given.beta[..., None])
    state = q.new_zeros(B, heads, q.shape[3], V) if given.initial is None else given.initial.to(wide)
    out, dots, x = torch.zeros_like(v), torch.zeros_like(v), None if given.x is None else of_heads(given.x)
    lacking = torch.zeros_like(v)
    starts = range(0, S, CHUNK)
    for start in reversed(starts) if given.reverse else starts:
        at = slice(start, start + CHUNK)
        chunk = Chunk(given, scale, decays[:, :, at], None if beta is None else beta[:, :, at], of_pairs)
        if given.of_values:
            out[:, :, at], dots[:, :, at], state = chunk.of_values(
                q[:, :, at], k[:, :, at], v[:, :, at], state, None if x is None else x[:, :, at], strict)
        else:
            out[:, :, at], state = chunk.of_keys(q[:, :, at], k[:, :, at], v[:, :, at], state)
            if given.updates:
                lacking[:, :, at] = chunk.lacking
    out, dots = out[:, :, :S], None if x is None else dots[:, :, :S].transpose(1, 2)
    dv = None
    if beta is not None and (given.reverse or given.updates):
        dv = (lacking[:, :, :S] if given.updates else beta[:, :, :S] * out).transpose(1, 2).to(given.v.dtype)
    out = out.transpose(1, 2)
    dots = None if dots is None else added_up(given, dots)
    out = out if given.of_values and not given.narrow else out.to(given.v.dtype)
    return Made(out, None if given.final is None else state, dots, dv)


def in_pairs(given, scale) -> Made:
    """As `value_pairs` has them, by two launches."""
    parts = dict(second=None, v2=None, rest=None, less=None, end=None, narrow=False)
    if not given.reverse:
        first = launched(given._replace(**parts), scale, False, True)
        second = launched(given._replace(**parts, q=given.second, x=given.v, final=None), 1.0, True, True)
        o, dots, o2 = first.o, first.dots - second.dots, -second.o
    else:
        initial = None if given.initial is None else given.initial / scale
        first = launched(given._replace(**parts, initial=initial, x=given.v2), scale, False, True)
        parts.update(initial=None, k=given.second, v=given.v2, x=given.v2)
        second = launched(given._replace(**parts), 1.0, True, True)
        o, dots, o2 = first.o - second.o, first.dots - second.dots, None
        o = o if given.rest is None else o + given.rest
    return Made(o.to(given.v.dtype) if given.narrow else o, first.state, added_up(given, dots), o2)


def added_up(given, dots):
    """Dots, or sums of them and others."""
    if given.less is None:
        return dots
    dots = (given.less - dots).flip(1).cumsum(1).flip(1)
    return dots if given.end is None else dots + given.end[:, None]


class Chunk:
    """One chunk of all heads; decays: (B, heads, 64, columns)."""

    def __init__(self, given, scale, decays, beta, of_pairs=False):
        self.given, self.scale, self.beta, self.decays, self.of_pairs = given, scale, beta, decays, of_pairs
        self.total = decays.prod(-2, keepdim=True)
        self.before, self.behind = decays.cumprod(-2), self.suffixes(decays)
        self.of_queries, self.of_keys_ = (self.behind, self.before) if given.reverse else (self.before, self.behind)

    @staticmethod
    def suffixes(x):
        """Products behind each."""
        return torch.cat([x[..., 1:, :], torch.ones_like(x[..., :1, :])], -2).flip(-2).cumprod(-2).flip(-2)

    def narrow(self, x):
        return x.to(self.given.v.dtype).to(x.dtype)

    def levels(self):
        """(mask of later rows and earlier columns, factors of each token) of each level; the diagonal has ones."""
        i = torch.arange(CHUNK, device=self.decays.device)
        yield i[:, None] == i, torch.ones_like(self.decays)
        for half in HALVES:
            parts = self.decays.unflatten(-2, (-1, 2, half))
            factors = torch.stack([self.suffixes(parts[..., 0, :, :]), parts[..., 1, :, :].cumprod(-2)], -3)
            late, early = i[:, None], i[None]
            yield ((late ^ early) // half == 1) & (late // half % 2 == 1), factors.flatten(-4, -2)

    def pairs(self, late, early, diagonal=True):
        """(64, 64) of each head: of later rows and earlier columns."""
        found = 0
        for n, (mask, factors) in enumerate(self.levels()):
            if n or diagonal:
                found = found + mask * (self.narrow(late * factors) @ self.narrow(early * factors).mT)
        return found

    def inverse(self, keys):
        lower = (self.beta.mT if self.given.updates else self.beta) * self.pairs(keys, keys, False)
        unit = torch.eye(CHUNK, dtype=lower.dtype, device=lower.device).expand_as(lower)
        return self.narrow(torch.linalg.solve_triangular(unit + lower, unit, upper=False))

    def of_keys(self, q, k, v, state):
        """(outputs, the state behind the chunk)"""
        reverse, delta, total = self.given.reverse, self.beta is not None, self.total.mT
        old, keys = self.narrow(state), q if reverse else k
        started = self.narrow(keys * self.before)
        if self.given.updates:
            self.lacking = self.inverse(k) @ self.narrow(v - started @ old)
            values = self.beta * self.lacking
            return values, total * state + self.narrow(k * self.of_keys_).mT @ self.narrow(values)
        if delta and not reverse:
            v = self.narrow(self.inverse(k) @ self.narrow(self.beta * v - self.beta * (started @ old)))
        p = self.pairs(k, q).mT if reverse else self.pairs(q, k)
        o = self.scale * (self.narrow(q * self.of_queries) @ old) + self.narrow(self.scale * p) @ v
        state = total * state + self.narrow(k * self.of_keys_).mT @ v
        if delta and reverse:
            o = self.inverse(q).mT @ self.narrow(o)
            state = state - started.mT @ self.narrow(self.beta / self.scale * o)
        return o, state

    def of_values(self, q, k, v, state, x, strict):
        """(outputs, those times x, the state behind the chunk): of each 64 columns by one product, or by levels."""
        by_levels = self.in_levels(q, k, v, state, x, strict)
        near = self.near()
        if not near.any():
            return by_levels
        return [torch.where(near, a, b) for a, b in zip(self.at_once(q, k, v, state, x, strict), by_levels)]

    def near(self):
        """(B, heads, 1, columns): are these decays near enough for `Whole`, where there are roundings?"""
        logs = self.decays.log2()
        near = (logs.unflatten(-2, (2, -1)).sum(-2).amin(-2) >= -MOST) & (logs <= 0).all(-2)
        near = near & (self.given.v.dtype == torch.bfloat16)
        parts = [part.all(-1, keepdim=True).expand_as(part) for part in near.split(CHUNK, -1)]
        return torch.cat(parts, -1)[..., None, :]

    def at_once(self, q, k, v, state, x, strict):
        """As `WholeOfValues` has it: Q K' and rows of v with their factors in two parts each, but for the product of
        what rounding leaves of both, and nothing of x is rounded; of pairs of passes Q K' alone."""
        reverse, halves = self.given.reverse, self.decays.unflatten(-2, (2, -1)).prod(-2)
        f = self.decays.log2().cumsum(-2)
        f = (f - f[..., CHUNK // 2 - 1:CHUNK // 2, :]).exp2()
        taken, given = (1 / f, f) if reverse else (f, 1 / f)
        before, after = (halves[..., n:n + 1, :] for n in ((1, 0) if reverse else (0, 1)))
        state = before * state
        old = self.narrow(state)
        if x is not None:
            old = old + self.narrow(state - old)
        p = q @ k.mT
        p, p_left = self.in_two_parts(p.triu(int(strict)) if reverse else p.tril(-int(strict)))
        v, v_left = self.in_two_parts(v * given)
        if self.of_pairs:
            v_left = 0 * v_left
        found = self.scale * (q @ old + p @ (v + v_left) + p_left @ v)
        dots = 0 * found if x is None else found * (self.narrow(x * taken) if self.of_pairs else x * taken)
        return found * taken, dots, after * (state + k.mT @ (v + v_left))

    def in_two_parts(self, x):
        """What is rounded, and what rounding leaves."""
        rounded = self.narrow(x)
        return rounded, self.narrow(x - rounded)

    def in_levels(self, q, k, v, state, x, strict):
        """As `Columns` has it."""
        old = self.narrow(state)
        if x is not None:
            old = old + self.narrow(state - old)
        given, p = self.scale * (q @ old), self.narrow(self.scale * (q @ k.mT))
        dots = torch.zeros_like(given)
        steps = [(given, self.of_queries)]
        for n, (mask, factors) in enumerate(self.levels()):
            if n or not strict:
                mask = mask.mT if self.given.reverse else mask
                steps.append(((p * mask) @ self.narrow(v * factors), factors))
        if x is not None:
            dots = sum(given * self.narrow(x * factors) for given, factors in steps)
        return (sum(given * factors for given, factors in steps), dots,
                self.total * state + k.mT @ self.narrow(v * self.of_keys_))

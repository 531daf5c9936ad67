"""Gradients of attention over packed sequences on a GPU: each sequence beside float64."""
import math

import torch

from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward.varlen_ops import attention_varlen_backward, run
from tkq.reference import attention_backward as reference_attention
from tkq.testing import assert_2x

BF16 = torch.bfloat16
MIXED = ((1, 1), (0, 0), (513, 513), (64, 64), (1, 900), (0, 70), (65, 0), (113, 203), (300, 100), (129, 127), (2, 63))
MANY = tuple((n, n) for n in (3, 70, 1, 128, 64, 0, 5) * 12)
LONGER = ((4097, 4097), (63, 63), (65, 65), (799, 3), (1023, 1023), (1024, 1023), (63, 65))
NAMES = "dq", "dk", "dv", "dsinks"


def cumulated(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def one_sequence(q, k, v, do, dlse, sinks, options, dtype):
    """o, lse and the gradients (of q, k, v and sinks) of one sequence, by autograd of plain operations in dtype."""
    causal, _, left, right, softcap = options
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    sink = None if sinks is None else sinks.detach().to(dtype).requires_grad_()
    wq, wk, wv = (x.transpose(0, 1) for x in (
        leaves[0], *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:])))
    s = wq @ wk.transpose(-1, -2) * q.shape[-1] ** -0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    mask = reference_attention.seen(q.shape[0], k.shape[0], causal, (left, right), q.device)
    some = mask.any(-1)
    none = torch.full((), -math.inf, dtype=dtype, device=q.device)
    if sink is not None:
        s = torch.cat([torch.where(mask, s, none), sink[:, None, None].expand(*s.shape[:2], 1)], -1)
        lse = s.logsumexp(-1)
    else:
        s = torch.where(mask | ~some[:, None], s, none)
        lse = torch.where(some, s.logsumexp(-1), none) if k.shape[0] else none.expand(s.shape[:2])
    o = ((s.softmax(-1)[..., :k.shape[0]] * some[:, None]) @ wv).transpose(0, 1)
    loss = (o.double() * do.double()).sum()
    if dlse is not None:
        loss = loss + torch.where(torch.isfinite(lse), lse.double() * dlse.double(), 0.0).sum()
    inputs = leaves if sink is None else [*leaves, sink]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return o.detach(), lse.detach(), [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]


def from_results(q, k, v, do, dlse, sinks, options, o, lse, true):
    """The same gradients, true, by the formula in float64 from o and lse as the kernel gets them: rowsum(o * do) of an
    o that was rounded is off by as much as what is left of dO V' - rowsum(o * do), where a key has nearly all of a row.
    """
    if not k.shape[0]:
        return true
    causal, scale, left, right, softcap = options
    wide = [x.double()[None] for x in (do, q, k, v, o, lse)]
    found = reference_attention.flash_attn_backward(
        *wide, None if dlse is None else dlse.double()[None], causal, scale, (left, right), softcap,
        None if sinks is None else sinks.double())
    return [x[0] for x in found[:3]] + list(found[3:])


class Problem:
    """Packed tensors, NaN wherever no sequence has a row in use, and what their gradients should be.

    sinks: their dtype, or None. longest: what is said of the lengths. change: of a sequence's q, k, v, do into others
    of their shapes."""

    def __init__(self, lengths, heads, kv_heads, dim, dtype=BF16, dim_v=None, spare=0, in_use=False, sinks=None,
                 dlse=False, longest=900, change=None, options=Options()):  # noqa: B008  (a tuple of numbers)
        g, self.change = torch.Generator("cuda").manual_seed(len(lengths)), change
        self.options, dim_v = options, dim_v or dim
        cu = [cumulated(n) for n in zip(*lengths)]
        used = [torch.tensor([n - n // 3 for n in x], device="cuda", dtype=torch.int32) for x in zip(*lengths)]
        self.lengths = Lengths(*cu, *(used if in_use else (None, None)), longest, longest)
        rows, keys = (int(x[-1]) + spare for x in cu)
        nan = lambda n, h, d: torch.full((n, h, d), math.nan, device="cuda", dtype=dtype)
        q, do = nan(rows, heads, dim), nan(rows, heads, dim_v)
        k, v = nan(keys, kv_heads, dim), nan(keys, kv_heads, dim_v)
        o, lse = torch.zeros_like(do), torch.full((heads, rows), -math.inf, device="cuda")
        self.sinks = torch.randn(heads, device="cuda", generator=g).to(sinks) if sinks else None
        if sinks:
            lse.copy_(self.sinks[:, None].expand_as(lse))
        dlse = torch.randn(heads, rows, device="cuda", generator=g) if dlse else None
        self.tensors = do, q, k, v, o, lse, dlse
        self.true = [torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in (q, k, v)]
        self.low = [torch.zeros_like(x) for x in self.true]
        self.dsinks, self.low_dsinks = torch.zeros(2, heads, dtype=torch.float64, device="cuda")
        for s in range(len(lengths)):
            a, c = (int(x[s]) for x in cu)
            b, d = (x + (int(u[s]) if in_use else n) for x, u, n in zip((a, c), used, lengths[s]))
            self.fill(slice(a, b), slice(c, d), g)

    def fill(self, rows, keys, g):
        do, q, k, v, o, lse, dlse = self.tensors
        for x, part in ((q, rows), (do, rows), (k, keys), (v, keys)):
            x[part] = torch.randn(x[part].shape, device="cuda", generator=g).to(x.dtype)
        if self.change:
            for x, part, new in zip((q, k, v, do), (rows, keys, keys, rows), self.change(
                    q[rows], k[keys], v[keys], do[rows])):
                x[part] = new
        given = q[rows], k[keys], v[keys], do[rows], None if dlse is None else dlse[:, rows], self.sinks, self.options
        if rows.stop > rows.start:
            one_o, one_lse, true = one_sequence(*given, torch.float64)
            o[rows], lse[:, rows] = one_o.to(o.dtype), one_lse.float()
            true = from_results(*given, o[rows], lse[:, rows], true)
            low = one_sequence(*given, q.dtype)[2]
            for to, x in ((self.true, true), (self.low, low)):
                for full, part, piece in zip(to, (rows, keys, keys), x):
                    full[part] = piece.double()
            if self.sinks is not None:
                self.dsinks += true[3]
                self.low_dsinks += low[3]

    def run(self, deterministic=False, config=None):
        """config: instead of the plan's; what is not in use then belongs to no task, and must not be NaN."""
        poison = torch.full((16 << 20,), math.nan, device="cuda")  # what torch.empty is likely to give next
        del poison
        if config is not None:
            found = [torch.full_like(x, math.nan if used is None else 0.0) for x, used in zip(
                self.tensors[1:4], (self.lengths.seqused_q, *[self.lengths.seqused_k] * 2))]
            run(self.tensors, found, self.lengths, self.options, config=config)
            return (*found, None)
        return attention_varlen_backward(self.tensors, self.sinks, self.lengths, self.options,
                                         deterministic=deterministic)

    def judge(self, what="", deterministic=False, config=None):
        found = self.run(deterministic, config)
        for name, a, b, c in zip(NAMES, found, self.true, self.low):
            judged = torch.where((a.double() - b).abs() <= 1e-5, b.to(a.dtype), a)  # sums that cancel; NaN stays
            assert_2x(judged, b, c.to(a.dtype), 1, f"{what} {name}")
        if self.sinks is not None and found[3] is not None:
            assert_2x(found[3], self.dsinks, self.low_dsinks, 1, f"{what} dsinks")
        return found

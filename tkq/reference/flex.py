"""flex_attention in plain PyTorch: its meaning, and the CPU path."""
import torch

from tkq.reference.graphs import evaluate, places_in, values
from tkq.runtime.call import autocast


@autocast.apart
def flex_attention(q, k, v, score, mask, blocks, scale, dtype=torch.float32):
    """(o, lse) of q (B, H, Sq, D), k, v (B, Hk, Sk, D). score, mask: a ``Traced`` or None. blocks: a ``Blocks`` or
    None. dtype: in which it is computed; o is of q's, lse is float32."""
    B, H, Sq, _ = q.shape
    Sk, group = k.shape[2], H // max(k.shape[1], 1)
    q_, k_, v_ = q.to(dtype), *(x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    s = q_ @ k_.mT * scale
    at = places(B, H, Sq, Sk, q.device)
    if score is not None:
        s = evaluate(*score, {**at, "score": s}, dtype).expand(B, H, Sq, Sk)
    if blocks is not None or mask is not None:
        s = s.masked_fill(~seen(mask, blocks, at, (B, H, Sq, Sk)), -torch.inf)
    top = s.amax(-1, keepdim=True) if Sk else s.new_full((B, H, Sq, 1), -torch.inf)
    p = torch.exp(s - top.masked_fill(top == -torch.inf, 0))
    norm = p.sum(-1, keepdim=True)
    empty = norm == 0
    norm = norm.masked_fill(empty, 1)  # no quotient by 0: its gradient would be NaN
    return (p @ v_ / norm).to(q.dtype), (top + norm.log()).masked_fill(empty, -torch.inf).squeeze(-1).float()


@autocast.apart
def flex_attention_backward(call, rows, slope, captures, dtype=torch.float32):
    """(dq, dk, dv, gradients of captured tensors). call: the arguments of ``flex_attention``; rows: (do, o, lse, dlse
    or None); slope: a ``Traced``, the derivative by the score, or None; captures: (a ``CaptureSlopes``, tensors like
    the gradients) or None."""
    q, k, v, score, mask, blocks, scale = call
    (B, H, Sq, _), Sk, group = q.shape, k.shape[2], q.shape[1] // max(k.shape[1], 1)
    do, _, lse, dlse = (None if x is None else x.to(dtype) for x in rows)
    q_, k_, v_ = q.to(dtype), *(x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    at = places(B, H, Sq, Sk, q.device)
    at["score"] = q_ @ k_.mT * scale
    s = at["score"] if score is None else evaluate(*score, at, dtype).expand(B, H, Sq, Sk)
    counts = seen(mask, blocks, at, (B, H, Sq, Sk)) & (lse > -torch.inf).unsqueeze(-1)
    p = torch.exp(s - lse.unsqueeze(-1)).masked_fill(~counts, 0)
    dp = do @ v_.mT
    delta = (p * dp).sum(-1) - (0 if dlse is None else dlse)  # not of o, which has been rounded
    ds = (p * (dp - delta.unsqueeze(-1))).masked_fill(p == 0, 0)
    learned = () if captures is None else _captured(*captures, ds, at, dtype)
    if slope is not None:
        ds = (ds * evaluate(*slope, at, dtype)).masked_fill(p == 0, 0)
    of_group = lambda x: x.unflatten(1, (k.shape[1], group)).sum(2) if group > 1 else x
    found = scale * ds @ k_, of_group(scale * ds.mT @ q_), of_group(p.mT @ do)
    return *(x.to(like.dtype) for x, like in zip(found, (q, k, v))), learned


def _captured(slopes, tensors, ds, at, dtype):
    derivatives, taken = slopes
    found = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in tensors]
    nodes = values(derivatives.graph, *taken[1:], at, dtype)
    for load in derivatives.loads:
        into, of = found[load.gradient], (ds * nodes[load.factor]).masked_fill(ds == 0, 0)
        if load.at:
            place = places_in(into, [nodes[i] for i in load.at])
            into.index_put_(tuple(x.expand(ds.shape) for x in place), of, accumulate=True)
        else:
            into += of.sum()
    return [x.to(like.dtype) for x, like in zip(found, tensors)]


def places(B, H, Sq, Sk, device):
    """Batch, head, row and column of each score, of shapes that go together."""
    return {name: torch.arange(n, device=device, dtype=torch.int32).reshape([-1 if d == i else 1 for d in range(4)])
            for i, (name, n) in enumerate(zip(("b", "h", "q", "kv"), (B, H, Sq, Sk)))}


def seen(mask, blocks, at, shape):
    """Which scores count: of no list, those where the mask holds; else those of full blocks, and of the others, where
    the mask holds."""
    device = at["q"].device
    holds = torch.ones((), dtype=torch.bool, device=device) if mask is None else evaluate(*mask, at)
    if blocks is None:
        return holds.expand(shape)
    lists, size = blocks[:2]
    partial = listed(lists.num, lists.indices, shape, size) & holds
    return partial if lists.full_num is None else partial | listed(lists.full_num, lists.full_indices, shape, size)


def listed(num, indices, shape, size):
    """(B, H, Sq, Sk): is a score in a listed block? A list's numbers count as far as there are such blocks."""
    B, H, Sq, Sk = shape
    columns = -(-Sk // size[1])
    counts = torch.arange(indices.shape[3], device=num.device) < num.unsqueeze(-1)
    found = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.bool, device=num.device)
    found.scatter_(3, torch.where(counts, indices.long().clamp(0, columns - 1), columns), True)
    found = found[..., :columns].repeat_interleave(size[0], 2)[:, :, :Sq].repeat_interleave(size[1], 3)[..., :Sk]
    return found.expand(B, H, Sq, Sk)

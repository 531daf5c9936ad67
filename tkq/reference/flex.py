"""flex_attention in plain PyTorch: its meaning, and the CPU path."""
import torch

from tkq.reference.graphs import evaluate
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
        s = evaluate(*score, {**at, "score": s}, dtype)
    if blocks is not None or mask is not None:
        s = s.masked_fill(~seen(mask, blocks, at, (B, H, Sq, Sk)), -torch.inf)
    top = s.amax(-1, keepdim=True) if Sk else s.new_full((B, H, Sq, 1), -torch.inf)
    p = torch.exp(s - top.masked_fill(top == -torch.inf, 0))
    norm = p.sum(-1, keepdim=True)
    empty = norm == 0
    norm = norm.masked_fill(empty, 1)  # no quotient by 0: its gradient would be NaN
    return (p @ v_ / norm).to(q.dtype), (top + norm.log()).masked_fill(empty, -torch.inf).squeeze(-1).float()


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

"""Trees of drafted tokens, and what their masks mean: for the tests of tree masks."""
import torch


def masks(batch, queries, seed=0, device="cpu"):
    """(B, Sq) int64: each draft's parent is an earlier one, or none; it sees itself and its ancestors."""
    g, found = torch.Generator().manual_seed(seed), torch.zeros(batch, queries, queries, dtype=torch.bool)
    for b in range(batch):
        for i in range(queries):
            parent = int(torch.randint(-1, i, (), generator=g)) if i else -1
            if parent >= 0:
                found[b, i] = found[b, parent]
            found[b, i, i] = True
    return packed(found).to(device)


def packed(seen):
    """(.., Sq) int64 of (.., Sq, drafts) bool: draft j is bit j."""
    bits = torch.tensor([1 << j if j < 63 else -(1 << 63) for j in range(seen.shape[-1])])
    return (seen.cpu() * bits).sum(-1)


def visible(mask, keys):
    """(Sq, keys) bool, draft by draft."""
    queries = len(mask)
    found = torch.ones(queries, keys, dtype=torch.bool)
    for i, word in enumerate(mask.tolist()):
        for key in range(max(keys - queries, 0), keys):
            found[i, key] = bool((word >> (key - (keys - queries))) & 1)
    return found


def attention(q, k, v, seen, sinks=None, softcap=0.0, dtype=torch.float64):
    """(o (Sq, H, Dv), lse (H, Sq)) of one sequence, products in the dtype."""
    shared, wide = q.shape[1] // k.shape[1], torch.float64 if dtype == torch.float64 else torch.float32
    k, v = (x.to(dtype).repeat_interleave(shared, 1).transpose(0, 1) for x in (k, v))
    scores = (q.to(dtype).transpose(0, 1) @ k.mT).to(wide) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.to(q.device), -torch.inf)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide)[:, None].expand_as(lse))
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return (p.to(dtype) @ v).transpose(0, 1), lse

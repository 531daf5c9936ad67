"""What flash-attention's functions give, in float64, without tkq: a page at a time, rotated pair by pair."""
import torch


def attended(q, k, v, causal):
    """q (S, H, D), k and v (L, Hk, D) of one sequence: o, float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        i, j = (torch.arange(n, device=q.device) for n in (q.shape[0], k.shape[0]))
        scores.masked_fill_(j > i[:, None] + k.shape[0] - q.shape[0], float("-inf"))
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1).nan_to_num(0.0), v)


def rotated(x, cos, sin, position, interleaved):
    """x (H, D) at a position, float64; columns behind the table's stay."""
    x, half = x.double().clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i].double(), sin[position, i].double()
        x[:, a], x[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return x


def step(q, caches, new, lengths, where, rotary, causal=True):
    """A call of flash_attn_with_kvcache: o and both caches afterwards. q (B, S, H, D). where: (sequence, position) ->
    (page, row). rotary: (cos, sin, interleaved), or None."""
    keys, values = (x.clone() for x in caches)
    out = []
    for s, length in enumerate(lengths):
        queries = q[s]
        for i in range(new[0].shape[1]):
            k = new[0][s, i] if rotary is None else rotated(new[0][s, i], *rotary[:2], length + i, rotary[2])
            keys[where(s, length + i)], values[where(s, length + i)] = k.to(keys.dtype), new[1][s, i]
        if rotary is not None:
            queries = torch.stack([rotated(x, *rotary[:2], length + i, rotary[2]) for i, x in enumerate(queries)])
        places = [where(s, i) for i in range(length + new[0].shape[1])]
        k, v = (torch.stack([cache[place] for place in places]) for cache in (keys, values))
        out.append(attended(queries.to(q.dtype), k, v, causal))
    return torch.stack(out), keys, values

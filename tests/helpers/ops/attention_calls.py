"""Calls of attention for every_op."""
import torch

import tkq


def shared_heads(t):
    """Heads that share K and V, sinks."""
    return dict(q=t(1, t.rows, 8, 64), k=t(1, t.rows, 2, 64), v=t(1, t.rows, 2, 64), sinks=t(8, dtype=torch.float32))


def heads_first(t):
    """Of flex_attention, and a tensor that its function captures."""
    return dict(query=t(2, 4, t.rows, 64), key=t(2, 4, t.rows, 64), value=t(2, 4, t.rows, 64),
                slopes=t(4, dtype=torch.float32))


def with_slopes(query, key, value, slopes):
    return tkq.flex_attention(query, key, value, lambda score, b, h, q, kv: score + slopes[h] * (kv - q))

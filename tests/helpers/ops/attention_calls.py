"""Calls of attention for every_op."""
import torch

import tkq

F8 = torch.float8_e4m3fn


def shared_heads(t):
    """Heads that share K and V, sinks."""
    return dict(q=t(1, t.rows, 8, 64), k=t(1, t.rows, 2, 64), v=t(1, t.rows, 2, 64), sinks=t(8, dtype=torch.float32))


def few_kv_heads(t):
    return dict(q=t(t.rows, 16, 4, 64), k=t(t.rows, 16, 2, 64), v=t(t.rows, 16, 2, 64))


def float8_heads(t):
    """Of e4m3, with a scale for each sequence and K/V head."""
    scale = lambda: t(t.rows, 2, dtype=torch.float32).abs()
    return dict(q=t(t.rows, 16, 4, 64, dtype=F8), k=t(t.rows, 16, 2, 64, dtype=F8), v=t(t.rows, 16, 2, 64, dtype=F8),
                q_descale=scale(), k_descale=scale(), v_descale=scale())


def attend_float8(q, k, v, q_descale, k_descale, v_descale):
    return tkq.flash_attn_fp8(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, causal=True,
                              return_lse=True)


def packed_float8_heads(t):
    scale = lambda: t(3, 2, dtype=torch.float32).abs()
    return dict(q=t(t.rows, 4, 64, dtype=F8), k=t(t.rows, 2, 64, dtype=F8), v=t(t.rows, 2, 64, dtype=F8),
                cu_seqlens_q=t.starts(3), cu_seqlens_k=t.starts(3), q_descale=scale(), k_descale=scale(),
                v_descale=scale())


def attend_packed_float8(q, k, v, cu_seqlens_q, cu_seqlens_k, q_descale, k_descale, v_descale):
    return tkq.flash_attn_fp8_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, 64, 64, q_descale=q_descale,
                                     k_descale=k_descale, v_descale=v_descale, causal=True, return_lse=True)


def heads_first(t):
    """Of flex_attention, and a tensor that its function captures."""
    return dict(query=t(2, 4, t.rows, 64), key=t(2, 4, t.rows, 64), value=t(2, 4, t.rows, 64),
                slopes=t(4, dtype=torch.float32))


def with_slopes(query, key, value, slopes):
    return tkq.flex_attention(query, key, value, lambda score, b, h, q, kv: score + slopes[h] * (kv - q))

"""The baselines of attention in float8. A peer takes (q, k, v, scale, and q, k, v in bf16): e4m3, with one descale for
each sequence and K/V head, of ones. Of packed sequences cu_seqlens come behind scale."""
from __future__ import annotations

from collections.abc import Callable

from bench.peers import attention, common


def ours(causal: bool, accumulate: str) -> Callable:
    import tkq

    return lambda q, k, v, scale, *_: tkq.flash_attn_fp8(
        q, k, v, q_descale=scale, k_descale=scale, v_descale=scale, causal=causal, accumulate=accumulate)


def flash_attention_3(causal: bool) -> Callable:
    """Whose sums are fast ones."""
    from flash_attn_interface import flash_attn_func

    def attend(q, k, v, scale, *_):
        found = flash_attn_func(q, k, v, causal=causal, q_descale=scale, k_descale=scale, v_descale=scale)
        return found[0] if isinstance(found, tuple) else found

    return attend


def in_bf16(causal: bool) -> Callable:
    """Ours, of 16 bits."""
    attend = attention.ours(attention.Call(causal))
    return lambda q, k, v, scale, *wide: attend(*wide)


def ours_packed(causal: bool, longest: int, accumulate: str) -> Callable:
    import tkq

    return lambda q, k, v, scale, cu, *_: tkq.flash_attn_fp8_varlen(
        q, k, v, cu, cu, longest, longest, q_descale=scale, k_descale=scale, v_descale=scale, causal=causal,
        accumulate=accumulate)


def flash_attention_3_packed(causal: bool, longest: int) -> Callable:
    from flash_attn_interface import flash_attn_varlen_func

    def attend(q, k, v, scale, cu, *_):
        found = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=causal, q_descale=scale,
                                       k_descale=scale, v_descale=scale)
        return found[0] if isinstance(found, tuple) else found

    return attend


def in_bf16_packed(causal: bool, longest: int) -> Callable:
    attend = attention.ours(attention.Call(causal, max_seqlen=longest))
    return lambda q, k, v, scale, cu, *wide: attend(*wide, cu)


PEERS = {"FA3": flash_attention_3, "tkq, bf16": in_bf16}
PACKED_PEERS = {"FA3": flash_attention_3_packed, "tkq, bf16": in_bf16_packed}
common.PEERS |= {"attention_fp8": PEERS, "attention_fp8_varlen": PACKED_PEERS}

"""The baselines of tkq.flash_attn_with_kvcache: (q, k_cache, v_cache, lengths, table) -> o (B, Sq, H, D). Plans,
metadata and caches in another layout are made once for each set of inputs, as a server makes them once a step for all
layers.

torch SDPA: over a plain cache (B, Hk, S, D), heads first, which has no pages; sequences of one length, one query. FA3:
its flash_attn_with_kvcache, with its scheduler's metadata. FlashInfer: fa2's kernels with tensor cores. read: torch.sum
of the keys and values, what reading them takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.peers import common


def once(make: Callable) -> Callable:
    """What ``make`` gives for a set of inputs, made at the first call with it."""
    known = {}

    def of(*given):
        key = given[1].data_ptr()
        if key not in known:
            known[key] = make(*given)
        return known[key]

    return of


def rows(cache, lengths, table):
    """(B, Hk, S, D): the pages of each sequence."""
    S = int(lengths[0])
    return cache[table.long()].flatten(1, 2)[:, :S].transpose(1, 2).contiguous()


def sdpa(alike: bool) -> Callable:
    if not alike:
        raise NotImplementedError("sequences of one length, with one query")
    plain = once(lambda q, k, v, lengths, table: [rows(x, lengths, table) for x in (k, v)])
    return lambda *given: F.scaled_dot_product_attention(
        given[0].transpose(1, 2), *plain(*given), enable_gqa=True).transpose(1, 2)


def flash_attention_3(alike: bool) -> Callable:
    from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

    def metadata(q, k, v, lengths, table):
        B, Sq, H, D = q.shape
        return get_scheduler_metadata(B, Sq, int(lengths.max()), H, k.shape[2], D, lengths, qkv_dtype=q.dtype,
                                      page_size=k.shape[1], causal=Sq > 1)

    plan = once(metadata)
    return lambda q, k, v, lengths, table: flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, page_table=table, causal=q.shape[1] > 1,
        scheduler_metadata=plan(q, k, v, lengths, table))


def flashinfer(alike: bool) -> Callable:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    def planned(q, k, v, lengths, table):
        page = k.shape[1]
        pages = (lengths + page - 1).div(page, rounding_mode="floor")
        indices = torch.cat([row[:n] for row, n in zip(table, pages.tolist())])
        made = BatchDecodeWithPagedKVCacheWrapper(q.new_empty(1 << 29, dtype=torch.uint8), "NHD", use_tensor_cores=True)
        made.plan(F.pad(pages.cumsum(0), (1, 0)).int(), indices, (lengths - 1) % page + 1, q.shape[2], k.shape[2],
                  q.shape[3], page, q_data_type=q.dtype, kv_data_type=k.dtype, q_len_per_req=q.shape[1])
        return made

    plan = once(planned)
    return lambda q, k, v, lengths, table: plan(q, k, v, lengths, table).run(q.flatten(0, 1), (k, v)).view(q.shape)


def read(alike: bool) -> Callable:
    return lambda q, k, v, lengths, table: (k.sum(), v.sum())


PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "decode": {"FA3": flash_attention_3, "FlashInfer": flashinfer, "torch": sdpa, "read": read},
}

common.PEERS.update(PEERS)

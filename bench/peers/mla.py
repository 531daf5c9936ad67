"""The baselines of tkq.mla_decode: (q, cache, lengths, table) -> o (B, Sq, H, 512). FlashMLA: its dense decoding, whose
metadata its first call with a set of inputs makes. read: torch.sum of the cache, what reading it takes.

Of the sparse op: (q, cache, indices) -> o. FlashMLA, float8: its sparse decoding, which takes float8 caches alone, of
656 bytes a token: 512 columns of e4m3, their scales, one float32 for 128, and 64 columns of bf16. The cache is packed
with a set's first call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers import common
from bench.peers.decode import once
from tkq.reference.mla import packed as as_bytes

SCALE = 192**-0.5  # of the heads before absorption


def flash_mla() -> Callable:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    plan = once(lambda *given: get_mla_metadata()[0])  # which the first call fills in
    return lambda q, cache, lengths, table: flash_mla_with_kvcache(
        q, cache.unsqueeze(2), table, lengths, 512, plan(q, cache, lengths, table), softmax_scale=SCALE,
        causal=q.shape[1] > 1)[0]


def packed(cache: torch.Tensor) -> torch.Tensor:
    """(N, page, 1, 656) of float8's dtype, of a cache (N, page, 576), some pages at a time."""
    return torch.cat([as_bytes(pages) for pages in cache.split(1024)]).view(torch.float8_e4m3fn).unsqueeze(2)


def flash_mla_sparse() -> Callable:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    plan = once(lambda *given: (get_mla_metadata()[0], packed(given[1])))

    def run(q, cache, indices):
        made, small = plan(q, cache, indices)
        return flash_mla_with_kvcache(q, small, None, None, 512, made, softmax_scale=SCALE, is_fp8_kvcache=True,
                                      indices=indices)[0]

    return run


def read() -> Callable:
    return lambda q, cache, lengths, table: cache.sum()


PEERS = {"FlashMLA": flash_mla, "read": read}
common.PEERS["mla"] = PEERS
common.PEERS["mla_sparse"] = {"FlashMLA, float8": flash_mla_sparse}

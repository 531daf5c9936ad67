"""The baselines of tkq.mla_decode: (q, cache, lengths, table) -> o (B, Sq, H, 512). FlashMLA: its dense decoding, whose
metadata its first call with a set of inputs makes. read: torch.sum of the cache, what reading it takes."""

from __future__ import annotations

from collections.abc import Callable

from bench.peers import common
from bench.peers.decode import once

SCALE = 192**-0.5  # of the heads before absorption


def flash_mla() -> Callable:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    plan = once(lambda *given: get_mla_metadata()[0])  # which the first call fills in
    return lambda q, cache, lengths, table: flash_mla_with_kvcache(
        q, cache.unsqueeze(2), table, lengths, 512, plan(q, cache, lengths, table), softmax_scale=SCALE,
        causal=q.shape[1] > 1)[0]


def read() -> Callable:
    return lambda q, cache, lengths, table: cache.sum()


PEERS = {"FlashMLA": flash_mla, "read": read}
common.PEERS["mla"] = PEERS

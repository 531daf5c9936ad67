"""What a call and its plan say of each other where there is no GPU, by the kernels' rules: lengths that were not
planned, pages that are not there and plans of other calls give NaN, and the plan says so."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from tkq.attention.decode import words
from tkq.attention.decode.planned import Planned


def judge(call, options, o: Tensor, lse: Tensor) -> None:
    """NaN in results of flash_attn_with_kvcache where its plan does not fit. call, options: as `check` has them. o (B,
    Sq, H, Dv), lse (B, H, Sq), or (T, H, Dv) and (H, T)."""
    table, page = call.block_table, call.k_cache.shape[1]
    capacity = page * (1 if table is None else table.shape[1])
    bad_page = table is not None and bad_pages(table, call.cache_seqlens, page, call.k_cache.shape[0])
    fine = noted(call.plan, Planned.of(call, options), call.cache_seqlens, capacity, bad_page, call.cu_seqlens_q)
    o[~fine] = math.nan
    (lse if call.cu_seqlens_q is None else lse.mT)[~fine] = math.nan


def bad_pages(table: Tensor, lengths: Tensor, page: int, pages: int) -> bool:
    """Is one of those that have a sequence's keys neither -1 nor one of ``pages``?"""
    if not page:
        return False
    inside = lengths <= page * table.shape[1]
    used = torch.arange(table.shape[1], device=table.device) * page < (lengths * inside)[:, None]
    return bool((used & ((table < -1) | (table >= pages))).any())


def noted(plan: Tensor, of: Planned, lengths: Tensor, capacity: int, bad_page: bool,
          cu: Tensor | None = None) -> Tensor:
    """Which sequences, or rows of ragged queries, have results; the others are NaN. What is wrong goes into the plan.

    of: what the call's plan is made for. lengths: of its sequences, up to ``capacity``. bad_page: does a table or a
    list name keys that are not there? cu: where ragged queries begin."""
    header, batch = plan[:words.HEADER].tolist(), of.batch(len(lengths))
    made = {words.MAGIC: words.NUMBER, words.BATCH: batch, words.HEADS_KV: of.heads_kv, words.GROUP: of.group,
            words.QUERIES: of.queries, words.KEY_BLOCK: of.keys, words.FIXED: of.split, words.LEFT: of.left}
    flags = {words.BAD_PAGE: bad_page}
    if any(header[place] != number for place, number in made.items()):
        fine = torch.zeros(len(lengths) if cu is None else of.total, dtype=torch.bool, device=plan.device)
        flags = {words.OTHER_CALL: True}
    elif cu is None:
        fine = (lengths == plan[words.LENGTHS:words.LENGTHS + batch]) & (lengths >= 0) & (lengths <= capacity)
        flags[words.BEYOND_CACHE] = not bool(fine.all())
    else:
        fine, flags[words.BEYOND_CACHE] = _rows(plan, of, lengths.tolist(), capacity, cu.tolist())
    with torch.inference_mode():  # as by a launch, wherever the plan was made
        for place in (place for place, found in flags.items() if found):
            plan[place] = 1
    return fine


def _rows(plan, of, lengths, capacity, starts):
    """(rows of q of tiles that are as they were planned, does one of the others have rows?)"""
    batch, fine, wrong = of.batch(len(lengths)), torch.zeros(of.total, dtype=torch.bool, device=plan.device), False
    at = words.listed(batch, of.heads_kv, of.count_tiles())
    tiles = plan[at:at + words.LISTED * batch].view(batch, words.LISTED).tolist()
    for (source, row, queries), planned in zip(tiles, plan[words.LENGTHS:words.LENGTHS + batch].tolist(), strict=True):
        there = 0 <= source < len(lengths) and 0 <= row <= of.total - queries and 0 <= queries <= of.queries
        ours = 0 <= planned <= capacity
        if there and queries:
            first, end, length = *starts[source:source + 2], lengths[source]
            ours = ours and first <= row and row + queries <= end and 0 <= length <= capacity and (
                planned == max(length - (end - row - queries), 0))
            fine[row:row + queries] = ours
        wrong = wrong or not ours
    return fine, wrong

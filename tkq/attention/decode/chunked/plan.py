"""Which calls have many queries, and how their kernel is built: pure Python, from sizes that the host knows."""
from __future__ import annotations

import math
from dataclasses import replace

from tkq.attention.decode.chunked.spec import CacheSpec
from tkq.attention.forward import plan as forward
from tkq.attention.forward.config import AttentionConfig
from tkq.attention.forward.spec import AttentionSpec

TILE_ROWS = 128  # of packed queries
MANY_ROWS = 256  # packed queries of a sequence, on average, from which on they are many
LEAST_TASKS = 96  # tiles of rows, of all K/V heads, below which too few SMs would work: nothing splits keys here
MOST_PACKED = 64
MOST_GROUPS = (1 << 31) - 1
DIMS = (64, 64), (128, 128), (192, 128), (192, 192), (256, 256)  # D and Dv
ROWS_OF_TMA = 8  # that pages are a multiple of
PANEL = 64  # columns of a tile that a swizzled row of 128 bytes has


def many_queries(dims: tuple, heads: tuple, queries: int, sequences: int) -> bool:
    """Are the queries many? dims: D, Dv. heads: of q and of K/V. queries: of all sequences. Plans of ragged queries
    depend on it, so that it asks for nothing that ``plan_decode`` is not told."""
    rows = queries * (heads[0] // heads[1])
    return (dims in DIMS and rows >= MANY_ROWS * max(sequences, 1)
            and -(-rows // TILE_ROWS) * heads[1] >= LEAST_TASKS)


def packed_heads(group: int) -> int:
    """How many query heads of a K/V head share a tile: all, as far as a power of 2 divides them."""
    return min(group & -group, MOST_PACKED)


def tile_queries(group: int) -> int:
    """Queries of a tile."""
    return TILE_ROWS // packed_heads(group)


def box_rows(keys: int, page: int | None) -> int:
    """Rows of a copy: as many of a page as divide a tile's ``keys``. page: None without pages."""
    return keys if page is None else math.gcd(keys, page)


def takes(page: int | None) -> bool:
    """Can TMA bring such pages?"""
    return page is None or page % ROWS_OF_TMA == 0


def groups_apart(shape: tuple, stride: tuple) -> int | None:
    """Groups of 8 rows from a page to the next, of pages (N, page, Hk, D): then those of all pages are one dimension,
    and a copy brings rows with all columns. None where pages lie at another distance, or more groups apart than TMA
    counts."""
    pages, rows = shape[:2]
    page, row = stride[:2]
    if row <= 0 or page % (ROWS_OF_TMA * row):
        return None
    apart = page // (ROWS_OF_TMA * row)
    return apart if (pages - 1) * apart + rows // ROWS_OF_TMA <= MOST_GROUPS else None


def producer_warps(boxes: int) -> int:
    """Among which a tile's boxes are dealt out: so that what each issues takes less time than the products of a
    block."""
    return 4 if boxes >= 8 else 2 if boxes >= 4 else 1


def cache_plan(spec: AttentionSpec, page: int | None, ragged: bool, multiples: bool) -> CacheSpec:
    """How a tile's copies are cut. page: as of `box_rows`. multiples: are pages a multiple of 8 rows apart, see
    `groups_apart`? Then tiles of several boxes are copied by whole rows; of 64 columns there is nothing to gain."""
    keys = _forward(spec).kv
    box = box_rows(keys, page)
    return CacheSpec(page is not None, ragged, box, multiples and box < keys and spec.head_dim > PANEL)


def plan(spec: AttentionSpec, cache: CacheSpec) -> AttentionConfig:
    """The forward's, of long causal problems where it is one; tasks are dealt out one at a time to blocks alone.
    Consumers whose tiles are several boxes begin one after the other, where they are not in ping-pong all the time."""
    config = _forward(spec)
    return replace(config, schedule="dynamic", cluster=1, overlap_tasks=False, registers=(56, 224),
                   stagger=cache.box < config.kv and not config.ping_pong)


def _forward(spec: AttentionSpec) -> AttentionConfig:
    return forward.plan(spec, "long" if spec.longest_first else "medium")

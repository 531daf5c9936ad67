"""What a plan is made for, and how many words it has."""
from __future__ import annotations

from typing import NamedTuple

from tkq.attention.decode import words
from tkq.attention.decode.balance import MOST_SEQUENCES, ROOM, balanced
from tkq.attention.decode.chunked.plan import many_queries, tile_queries
from tkq.attention.decode.plan import (
    FIXED_KEYS,
    LATENT,
    LEAST,
    OVERHEAD,
    ROWS,
    blocks_of_sm,
    key_block,
    row_tiles,
    tiles_together,
)


class Planned(NamedTuple):
    """What a plan is made for. left: -1 without a limit. keys: of a block of keys. blocks: of
    threads on an SM. total: rows of ragged queries, whose tiles have ``queries``; -1 where all
    sequences have as many. together: blocks of threads that read the same keys, each for another
    tile. latent: of latent attention."""

    heads_q: int
    heads_kv: int
    keys: int
    queries: int = 1
    left: int = -1
    fixed: bool = False
    blocks: int = 1
    total: int = -1
    together: int = 1
    latent: bool = False

    @classmethod
    def of(cls, call, options=None) -> Planned:
        """Of a call's tensors and options."""
        q, k, v = call[:3]
        dims, heads = (q.shape[-1], v.shape[3]), (q.shape[-2], k.shape[2])
        given = () if options is None else (options.left, options.batch_invariant)
        return cls.made(dims, heads, q.shape[:-2], call.cu_seqlens_q is not None, given, call.cache_seqlens.shape[0])

    @classmethod
    def made(cls, dims, heads, places, ragged, given=(), sequences=1) -> Planned:
        """dims: D, Dv. heads: of q and of K/V. places: sequences and queries of each, or ragged queries in all. given:
        left and fixed. sequences: that ragged queries are of."""
        left, fixed = given or (-1, False)
        queries, group = places[-1], heads[0] // heads[1]
        if ragged:
            many = not fixed and many_queries(dims, heads, places[0], sequences)
            queries = tile_queries(group) if many else ROWS // group or 1
        together = 1 if ragged else tiles_together(dims[0], queries, group)
        return cls(*heads, key_block(*dims), queries, left, fixed, blocks_of_sm(*dims), places[0] if ragged else -1,
                   together, dims[0] == LATENT and not ragged)

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_kv

    @property
    def tiles(self) -> int:
        return self.count_tiles()

    def count_tiles(self) -> int:
        """Tiles, of those that a block has one after the other. A method, as all that `tasks` and `words` ask: Dynamo
        of torch 2.9 reads no property of a NamedTuple."""
        return -(-row_tiles(self.queries, self.heads_q // self.heads_kv) // self.together)

    def parts(self, sms: int) -> int:
        """Into how many equal shares a plan divides the work on a GPU of ``sms`` multiprocessors: one for
        each block, or for blocks that go ``together``."""
        return max(1, self.blocks * sms // self.together)

    @property
    def split(self) -> int:
        """Blocks of a fixed split; 0: positions are blocks."""
        return FIXED_KEYS // self.keys if self.fixed else 0

    def balanced(self, sequences: int, parts: int) -> bool:
        """Does `decode.balance` divide the work? Of sequences of one task each, and not many of them."""
        return (self.latent and not self.fixed and self.left < 0 and self.tiles == 1
                and 0 < sequences <= min(ROOM, MOST_SEQUENCES * parts))

    def divided(self, blocks: list[int], parts: int) -> tuple[list[int], int, int]:
        """(where each sequence begins, blocks of a part, blocks and gaps in all), where that is so."""
        return balanced(blocks, parts, -(-OVERHEAD // self.keys), min(ROWS, self.queries * self.group))

    def batch(self, sequences: int) -> int:
        """Sequences of the plan: of ragged queries as many tiles as there may be."""
        return sequences if self.total < 0 else self.total // self.queries + sequences

    def words(self, sequences: int) -> int:
        """Of the plan."""
        batch = self.batch(sequences)
        return words.size(batch, self.heads_kv, self.count_tiles()) + (0 if self.total < 0 else words.LISTED * batch)

    def sizes(self, batch: int, parts: int) -> tuple:
        """`planner.Sizes`. A sequence has so few blocks at most that all positions are counted in 31 bits."""
        most = ((1 << 31) - (1 << 16)) // max(1, batch * self.heads_kv * self.tiles) - OVERHEAD - 1
        overhead, least = (-(-keys // self.keys) for keys in (OVERHEAD, LEAST))
        return (self.heads_kv, self.group, self.queries, self.tiles, self.keys, self.left, self.split, parts, overhead,
                1 if self.fixed else least, most)

"""Which head a warpgroup has: the part of `LinearAttention` that knows of two heads of a block."""
from dataclasses import replace

import tkq.tile as tk

FACTORS = 1  # the first of the warps beside the producer that make factors, of a warpgroup
WARPS = tk.WARPGROUP // 32


class Heads:
    """A block has one head, or two neighbouring ones that share one of q and k: then each has a warpgroup of the state,
    with all columns of V. Their scores are made of the same products, each with gates of its own, which a warp makes
    for each head. A stage of the scores has a place for each.

    Where factors are all that there is to make (`plan.factors_alone`), the four warps of the scores' warpgroup make
    them: all four those of one head, or two those of each of two."""

    def __init__(self, count: int, stages: int = 2, all_warps: bool = False):
        """stages: of the scores. all_warps: each warp of a warpgroup makes factors, those of a head in turn. every: by
        how many chunks a warp of factors goes on."""
        self.count, self.places, self.all_warps = count, stages * count, all_warps
        self.every = WARPS // count if all_warps else 1

    def blocks(self, heads):
        """Of a sequence and a part of V."""
        return heads if self.count == 1 else heads // self.count

    def first(self, block):
        """The first head of a block."""
        return block if self.count == 1 else block * self.count

    def of_warpgroup(self, g, t, wg):
        """The task as a warpgroup of the state has it, whose columns of V are those of tile `part + wg`."""
        if self.count == 1:
            return t
        return replace(t, head=t.head + wg, head_v=(t.head + wg) // g.heads_per_v, part=t.part - wg)

    def makes_factors(self):
        """Is this one of the warps that do? Of one head the scores' first one, of two those from `FACTORS` on; or all.
        """
        warp = tk.warp_id() % 4
        if self.all_warps:
            return True
        return warp == 0 if self.count == 1 else (warp >= FACTORS) & (warp < FACTORS + self.count)

    def first_chunk(self):
        """Of a warp of factors."""
        return tk.warp_id() % WARPS // self.count if self.all_warps else 0

    def of_warp(self, t):
        """The task as the warps have it that make factors."""
        return t if self.count == 1 else replace(t, head=t.head + self.head_of_warp())

    def head_of_warp(self):
        """Which of the block's heads is this warp's."""
        return (tk.warp_id() % WARPS - (0 if self.all_warps else FACTORS)) % self.count

    def place(self, scores, head):
        """Where the present stage of scores, a ring, has what is of a head. The ring is asked for its stage each time:
        a number that stands for it would be in a register throughout."""
        return scores.stage if self.count == 1 else self.count * scores.stage + head

    def place_of_warp(self, scores):
        """Likewise, of the head for which a warp makes factors."""
        return scores.stage if self.count == 1 else self.place(scores, self.head_of_warp())


ONE = Heads(1)

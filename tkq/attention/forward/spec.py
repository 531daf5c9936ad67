"""What a caller of attention asked for: the part that decides which code is compiled."""
from dataclasses import dataclass, replace
from typing import Optional

from tkq.attention.common import refusals

HEAD_DIMS = tuple(range(8, 257, 8))
WIDTHS = (64, 96, 128, 192, 256)  # of tiles. A head_dim between two of them takes the wider; TMA fills it up with zeros
LONG_WINDOW = 512  # keys: the most that a task's rows and a block's keys can be together


def width(head_dim: int) -> int:
    """Of the tile that holds ``head_dim`` columns."""
    return next(w for w in WIDTHS if head_dim <= w)


@dataclass(frozen=True)
class AttentionSpec:
    """dtype: of q, k, v and o. head_dim: of q and k; head_dim_v: of v and o, the same where not given.

    Query i is aligned with key i + Sk - Sq. causal: it sees no key behind that one. left, right: a number of keys,
    known at run time, limits what it sees before and behind that one. long_window: left is LONG_WINDOW or more, so that
    no block needs a mask on both sides. lse: the log-sum-exp is written too. softcap: scores go through softcap *
    tanh(score / softcap). sinks: dtype of one more logit a head, None: there is none. varlen: packed sequences,
    delimited by cu_seqlens; seqused_q, seqused_k: only the first rows of each are in use. pack: query heads of one K/V
    head that share a tile of rows.

    Raises:
        NotImplementedError: what no kernel takes, by name.
    """

    dtype: str = "bf16"
    head_dim: int = 128
    causal: bool = False
    lse: bool = True
    head_dim_v: Optional[int] = None
    left: bool = False
    right: bool = False
    softcap: bool = False
    sinks: Optional[str] = None
    varlen: bool = False
    seqused_q: bool = False
    seqused_k: bool = False
    pack: int = 1
    long_window: bool = False

    def __post_init__(self):
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        refusals.of_operands("flash_attn", self)
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) not in HEAD_DIMS:
                raise NotImplementedError(f"flash_attn: {name} is {getattr(self, name)}, supported are multiples of 8 "
                                          f"from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}")
        refusals.of_masks("flash_attn", self)

    @property
    def longest_first(self) -> bool:
        """Do the last queries see many more keys than the first?"""
        return (self.causal or self.right) and not self.left

    @property
    def sides(self) -> bool:
        """May a row, or a part of a tile, see no key of a block that is visited?"""
        return self.causal or self.right or self.left or self.varlen

    def kernel(self) -> "AttentionSpec":
        """The spec of the kernel that serves this one: head dims rounded up to a tile's width."""
        return replace(self, head_dim=width(self.head_dim), head_dim_v=width(self.head_dim_v))

"""What a caller of attention with wide heads asked for: the part that decides which code is compiled."""
from dataclasses import dataclass, replace
from typing import Optional

from tkq.attention.common import refusals

HEAD_DIMS = tuple(range(264, 513, 8))
WIDTHS = (320, 384, 512)  # of tiles. A head_dim between two of them takes the wider; TMA fills it up with zeros


def width(head_dim: int) -> int:
    """Of the tile that holds ``head_dim`` columns."""
    return next(w for w in WIDTHS if head_dim <= w)


@dataclass(frozen=True)
class WideSpec:
    """``AttentionSpec`` for a head_dim above 256, which q, k, v and o share; the other fields mean the same, so that
    masks, softmax and scheduler of ``tkq.attention.forward`` take either.

    Raises:
        NotImplementedError: what no kernel takes, by name.
    """

    dtype: str = "bf16"
    head_dim: int = 512
    causal: bool = False
    lse: bool = True
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
        refusals.of_operands("flash_attn", self)
        if self.head_dim not in HEAD_DIMS:
            raise NotImplementedError(f"flash_attn: head_dim is {self.head_dim}, supported beyond 256 are multiples of "
                                      f"8 up to {HEAD_DIMS[-1]}")
        refusals.of_masks("flash_attn", self)

    @property
    def head_dim_v(self) -> int:
        """Columns of v and o."""
        return self.head_dim

    @property
    def longest_first(self) -> bool:
        """Do the last queries see many more keys than the first?"""
        return (self.causal or self.right) and not self.left

    @property
    def sides(self) -> bool:
        """May a row, or a part of a tile, see no key of a block that is visited?"""
        return self.causal or self.right or self.left or self.varlen

    def kernel(self) -> "WideSpec":
        """The spec of the kernel that serves this one: head_dim rounded up to a tile's width."""
        return replace(self, head_dim=width(self.head_dim))

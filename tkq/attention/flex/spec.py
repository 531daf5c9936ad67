"""What a caller of flex_attention asked for: the part that decides which code is compiled."""
from dataclasses import dataclass
from typing import Optional

from tkq.attention.common.refusals import DTYPES
from tkq.attention.flex.functions.graph import Graph
from tkq.attention.forward.spec import AttentionSpec

WIDTHS = (64, 128, 192, 256)  # of tiles: TMA fills a narrower head up with zeros
WITH_GRADIENTS = (64, 128, 256)  # of the tiles of a backward
BLOCK = 64  # what block sizes of a mask are multiples of


@dataclass(frozen=True)
class FlexSpec:
    """dtype: of q, k, v and o. head_dim: columns of their tiles, see ``width``. lse: the log-sum-exp is written too.
    score, mask: graphs of the user's functions, None where there is none. blocks: a mask's lists of key blocks say
    which are visited; without, all. full: there are lists of blocks that need no mask. q_tile, kv_tile: rows and keys
    of a tile, 128 or 64; q_per, kv_per: tiles in a listed block.

    Raises:
        NotImplementedError: what no kernel takes, by name.
    """

    dtype: str = "bf16"
    head_dim: int = 128
    lse: bool = True
    score: Optional[Graph] = None
    mask: Optional[Graph] = None
    blocks: bool = False
    full: bool = False
    q_tile: int = 128
    kv_tile: int = 128
    q_per: int = 1
    kv_per: int = 1

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise NotImplementedError(f"flex_attention: query is {self.dtype}, supported are {', '.join(DTYPES)}")
        if self.head_dim not in WIDTHS:
            raise NotImplementedError(f"flex_attention: tiles of {self.head_dim} columns, supported are "
                                      f"{', '.join(map(str, WIDTHS))}")
        if {self.q_tile, self.kv_tile} - {64, 128}:
            raise ValueError(f"flex_attention: tiles of {self.q_tile} rows and {self.kv_tile} keys, allowed are 64 "
                             "and 128")
        if self.head_dim > 128 and self.kv_tile != 64:
            raise ValueError(f"flex_attention: tiles of {self.kv_tile} keys and {self.head_dim} columns, allowed are "
                             "64 keys above 128 columns")
        if self.full and not self.blocks:
            raise ValueError("flex_attention: full belongs to blocks")

    @property
    def attention(self) -> AttentionSpec:
        """Of the parts that it shares with ``flash_attn``. right: rows may see no key of a block, and tasks differ in
        length."""
        return AttentionSpec(self.dtype, self.head_dim, lse=self.lse, right=True)


def width(head_dim: int, head_dim_v: int, op: str = "flex_attention", when: str = "", widths: tuple = WIDTHS) -> int:
    """Of the tiles that hold ``head_dim`` columns of q and k, and ``head_dim_v`` of v: one of ``widths``.

    Raises:
        NotImplementedError: not multiples of 8 from 8 to the widest.
    """
    for name, n in (("head_dim", head_dim), ("head_dim of value", head_dim_v)):
        if n % 8 or not 8 <= n <= widths[-1]:
            raise NotImplementedError(f"{op}: {name} is {n}, supported {when + ' ' if when else ''}are multiples of 8 "
                                      f"from 8 to {widths[-1]}")
    return next(w for w in widths if max(head_dim, head_dim_v) <= w)


def backward_width(head_dim: int, head_dim_v: int) -> int:
    """``width``, of a call whose gradients are asked for."""
    return width(head_dim, head_dim_v, widths=WITH_GRADIENTS)


def task_of(width: int) -> int:
    """Keys of a task of the backward."""
    return 128 if width <= 128 else 64


@dataclass(frozen=True)
class StatesSpec:
    """Of the kernel that looks at a mask's blocks. mask: its graph."""

    mask: Graph


def tile_of(block: int) -> int:
    """Rows of a tile, of which a listed block has a whole number."""
    return 128 if block % 128 == 0 else 64


def kv_tile_of(block: int, width: int) -> int:
    """Keys of a tile, likewise: so many that K and V of wide heads fit into shared memory twice."""
    return tile_of(block) if width <= 128 else 64

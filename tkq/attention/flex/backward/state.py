"""What the backward's roles see beside what attention's backward has: lists of query blocks, captured values."""
from dataclasses import dataclass
from typing import Any, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr

from tkq.attention.backward.state import Globals
from tkq.attention.flex.operands import Captured


@dataclass(frozen=True)
class FlexGlobals(Globals):
    queries: Any = None  # a ``KeyTiles``, of queries: rows are blocks of keys there
    score: Optional[Captured] = None
    mask: Optional[Captured] = None
    slopes: Optional[Captured] = None  # of the kernel that makes gradients of captured tensors
    states: Optional[cute.Tensor] = None  # (B, H, blocks of queries, blocks of 64 keys) int32
    q_per: Constexpr[int] = 1  # tiles of queries in a listed block
    gradients: Any = None  # a tuple of those of captured tensors

    def row_block(self, tile):
        return cutlass.min(tile // self.q_per, self.states.shape[2] - 1)


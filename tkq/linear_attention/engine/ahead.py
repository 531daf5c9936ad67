"""Numbers of tokens, such as gates, that are read from global memory a chunk before they are used."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK


class Ahead(NamedTuple):
    """found: registers of two tokens of a chunk, as they are in memory. row: (S,), all of a head's."""

    found: cute.Tensor
    row: cute.Tensor


def begin(x: cute.Tensor, g, t, chunk) -> Ahead:
    """Of each lane of a warpgroup's first warp, for the first chunk. x: (B, S, HO). What is made of the numbers waits
    for them: it is made when the chunk comes. Where a head's are is found once: the other warps wait for the first."""
    mine = Ahead(cute.make_rmem_tensor((2,), x.element_type), x[t.batch, None, t.head])
    read(mine, g, chunk)
    return mine


@cute.jit
def read(mine: Ahead, g, chunk):
    """They are on their way; 0 past the end, and before the first token."""
    into = mine.found
    for e in cutlass.range_constexpr(2):
        into[e] = into.element_type(0.0)
    if tk.warp_id() % 4 == 0:
        for e in cutlass.range_constexpr(2):
            token = token_of(chunk, e)
            if token >= 0 and token < g.tokens:
                into[e] = mine.row[token]


def token_of(chunk, e) -> Any:
    """A lane's."""
    return chunk * CHUNK + 2 * tk.lane_id() + e

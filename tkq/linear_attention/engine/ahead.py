"""Numbers of tokens, such as gates, that are read from global memory a chunk before they are used."""
from typing import Any

import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK


def begin(x: cute.Tensor, g, t, chunk) -> cute.Tensor:
    """Registers of two tokens of a chunk for each lane of a warpgroup's first warp, as they are in memory. x: (B, S,
    HO). What is made of the numbers waits for them: it is made when the chunk comes."""
    found = cute.make_rmem_tensor((2,), x.element_type)
    read(x, g, t, chunk, found)
    return found


@cute.jit
def read(x: cute.Tensor, g, t, chunk, into: cute.Tensor):
    """They are on their way; 0 past the end, and before the first token."""
    for e in cutlass.range_constexpr(2):
        into[e] = x.element_type(0.0)
    if tk.warp_id() % 4 == 0:
        for e in cutlass.range_constexpr(2):
            token = token_of(chunk, e)
            if token >= 0 and token < g.tokens:
                into[e] = x[t.batch, token, t.head]


def token_of(chunk, e) -> Any:
    """A lane's."""
    return chunk * CHUNK + 2 * tk.lane_id() + e

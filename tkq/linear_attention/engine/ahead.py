"""Numbers of tokens, such as gates, that are read from global memory a chunk before they are used."""
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int64, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.heads import ONE, Heads
from tkq.tile.assembly import opaque_sum


class Ahead(NamedTuple):
    """found: registers of two tokens of a chunk, as they are in memory. first: behind how many elements of x these lie,
    in a register that goes from chunk to chunk: the strides' products would be made in each. Or None where none is
    free. step: to the next chunk."""

    found: cute.Tensor
    x: cute.Tensor
    first: Optional[cute.Tensor]
    step: Any


def begin(x: cute.Tensor, g, t, chunk, step: int, carried: bool = True, heads: Heads = ONE) -> Ahead:
    """Of each lane of the warps that make factors (`heads.Heads.makes_factors`), for the first chunk. x: (B, S, HO).
    What is made of the numbers waits for them: it is made when the chunk comes. step: how many chunks behind it the
    next one is. carried: is there a register for `first`?"""
    first, step = None, Int64(x.stride[1]) * (step * CHUNK)
    if carried:
        first = cute.make_rmem_tensor((1,), Int64)
        first[0] = (Int64(t.batch) * x.stride[0] + Int64(token_of(chunk, 0)) * x.stride[1]
                    + Int64(t.head) * x.stride[2])
    mine = Ahead(cute.make_rmem_tensor((2,), x.element_type), x, first, step)
    read(mine, g, t, chunk, heads)
    return mine


def follow(mine: Ahead, g, t, chunk, heads: Heads = ONE):
    """The numbers of the chunk that follows are on their way."""
    if mine.first is not None:
        mine.first[0] = opaque_sum(mine.first[0], mine.step)
    read(mine, g, t, chunk, heads)


@cute.jit
def read(mine: Ahead, g, t, chunk, heads: Constexpr[Heads]):
    """They are on their way; 0 past the end, and before the first token."""
    into, x = mine.found, mine.x
    for e in cutlass.range_constexpr(2):
        into[e] = x.element_type(0.0)
    if heads.makes_factors():
        for e in cutlass.range_constexpr(2):
            token = token_of(chunk, e)
            if token >= 0 and token < g.tokens:
                if const_expr(mine.first is None):
                    into[e] = x[t.batch, token, t.head]
                else:
                    at = x.iterator + (mine.first[0] + e * x.stride[1])
                    into[e] = cute.make_tensor(at, cute.make_layout(1))[0]


def token_of(chunk, e) -> Any:
    """A lane's."""
    return chunk * CHUNK + 2 * tk.lane_id() + e

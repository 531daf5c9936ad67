"""Numbers that TMA does not bring, from the producer: gates on their way to L2 before they are asked for, as half a
chunk ahead is not enough for global memory, and beta in shared memory, as registers for it would have to be there where
there are fewest."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.tile.assembly import ptx


@cute.jit
def prefetch_rows(gates: cute.Tensor, tokens, columns, chunk):
    """A chunk's gates, where there are any, by a warp. gates: (tokens, columns), fp32, columns contiguous, a multiple
    of 16 of them."""
    for part in cutlass.range_constexpr(CHUNK // 32):
        token = chunk * CHUNK + 32 * part + tk.lane_id()
        if token >= 0 and token < tokens:
            _prefetch((gates.iterator + cute.crd2idx((token, 0), gates.layout)).toint(), Int32(4 * columns))


class Taken(NamedTuple):
    """Of a chunk, as `Delta.factors` takes it: registers of two tokens."""

    found: cute.Tensor


def slots(stages: int) -> int:
    """How many chunks' beta there is room for: more than there are stages, so that a chunk's may be written before its
    stage is free, and a power of 2."""
    return 1 << stages.bit_length()


@cute.jit
def put_beta(g, beta: cute.Tensor, t, chunk, i):
    """That of the i-th chunk that is visited, in front of `acquire`, by the producer's warp. beta: (tokens, slots)."""
    for part in cutlass.range_constexpr(CHUNK // 32):
        at = 32 * part + tk.lane_id()
        token, found = chunk * CHUNK + at, Float32(0.0)
        if token >= 0 and token < g.tokens:
            found = Float32(g.beta[t.batch, token, t.head])
        beta[at, i & (beta.shape[1] - 1)] = found
    cute.arch.sync_warp()


@cute.jit
def take_beta(beta: cute.Tensor, i, into: cute.Tensor):
    """Two tokens' of each lane of a warpgroup's first warp, as `Delta.factors` takes them."""
    if tk.warp_id() % 4 == 0:
        for e in cutlass.range_constexpr(2):
            into[e] = beta[2 * tk.lane_id() + e, i & (beta.shape[1] - 1)]


@dsl_user_op
def _prefetch(src, bytes, *, loc=None, ip=None):
    """Addresses and sizes are multiples of 16 bytes."""
    ptx([Int64(src), bytes], "cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", loc, ip)

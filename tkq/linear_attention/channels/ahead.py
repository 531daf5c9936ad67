"""Gates on their way to L2 before they are asked for: half a chunk ahead is not enough for global memory."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.tile.assembly import _asm


@cute.jit
def prefetch_rows(gates: cute.Tensor, tokens, columns, chunk):
    """A chunk's gates, where there are any, by a warp. gates: (tokens, columns), fp32, columns contiguous, a multiple
    of 16 of them."""
    for part in cutlass.range_constexpr(CHUNK // 32):
        token = chunk * CHUNK + 32 * part + tk.lane_id()
        if token >= 0 and token < tokens:
            _prefetch((gates.iterator + cute.crd2idx((token, 0), gates.layout)).toint(), Int32(4 * columns))


@dsl_user_op
def _prefetch(src, bytes, *, loc=None, ip=None):
    """Addresses and sizes are multiples of 16 bytes."""
    _asm([Int64(src), bytes], "cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", loc, ip)

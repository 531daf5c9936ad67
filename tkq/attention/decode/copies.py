"""Copies of 16 bytes into shared memory that bring zeros where there is nothing to read."""
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from tkq.tile.assembly import ptx


@dsl_user_op
def copy16(dst, src, there, *, loc=None, ip=None):
    """16 bytes from the global address ``src`` to the shared address ``dst``, asynchronous, past L1 (cp.async.cg); only
    the first ``there`` of them, 0 or 16, are read, the others become 0. Any thread."""
    ptx([Int32(dst), Int64(src), Int32(there)], "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", "r,l,r",
         loc, ip)

"""When a warpgroup of the state may use the tensor cores first: the part of `LinearAttention` that knows of turns."""
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk


class Turns:
    """With second operands the two warpgroups of a block's state take turns with what the state gives for queries. Both
    have the same work, and wait for the same tokens: without turns both would have products at the same time, and then
    both none, while they round, add up and write. In turns the products of one are computed beside the rest of the
    other.

    Deadlock-free: a turn waits for the other's last one, that of the chunk before or of the same chunk, and for nothing
    that comes behind it."""

    def __init__(self, there: bool, barrier: int):
        """there: are there turns? barrier: the first of two named barriers, one for each warpgroup."""
        self.there, self.barrier = there, barrier

    @cute.jit
    def begin(self, wg: Int32, i: Int32):
        """The i-th chunk's turn of a warpgroup; the first one of all waits for none."""
        if const_expr(self.there):
            if wg + i > 0:
                tk.sync(self.barrier + wg, 2 * tk.WARPGROUP)

    @cute.jit
    def end(self, wg: Int32, i: Int32, chunks: Int32):
        """It is the other's, if that has another one."""
        if const_expr(self.there):
            if wg == 0 or i + 1 < chunks:
                tk.sync_arrive(self.barrier + 1 - wg, 2 * tk.WARPGROUP)

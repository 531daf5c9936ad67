"""How dK and dV leave a block: from registers, or through the shared memory of K and V."""
import cutlass.cute as cute

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import Tiles
from tkq.attention.common.sequences import heads_outside, stores
from tkq.tile import WARPGROUP


class DkvOutput:
    """A part of both dK/dV parts."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, tiles: Tiles, scheduler):
        self.spec, self.config, self.tiles, self.scheduler = spec, config, tiles, scheduler

    def globals(self, x):
        """dk or dv as it is written. In the host function."""
        return (heads_outside(x, self.spec.varlen) if self.config.store_from_registers else
                stores(x, self.tiles.out, self.spec.varlen))

    @cute.jit
    def send(self, dst, tile, x, at, barrier):
        """Write a warpgroup's x through a shared tile that is no longer read."""
        tk.store(tile, x)
        tk.publish()
        tk.sync(barrier, WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(dst, tile, at)

    def write(self, g, dst, x, t, number, part=0):
        """x, from registers, to rows of dK or dV: 64 from 64 * number on, columns of part ``part`` of x's width."""
        first = t.batch_k - t.rows_k if self.spec.varlen else 0
        head = self.scheduler.kv_head(g, t)
        head = dst[None, None, head] if self.spec.varlen else dst[None, None, head, t.batch_k]
        rows, cols = head.shape
        cols = cute.make_tensor(head.iterator + part * x.cols, cute.make_layout((rows, cols - part * x.cols),
                                                                                stride=head.stride))
        tk.store_narrow(cols, x, first + 64 * number, first + t.rows_k)


def acquire_after(pipe, ring):
    """Wait until what was handed over last, at the position before ``ring``'s, has been taken."""
    for _ in range(pipe.stages - 1):
        ring.advance()
    pipe.acquire_empty(ring)

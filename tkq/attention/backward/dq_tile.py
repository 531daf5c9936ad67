"""A tile of dQ on its way to the accumulator in global memory."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import Tiles


class DqTile:
    """dS K of a tile, in parts of 64 rows x ``dq_cols``, which every dQ policy makes and sends. The accumulator's
    order: fp32 as the registers lie, of each part, of each warp, 16 bytes of every lane side by side, then the next
    16."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, tiles: Tiles):
        self.spec, self.config, self.tiles = spec, config, tiles

    def staging(self, al):
        """(4, lane, quads, warps [, parts or stages of a pipe]) fp32: a part of dQ as the threads have it."""
        c = self.config
        if c.dq_from_registers or not c.adds_dq(self.spec):
            return None
        rows, cols = c.dq_parts(self.spec.width)
        shape = 4, 32, c.dq_cols // 8, 4, *((rows * cols,) if c.serial else (c.dq_stages,) if c.ordered else ())
        return al.allocate_tensor(Float32, cute.make_layout(shape), 128)

    @cute.jit
    def each_part(self, g, s, dq, ring, number, send: Constexpr, last: Constexpr = lambda: None):
        """``send(address)`` for each part of dS K, which is in dq then, and its place in the accumulator's tile
        ``number``. ``last()`` when dS and K have been read."""
        rows, cols = self.config.dq_parts(self.spec.width)
        part_bytes = 64 * self.config.dq_cols * 4
        address = g.acc.iterator.toint() + number * (rows * cols * part_bytes)
        for i in cutlass.range_constexpr(rows * cols):
            self.make(s, dq, ring, a_part=i // cols, b_part=i % cols)
            if const_expr(i == rows * cols - 1):
                s.ds_pipe.release(ring)
                last()
            send(address + i * part_bytes)

    def make(self, s, dq, ring, **parts):
        """A part of dS K."""
        n = self.tiles.of_keys
        for half in range(n):
            mma = tk.mma_AtB if half else tk.mm_AtB
            mma(dq, s.ds[n * ring.stage + half], s.k[half], **parts)
        tk.mma_wait(0)

    @cute.jit
    def send_rows(self, staging, dq, send: Constexpr, pending: Constexpr[int] = 0):
        """A warp's rows of a part by way of its staging buffer in shared memory, out of which all but the last
        ``pending`` of its parts have to have left: ``send(the buffer's address, bytes)`` by one lane."""
        lane, quads = tk.lane_id(), self.config.dq_cols // 8
        tk.store_wait(pending)
        cute.arch.sync_warp()
        self.write_rows(staging, dq)
        cute.arch.sync_warp()
        if lane == 0:
            send(staging.iterator.toint(), quads * 512)
            tk.bulk_commit()

    @cute.jit
    def write_rows(self, staging, dq):
        """A warp's rows of a part to its staging buffer, visible to TMA."""
        quads = self.config.dq_cols // 8
        mine = cute.make_tensor(dq.tensor.iterator, cute.make_layout((4, quads)))
        for j in cutlass.range_constexpr(quads):
            cute.autovec_copy(mine[None, j], staging[None, tk.lane_id(), j])
        tk.publish()


@cute.jit
def store_or_add(first, to, src, size: Constexpr[int]):
    """From shared memory: the first contributor stores, later ones add."""
    if first:
        tk.bulk_store(to, src, size)
    else:
        tk.bulk_add(to, src, size)

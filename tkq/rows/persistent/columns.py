"""Sums down the columns, finished in the launch that began them: the same bits every time."""
from dataclasses import dataclass
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

from ... import tile as tk
from .partition import global_view, put
from .shape import QUAD, WARP, RowPlan

COMPUTING = 1  # the named barrier of all threads that compute


@dataclass(frozen=True)
class ColumnSums:
    """One fp32 sum for each column, in the registers of the threads that see it pass; then, once a block:

      flush    rows of a warp, then the warps' rows, are added up; one row of the workspace for each block (cluster).
               flushed: each warp arrives. The producer warp, done with loading, takes it to the grid's barrier
      finish   when all blocks have (total: the producer's arrival), each block adds up a slab of columns over all rows
               of the workspace, and stores it in the type of the result

    Between the two the last tile is written, so the barrier costs little. Every sum is taken in an order that depends
    on the shape and the number of blocks alone.
    """

    registers: dict  # name -> (vector, chunks) fp32
    workspace: cute.Tensor  # (names, units, pitch) fp32
    scratch: cute.Pointer
    flushed: tk.Semaphore
    total: tk.Semaphore
    counter: Optional[cute.Tensor]
    plan: Constexpr[RowPlan]

    def init(self):
        """One thread, before the block goes on."""
        tk.init(self.flushed, self.plan.warps)
        tk.init(self.total, 1)

    def clear(self):
        for sums in self.registers.values():
            sums.fill(0.0)

    def add(self, name, j, value):
        """value to chunk j."""
        chunk = self.registers[name][None, j]
        chunk.store(chunk.load() + value)

    # ---- a block's sums -----------------------------------------------------------------------------

    @cute.jit
    def flush(self, part: Constexpr, thread: Int32):
        """All threads that compute, once."""
        p = self.plan
        for n, name in enumerate(self.registers):
            row = self._workspace_row(n, part.share.unit)
            if const_expr(p.merges == 1):
                view = global_view(self.workspace, row + part.share.col0 + part.thread * p.vector, part.layout,
                                   min(16, 4 * p.vector))
                for j in cutlass.range_constexpr(p.chunks):
                    put(view[None, 0, j], self.registers[name][None, j], part.inside(j))
            else:
                self._merge(self.registers[name], part, thread, row)
        if const_expr(p.finish == "grid"):
            if const_expr(p.direct):
                tk.sync(COMPUTING, p.threads)
                if thread == 0:
                    tk.grid_arrive(self.counter.iterator.toint(), cute.arch.grid_dim()[0])
            else:
                cute.arch.sync_warp()
                tk.arrive(self.flushed)

    @cute.jit
    def _merge(self, sums: cute.Tensor, part: Constexpr, thread: Int32, row: Int64):
        """Rows that share a warp by shuffles, warps through shared memory, then one row to the workspace."""
        p = self.plan
        for i in cutlass.range_constexpr(cute.size(sums)):
            offset = p.threads_per_row
            while const_expr(offset < WARP):
                sums[i] = sums[i] + cute.arch.shuffle_sync_bfly(sums[i], offset=offset)
                offset = offset * 2
        padded = const_expr(p.chunks * p.vector * p.threads_per_row)
        layout = cute.append(part.layout, cute.make_layout(p.merges, stride=padded))
        parts = cute.make_tensor(self.scratch, layout)
        tk.sync(COMPUTING, p.threads)
        if thread % WARP < p.threads_per_row:
            for j in cutlass.range_constexpr(p.chunks):
                cute.autovec_copy(sums[None, j], parts[None, part.thread, j, thread // WARP // p.warps_per_row])
        tk.sync(COMPUTING, p.threads)
        quads = cute.make_tensor(self.scratch, cute.make_layout((QUAD, padded // QUAD, p.merges),
                                                                stride=(1, QUAD, padded)))
        out = global_view(self.workspace, row + part.share.col0, cute.make_layout((QUAD, padded // QUAD)), 16)
        for c in cutlass.range(thread, (part.share.limit + QUAD - 1) // QUAD, p.threads, unroll=1):
            total, x = [cute.make_rmem_tensor((QUAD,), Float32) for _ in range(2)]
            cute.autovec_copy(quads[None, c, 0], total)
            for a in cutlass.range_constexpr(1, p.merges):
                cute.autovec_copy(quads[None, c, a], x)
                total.store(total.load() + x.load())
            cute.autovec_copy(total, out[None, c])

    def _workspace_row(self, n, unit):
        return (Int64(n) * self.workspace.shape[1] + unit) * self.plan.pitch

    # ---- all blocks' sums ---------------------------------------------------------------------------

    @cute.jit
    def keep_barrier(self):
        """The grid's barrier, by the producer warp: its wait for this block's stores delays no other warp."""
        if const_expr(self.plan.finish == "grid"):
            tk.wait(self.flushed, 0)
            with cute.arch.elect_one():
                tk.grid_arrive(self.counter.iterator.toint(), cute.arch.grid_dim()[0])
                tk.grid_wait(self.counter.iterator.toint(), cute.arch.grid_dim()[0])
                cute.arch.mbarrier_arrive(self.total.ptr)

    @cute.jit
    def finish(self, outs: Constexpr, units: Int32, thread: Int32):
        """All threads that compute, once, after ``flush``. With a tail kernel there is nothing left to do."""
        p = self.plan
        if const_expr(p.finish == "grid"):
            if const_expr(p.direct):
                if thread == 0:
                    tk.grid_wait(self.counter.iterator.toint(), cute.arch.grid_dim()[0])
                tk.sync(COMPUTING, p.threads)
            else:
                tk.wait(self.total, 0)
            sum_slabs(p, self.workspace, outs, self.scratch, units, thread)


@cute.jit
def sum_slabs(p: Constexpr, workspace: cute.Tensor, outs: Constexpr, scratch: cute.Pointer, units: Int32,
              thread: Int32):
    """outs[n][c] = sum over u of workspace[n, u, c], a slab of p.slab quads of columns a block at a time.

    A thread takes every rows-th row of one quad, loads all of them at once where the grid is as planned, and adds them
    in order; then lanes of a warp, then warps."""
    quads, w, names = const_expr(-(-p.N // QUAD)), const_expr(p.slab), const_expr(len(outs))
    rows, warps_rows = const_expr(p.threads // w), const_expr(p.threads // max(WARP, w))
    c, r0 = thread % w, thread // w
    box = cute.make_tensor(scratch, cute.make_ordered_layout((QUAD, w, warps_rows, names), order=(0, 1, 2, 3)))
    totals = [cute.make_rmem_tensor((QUAD,), Float32) for _ in range(names)]
    for slab in cutlass.range(cute.arch.block_idx()[0], cute.ceil_div(quads, w), cute.arch.grid_dim()[0], unroll=1):
        quad = slab * w + c
        column = cutlass.min(quad, quads - 1) * QUAD
        for n in cutlass.range_constexpr(names):
            totals[n].fill(0.0)
        for u0 in cutlass.range(r0, units, rows * p.slab_loads, unroll=1):
            _add_rows(p, workspace, totals, u0, rows, units, column)
        for n in cutlass.range_constexpr(names):
            for i in cutlass.range_constexpr(QUAD):
                offset = w
                while const_expr(offset < WARP):
                    totals[n][i] = totals[n][i] + cute.arch.shuffle_sync_bfly(totals[n][i], offset=offset)
                    offset = offset * 2
        if const_expr(warps_rows > 1):
            tk.sync(COMPUTING, p.threads)
            if thread % WARP < w:
                for n in cutlass.range_constexpr(names):
                    cute.autovec_copy(totals[n], box[None, c, thread // max(WARP, w), n])
            tk.sync(COMPUTING, p.threads)
        if thread < w and quad < quads:
            for n in cutlass.range_constexpr(names):
                x = cute.make_rmem_tensor((QUAD,), Float32)
                for a in cutlass.range_constexpr(warps_rows if warps_rows > 1 else 0):
                    cute.autovec_copy(box[None, c, a, n], x)
                    totals[n].store(x.load() if const_expr(a == 0) else totals[n].load() + x.load())
                _store_quad(outs[n], p.N, quad, totals[n])


def _add_rows(p, workspace, totals, u0, rows, units, column):
    """Rows u0, u0 + rows, .. : all loads first."""
    held = []
    for n in range(len(totals)):
        for k in range(p.slab_loads):
            u = cutlass.min(u0 + k * rows, units - 1)
            offset = (Int64(n) * workspace.shape[1] + u) * p.pitch + column
            x = cute.make_rmem_tensor((QUAD,), Float32)
            cute.autovec_copy(global_view(workspace, offset, cute.make_layout(QUAD), 16), x)
            held.append((totals[n], x, u0 + k * rows < units))
    for total, x, exists in held:
        for i in range(QUAD):
            total[i] = total[i] + cutlass.select_(exists, x[i], Float32(0))


@cute.jit
def _store_quad(out: cute.Tensor, N: Constexpr[int], quad: Int32, total: cute.Tensor):
    """The quad's columns, in out's type; those past the end are left out."""
    dtype = out.element_type
    packed = cute.make_rmem_tensor((QUAD,), dtype)
    packed.store(total.load().to(dtype))
    if const_expr(N % QUAD == 0):
        layout = cute.make_layout(QUAD)
        cute.autovec_copy(packed, global_view(out, Int64(quad) * QUAD, layout, QUAD * dtype.width // 8))
    else:
        for i in cutlass.range_constexpr(QUAD):
            if quad * QUAD + i < N:
                out[quad * QUAD + i] = packed[i]

"""PerHeadBackward: the gradients of a norm with a weight for each head, x (R, H, D) and weight (H, D).

The rows, R * H of them, are dealt to groups of threads. There is a multiple of H groups, so that group u keeps head
u % H, its weight and its columns of dweight (and dbias), which it sums up in registers over its rows u, u + groups, ...
It loads `rows_per_thread` of them before it waits for any. In the end every group writes its sums to its row of
`partial` (groups / H, H * D), and a second kernel in the same call adds up the columns: in the same order every time.

    g = dy * w, dx = rstd * g - x * rstd^3 * mean(g * x), dw = sum of dy * x * rstd, db = sum of dy

layernorm has x less its row's mean for x, and dx less rstd * mean(g).
"""
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ... import tile as tk
from ...reduction_base import ReductionBase
from ...rows.one_pass.columns import Columns
from ...rows.one_pass.copies import RowCopies, both
from ...runtime.compile import fake
from ...utils import WARP, row_reduce
from ..forward.row_norm import Mine, Place, vector_of

FINISH = 256  # threads of a block of the second kernel


class Operands(NamedTuple):
    """x, dy, dresidual_out: (R, H, D). weight: (H, D). rstd, mean: (R * H,). dx, dresidual: (R * H, D). partial_w,
    partial_b: (groups / H, H * D). dweight, dbias: (H * D,). An argument of the compiled function."""

    dy: cute.Tensor
    x: cute.Tensor
    weight: cute.Tensor
    rstd: cute.Tensor
    mean: Optional[cute.Tensor]
    dresidual_out: Optional[cute.Tensor]
    dx: Optional[cute.Tensor]
    dresidual: Optional[cute.Tensor]
    partial_w: Optional[cute.Tensor]
    partial_b: Optional[cute.Tensor]
    dweight: Optional[cute.Tensor]
    dbias: Optional[cute.Tensor]


class PerHeadBackward(ReductionBase):
    def __init__(self, spec, config):
        self.reductions = 2 if spec.kind == "layernorm" else 1
        super().__init__(tk.element_type(spec.x), spec.D, config.rows_per_thread * self.reductions)
        self.spec, self.config = spec, config
        self._set_cluster_n()
        self.tile = self._get_tile(spec.vector * self.dtype.width)
        self.copies = RowCopies(Columns(self.tile, self.N), config.load)

    def _calculate_threads_per_row(self):
        return self.config.threads_per_row

    def _get_num_threads(self):
        return self.config.threads

    def fake_arguments(self):
        """Compiled for `Operands`, what is added to the weight or None, and the number of blocks."""
        spec = self.spec
        rows, positions, heads, columns = fake.sym(), fake.sym(), fake.sym(), fake.sym()
        shares = fake.sym()

        def bytes_of(dtype):
            return spec.vector * tk.element_type(dtype).width // 8

        def loaded(dtype):
            strides = (fake.sym64(divisibility=spec.vector), fake.sym64(divisibility=spec.vector), 1)
            return dtype and fake.tensor(dtype, (positions, heads, spec.D), strides, align=bytes_of(dtype))

        def stored(dtype):
            return dtype and fake.tensor(dtype, (rows, spec.D), (spec.D, 1), align=bytes_of(dtype))

        def partial(dtype):
            return dtype and fake.tensor("fp32", (shares, columns), (fake.sym64(divisibility=spec.vector), 1))

        def summed(dtype):
            return dtype and fake.tensor(dtype, (columns,), (1,), align=4)

        weight = fake.tensor(spec.weight, (heads, spec.D), (spec.D, 1), align=min(16, bytes_of(spec.weight)))
        rstd, mean = (fake.tensor("fp32", (rows,), (1,), align=4) for _ in range(2))
        operands = Operands(
            loaded(spec.dy), loaded(spec.x), weight, rstd, mean if spec.kind == "layernorm" else None,
            loaded(spec.dresidual_out), stored(spec.dx), stored(spec.dresidual), partial(spec.dweight),
            partial(spec.dbias), summed(spec.dweight), summed(spec.dbias))
        return operands.dy, tuple(operands[1:]), Float32(0) if spec.offset else None, Int32(1)

    @cute.jit
    def __call__(self, dy: cute.Tensor, others: Any, offset: Optional[Float32], blocks: Int32, stream: cuda.CUstream):
        """others: those of `Operands` behind dy."""
        g = Operands(dy, *others)
        _, tv_layout = self._get_tv_layout(self.spec.vector * self.dtype.width)
        heads = cute.fast_divmod_create_divisor_v2(g.x.shape[1])
        self.kernel(g, offset, heads, tv_layout).launch(grid=[blocks, 1, 1], block=[self.tile.threads, 1, 1],
                                                        stream=stream)
        columns = [(p, d) for p, d in ((g.partial_w, g.dweight), (g.partial_b, g.dbias)) if d is not None]
        if const_expr(len(columns) > 0):
            self.finish(columns).launch(grid=[cute.ceil_div(columns[0][1].shape[0], WARP), 1, 1], block=[FINISH, 1, 1],
                                        stream=stream)

    @cute.kernel
    def kernel(self, g: Operands, offset: Optional[Float32], heads, tv_layout: cute.Layout):
        t, rows_per_thread = self.tile, self.config.rows_per_thread
        tidx, _, _ = cute.arch.thread_idx()
        smem = tk.SharedAllocator()
        buffer, _ = self._allocate_reduction_buffer_and_mbar(smem, tv_layout)
        col = self.copies.columns.first(tidx, 0)
        mine = Mine(tidx, col, self.copies.columns.inside(col), [], smem)
        groups = cute.arch.grid_dim()[0] * t.rows
        group = cute.arch.block_idx()[0] * t.rows + tidx // t.threads_per_row
        share, head = divmod(group, heads)
        w = self._weight(g.weight, (Int32(head), col), mine, offset)
        dw, db = self._sums(g.dweight), self._sums(g.dbias)
        count = g.rstd.shape[0]
        for i in cutlass.range(cute.ceil_div(count, groups * rows_per_thread), unroll=1):
            first = group + i * (groups * rows_per_thread)
            places = [self._place_of(first + r * groups, count, heads) for r in range(rows_per_thread)]
            held = [self._loaded(g, place, count, mine) for place in places]
            for r in cutlass.range_constexpr(rows_per_thread):
                buffers = [buffer[None, None, k * rows_per_thread + r] for k in range(self.reductions)]
                self._row(g, places[r], count, held[r], w, dw, db, buffers, mine)
        coord = (Int32(share), Int32(head) * self.N + col)
        if const_expr(g.dweight is not None):
            self._store_sums(g.partial_w, coord, dw, mine)
        if const_expr(g.dbias is not None):
            self._store_sums(g.partial_b, coord, db, mine)

    # ---- one row ------------------------------------------------------------------------------------

    def _place_of(self, row, count, heads):
        position, head = divmod(cutlass.min(row, count - 1), heads)
        return Place(row, (Int32(position), Int32(head)))

    def _loaded(self, g, place, count, mine):
        """dy, x, what is added to dx, rstd and mean. Past the end zeros, but the last row's numbers."""
        there = place.row < count
        numbers = [None if m is None else m[cutlass.min(place.row, count - 1)] for m in (g.rstd, g.mean)]
        inside, coord = tuple(both(inside, there) for inside in mine.inside), (*place.at, mine.col)
        streams = [None if m is None else self.copies.fetch_row(m, coord, inside, mine.smem, mine.tidx)
                   for m in (g.dy, g.x, g.dresidual_out)]
        return *streams, *numbers

    def _row(self, g, place, count, held, w, dw, db, buffers, mine):
        dy, x, added, rstd, mean = held
        t, copies = self.tile, self.copies
        products = gradients = None
        for j in range(t.blocks):
            dy_j, x_j = _floats(dy, j), _centred(x, j, mean)
            if dw is not None:
                _add_if(dw, j, dy_j * x_j * rstd, place.row < count)  # past the end it may be 0 * NaN
            if db is not None:
                _add(db, j, dy_j)
            gradient = dy_j * w[j]
            p = gradient * x_j
            products = p if products is None else products + p
            gradients = gradient if gradients is None else gradients + gradient
        if g.dx is None and g.dresidual is None:
            return
        slope, shift = [row_reduce(sums, cute.ReductionOp.ADD, t.threads_per_row, buffer) * (1.0 / self.N) * rstd
                        for sums, buffer in zip((products, gradients), buffers)] + [None] * (2 - self.reductions)
        slope = slope * rstd * rstd
        for j in range(t.blocks):
            dx = _floats(dy, j) * w[j] * rstd - _centred(x, j, mean) * slope
            if shift is not None:
                dx = dx - shift
            if added is not None:
                dx = dx + _floats(added, j)
            for m in (g.dx, g.dresidual):
                if m is not None:
                    stored = both(mine.inside[j], place.row < count)
                    copies.put(copies.store_atom(m), copies.packed(dx, m),
                               copies.view(m, (place.row, mine.col))[None, j], stored)

    # ---- what is held across rows ---------------------------------------------------------------------

    def _weight(self, m, coord, mine, offset):
        """This thread's part of its head's weight, as fp32 vectors."""
        found = [vector_of(self, m, coord, mine.inside, j) for j in range(self.tile.blocks)]
        return found if offset is None else [w + offset for w in found]

    def _sums(self, wanted):
        if wanted is None:
            return None
        sums = cute.make_rmem_tensor((self.tile.vector, self.tile.blocks), Float32)
        sums.fill(0.0)
        return sums

    def _store_sums(self, partial, coord, sums, mine):
        to = self.copies.view(partial, coord)
        for j in range(self.tile.blocks):
            self._put_floats(sums[None, j], to[None, j], mine.inside[j])

    @cute.jit
    def _put_floats(self, src: cute.Tensor, dst: cute.Tensor, stored):
        if const_expr(stored is True):
            cute.autovec_copy(src, dst)
        else:
            if stored:
                cute.autovec_copy(src, dst)

    # ---- the second kernel ------------------------------------------------------------------------------

    @cute.kernel
    def finish(self, columns):
        """(partial, sum) for each: sum[c] = the total of column c. A warp takes every eighth row of 32 columns."""
        lane, warp = tk.lane_id(), tk.warp_id()
        column = cute.arch.block_idx()[0] * WARP + lane
        smem = tk.SharedAllocator()
        for partial, total in columns:
            self._finish_one(partial, total, column, lane, warp, smem)

    @cute.jit
    def _finish_one(self, partial: cute.Tensor, total: cute.Tensor, column, lane, warp, smem: cutlass.Constexpr):
        warps = const_expr(FINISH // WARP)
        met = smem.allocate_tensor(Float32, cute.make_layout((WARP, warps)), byte_alignment=16)
        sum_ = Float32(0)
        if column < total.shape[0]:
            for s in cutlass.range(warp, partial.shape[0], warps, unroll=4):
                sum_ += partial[s, column]
        met[lane, warp] = sum_
        cute.arch.sync_threads()
        if warp == 0 and column < total.shape[0]:
            all_ = met[lane, 0]
            for s in cutlass.range_constexpr(1, warps):
                all_ += met[lane, s]
            total[column] = all_.to(total.element_type)


def _floats(held, j):
    return held[None, j].load().to(Float32)


def _centred(x, j, mean):
    x = _floats(x, j)
    return x if mean is None else x - mean


def _add(sums, j, value):
    sums[None, j].store(sums[None, j].load() + value)


@cute.jit
def _add_if(sums: cute.Tensor, j: cutlass.Constexpr[int], value, wanted):
    if wanted:
        _add(sums, j, value)

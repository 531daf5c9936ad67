"""Columns transformed back, of what `RadixFirstColumns` leaves: the last pass of a convolution of more than a million
points, or of split operands."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.long.back import ColumnsBack, Given, Shared
from tkq.convolution.fft.long.spec import PART
from tkq.convolution.fft.long.steps import fill_steps, largest_of, parts_of, place, powers_of, sums, times, turn
from tkq.convolution.fft.sequences import put_rest, put_run
from tkq.convolution.fft.spec import COLS, ROWS, FftSpec
from tkq.convolution.fft.tables import Tables, exact_root, power_of
from tkq.convolution.fft.transform import Transform
from tkq.runtime.compile import fake
from tkq.tile import vectors


class RadixFirstBack:
    """As `ColumnsBack`, of rows in the order of `RadixFirstColumns`: frequency k1 is in row 64 (k1 mod Q) + k1 div Q.

    Sums of Q numbers are a thread's, as there; of split numbers both parts are added before, and operands are split
    again.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        fft = FftSpec("bf16", ROWS, split=spec.split)
        self.tables, self.transform = Tables(fft, config.threads), Transform(fft)
        self.one = ColumnsBack(spec, config)
        self.turn = exact_root if spec.split else turn

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """As of `ColumnsBack`, of as many planes as there are."""
        _, others, blocks = self.one.fake_arguments()
        steps = [fake.sym64(divisibility=4096) for _ in range(3)]
        shape = others[0].shape[0], fake.sym(), self.spec.planes, fake.sym(divisibility=4096)
        return fake.tensor("fp16", shape, (*steps, 1)), others, blocks

    @cute.jit
    def __call__(self, x: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind x."""
        self.kernel(Given(x, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=self.config.blocks, preferred_smem_carveout=100)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        spec, al, n = self.spec, tk.SharedAllocator(), self.config.warpgroups
        rows = self.transform.left_factors(al)
        tiles = al.tile(tk.st(ROWS, spec.cols, Float16), spec.planes * spec.radix * n)
        steps = al.allocate_tensor(Float32, cute.make_layout((4, spec.rows)), 16)
        wg, me = tk.warpgroup_id(), cute.arch.thread_idx()[0]
        self.tables.fill_rows(rows, me)
        fill_steps(steps, g.x.shape[3], me, self.config.threads, spec.split)
        tk.publish()
        tk.sync_block()
        s = Shared(rows, steps, tiles)
        H, B, _, points = g.x.shape
        across = points // (spec.rows * spec.cols)
        for item in cutlass.range(cute.arch.block_idx()[0] * n + wg, H * B * across, cute.arch.grid_dim()[0] * n,
                                  unroll=1):
            self.tile(g, s, (item // across // B, item // across % B, item % across * spec.cols), wg)

    @cute.jit
    def tile(self, g: Given, s: Shared, where, wg):
        """where: (head, batch index, first column)"""
        spec, (head, batch, col0), barrier = self.spec, where, 1 + wg
        most = largest_of(g.exponents[head, None])
        planes = spec.planes
        tiles = [s.tiles[planes * spec.radix * wg + a] for a in range(planes * spec.radix)]
        tk.sync(barrier, tk.WARPGROUP)  # all have done with the tiles before
        for i in cutlass.range(parts_of(spec.cols, spec.each), unroll=1):
            self.put(g, s, (head, batch, most, col0, tiles), i)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        found = [tk.rt(spec.cols) for _ in range(spec.radix)]
        for a in cutlass.range_constexpr(spec.radix):
            self.transform.left_back(found[a], s.rows, tiles[planes * a:planes * (a + 1)], 0)
        scale = self.one.scale(g, head, batch, most)
        tk.mma_wait()
        for a in cutlass.range_constexpr(spec.radix):
            for r in cutlass.range_constexpr(2):
                at = head, batch, spec.radix * (tk.first_row() + 8 * r) + a, col0
                if const_expr(spec.cols >= PART):
                    self.one.store(g, found[a], at, r, scale)
                else:
                    self.store(g, found[a], at, r, scale)

    def put(self, g: Given, s: Shared, given, i):
        """The products' operands, of a thread's i-th part of a tile. given: (head, batch index, largest exponent, first
        column, tiles)"""
        spec, (head, batch, most, col0, tiles), points = self.spec, given, g.x.shape[3]
        row, col = place(i, spec.cols, spec.each)
        values = cute.make_rmem_tensor((spec.each, spec.planes, spec.radix), Float16)
        here, step, across = [], [], points // spec.rows
        first = row % spec.radix * ROWS + row // spec.radix
        for q in range(spec.radix):
            at = (first + ROWS // spec.radix * q) * across
            for of in range(spec.planes):
                cute.autovec_copy(vectors.run_at(g.x, (head, batch, of, at + col0 + col), spec.each),
                                  values[None, of, q])
            k1 = row + ROWS * q
            x, y = self.turn((4 * k1 - 1) * (col0 + col), 4 * points)
            by = power_of(g.exponents[head, at // (ROWS * COLS)] - most) * Float32(spec.scale)
            here.append((x * by, y * by))
            step.append((s.steps[0, k1], -s.steps[1, k1]))
        roots = powers_of(self.turn(4 * row - 1, 4 * spec.rows), spec.radix - 1) if spec.radix > 1 else []
        found = [([], []) for _ in range(spec.radix)]
        for e in range(spec.each):
            x = [times(self.number(values, e, q), here[q]) for q in range(spec.radix)]
            for a, v in enumerate(sums(x, True)):
                v = times(v, roots[a - 1]) if a else v
                found[a][0].append(v[0])
                found[a][1].append(v[1])
            here = [times(h, w) for h, w in zip(here, step)]
        for a in range(spec.radix):
            for of in range(2):
                put_run(tiles[spec.planes * a + of], found[a][of], row, col)
                if spec.split:
                    put_rest(tiles[spec.planes * a + 2 + of], found[a][of], row, col)

    def number(self, values, e, q):
        """A complex one, of its planes."""
        if not self.spec.split:
            return Float32(values[e, 0, q]), Float32(values[e, 1, q])
        return tuple(Float32(values[e, of, q]) + Float32(values[e, 2 + of, q]) for of in range(2))

    @cute.jit
    def store(self, g: Given, result: tk.RegTile, at, r: cutlass.Constexpr, scale):
        """As of `ColumnsBack`, of tiles too narrow for lanes to store together: two neighbours each."""
        (head, batch, row, col0), L = at, g.y.shape[2]
        first, view, dtype = row * (g.x.shape[3] // self.spec.rows) + col0, result.rows_view, self.one.dtype
        for j in cutlass.range_constexpr(self.spec.cols // 8):
            token = first + tk.first_col() + 8 * j
            two = [view[r, 2 * j + e] * scale[0] * scale[1] for e in range(2)]
            if const_expr(g.gate is not None):
                by = cute.make_rmem_tensor((2,), dtype)
                self.one.sequences.fetch(by, g.gate, batch, head, token)
                two = [x * Float32(by[e]) for e, x in enumerate(two)]
            if token < L:
                there = vectors.run_at(g.y, (batch, head, token), 2)
                aligned = cute.make_tensor(there.iterator.align(2 * dtype.width // 8), there.layout)
                cute.autovec_copy(vectors.packed(two, dtype), aligned)

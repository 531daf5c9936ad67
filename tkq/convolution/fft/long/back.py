"""Columns transformed back: the last pass of a convolution of many points."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.long.spec import PART, SEGMENT
from tkq.convolution.fft.long.steps import (
    EACH,
    exponent_of,
    fill_steps,
    largest_of_few,
    of_four,
    parts_of,
    place,
    times,
    turn,
)
from tkq.convolution.fft.sequences import Sequences, put_run
from tkq.convolution.fft.spec import COLS, ROWS, FftSpec
from tkq.convolution.fft.tables import INFINITE, Tables, power_of
from tkq.convolution.fft.transform import TILE
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.transfer import _transposed


class Given(NamedTuple):
    """x (H, B, 2, N) fp16 and exponents (H, tiles), as the rows' pass leaves them; y and a gate (B, H, L); notes of the
    largest numbers of the sequences (H, B, segments) and of the filter (H, 1, segments), None of a gradient, which has
    its size already; exponent: of what results are multiplied by besides."""

    x: cute.Tensor
    exponents: cute.Tensor
    largest: Optional[cute.Tensor]
    of_filter: Optional[cute.Tensor]
    gate: Optional[cute.Tensor]
    y: cute.Tensor
    exponent: Int32


class Shared(NamedTuple):
    """A block's: factors from the left, steps between columns. A warpgroup's: tiles."""

    rows: tk.SharedTile
    steps: cute.Tensor
    tiles: tk.SharedTile


class ColumnsBack:
    """y[n1, n2] = the real part of the sum over k1 of w(R)^(-n1 r) w(N)^(-r n2) x[k1, n2],  r = k1 - 1/4,  times a
    gate.

    As `Columns`, in the opposite order: factors, sums of as many numbers as the radix has, products by wgmma.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.tables = Tables(FftSpec("bf16", ROWS), config.threads)
        self.dtype = tk.element_type(spec.dtype)
        self.sequences = Sequences(spec, self.dtype)
        self.wide = spec.dtype == "fp32"
        self.gradient = self.wide and not spec.noted

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any sizes and strides, but of neighbouring tokens."""
        spec, B, H, L = self.spec, fake.sym(), fake.sym(), fake.sym(divisibility=self.spec.vector)
        notes = lambda batch: None if self.gradient else fake.tensor("int32", (H, batch, fake.sym()), align=4)

        def operand():
            steps = [fake.sym64(divisibility=128 // self.dtype.width) for _ in range(2)]
            return fake.tensor(spec.dtype, (B, H, L), (*steps, 1))

        steps = [fake.sym64(divisibility=4096) for _ in range(3)]
        x = fake.tensor("fp16", (H, B, 2, fake.sym(divisibility=4096)), (*steps, 1))
        return x, (fake.tensor("int32", (H, fake.sym()), align=4), notes(B), notes(fake.sym()),
                   operand() if spec.gate else None, operand(), Int32(0)), Int32(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind x."""
        self.kernel(Given(x, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=self.config.blocks, preferred_smem_carveout=100)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        spec, al, n = self.spec, tk.SharedAllocator(), self.config.warpgroups
        rows, tiles = al.tile(TILE, 2), al.tile(tk.st(ROWS, spec.cols, Float16), 2 * spec.radix * n)
        steps = al.allocate_tensor(Float32, cute.make_layout((4, spec.rows)), 16)
        wg, me = tk.warpgroup_id(), cute.arch.thread_idx()[0]
        self.tables.fill_rows(rows, me)
        fill_steps(steps, g.x.shape[3], me, self.config.threads)
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
        values = cute.make_rmem_tensor((EACH, 2, parts_of(spec.cols), spec.radix), Float16)
        for q in cutlass.range_constexpr(spec.radix):
            for i in cutlass.range_constexpr(parts_of(spec.cols)):
                row, col = place(i, spec.cols)
                point = (row + ROWS * q) * (g.x.shape[3] // spec.rows) + col0 + col
                for of in cutlass.range_constexpr(2):
                    cute.autovec_copy(vectors.run_at(g.x, (head, batch, of, point), EACH), values[None, of, i, q])
        most = largest_of_few(g.exponents[head, None], spec.most // (ROWS * COLS))
        tk.sync(barrier, tk.WARPGROUP)  # all have done with the tiles before
        tiles = [s.tiles[2 * spec.radix * wg + a] for a in range(2 * spec.radix)]
        for i in cutlass.range_constexpr(parts_of(spec.cols)):
            self.put(g, s, values[None, None, i, None], (head, most, col0, tiles), i)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        found = [tk.rt(spec.cols) for _ in range(spec.radix)]
        for a in cutlass.range_constexpr(spec.radix):
            tk.mm_AtB(found[a], s.rows[0], tiles[2 * a])
            tk.mma_AtB(found[a], s.rows[1], tiles[2 * a + 1])
        scale = self.scale(g, head, batch, most)
        tk.mma_wait()
        for a in cutlass.range_constexpr(spec.radix):
            for r in cutlass.range_constexpr(2):
                self.store(g, found[a], (head, batch, spec.radix * (tk.first_row() + 8 * r) + a, col0), r, scale)

    def scale(self, g: Given, head, batch, most):
        """Two factors of a sequence's results: either is a number where their product may be none."""
        exponent = g.exponent + most - 127
        if self.gradient:
            return power_of(exponent >> 1), power_of(exponent - (exponent >> 1))
        notes = g.largest[head, batch, None], g.of_filter[head, Int32(0), None]
        of_x, of_filter = (largest_of_few(x, self.spec.most // SEGMENT) for x in notes)
        exponent = exponent + exponent_of(of_x) + exponent_of(of_filter) - 254
        finite = cutlass.max(of_x, of_filter) < INFINITE
        second = cutlass.select_(finite, power_of(exponent - (exponent >> 1)), Float32.inf - Float32.inf)
        return power_of(exponent >> 1), second

    def put(self, g: Given, s: Shared, values, given, i):
        """The products' operands, of a thread's i-th part of a tile."""
        spec, (head, most, col0, tiles), points = self.spec, given, g.x.shape[3]
        row, col = place(i, spec.cols)
        one, here, step = turn(4 * row - 1, 4 * spec.rows), [], []
        for q in range(spec.radix):
            k1 = row + ROWS * q
            x, y = turn((4 * k1 - 1) * (col0 + col), 4 * points)
            tile = k1 * (points // spec.rows) // (ROWS * COLS)
            by = power_of(g.exponents[head, tile] - most) * Float32(spec.scale)
            here.append((x * by, y * by))
            step.append((s.steps[0, k1], -s.steps[1, k1]))
        found = [([], []) for _ in range(spec.radix)]
        for e in range(EACH):
            x = [times((Float32(values[e, 0, q]), Float32(values[e, 1, q])), here[q]) for q in range(spec.radix)]
            root = None
            for a, v in enumerate(of_four(x, True)):
                if a:
                    root = one if root is None else times(root, one)
                    v = times(v, root)
                found[a][0].append(v[0])
                found[a][1].append(v[1])
            here = [times(h, w) for h, w in zip(here, step)]
        for a in range(spec.radix):
            for of in range(2):
                put_run(tiles[2 * a + of], found[a][of], row, col)

    @cute.jit
    def store(self, g: Given, result: tk.RegTile, at, r: cutlass.Constexpr, scale):
        """A thread's part of a row of y, scaled, times the gate, rounded once. at: (head, batch index, row, column)."""
        (head, batch, row, col0), lane, L = at, tk.lane_id() % 4, g.y.shape[2]
        first, view = row * (g.x.shape[3] // self.spec.rows) + col0, result.rows_view
        for part in cutlass.range_constexpr(self.spec.cols // PART):
            words = []
            for j in cutlass.range_constexpr(4):
                token = first + tk.first_col() + 8 * (4 * part + j)
                two = [view[r, 2 * (4 * part + j) + e] * scale[0] * scale[1] for e in range(2)]
                if const_expr(g.gate is not None):
                    by = cute.make_rmem_tensor((2,), self.dtype)
                    self.sequences.fetch(by, g.gate, batch, head, token)
                    two = [x * Float32(by[e]) for e, x in enumerate(two)]
                if const_expr(self.wide):
                    if token < L:
                        held = cute.make_rmem_tensor((2,), Float32)
                        held[0], held[1] = two
                        there = vectors.run_at(g.y, (batch, head, token), 2)
                        cute.autovec_copy(held, cute.make_tensor(there.iterator.align(8), there.layout))
                else:
                    words.append(cute.recast_tensor(vectors.packed(two, self.dtype), Int32)[0])
            if const_expr(not self.wide):
                four, token = _transposed(words, lane), first + PART * part + EACH * lane
                if token < L:
                    there = vectors.run_at(g.y, (batch, head, token), EACH).iterator.align(16)
                    cute.autovec_copy(four, cute.make_tensor(cute.recast_ptr(there, dtype=Int32), cute.make_layout(4)))

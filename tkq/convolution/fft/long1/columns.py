"""Columns of sequences transformed: the first pass of a transform of many points."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.long1.spec import IN_TILE, PART
from tkq.convolution.fft.long1.steps import (
    EACH,
    exponent_of,
    fill_steps,
    largest_of_warpgroup,
    of_four,
    parts_of,
    place,
    times,
    turn,
)
from tkq.convolution.fft.sequences import Sequences, put_eight
from tkq.convolution.fft.spec import ROWS, FftSpec
from tkq.convolution.fft.tables import INFINITE, Tables, magnitude, power_of
from tkq.convolution.fft.transform import TILE
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.transfer import _transposed


class Given(NamedTuple):
    """x and a gate (B, H, L); to (H, B, 2, N) fp16: real and imaginary parts; largest (H, B, parts): magnitudes of the
    largest numbers of 32 columns, or of all of a tile that has them."""

    x: cute.Tensor
    gate: Optional[cute.Tensor]
    to: cute.Tensor
    largest: cute.Tensor


class Shared(NamedTuple):
    """A block's: factors from the left, steps between columns. A warpgroup's: tiles, four ints."""

    rows: tk.SharedTile
    steps: cute.Tensor
    tiles: tk.SharedTile
    largest: cute.Tensor


class Columns:
    """to[k1, n2] = w(N)^(r n2) sum over n1 of w(R)^(n1 r) x[n1, n2],  r = k1 - 1/4,  of x times a gate.

    A warpgroup has a tile of columns after the other. Of a radix q it transforms the q matrices of every q-th row by
    wgmma, with the factors of 64 points; sums of q of their numbers, times roots of unity, are the result's.

    Each tile is divided by a power of 2 near its largest number, which is noted for the next pass. One that has NaN or
    infinities is zeros: the note says so.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.tables = Tables(FftSpec("bf16", ROWS), config.threads)
        self.dtype = tk.element_type(spec.dtype)
        self.sequences = Sequences(spec, self.dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any sizes and strides, but of neighbouring tokens."""
        spec, B, H, L = self.spec, fake.sym(), fake.sym(), fake.sym(divisibility=self.spec.vector)

        def operand():
            steps = [fake.sym64(divisibility=128 // self.dtype.width) for _ in range(2)]
            return fake.tensor(spec.dtype, (B, H, L), (*steps, 1))

        to, largest = fake.tensor("fp16", (H, B, 2, fake.sym(divisibility=4096))), fake.tensor(
            "int32", (H, B, fake.sym()), align=4)
        return operand(), (operand() if spec.gate else None, to, largest), Int32(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind x."""
        self.kernel(Given(x, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=self.config.blocks, preferred_smem_carveout=100)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        spec, al, n = self.spec, tk.SharedAllocator(), self.config.warpgroups
        rows, tiles = al.tile(TILE, 2), al.tile(tk.st(ROWS, spec.cols, Float16), spec.radix * n)
        steps = al.allocate_tensor(Float32, cute.make_layout((4, spec.rows)), 16)
        largest = al.allocate_tensor(Int32, cute.make_layout((4, n)), 16)
        wg, me = tk.warpgroup_id(), cute.arch.thread_idx()[0]
        self.tables.fill_rows(rows, me)
        fill_steps(steps, g.to.shape[3], me, self.config.threads)
        tk.publish()
        tk.sync_block()
        s = Shared(rows, steps, tiles, largest[None, wg])
        H, B, _, points = g.to.shape
        across = points // (spec.rows * spec.cols)
        for item in cutlass.range(cute.arch.block_idx()[0] * n + wg, H * B * across, cute.arch.grid_dim()[0] * n,
                                  unroll=1):
            self.tile(g, s, (item // across // B, item // across % B, item % across * spec.cols), wg)

    @cute.jit
    def tile(self, g: Given, s: Shared, where, wg):
        """where: (head, batch index, first column)"""
        spec, (head, batch, col0), barrier = self.spec, where, 1 + wg
        values = cute.make_rmem_tensor((EACH, parts_of(spec.cols), spec.radix), Float32)
        parts = [(i, a) for a in range(spec.radix) for i in range(parts_of(spec.cols))]
        most = Int32(0)
        for i, a in parts:
            self.load(values[None, i, a], g, (head, batch, self.token(g, i, a) + col0))
        for i, a in parts:
            for e in cutlass.range_constexpr(EACH):
                most = cutlass.max(most, magnitude(values[e, i, a]))
        most = largest_of_warpgroup(most, s.largest, barrier)  # all have done with the tiles before, too
        if tk.thread_in_warpgroup() < spec.cols // PART:
            g.largest[head, batch, col0 // PART + tk.thread_in_warpgroup()] = most
        down, finite = power_of(127 + IN_TILE - exponent_of(most)), most < INFINITE
        tiles = [s.tiles[spec.radix * wg + a] for a in range(spec.radix)]
        for i, a in parts:
            put_eight(tiles[a], [cutlass.select_(finite, values[e, i, a] * down, Float32(0.0)) for e in range(EACH)],
                      *place(i, spec.cols))
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        found = [tk.pair(spec.cols) for _ in range(spec.radix)]
        for a in cutlass.range_constexpr(spec.radix):
            tk.mm_AB(found[a].real, s.rows[0], tiles[a])
            tk.mm_AB(found[a].imag, s.rows[1], tiles[a])
        tk.mma_wait()
        for r in cutlass.range_constexpr(2):
            self.store(g, s, found, r, where)

    def token(self, g: Given, i, a):
        """Of the first column of a thread's i-th part of the tile of every radix-th row, from the a-th on."""
        row, col = place(i, self.spec.cols)
        return (self.spec.radix * row + a) * (g.to.shape[3] // self.spec.rows) + col

    @cute.jit
    def load(self, values, g: Given, at):
        """Eight neighbours, times the gate; 0 behind the end."""
        head, batch, token = at
        held = cute.make_rmem_tensor((EACH,), self.dtype)
        self.sequences.fetch(held, g.x, batch, head, token)
        if const_expr(g.gate is not None):
            by = cute.make_rmem_tensor((EACH,), self.dtype)
            self.sequences.fetch(by, g.gate, batch, head, token)
            values.store(held.load().to(Float32) * by.load().to(Float32))
        else:
            values.store(held.load().to(Float32))

    def store(self, g: Given, s: Shared, found, r, where):
        """What a thread has of a row of each of the matrices `found`: combined, times factors, to memory."""
        spec, (head, batch, col0), lane = self.spec, where, tk.lane_id() % 4
        points, c = g.to.shape[3], tk.first_row() + 8 * r
        row_points = points // spec.rows
        one = self.conjugate(turn(4 * c - 1, 4 * spec.rows))  # w(R)^(c - 1/4)
        roots, here, eight = [one], [], []
        for _ in range(2, spec.radix):
            roots.append(times(roots[-1], one))
        for q in range(spec.radix):
            k1 = c + ROWS * q
            x, y = self.conjugate(turn((4 * k1 - 1) * (col0 + tk.first_col()), 4 * points))
            first = (x * Float32(spec.scale), y * Float32(spec.scale))
            step = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(s.steps[None, k1], step)
            here.append([first, times(first, (step[0], step[1]))])
            eight.append((step[2], step[3]))
        views = [(x.real.rows_view, x.imag.rows_view) for x in found]
        for part in range(spec.cols // PART):
            words = [([], []) for _ in range(spec.radix)]
            for j in range(4):
                two = []
                for e in range(2):
                    at = 2 * (4 * part + j) + e
                    x = [(re[r, at], im[r, at]) for re, im in views]
                    x = of_four([x[0]] + [times(v, w) for v, w in zip(x[1:], roots)], False)
                    two.append([times(v, here[q][e]) for q, v in enumerate(x)])
                for q in range(spec.radix):
                    for of in range(2):
                        narrow = vectors.packed([two[e][q][of] for e in range(2)], Float16)
                        words[q][of].append(cute.recast_tensor(narrow, Int32)[0])
                    here[q] = [times(w, eight[q]) for w in here[q]]
            for q in range(spec.radix):
                token = (c + ROWS * q) * row_points + col0 + PART * part + EACH * lane
                for of in range(2):
                    four = _transposed(words[q][of], lane)
                    there = vectors.run_at(g.to, (head, batch, of, token), EACH).iterator.align(16)
                    cute.autovec_copy(four, cute.make_tensor(cute.recast_ptr(there, dtype=Int32), cute.make_layout(4)))

    def conjugate(self, x):
        return x[0], -x[1]

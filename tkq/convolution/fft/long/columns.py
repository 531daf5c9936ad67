"""Columns of sequences transformed: the first pass of a transform of many points."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

import tkq.tile as tk
from tkq.convolution.fft.long.steps import (
    EACH,
    exponent_of,
    fill_steps,
    largest_of,
    load_run,
    of_four,
    parts_of,
    place,
    times,
    turn,
)
from tkq.convolution.fft.sequences import Sequences, put_run
from tkq.convolution.fft.spec import ROWS, FftSpec
from tkq.convolution.fft.tables import INFINITE, Tables, power_of
from tkq.convolution.fft.transform import TILE
from tkq.runtime.compile import fake
from tkq.tile import vectors


class Given(NamedTuple):
    """x and a gate (B, H, L), largest (H, B, segments) as `Largest` leaves it; to, of sequences (head by head), parts
    and rows, R of N2 fp16 each: real and imaginary parts; above: as in `Size`."""

    x: cute.Tensor
    gate: Optional[cute.Tensor]
    largest: cute.Tensor
    to: tk.gl
    above: Int32
    points: Int32


class Shared(NamedTuple):
    """A block's: factors from the left, steps between columns, tiles."""

    rows: tk.SharedTile
    steps: cute.Tensor
    tiles: tk.SharedTile


class Columns:
    """to[k1, n2] = w(N)^(r n2) sum over n1 of w(R)^(n1 r) x[n1, n2],  r = k1 - 1/4,  of x times a gate.

    A warpgroup has a tile of columns after the other. Of a radix q it transforms the q matrices of every q-th row by
    wgmma, with the factors of 64 points; sums of q of their numbers, times roots of unity, are the result's.

    Each sequence is divided by a power of 2 near its largest number. One that has NaN or infinities is zeros: the notes
    say so to the last pass.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.tables = Tables(FftSpec("bf16", ROWS), config.threads)
        self.dtype = tk.element_type(spec.dtype)
        self.sequences, self.tile_type = Sequences(spec, self.dtype), tk.st(ROWS, spec.cols, Float16)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any sizes and strides, but of neighbouring tokens."""
        spec, B, H, L = self.spec, fake.sym(), fake.sym(), fake.sym(divisibility=self.spec.vector)

        def operand():
            steps = [fake.sym64(divisibility=128 // self.dtype.width) for _ in range(2)]
            return fake.tensor(spec.dtype, (B, H, L), (*steps, 1))

        to = fake.tensor("fp16", (fake.sym(divisibility=spec.rows), fake.sym(divisibility=128)))
        largest = fake.tensor("int32", (H, B, fake.sym()), align=4)
        return operand(), (operand() if spec.gate else None, largest, to, Int32(0)), Int32(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind x, but for the last one."""
        gate, largest, to, above = others
        g = Given(x, gate, largest, tk.gl.store(to, self.tile_type), above, to.shape[1] * self.spec.rows)
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                              min_blocks_per_mp=self.config.blocks, preferred_smem_carveout=100)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        spec, al, n = self.spec, tk.SharedAllocator(), self.config.warpgroups
        rows, tiles = al.tile(TILE, 2), al.tile(self.tile_type, 2 * spec.radix * n)
        steps = al.allocate_tensor(Float32, cute.make_layout((4, spec.rows)), 16)
        wg, me = tk.warpgroup_id(), cute.arch.thread_idx()[0]
        self.tables.fill_rows(rows, me)
        fill_steps(steps, g.points, me, self.config.threads)
        tk.publish()
        tk.sync_block()
        s = Shared(rows, steps, tiles)
        H, B, _ = g.largest.shape
        across = g.points // (spec.rows * spec.cols)
        for item in cutlass.range(cute.arch.block_idx()[0] * n + wg, H * B * across, cute.arch.grid_dim()[0] * n,
                                  unroll=1):
            self.tile(g, s, (item // across // B, item // across % B, item % across), wg)
        if tk.first_warp_of_group():
            tk.store_wait(read=False)

    @cute.jit
    def tile(self, g: Given, s: Shared, where, wg):
        """where: (head, batch index, tile of columns)"""
        spec, (head, batch, across), barrier = self.spec, where, 1 + wg
        values = cute.make_rmem_tensor((EACH, parts_of(spec.cols), spec.radix), Float32)
        parts = [(i, a) for a in range(spec.radix) for i in range(parts_of(spec.cols))]
        for i, a in parts:
            token = self.token(g, i, a) + across * spec.cols
            load_run(values[None, i, a], self.sequences, g, (head, batch, token))
        most = largest_of(g.largest[head, batch, None])
        down, finite = power_of(127 + g.above - exponent_of(most)), most < INFINITE
        tiles = [s.tiles[2 * spec.radix * wg + a] for a in range(2 * spec.radix)]
        if tk.first_warp_of_group():
            tk.store_wait()
        tk.sync(barrier, tk.WARPGROUP)  # what was in the tiles has been stored
        for i, a in parts:
            put_run(tiles[a], [cutlass.select_(finite, values[e, i, a] * down, Float32(0.0)) for e in range(EACH)],
                      *place(i, spec.cols))
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        found = [tk.pair(spec.cols) for _ in range(spec.radix)]
        for a in cutlass.range_constexpr(spec.radix):
            tk.mm_AB(found[a].real, s.rows[0], tiles[a])
            tk.mm_AB(found[a].imag, s.rows[1], tiles[a])
        tk.mma_wait()
        narrow = [tk.pair(spec.cols, Float16) for _ in range(spec.radix)]
        for r in cutlass.range_constexpr(2):
            self.combine(g, s, (found, narrow), r, across * spec.cols)
        tk.sync(barrier, tk.WARPGROUP)  # all have done with the inputs
        for q in cutlass.range_constexpr(spec.radix):
            tk.store(tiles[2 * q], narrow[q].real)
            tk.store(tiles[2 * q + 1], narrow[q].imag)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        if tk.first_warp_of_group():
            sequence = 2 * (head * g.largest.shape[1] + batch)
            for q in cutlass.range_constexpr(spec.radix):
                for of in cutlass.range_constexpr(2):
                    tk.store_async(g.to, tiles[2 * q + of], ((sequence + of) * spec.radix + q, across))

    def token(self, g: Given, i, a):
        """Of the first column of a thread's i-th part of the tile of every radix-th row, from the a-th on."""
        row, col = place(i, self.spec.cols)
        return (self.spec.radix * row + a) * (g.points // self.spec.rows) + col

    def combine(self, g: Given, s: Shared, what, r, col0):
        """What a thread has of a row of each of the matrices: combined, times factors, rounded. what: (matrices,
        results)"""
        spec, (found, narrow), points = self.spec, what, g.points
        c = tk.first_row() + 8 * r
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
        to = [[cute.recast_tensor(t.tensor, Int32) for t in (x.real, x.imag)] for x in narrow]
        for j in range(spec.cols // 8):
            two = []
            for e in range(2):
                x = [(re[r, 2 * j + e], im[r, 2 * j + e]) for re, im in views]
                x = of_four([x[0]] + [times(v, w) for v, w in zip(x[1:], roots)], False)
                two.append([times(v, here[q][e]) for q, v in enumerate(x)])
            for q in range(spec.radix):
                for of in range(2):
                    to[q][of][2 * j + r] = cute.recast_tensor(
                        vectors.packed([two[e][q][of] for e in range(2)], Float16), Int32)[0]
                here[q] = [times(w, eight[q]) for w in here[q]]

    def conjugate(self, x):
        return x[0], -x[1]

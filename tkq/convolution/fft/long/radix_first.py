"""Columns of sequences transformed, the radix before the products: of more than a million tokens, and of split
operands."""
import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.convolution.fft.long.columns import Columns, Given, Shared
from tkq.convolution.fft.long.steps import (
    exponent_of,
    fill_steps,
    largest_of,
    load_run,
    parts_of,
    place,
    powers_of,
    sums,
    times,
    turn,
)
from tkq.convolution.fft.sequences import put_rest, put_run
from tkq.convolution.fft.spec import ROWS, FftSpec
from tkq.convolution.fft.tables import INFINITE, Tables, exact_root, power_of
from tkq.convolution.fft.transform import Transform


class RadixFirstColumns:
    """As `Columns`, in the other order, of R = 64 Q rows. With n1 = 64 a + b and k1 = q + Q c, r = k1 - 1/4:

        z[q, b] = w(R)^(b (q - 1/4)) sum over a of w(Q)^(a (q - 1/4)) x[64 a + b, n2]    Q numbers of a thread's, fp32
        to[64 q + c, n2] = w(N)^(r n2) sum over b of w(64)^(b c) z[q, b]                 complex products by wgmma

    So one of Q transforms at a time is in accumulators, whatever Q is, and operands leave room for their low parts.
    They are rounded once more than in `Columns`.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        fft = FftSpec("bf16", ROWS, causal=False, split=spec.split)
        self.tables, self.transform = Tables(fft, config.threads), Transform(fft)
        self.one = Columns(spec, config)
        self.sequences, self.tile_type = self.one.sequences, self.one.tile_type
        self.turn = exact_root if spec.split else turn

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        return self.one.fake_arguments()

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
        rows = self.transform.left_factors(al)
        tiles = al.tile(self.tile_type, spec.planes * spec.radix * n)
        steps = al.allocate_tensor(Float32, cute.make_layout((4, spec.rows)), 16)
        wg, me = tk.warpgroup_id(), cute.arch.thread_idx()[0]
        self.tables.fill_rows(rows, me)
        fill_steps(steps, g.points, me, self.config.threads, spec.split)
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
        most = largest_of(g.largest[head, batch, None])
        down, finite = power_of(127 + g.above - exponent_of(most)), most < INFINITE
        down = cutlass.select_(finite, down, Float32(0.0))
        tiles = [s.tiles[spec.planes * spec.radix * wg + a] for a in range(spec.planes * spec.radix)]
        if tk.first_warp_of_group():
            tk.store_wait()
        tk.sync(barrier, tk.WARPGROUP)  # what was in the tiles has been stored
        for i in cutlass.range(parts_of(spec.cols, spec.each), unroll=1):
            self.put(g, tiles, (head, batch, across * spec.cols, down, finite), i)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        for q in cutlass.range(spec.radix, unroll=1):
            first = spec.planes * (spec.radix * wg + q)
            self.product(g, s, [s.tiles[first + of] for of in range(spec.planes)], (q, across * spec.cols, barrier))
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        if tk.first_warp_of_group():
            sequence = spec.planes * (head * g.largest.shape[1] + batch)
            for q in cutlass.range_constexpr(spec.radix):
                for of in cutlass.range_constexpr(spec.planes):
                    tk.store_async(g.to, tiles[spec.planes * q + of], ((sequence + of) * spec.radix + q, across))

    def put(self, g: Given, tiles, given, i):
        """The products' operands, of a thread's i-th part of a tile. given: (head, batch index, first column, factor,
        is the sequence finite?)"""
        spec, (head, batch, col0, down, finite) = self.spec, given
        row, col = place(i, spec.cols, spec.each)
        values = cute.make_rmem_tensor((spec.each, spec.radix), Float32)
        for a in range(spec.radix):
            token = (ROWS * a + row) * (g.points // spec.rows) + col0 + col
            load_run(values[None, a], self.sequences, g, (head, batch, token))
        first, step = self.turn(row, 4 * spec.rows), self.turn(-row, spec.rows)
        first = (first[0] * Float32(spec.scale), first[1] * Float32(spec.scale))
        roots = [first] + [times(first, w) for w in powers_of(step, spec.radix - 1) if spec.radix > 1]
        found = [([], []) for _ in range(spec.radix)]
        for e in range(spec.each):
            x = []
            for a in range(spec.radix):
                value = cutlass.select_(finite, values[e, a] * down, Float32(0.0))
                angle = math.pi / 2 * a / spec.radix
                x.append((value * Float32(math.cos(angle)), value * Float32(math.sin(angle))))
            for q, v in enumerate(sums(x, False)):
                v = times(v, roots[q])
                found[q][0].append(v[0])
                found[q][1].append(v[1])
        for q in range(spec.radix):
            for of in range(2):
                put_run(tiles[spec.planes * q + of], found[q][of], row, col)
                if spec.split:
                    put_rest(tiles[spec.planes * q + 2 + of], found[q][of], row, col)

    @cute.jit
    def product(self, g: Given, s: Shared, tiles, what):
        """The q-th transform of 64 points, of its tiles, times factors, rounded, in their place. what: (q, first
        column, barrier)"""
        spec, (q, col0, barrier), points = self.spec, what, g.points
        found = tk.pair(spec.cols)
        self.transform.left(found, s.rows, tiles)
        tk.mma_wait()
        views = found.real.rows_view, found.imag.rows_view
        for r in cutlass.range_constexpr(2):
            k1 = q + spec.radix * (tk.first_row() + 8 * r)
            x, y = self.turn((4 * k1 - 1) * (col0 + tk.first_col()), 4 * points)
            step = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(s.steps[None, k1], step)
            here = [(x, -y), times((x, -y), (step[0], step[1]))]
            for j in cutlass.range_constexpr(spec.cols // 8):
                for e in cutlass.range_constexpr(2):
                    at = r, 2 * j + e
                    views[0][at], views[1][at] = times((views[0][at], views[1][at]), here[e])
                here = [times(w, (step[2], step[3])) for w in here]
        narrow = self.transform.narrow(spec.cols)
        tk.complex_copy(narrow, found)
        tk.sync(barrier, tk.WARPGROUP)  # all have done with the operands
        self.transform.put(tiles, narrow)

"""Sequences in and out of tiles: gates, scales, what is behind an end."""
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.spec import COLS, ROWS
from tkq.convolution.fft.tables import INFINITE, magnitude, power
from tkq.tile import vectors
from tkq.tile.transfer import _transposed

EACH = 8  # neighbours that a thread has of a row
STEPS = ROWS * COLS // (tk.WARPGROUP * EACH)  # rows of a tile that it has a part of


class Place(NamedTuple):
    """Of a tile's sequences: the head, the first one's batch index, the first token."""

    head: Int32
    batch: Int32
    token: Int32


def put_run(to: tk.SharedTile, values, row, col):
    """Neighbours of a row, rounded."""
    n = len(values)
    there = cute.local_tile(to.tensor, (1, n), (row, col // n))
    cute.autovec_copy(vectors.packed(values, Float16), there[0, None])


def put_rest(to: tk.SharedTile, values, row, col):
    """What rounding neighbours of a row leaves off, rounded."""
    high = vectors.packed(values, Float16)
    put_run(to, [x - Float32(high[e]) for e, x in enumerate(values)], row, col)


class Sequences:
    """A tile's sequences between global memory and registers or shared memory, of a spec."""

    def __init__(self, spec, dtype):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def load(self, values, u: cute.Tensor, gate: Optional[cute.Tensor], place: Place, tile: cutlass.Constexpr):
        """values (8, 4) = the thread's numbers of an input tile, times the gate, fp32; 0 where there are none."""
        for i in cutlass.range_constexpr(STEPS):
            row, col = self.mine(i)
            batch, token = self.where(place, tile, row, col)
            held = cute.make_rmem_tensor((EACH,), self.dtype)
            self.fetch(held, u, batch, place.head, token)
            if const_expr(gate is not None):
                by = cute.make_rmem_tensor((EACH,), self.dtype)
                self.fetch(by, gate, batch, place.head, token)
                values[None, i].store(held.load().to(Float32) * by.load().to(Float32))
            else:
                values[None, i].store(held.load().to(Float32))

    def mine(self, i):
        """(row, first column) of the i-th part that a thread has of an input tile."""
        me = tk.thread_in_warpgroup()
        return me // (COLS // EACH) + i * (ROWS // STEPS), me % (COLS // EACH) * EACH

    def where(self, place, tile, row, col):
        """(batch index, token)"""
        batch = place.batch + self.spec.sequence(tile, row)
        return batch, place.token + row % self.spec.rows * COLS + col

    @cute.jit
    def fetch(self, held, x: cute.Tensor, batch, head, token):
        """held = x[batch, head, token ..], 0 behind the ends.

        Several at a time have no branches: what is nearest is loaded where there is nothing, and dropped. With a branch
        around each load the next one begins when this one's numbers are there."""
        B, _, L = x.shape
        n = cute.size(held)
        if const_expr(self.spec.vector > 1):
            at = cutlass.min(batch, B - 1), head, cutlass.min(token, L - n)
            cute.autovec_copy(vectors.run_at(x, at, n), held)
            words = cute.recast_tensor(held, Int32)
            for i in cutlass.range_constexpr(cute.size(words)):
                word = cutlass.select_(token < L, words[i], Int32(0))
                words[i] = cutlass.select_(batch < B, word, Int32(0))
        else:
            held.fill(0.0)
            for e in cutlass.range_constexpr(n):
                if batch < B and token + e < L:
                    held[e] = vectors.run_at(x, (batch, head, token + e), 1)[0]

    @cute.jit
    def note_largest(self, most: cute.Tensor, values: cute.Tensor):
        """most[i] = the largest magnitude so far of a thread's part of its i-th row, as an int."""
        for i in cutlass.range_constexpr(STEPS):
            for e in cutlass.range_constexpr(EACH):
                most[i] = cutlass.max(most[i], magnitude(values[e, i]))

    @cute.jit
    def largest_of_rows(self, most: cute.Tensor, to: cute.Tensor, tile: cutlass.Constexpr):
        """to[row] = the largest magnitude in each of a tile's rows, of what its threads have."""
        for i in cutlass.range_constexpr(STEPS):
            found = most[i]
            for offset in (1, 2, 4):
                found = cutlass.max(found, cute.arch.shuffle_sync_bfly(found, offset=offset))
            row, col = self.mine(i)
            if col == 0:
                to[tile * ROWS + row] = found

    def largest_of_tile(self, values, to, tile):
        """Both, of one tile."""
        most = cute.make_rmem_tensor((STEPS,), Int32)
        most.fill(0)
        self.note_largest(most, values)
        self.largest_of_rows(most, to, tile)

    @cute.jit
    def largest_of_sequences(self, of_rows: cute.Tensor, to: cute.Tensor):
        """to[row] = the largest magnitude of the row's sequence (of 64 rows: of its half). Both (tiles * 64)."""
        n = self.spec.tiles * ROWS
        me = tk.thread_in_warpgroup() % n
        most, reach = of_rows[me], min(self.spec.rows, 32)
        for shift in cutlass.range_constexpr(reach.bit_length() - 1):
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << shift))
        to[me] = most

    def largest(self, of_sequences, tile, row):
        """Of a row's sequence."""
        most = of_sequences[tile * ROWS + row]
        if self.spec.rows > 32:
            most = cutlass.max(most, of_sequences[tile * ROWS + (row ^ 32)])
        return most

    @cute.jit
    def put(self, tiles, values, of_sequences: cute.Tensor, tile: cutlass.Constexpr):
        """The input tile in shared memory, scaled (split, its low part too, two tiles on); a sequence with NaN or
        infinities is zeros: its neighbours share transforms with it."""
        for i in cutlass.range_constexpr(STEPS):
            row, col = self.mine(i)
            most = self.largest(of_sequences, tile, row)
            down, _ = power(most, self.spec.above)
            finite = most < INFINITE
            eight = [cutlass.select_(finite, values[e, i] * down, Float32(0.0)) for e in range(EACH)]
            put_run(tiles[tile], eight, row, col)
            if const_expr(self.spec.split):
                put_rest(tiles[2 + tile], eight, row, col)

    @cute.jit
    def store(self, y: cute.Tensor, gate: Optional[cute.Tensor], result: tk.RegTile, of_sequences: cute.Tensor,
              scale, place: Place, tile: cutlass.Constexpr):
        """y = an output tile, times scale and its sequences' own, times the gate, rounded once. Whole warps."""
        view, lane = result.rows_view, tk.lane_id() % 4
        B, _, L = y.shape
        for r in cutlass.range_constexpr(2):
            row = tk.first_row() + 8 * r
            most = self.largest(of_sequences, tile, row)
            _, up = power(most, self.spec.above)
            up = cutlass.select_(most < INFINITE, up, Float32.inf - Float32.inf) * scale
            for part in cutlass.range_constexpr(COLS // 32):
                words = []
                for j in cutlass.range_constexpr(4):
                    at = 2 * (4 * part + j)
                    two = [view[r, at + e] * up for e in range(2)]
                    if const_expr(gate is not None):
                        batch, token = self.where(place, tile, row, tk.first_col() + 8 * (4 * part + j))
                        by = cute.make_rmem_tensor((2,), self.dtype)
                        self.fetch(by, gate, batch, place.head, token)
                        two = [x * Float32(by[e]) for e, x in enumerate(two)]
                    words.append(cute.recast_tensor(vectors.packed(two, self.dtype), Int32)[0])
                four = _transposed(words, lane)
                batch, token = self.where(place, tile, row, 32 * part + 8 * lane)
                if const_expr(self.spec.vector > 1):
                    if batch < B and token < L:
                        there = cute.recast_ptr(vectors.run_at(y, (batch, place.head, token), EACH).iterator.align(16),
                                                dtype=Int32)
                        cute.autovec_copy(four, cute.make_tensor(there, cute.make_layout(4)))
                else:
                    halves = cute.recast_tensor(four, self.dtype)
                    for e in cutlass.range_constexpr(EACH):
                        if batch < B and token + e < L:
                            vectors.run_at(y, (batch, place.head, token + e), 1)[0] = halves[e]

"""LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias, row by row (Ba et al., 2016).

The variance comes from centred values and still needs one exchange: each warp centres its part on its own mean, and
the parts are joined as in Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983): the sum of
squares about the row's mean is that over its warps of (squares about the warp's mean + count * (warp's mean - mean)^2).
"""
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from ... import tile as tk
from ...utils import WARP, collect, lanes_used, pack_f32x2, publish, rsqrt, unpack_f32x2, warp_reduce
from .exchange import send


class LayerNorm:
    """A part of `row_norm.RowNorm`: the statistics of a row. Rows are joined one after the other."""

    def exchanged(self, spec):
        """A warp's mean and sum of squares travel together."""
        return Int64

    def statistics(self, kernel, rows, eps):
        return [self._of_row(kernel, row, eps, r == 0) for r, row in enumerate(rows)]

    def normalise(self, x, statistics):
        return (x - statistics[0]) * statistics[1]

    def _of_row(self, kernel, row, eps, first):
        moments = self.moments(kernel, row, first)
        if cute.size(row.buffer, mode=[1]) > 1:
            moments = self._join(kernel, moments, row)
        return [(mean, rsqrt(squares * (1.0 / kernel.N) + eps)) for mean, squares in moments]

    def _sum(self, x, lanes):
        return warp_reduce(x.reduce(cute.ReductionOp.ADD, 0.0, 0), operator.add, lanes)

    def moments(self, kernel, row, first):
        """(mean, sum of squares about it) of the warp's part, for each of `RowNorm.seen`; in all of its lanes. After
        the first row's the cluster's blocks are ready for an exchange."""
        found = self._of_warp(kernel, row)
        if first and kernel.cluster_n > 1:
            tk.cluster_wait()
        return found

    def _of_warp(self, kernel, row):
        lanes = min(kernel.tile.threads_per_row, WARP)
        total = None
        for j in range(kernel.tile.blocks):
            x = row.block(j)
            total = x if total is None else total + x
        count = _count(kernel, tk.warp_id() % max(kernel.tile.threads_per_row // WARP, 1), row.rank)
        mean = _quotient(self._sum(total, lanes), count)
        kernel.copies.forget()
        # the rounded values about the rounded mean, of which rows of one number have none: so they are seen once
        about = (mean, kernel.rounded(mean)) if kernel.spec.rounded else (mean,)
        rests, squares = [None] * len(about), [None] * len(about)
        for j in range(kernel.tile.blocks):
            for i, x in enumerate(kernel.seen(row, j)):
                # a vector outside the row holds zeros: about 0 they add nothing
                d = x - (about[i] if row.inside[j] is True else cutlass.select_(row.inside[j], about[i], Float32(0)))
                squares[i] = d * d if squares[i] is None else squares[i] + d * d
                rests[i] = d if rests[i] is None else rests[i] + d
        found = []
        for i, of_one in enumerate(squares):
            found.append((about[i], self._sum(of_one, lanes)))
            # what rounding left in the mean; in a sum of 16-bit values nothing that counts
            if about[i] is not mean or kernel.spec.loaded >= 32:
                found[i] = _about_mean(*found[i], self._sum(rests[i], lanes), count)
        return found

    def _join(self, kernel, moments, row):
        """Mean and sum of squares of the row, from those of its warps; for each of `RowNorm.seen`, in one exchange."""
        warps, blocks = row.buffer.shape[1]
        if (warps * blocks) & (warps * blocks - 1):
            raise ValueError(f"a row of {warps} warps in {blocks} blocks: their product must be a power of two")
        pairs = [pack_f32x2(*of_one) for of_one in moments]
        for pair, buffer, mbar_ptr in list(zip(pairs, row.buffers, row.mbar_ptrs))[1:]:
            send(pair, buffer, mbar_ptr)
        publish(pairs[0], row.buffer, row.mbar_ptr)
        for mbar_ptr in row.mbar_ptrs[1:len(pairs)]:
            if mbar_ptr is not None:
                tk.wait(tk.Semaphore(mbar_ptr), 0)
        return [self._join_one(kernel, buffer) for buffer in row.buffers[:len(pairs)]]

    def _join_one(self, kernel, buffer):
        warps, blocks = buffer.shape[1]
        parts = collect(buffer, Int64(0))
        means, sums, counts = [], [], []
        for i in range(cute.size(parts)):
            m, s = unpack_f32x2(parts[i])
            slot = (tk.lane_id() + i * WARP) % (warps * blocks)
            means.append(m)
            sums.append(s)
            counts.append(_count(kernel, slot % warps, slot // warps))
        lanes = lanes_used(warps * blocks)
        # about one warp's mean, so that a mean far from 0 costs no digits
        about = cute.arch.shuffle_sync(means[0], 0)
        weighted = [c * (m - about) for c, m in zip(counts, means, strict=True)]
        mean = about + warp_reduce(sum(weighted[1:], weighted[0]), operator.add, lanes) * (1.0 / kernel.N)
        squares = [s + c * (m - mean) * (m - mean) for s, c, m in zip(sums, counts, means, strict=True)]
        return mean, warp_reduce(sum(squares[1:], squares[0]), operator.add, lanes)


def _count(kernel, slot, rank):
    """How many elements of the row warp `slot` of block `rank` holds, as a float."""
    t = kernel.tile
    if t.threads_per_row <= WARP:
        return Float32(kernel.N)
    if t.even(kernel.N):
        return Float32(t.cols * WARP // t.threads_per_row)
    first = slot * WARP * t.vector + (rank * t.cols if t.cluster > 1 else 0)
    count = cutlass.Int32(0)
    for j in range(t.blocks):
        left = kernel.N - (first + j * t.vector * t.threads_per_row)
        count += cutlass.max(cutlass.min(left, WARP * t.vector), 0)
    return count.to(Float32)


def _about_mean(about, squares, rest, count):
    """(mean, sum of squares about it), from the sums of differences from a number near it, and of their squares."""
    off = _quotient(rest, count)
    return about + off, cutlass.max(squares - off * off * count, Float32(0))


def _quotient(a, count):
    """a / count, as good as correctly rounded: a constant row has that constant as its mean. 0 where count is 0."""
    inverse = cute.arch.rcp_approx(cutlass.max(count, Float32(1)))
    q = a * inverse
    return q + (a - q * count) * inverse

"""The arithmetic of a row reduction: how many threads, blocks and elements a row of N columns gets. Pure Python.

`ReductionBase` and the plans of tkq.norms stand on these few functions, so that no kernel has a ladder of its own.
"""
import math
from dataclasses import dataclass

MAX_CLUSTER = 16  # Hopper's largest (non-portable); 8 is the largest portable one
SMEM_BYTES = 226 * 1024  # what one block may allocate: the loader grants 227 KB less the static 1 KB

# (largest N, threads to a row). A row takes whole warps from 32 threads on; below, several rows share a warp.
THREADS_PER_ROW = ((64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128), (math.inf, 256))
# (largest N, threads of a block)
NUM_THREADS = ((16384, 128), (math.inf, 256))
# (largest bytes of a row, blocks of a cluster that share it)
CLUSTER = ((32 << 10, 1), (64 << 10, 2), (128 << 10, 4), (256 << 10, 8), (math.inf, 16))


def _rung(ladder, n):
    return next(value for limit, value in ladder if n <= limit)


def threads_per_row(N: int) -> int:
    return _rung(THREADS_PER_ROW, N)


def num_threads(N: int) -> int:
    return _rung(NUM_THREADS, N)


def cluster(N: int, width: int) -> int:
    """Blocks to a row of N elements of `width` bits."""
    return _rung(CLUSTER, N * width // 8)


def vector(N: int, width: int, copy_bits: int = 128) -> int:
    """Elements of one access: the most of at most `copy_bits` bits that cut every row into whole accesses."""
    return math.gcd(N, copy_bits // width)


@dataclass(frozen=True)
class Tile:
    """What one block holds: `rows` x `cols`; each thread `blocks` vectors of `vector` elements of one row."""

    rows: int
    cols: int
    vector: int
    blocks: int
    threads_per_row: int
    cluster: int

    @property
    def threads(self) -> int:
        return self.rows * self.threads_per_row

    @property
    def per_thread(self) -> int:
        return self.vector * self.blocks

    def even(self, N: int) -> bool:
        """No access of any thread lies past the row's end."""
        return self.cols * self.cluster == N


def tile(N: int, vec: int, row_threads: int, threads: int, cluster_n: int) -> Tile:
    """Raises ValueError where the threads do not divide into rows, or a row not into vectors.

    The cluster is cut down until the row has more vectors than one block has threads: otherwise one block's tile covers
    the whole row, and its peers would reduce the same columns again.
    """
    if N < 1 or N % vec:
        raise ValueError(f"a row of N = {N} columns is not a whole number of vectors of {vec}")
    if row_threads & (row_threads - 1) or not 1 <= row_threads <= 1024:
        raise ValueError(f"threads per row must be a power of two of at most 1024, got {row_threads}")
    if threads % 32 or threads % row_threads or not 32 <= threads <= 1024:
        raise ValueError(f"{threads} threads are not whole warps of whole rows of {row_threads} threads, at most 1024")
    vectors = N // vec
    if cluster_n > 1 and vectors < row_threads * cluster_n:
        cluster_n = 1 << max(0, (vectors // row_threads).bit_length() - 1)
    blocks = -(-vectors // (row_threads * cluster_n))
    return Tile(threads // row_threads, vec * blocks * row_threads, vec, blocks, row_threads, cluster_n)

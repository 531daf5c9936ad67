"""Which columns of a row a thread has, where a row is spread over the threads of a block or a cluster of blocks."""
from dataclasses import dataclass

from ...reduction.geometry import Tile


@dataclass(frozen=True)
class Columns:
    """Each block of a cluster has a stretch of the row, `tile.cols` long; within it a thread's vectors are `pace`
    columns apart. N: columns of the row."""

    tile: Tile
    N: int

    @property
    def pace(self):
        return self.tile.vector * self.tile.threads_per_row

    def first(self, thread, rank):
        """The first column of a thread in block `rank` of the cluster."""
        t = self.tile
        col = thread % t.threads_per_row * t.vector
        return rank * t.cols + col if t.cluster > 1 else col

    def whole(self, j):
        """At compile time: is vector j within the row, in every thread?"""
        t = self.tile
        return t.cols * (t.cluster - 1) + (j + 1) * self.pace <= self.N

    def inside(self, col):
        """For each vector of the thread whose first column is col: does it lie within the row? True at compile time
        where no thread's can lie outside."""
        return tuple(True if self.whole(j) else col + j * self.pace < self.N for j in range(self.tile.blocks))


@dataclass(frozen=True)
class InterleavedColumns:
    """The blocks of a cluster lie side by side: vector j of all their threads is one stretch of the row, so that they
    walk along it together. Methods as of `Columns`."""

    tile: Tile
    N: int

    @property
    def pace(self):
        return self.tile.vector * self.tile.threads_per_row * self.tile.cluster

    def first(self, thread, rank):
        t = self.tile
        return (rank * t.threads_per_row + thread % t.threads_per_row) * t.vector

    def whole(self, j):
        return (j + 1) * self.pace <= self.N

    inside = Columns.inside

"""The table of groups, in shared memory: where each begins, and which tiles are whose. Groups' sizes are known on the
device alone."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from ... import tile as tk
from ..fp8.config import Fp8Config
from ..fp8.matrices import in_cluster
from ..raster import raster


@dataclass(frozen=True)
class Tile:
    """Where a block works: in tiles of its group; the group, where in a's rows (or, along K, in K) it begins, and how
    many of them it has."""

    row: Int32
    col: Int32
    group: Int32
    first: Int32
    size: Int32


@dataclass(frozen=True)
class Order:
    """Numbers of cluster tiles, of all groups, one after the other; dealt out as by ``tk.Schedule``."""

    tasks: Int32
    cluster: Constexpr[int]
    cursor: cute.Tensor  # the group of the last tile: numbers only grow

    def workers(self):
        """The fewest clusters that need no more waves than all: see ``plan.even_blocks``. At least one."""
        clusters = cute.arch.grid_dim()[0] // self.cluster
        waves = cutlass.max(cute.ceil_div(self.tasks, clusters), 1)
        return cutlass.max(cute.ceil_div(self.tasks, waves), 1)

    def first(self):
        """For those that have no work: past the end."""
        mine = Int32(cute.arch.block_idx()[0] // self.cluster)
        return cutlass.select_(mine < self.workers(), mine, self.tasks)

    def following(self, number):
        return number + self.workers()


class GroupTable:
    """Before the roles part, a warp of each block reads the offsets and counts every group's tiles into shared memory;
    then every role finds the group of each of its tiles there. Groups may be empty, and a block may have no tile.

    along_k: groups are columns of a and rows of b, and each has all tiles of C."""

    def __init__(self, config: Fp8Config, along_k: bool):
        self.config, self.along_k = config, along_k

    def span(self):
        """Rows and columns of a cluster's tile."""
        x = self.config
        return (x.m, x.n * x.cluster) if x.cluster_along_n else (x.m * x.cluster, x.n)

    @cute.jit
    def count(self, g, begins: cute.Tensor, counts: cute.Tensor):
        """The table, by warp 0: 32 groups at a time. An offset below one before counts as that one, and none is below 0
        or past the end: whatever the offsets say, no memory is touched that is not the caller's, and none twice."""
        if tk.warp_id() == 0:
            lane, limit = tk.lane_id(), g.k if const_expr(self.along_k) else g.m
            tall, wide = self.span()
            cols, total, most = cute.ceil_div(g.n, wide), Int32(0), Int32(0)
            if lane == 0:
                counts[0] = Int32(0)
            for base in cutlass.range(0, g.groups, 32, unroll=1):
                group = base + lane
                begin, end = Int32(0), Int32(0)
                if group < g.groups:
                    end = cutlass.min(cutlass.max(g.offsets[group], 0), limit)
                    if group > 0:
                        begin = cutlass.min(cutlass.max(g.offsets[group - 1], 0), limit)
                # begin is below what the groups before have reached, or end below begin, where offsets fall alone
                if cute.arch.vote_ballot_sync((group < g.groups) & ((end < begin) | (begin < most))) != 0:
                    begin, end = self.risen(end, most)
                most = cute.arch.shuffle_sync(end, 31)
                tiles = Int32(0)
                if group < g.groups:
                    if const_expr(self.along_k):
                        tiles = cute.ceil_div(g.m, tall) * cols
                    else:
                        tiles = cute.ceil_div(cutlass.max(end - begin, 0), tall) * cols
                for i in cutlass.range_constexpr(5):
                    below = cute.arch.shuffle_sync_up(tiles, 1 << i, mask_and_clamp=0)
                    if lane >= 1 << i:
                        tiles += below
                if group < g.groups:
                    begins[group] = begin
                    begins[group + 1] = end  # the next group writes the same, but for the last
                    counts[group + 1] = total + tiles
                total += cute.arch.shuffle_sync(tiles, 31)

    @cute.jit
    def risen(self, end, most):
        """(begin, end) of each lane's group where offsets fall: the largest end of the groups before, which ``most`` is
        of those before lane 0's, and of these and its own."""
        end = cutlass.max(end, most)
        for i in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(end, 1 << i, mask_and_clamp=0)
            if tk.lane_id() >= 1 << i:
                end = cutlass.max(end, below)
        begin = cute.arch.shuffle_sync_up(end, 1, mask_and_clamp=0)
        return cutlass.select_(tk.lane_id() == 0, most, begin), end

    def order(self, g, s):
        cursor = cute.make_rmem_tensor((1,), Int32)
        cursor[0] = Int32(0)
        return Order(s.counts[g.groups], self.config.cluster, cursor)

    @cute.jit
    def seek(self, counts: cute.Tensor, cursor: cute.Tensor, number):
        """Move the cursor to the group that has tile ``number``."""
        while counts[cursor[0] + 1] <= number:
            cursor[0] = cursor[0] + 1

    def tile(self, g, s, order, number) -> Tile:
        self.seek(s.counts, order.cursor, number)
        group = cute.arch.make_warp_uniform(order.cursor[0])
        first, end = (cute.arch.make_warp_uniform(s.begins[group + i]) for i in range(2))
        size = cutlass.max(end - first, 0)
        tall, wide = self.span()
        rows = cute.ceil_div(g.m if self.along_k else size, tall)
        row, col = raster(number - s.counts[group], rows, cute.ceil_div(g.n, wide), self.config.raster_group,
                          cutlass.min)
        return Tile(*in_cluster(self.config, row, col), group, first, size)

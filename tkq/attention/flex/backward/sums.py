"""Where gradients of captured tensors are added up: in registers as far as elements of a score matrix share an element
of the tensor, then in global memory."""
import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

import tkq.tile as tk
from tkq.attention.flex.emit import Emitted, place_in, select
from tkq.tile.assembly import ptx

# Of a warp's tile in shared memory: its rows, the columns before it, a pitch by which no two rows' pairs meet in a bank
ROWS, PAD, PITCH = 16, 16, 104


@dsl_user_op
def add_if(condition, address, value, *, loc=None, ip=None):
    """fp32 added to global memory where the condition, an integer, is not 0: one instruction, no branch. Relaxed."""
    ptx([Int32(condition), Int64(address), Float32(value)],
        "{ .reg .pred p; setp.ne.s32 p, $0, 0; @p red.relaxed.gpu.global.add.f32 [$1], $2; }", "r,l,f", loc, ip)


def flag(condition):
    return cutlass.select_(condition, Int32(1), Int32(0))


@dsl_user_op
def store_pair(address, a, b, *, loc=None, ip=None):
    """Two fp32 to shared memory, 8 bytes aligned."""
    ptx([Int32(address), Float32(a), Float32(b)], "st.shared.v2.f32 [$0], {$1, $2};", "r,f,f", loc, ip)


def address_of(x, at):
    """Of the element of a gradient that a load's indices lead to."""
    place = place_in(x, at)
    return (x.iterator + cute.crd2idx(place, x.layout)).toint()


def sum_over(value, *offsets):
    """Over the lanes of a warp whose numbers differ in these bits."""
    for offset in offsets:
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


class Sums:
    """Of one load. A tile's rows are keys, its columns queries.

    What its indices depend on decides how much is added up before it goes to memory: on neither queries nor keys, all
    that a warp has of a query head; on keys, a row (as long); on queries, a column of a tile, over the rows of a warp;
    on their difference alone, a diagonal of a warp's part of a tile, through shared memory; on both otherwise, or on
    the score, what follows each other in a thread and goes to the same place."""

    def __init__(self, graph, load):
        self.graph, self.load = graph, load
        depends = graph.inputs_of()
        found = {name for i in load.at for name in depends[i]}
        self.kind = {(False, False): "head", (False, True): "key", (True, False): "query"}.get(
            ("q" in found, "kv" in found), "each") if "score" not in found else "each"
        if self.kind == "each" and all(_of_difference(graph)[i] for i in load.at):
            self.kind = "diagonal"

    def registers(self):
        """That last for a query head."""
        n = {"head": 1, "key": 2}.get(self.kind)
        return None if n is None else cute.make_rmem_tensor((n,), Float32)

    def begin(self, sums):
        if sums is not None:
            sums.fill(0.0)

    def place(self, x, emitted, inputs):
        return address_of(x, [emitted.node_at(i, **inputs) for i in self.load.at])

    def tile(self, sums, x, emitted, of_warp):
        """What takes a tile's elements, one after the other along its diagonals: ``take(r, j, inputs, value)``, then
        ``close()``. x: the gradient; sums: ``registers``; of_warp: a ``Diagonals``."""
        if sums is not None:
            return _InRegisters(sums, self.kind)
        if self.kind == "diagonal":
            return _AcrossRows(lambda inputs: self.place(x, Emitted(emitted.graph, (emitted.tensors, emitted.numbers)),
                                                         inputs), of_warp)
        to = lambda inputs: self.place(x, emitted, inputs)
        return _Columns(to) if self.kind == "query" else _Runs(to)

    def end(self, sums, x, captured, inputs_of_row):
        """Of a query head. inputs_of_row: of r."""
        if self.kind == "head":
            total = sum_over(sums[0], 1, 2, 4, 8, 16)
            place = self.place(x, Emitted(self.graph, captured), inputs_of_row(0))
            add_if(flag((tk.lane_id() == 0) & (total != Float32(0.0))), place, total)
        elif self.kind == "key":
            emitted = Emitted(self.graph, captured)
            for r in range(2):
                total = sum_over(sums[r], 1, 2)
                place = self.place(x, emitted, inputs_of_row(r))
                add_if(flag((tk.lane_id() % 4 == 0) & (total != Float32(0.0))), place, total)


def _of_difference(graph):
    """Of each node: does it depend on query and key by their difference alone, if at all?"""
    found = []
    for i, (node, steps, depends) in enumerate(zip(graph.nodes, graph.affine(), graph.inputs_of())):
        if steps is not None:
            found.append(sum(steps) == 0)
        elif node.op == "input":
            found.append(not depends & {"q", "kv", "score"})
        else:
            found.append(all(found[a] for a in graph.operands(i)))
    return found


class Diagonals(NamedTuple):
    """Of a warp's 16 keys and 64 queries. buffer: its ``ROWS * PITCH`` fp32 in shared memory, 0 beside the tile.
    inputs(d): of the graphs, where query - key is d more than at the tile's first ones."""

    buffer: Any
    inputs: Any

    @staticmethod
    def clear(buffer):
        for i in range(ROWS * PITCH // 32):
            buffer[tk.lane_id() + 32 * i] = Float32(0.0)
        cute.arch.sync_warp()


class _AcrossRows:
    """Along the diagonals of a warp's tile: it is written row by row to shared memory, where each lane adds up three of
    its 79 diagonals. Where all lanes' go to one place, as far ones' of a table of buckets, one lane adds their sum."""

    def __init__(self, to, of_warp):
        self.to, self.of_warp, self.found = to, of_warp, {}

    def take(self, r, j, inputs, value):
        self.found[r, j] = value

    def close(self):
        buffer, lane = self.of_warp.buffer, tk.lane_id()
        base = Int32(buffer.iterator.toint()) + 4 * (lane // 4 * PITCH + PAD + lane % 4 * 2)
        cute.arch.sync_warp()  # the tile before has been read
        for r, j in itertools.product(range(2), range(0, len(self.found) // 2, 2)):
            store_pair(base + 4 * (8 * r * PITCH + 4 * j), self.found[r, j], self.found[r, j + 1])
        cute.arch.sync_warp()
        columns = 2 * len(self.found)
        for first in range(1 - ROWS, columns, 32):
            d = cutlass.min(lane + first, Int32(columns))  # behind the last: a diagonal of zeroes
            total = Float32(0.0)
            for row in range(ROWS):
                total = total + buffer[row * (PITCH + 1) + PAD + d]
            self.add(self.to(self.of_warp.inputs(d)), total)

    @staticmethod
    def add(place, total):
        lane = tk.lane_id()
        halves = Int32(place), Int32(place >> Int64(32))
        alone = cute.arch.vote_all_sync(halves[0] == cute.arch.shuffle_sync(halves[0], 0))
        alone = alone & cute.arch.vote_all_sync(halves[1] == cute.arch.shuffle_sync(halves[1], 0))
        together = sum_over(total, 1, 2, 4, 8, 16)
        total = select(alone, select(lane == 0, together, Float32(0.0)), total)
        add_if(flag(total != Float32(0.0)), place, total)


class _InRegisters:
    """Of a query head, by row or all together."""

    def __init__(self, sums, kind):
        self.sums, self.kind = sums, kind

    def take(self, r, j, inputs, value):
        at = r if self.kind == "key" else 0
        self.sums[at] = self.sums[at] + value

    def close(self):
        """Nothing is left to be done."""


class _Columns:
    """Of a tile, by column."""

    def __init__(self, to):
        self.to, self.found = to, {}

    def take(self, r, j, inputs, value):
        first, total = self.found.get(j, (inputs, None))
        self.found[j] = first, value if total is None else total + value

    def close(self):
        for inputs, total in self.found.values():
            total = sum_over(total, 4, 8, 16)
            add_if(flag((tk.lane_id() < 4) & (total != Float32(0.0))), self.to(inputs), total)


class _Runs:
    """Of what follows each other and goes to the same place."""

    def __init__(self, to):
        self.to, self.place, self.total = to, None, None

    def take(self, r, j, inputs, value):
        to = self.to(inputs)
        if self.place is not None:
            other = self.place != to
            add_if(flag(other & (self.total != Float32(0.0))), self.place, self.total)
            value = select(other, Float32(0.0), self.total) + value
        self.place, self.total = to, value

    def close(self):
        add_if(flag(self.total != Float32(0.0)), self.place, self.total)

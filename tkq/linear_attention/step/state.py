"""A lane's part of a state: where it is in the pool, its loads and stores, sums over K."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.step.config import StepConfig
from tkq.linear_attention.step.spec import StepSpec
from tkq.tile import vectors
from tkq.tile.dtypes import element_type


class Part(NamedTuple):
    """Of a state, this lane's: the first of its rows of K and of its columns of V, and which of the slice's columns
    that is. Is it the warp's first lane along K, and the first of all warps'? Its number in the warp."""

    k: Int32
    v: Int32
    in_slice: Int32
    first_along_k: cutlass.Boolean
    first: cutlass.Boolean
    lane: Int32


class LaneState:
    """Numbers (i, j), i along K, j along V. Along K they are `k_run` neighbours, and `k_run` more behind those of the
    other lanes; along V they are neighbours. One access takes several along the state's contiguous dimension."""

    def __init__(self, spec: StepSpec, config: StepConfig):
        self.spec, self.config, self.dtype = spec, config, element_type(spec.state)
        self.along_k = spec.layout == "k"
        apart = 1 if self.along_k else config.v_lanes  # lanes from one to the next along K
        self.offsets = tuple(apart << i for i in range(config.k_lanes.bit_length() - 1))

    def part(self, column, row):
        """column, row: the first of V and of K that this warp has."""
        c, lane = self.config, tk.lane_id()
        along_k, along_v = lane // c.v_lanes, lane % c.v_lanes
        if self.along_k:
            along_k, along_v = lane % c.k_lanes, lane // c.k_lanes
        in_slice, first = along_v * c.v_values, along_k == 0
        return Part(row + along_k * c.k_run, column + in_slice, in_slice, first,
                    first if c.k_warps == 1 else row + along_k == 0, lane)

    def at(self, i: int, j: int) -> int:
        """Where (i, j) is among the registers: what one access takes are neighbours."""
        c = self.config
        return j * c.k_values + i if self.along_k else i * c.v_values + j

    def registers(self):
        return cute.make_rmem_tensor(self.config.k_values * self.config.v_values, Float32)

    def accesses(self):
        """(i, j, numbers) of each."""
        c = self.config
        if self.spec.layout == "v":
            return [(i, 0, c.v_values) for i in range(c.k_values)]
        if self.spec.layout == "k":
            return [(i, j, c.k_run) for j in range(c.v_values) for i in range(0, c.k_values, c.k_run)]
        return [(i, j, 1) for i in range(c.k_values) for j in range(c.v_values)]

    def first(self, pool, row, head, part):
        """The pool from the lane's (0, 0) on, as (K, V)."""
        k, v = (3, 2) if self.spec.v_first else (2, 3)
        coord = (row, head, part.v, part.k) if self.spec.v_first else (row, head, part.k, part.v)
        pointer = vectors.run_at(pool, coord, 1).iterator
        return cute.make_tensor(pointer, cute.select(pool.layout, [k, v]))

    def run(self, first, i, j, n):
        """n neighbours of the state, from (i, j) on."""
        c = self.config
        k = i // c.k_run * c.k_run * c.k_lanes + i % c.k_run
        return cute.make_tensor(first.iterator + cute.crd2idx((k, j), first.layout), cute.make_layout(n))

    def load(self, state, pool, row, head, part):
        """All of the lane's accesses are under way before a number is used."""
        first = self.first(pool, row, head, part)
        narrow = state if self.dtype is Float32 else cute.make_rmem_tensor(cute.size(state), self.dtype)
        for i, j, n in self.accesses():
            cute.autovec_copy(self.run(first, i, j, n), self.held(narrow, i, j, n))
        if narrow is not state:
            state.store(narrow.load().to(Float32))

    def store(self, state, pool, row, head, part):
        first, narrow = self.first(pool, row, head, part), state
        if self.dtype is not Float32:
            narrow = cute.make_rmem_tensor(cute.size(state), self.dtype)
            narrow.store(state.load().to(self.dtype))
        for i, j, n in self.accesses():
            cute.autovec_copy(self.held(narrow, i, j, n), self.run(first, i, j, n))

    def read_rows(self, first, to):
        """What belongs to the lane's rows of K, one number each, to registers. first: where the lane's begin."""
        c = self.config
        for i in range(0, c.k_values, c.k_run):
            cute.autovec_copy(cute.make_tensor(first.iterator + i * c.k_lanes, cute.make_layout(c.k_run)),
                              cute.make_tensor(to.iterator + i, cute.make_layout(c.k_run)))

    def held(self, registers, i, j, n):
        return cute.make_tensor(registers.iterator + self.at(i, j), cute.make_layout(n))

    def sums(self, values: list) -> list:
        """Of each value over the lanes along K; the same in all of them."""
        for offset in self.offsets:
            values = [x + cute.arch.shuffle_sync_bfly(x, offset=offset) for x in values]
        return values

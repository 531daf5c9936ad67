"""A lane's part of a state: where it is in the pool, its loads and stores, sums over K."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, CopyR2GOp, LoadCacheMode, MemoryOrder, StoreCacheMode

import tkq.tile as tk
from tkq.linear_attention.step.config import StepConfig
from tkq.linear_attention.step.spec import StepSpec
from tkq.tile import vectors
from tkq.tile.dtypes import element_type


class Part(NamedTuple):
    """Of a state, this lane's: the first of its rows of K and of its columns of V; is it the first lane along K?"""

    k: Int32
    v: Int32
    first: cutlass.Boolean
    first_lane: cutlass.Boolean
    in_warp: tuple


def fetch(src, dst, volatile):
    """dst = src."""
    if not volatile:
        cute.autovec_copy(src, dst)
        return
    n, bits = cute.size(src), src.element_type.width
    per = min(n, 128 // bits)
    atom = cute.make_copy_atom(CopyG2ROp(), src.element_type, num_bits_per_copy=per * bits, memory_order=MemoryOrder.VOLATILE)
    part = cute.make_layout((per, n // per))
    cute.copy(atom, cute.make_tensor(src.iterator, part), cute.make_tensor(dst.iterator, part))


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
        first = along_k == 0
        inside = along_k * c.k_run, along_v * c.v_values
        return Part(row + inside[0], column + inside[1], first if c.k_warps == 1 else row + along_k == 0, first, inside)

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
            self.get(self.run(first, i, j, n), self.held(narrow, i, j, n))
        if narrow is not state:
            state.store(narrow.load().to(Float32))

    def store(self, state, pool, row, head, part):
        first, narrow = self.first(pool, row, head, part), state
        if self.dtype is not Float32:
            narrow = cute.make_rmem_tensor(cute.size(state), self.dtype)
            narrow.store(state.load().to(self.dtype))
        for i, j, n in self.accesses():
            self.give(self.held(narrow, i, j, n), self.run(first, i, j, n))

    def get(self, src, dst):
        hint = self.config.load_hint
        if not hint:
            fetch(src, dst, self.config.volatile)
            return
        kinds = dict(na=dict(l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE),
                     cs=dict(load_cache_mode=LoadCacheMode.STREAMING))
        atom = cute.make_copy_atom(CopyG2ROp(), src.element_type, num_bits_per_copy=128, **kinds[hint])
        n = cute.size(src)
        cute.copy(atom, cute.make_tensor(src.iterator, cute.make_layout((n, 1))), cute.make_tensor(dst.iterator, cute.make_layout((n, 1))))

    def give(self, src, dst):
        hint = self.config.store_hint
        if not hint:
            cute.autovec_copy(src, dst)
            return
        kinds = dict(cs=dict(store_cache_mode=StoreCacheMode.STREAMING))
        atom = cute.make_copy_atom(CopyR2GOp(), src.element_type, num_bits_per_copy=128, **kinds[hint])
        n = cute.size(src)
        cute.copy(atom, cute.make_tensor(src.iterator, cute.make_layout((n, 1))), cute.make_tensor(dst.iterator, cute.make_layout((n, 1))))

    def read(self, state, i, j, n):
        """n numbers from (i, j) on."""
        if not self.config.in_place:
            return [state[self.at(i, j) + m] for m in range(n)]
        held = cute.make_rmem_tensor(n, self.dtype)
        cute.autovec_copy(self.run(state, i, j, n), held)
        return vectors.wide(held)

    def write(self, state, i, j, values):
        if not self.config.in_place:
            for m, x in enumerate(values):
                state[self.at(i, j) + m] = x
        else:
            cute.autovec_copy(vectors.packed(values, self.dtype), self.run(state, i, j, len(values)))

    def ij(self, i, j, m):
        return (i + m, j) if self.along_k else (i, j + m)

    def shared(self, copy, pool, part):
        """The warp's copy of its slice, seen from this lane's first number on as (K, V)."""
        k, v = (3, 2) if self.spec.v_first else (2, 3)
        layout = cute.select(pool.layout, [k, v])
        return cute.make_tensor(copy.iterator + cute.crd2idx(part.in_warp, layout), layout)

    def load_shared(self, state, shared):
        narrow = state if self.dtype is Float32 else cute.make_rmem_tensor(cute.size(state), self.dtype)
        for i, j, n in self.accesses():
            cute.autovec_copy(self.run(shared, i, j, n), self.held(narrow, i, j, n))
        if narrow is not state:
            state.store(narrow.load().to(Float32))

    def store_shared(self, state, shared):
        narrow = state
        if self.dtype is not Float32:
            narrow = cute.make_rmem_tensor(cute.size(state), self.dtype)
            narrow.store(state.load().to(self.dtype))
        for i, j, n in self.accesses():
            cute.autovec_copy(self.held(narrow, i, j, n), self.run(shared, i, j, n))

    def slice_address(self, pool, row, head, part):
        """Where the warp's slice of the pool begins."""
        k0, v0 = part.k - part.in_warp[0], part.v - part.in_warp[1]
        coord = (row, head, v0, k0) if self.spec.v_first else (row, head, k0, v0)
        return vectors.run_at(pool, coord, 1).iterator.toint()

    def read_rows(self, first, to):
        """What belongs to the lane's rows of K, one number each, to registers. first: where the lane's begin."""
        c = self.config
        for i in range(0, c.k_values, c.k_run):
            fetch(cute.make_tensor(first.iterator + i * c.k_lanes, cute.make_layout(c.k_run)),
                  cute.make_tensor(to.iterator + i, cute.make_layout(c.k_run)), c.volatile)

    def held(self, registers, i, j, n):
        return cute.make_tensor(registers.iterator + self.at(i, j), cute.make_layout(n))

    def sums(self, values: list) -> list:
        """Of each value over the lanes along K; the same in all of them."""
        for offset in self.offsets:
            values = [x + cute.arch.shuffle_sync_bfly(x, offset=offset) for x in values]
        return values

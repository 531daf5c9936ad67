"""Kernels of rows that bench/tune_hints.py times: with and without hints to the caches, and the sum of the longest rows
in other ways. Recipes' builders, apart from the script that asks for them."""
import importlib
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, CopyR2GOp, LoadCacheMode, StoreCacheMode, cpasync

from tkq import row_copies
from tkq.norms.build import RMSNormOptions, _arguments
from tkq.norms.row import Operands
from tkq.pointwise import access
from tkq.row_kernel import RowKernel
from tkq.utils import rsqrt


def build(builder: str, spec, config, loads: bool, stores: bool):
    """What the builder makes, whose loads go past L1 and whose stores leave L2 first, as said. It says so to whatever
    is traced next: every recipe of a process that has this one is to be of this builder."""
    _hint(loads, stores)
    module, _, name = builder.partition(":")
    return getattr(importlib.import_module(module), name)(spec, config)


def _hint(loads, stores):
    loading = dict(l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE) if loads else {}
    storing = dict(store_cache_mode=StoreCacheMode.STREAMING) if stores else {}

    def load_atom(self, m):
        bits = self.tile.vector * m.element_type.width
        if self.config.load == "shared":
            past_l1 = bits == 128 and self._past_l1()
            op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL if past_l1 else LoadCacheMode.ALWAYS)
            return cute.make_copy_atom(op, m.element_type, num_bits_per_copy=bits)
        return cute.make_copy_atom(CopyG2ROp(), m.element_type, num_bits_per_copy=bits, **loading)

    def store_atom(self, m):
        bits = self.tile.vector * m.element_type.width
        return cute.make_copy_atom(CopyR2GOp(), m.element_type, num_bits_per_copy=bits, **storing)

    row_copies.RowCopies._load_atom, row_copies.RowCopies._store_atom = load_atom, store_atom
    access.load, access.store = _load(loading), _store(storing)


def _load(hint):
    def load(src, once=False):
        dtype = src.element_type
        bits = min(128, cute.size(src) * dtype.width)
        # as the package had it: what is read again, a table of few elements, is not hinted
        words = hint if bits == 128 and dtype.width == 16 else {}
        atom = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=bits, **words)
        held = cute.make_rmem_tensor(cute.size(src), dtype)
        part = cute.make_layout(bits // dtype.width)
        cute.copy(atom, cute.logical_divide(src, part), cute.logical_divide(held, part))
        return held

    return load


def _store(hint):
    def store(held, dst):
        dtype = held.element_type
        bits = min(128, cute.size(held) * dtype.width)
        atom = cute.make_copy_atom(CopyR2GOp(), dtype, num_bits_per_copy=bits, **hint)
        part = cute.make_layout(bits // dtype.width)
        cute.copy(atom, cute.logical_divide(held, part), cute.logical_divide(dst, part))

    return store


class Resident(RMSNormOptions):
    """With registers for so many blocks on a multiprocessor."""

    resident = 2

    @cute.jit
    def _launch(self, g: Operands, eps: Float32, offset: Optional[Float32], stream: cuda.CUstream):
        self._set_cluster_n()
        bits = self.spec.vector * self.dtype.width
        _, tv_layout = self._get_tv_layout(bits)
        self.tile = self._get_tile(bits)
        self.kernel(g, eps, offset, None, tv_layout).launch(
            grid=[cute.ceil_div(g.rows, self.config.rows_each), self.cluster_n, 1],
            block=[self.tile.threads, 1, 1], cluster=[1, self.cluster_n, 1], stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=100)


def resident(spec, config):
    return Resident(spec, config), _arguments(spec)


class KeptSum(RowKernel):
    """rmsnorm of x + residual, and that sum, by blocks that stay."""

    loads, stores, vectors, parameters = ("x", "residual"), ("y", "total"), ("weight",), ("eps",)

    def partial(self, e, r):
        h = e.x + e.residual
        return (h * h,)

    def row(self, sums, r):
        return dict(rstd=rsqrt(sums[0] * (1.0 / self.N) + r.eps))

    def write(self, e, r):
        h = e.x + e.residual
        return dict(y=h * r.rstd * e.weight, total=h)

"""Device helpers for row reductions: reduce over a row's threads, warps and blocks, predicates, 64-bit offsets.

All are called inside kernels. `row_reduce`, `predicate_k`, `domain_offset_i64` and `rsqrt` have the names and arguments
of the public CuTe-DSL reduction tutorial, so that kernels written against it run on them.
"""
import operator
from collections.abc import Callable
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from .tile.naps import nap
from .tile.vectors import domain_offset_i64 as domain_offset_i64  # of the tutorial's names

WARP = 32


@dsl_user_op
def rsqrt(x: Float32, *, loc=None, ip=None) -> Float32:
    """1 / sqrt(x), within 0.51 units in the last place; subnormal x allowed.

    The hardware's approximation is off by up to a unit, which a norm's rstd would hand on to every element of its row;
    one Newton step mends that. The residual 1 - x r^2 of 0 and infinity is NaN: there the approximation is exact."""
    def fma(a, b, c):
        return ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, c)

    def ptx(code, *args):
        return cute.arch.inline_ptx(code, write_only_types=[Float32], read_only_args=[Float32(a) for a in args],
                                    loc=loc, ip=ip)

    r = ptx("rsqrt.approx.f32 {$w0}, {$r0};", x)
    product = x * r
    rest = fma(x, r, -product)  # what was rounded off the product
    residual = fma(-rest, r, fma(-product, r, 1.0))
    return cutlass.select_(residual == residual, fma(0.5 * r, residual, r), r)


@dsl_user_op
def elem_pointer(x: cute.Tensor, coord, *, loc=None, ip=None) -> cute.Pointer:
    """The address of x[coord]."""
    return x.iterator + cute.crd2idx(coord, x.layout, loc=loc, ip=ip)


def widened(x: cute.Tensor):
    """The fp32 values of a vector in registers, (n,) with stride 1.

    Two of bf16 by a shift and a mask of the word they share: the compiler's own conversion takes three instructions.
    """
    n = cute.size(x)
    if x.element_type is not BFloat16 or n % 2:
        return x.load().to(Float32)
    words, wide = cute.recast_tensor(x, Uint32), cute.make_rmem_tensor(n, Float32)
    for i in range(n // 2):
        wide[2 * i] = (words[i] << 16).bitcast(Float32)
        wide[2 * i + 1] = (words[i] & Uint32(0xFFFF0000)).bitcast(Float32)
    return wide.load()


def predicate_k(tAcA: cute.Tensor, limit) -> cute.Tensor:
    """Which of a thread's copies start left of column `limit`.

    tAcA: coordinates partitioned like the data, ((vector, V), M, K). Returns Booleans of shape (V, M, K), as
    `cute.copy` wants them for `pred`; the columns do not depend on the row, so all of M share one value.
    """
    v, m, k = cute.size(tAcA, mode=[0, 1]), cute.size(tAcA, mode=[1]), cute.size(tAcA, mode=[2])
    pred = cute.make_rmem_tensor(cute.make_layout((v, m, k), stride=(k, 0, 1)), Boolean)
    for i in range(v):
        for j in range(k):
            pred[i, 0, j] = cute.elem_less(tAcA[(0, i), 0, j][1], limit)
    return pred


def fill_oob(tXsX: cute.Tensor, tXpX: Optional[cute.Tensor], fill_value) -> None:
    """Write `fill_value` over the vectors of a thread's part ((vector, V), M, K) that the predicate leaves out."""
    if tXpX is not None:
        _fill_oob(tXsX, tXpX, fill_value)


@cute.jit
def _fill_oob(tXsX: cute.Tensor, tXpX: cute.Tensor, fill_value):
    for i in cutlass.range_constexpr(cute.size(tXsX, mode=[0, 1])):
        for j in cutlass.range_constexpr(cute.size(tXsX, mode=[2])):
            if not tXpX[i, 0, j]:
                part = tXsX[(None, i), None, j]
                value = cute.make_rmem_tensor_like(part)
                value.fill(fill_value)
                cute.autovec_copy(value, part)


@cute.jit
def warp_reduce(val, op: Constexpr, width: Constexpr[int] = WARP):
    """Reduce over aligned groups of `width` lanes (a power of two); all lanes get the result."""
    for i in cutlass.range_constexpr(width.bit_length() - 1):
        val = op(val, cute.arch.shuffle_sync_bfly(val, offset=1 << i))
    return val


@dsl_user_op
def pack_f32x2(a: Float32, b: Float32, *, loc=None, ip=None) -> Int64:
    """Two floats as one 64-bit value, for a reduction buffer whose type is Int64."""
    low, high = Float32(a).bitcast(cutlass.Uint32), Float32(b).bitcast(cutlass.Uint32)
    return Int64(low) | (Int64(high) << 32)


@dsl_user_op
def unpack_f32x2(v: Int64, *, loc=None, ip=None):
    """The two floats that `pack_f32x2` put into v."""
    return Int32(v & 0xFFFFFFFF).bitcast(Float32), Int32(v >> 32).bitcast(Float32)


@cute.jit
def publish(val, reduction_buffer: cute.Tensor, mbar_ptr: Optional[cute.Pointer], phase=None):
    """Put every warp's value where all warps of its row can read it, and wait until all of them are there.

    reduction_buffer: (rows, (warps to a row, blocks of the cluster)). Without mbar_ptr the row lies in one block, and
    the whole block meets. With it every block sends its values to all blocks of the cluster: st.async, counted in bytes
    by the receiver's mbarrier, which must be initialised (one arrival) in all blocks before any of them calls this.
    """
    nap("arrive")
    rows, (warps_per_row, cluster_n) = reduction_buffer.shape
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row, col = warp // warps_per_row, warp % warps_per_row
    if const_expr(mbar_ptr is None):
        if lane == 0:
            reduction_buffer[row, col] = val
        cute.arch.sync_threads()
    else:
        if warp == 0:
            with cute.arch.elect_one():
                count = rows * warps_per_row * cluster_n * (reduction_buffer.element_type.width // 8)
                cute.arch.mbarrier_arrive_and_expect_tx(mbar_ptr, count)
        if lane < cluster_n:
            mine = elem_pointer(reduction_buffer, (row, (col, cute.arch.block_idx_in_cluster())))
            words = _words(val)
            cute.arch.store_async_dsmem(cute.recast_ptr(mine, dtype=Int32), words, mbar_ptr, lane)
        cute.arch.mbarrier_wait(mbar_ptr, phase if const_expr(phase is not None) else 0)


def _words(val):
    if val.dtype.width == 64:
        return Int32(val & 0xFFFFFFFF), Int32(val >> 32)
    return val.bitcast(Int32)


def lanes_used(slots: int) -> int:
    """How many lanes have to be reduced over after `collect`: `slots` itself where lanes can repeat it."""
    return slots if slots <= WARP and slots & (slots - 1) == 0 else WARP


@cute.jit
def collect(reduction_buffer: cute.Tensor, init_val):
    """What `publish` brought for this warp's row, dealt to its lanes: ceil(slots / 32) registers, init_val where empty.

    With a power of two up to 32 slots, slot i goes to all lanes i modulo slots.
    """
    warps_per_row, cluster_n = reduction_buffer.shape[1]
    slots = const_expr(warps_per_row * cluster_n)
    lane, row = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()) // warps_per_row
    values = cute.make_rmem_tensor(cute.ceil_div(slots, WARP), reduction_buffer.element_type)
    if const_expr(lanes_used(slots) == slots):
        values[0] = reduction_buffer[row, lane % slots]
    else:
        values.fill(init_val)
        for i in cutlass.range_constexpr(cute.size(values)):
            if lane + i * WARP < slots:
                values[i] = reduction_buffer[row, lane + i * WARP]
    return values


def _nan_max(a, b):
    return cute.arch.fmax(a, b, nan=True) if isinstance(a, Float32) else cutlass.max(a, b)


def _nan_min(a, b):
    return cute.arch.fmin(a, b, nan=True) if isinstance(a, Float32) else cutlass.min(a, b)


_SCALAR_OPS = {cute.ReductionOp.ADD: operator.add, cute.ReductionOp.MUL: operator.mul,
               cute.ReductionOp.MAX: _nan_max, cute.ReductionOp.MIN: _nan_min}


@cute.jit
def row_reduce(x, op: Constexpr, threads_per_row: Constexpr[int], reduction_buffer: Optional[cute.Tensor] = None,
               mbar_ptr: Optional[cute.Pointer] = None, phase: Optional[Int32] = None, init_val: Constexpr = 0.0,
               hook_fn: Constexpr[Optional[Callable]] = None):
    """Reduce x over all threads of its row; every one of them gets the result.

    x: this thread's elements (a TensorSSA) or a scalar. op: cute.ReductionOp.ADD, MUL, MAX or MIN; a NaN gives NaN.
    reduction_buffer: one stage of the buffer of `ReductionBase`, needed where a row is wider than a warp.
    mbar_ptr: that stage's mbarrier; needed where the row spans a cluster, None otherwise.
    phase: parity of the mbarrier, 0 where None. init_val: the neutral element.
    hook_fn: called between a warp's own reduction and the exchange (`cute.arch.cluster_wait`, hidden behind the loads).
    Every thread of the block has to call it.
    """
    val = x.reduce(op, init_val, 0) if const_expr(isinstance(x, cute.TensorSSA)) else x
    scalar_op = const_expr(_SCALAR_OPS[op])
    val = warp_reduce(val, scalar_op, min(threads_per_row, WARP))
    if const_expr(hook_fn is not None):
        hook_fn()
    if const_expr(reduction_buffer is not None and cute.size(reduction_buffer, mode=[1]) > 1):
        if const_expr(reduction_buffer.shape[1][1] > 1 and mbar_ptr is None):
            raise ValueError("mbar_ptr: a row that spans a cluster needs the mbarrier of its stage, got None")
        publish(val, reduction_buffer, mbar_ptr, phase)
        parts = collect(reduction_buffer, init_val)
        val = parts[0]
        for i in cutlass.range_constexpr(1, cute.size(parts)):
            val = scalar_op(val, parts[i])
        val = warp_reduce(val, scalar_op, lanes_used(cute.size(reduction_buffer, mode=[1])))
    return val

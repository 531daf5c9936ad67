"""What the tile layer refuses while it traces. Each case: (body(x), the error, a pattern of its message).

x is fp32 (64, 64) in global memory. HOST bodies run in the host function, the others in the kernel.
"""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32
from cutlass import Float8E4M3FN as E4M3

import tkq.tile as tk

from .common import OneBlock, tensor


def ring(rows, cols, dtype=BFloat16):
    return tk.SharedAllocator().tile(tk.st(rows, cols, dtype))


def one(rows, cols, dtype=BFloat16):
    return ring(rows, cols, dtype)[0]


def _view(x, *modes):
    return cute.make_tensor(x.iterator, cute.select(x.layout, list(modes)))


def _strided(x, stride, cols=8):
    return cute.make_tensor(x.iterator, cute.make_layout((8, cols), stride=(stride, 1)))


def _heads(x):
    return cute.make_tensor(x.iterator, cute.make_layout((8, 32, 6), stride=(256, 1, 32)))


def _bare(**given):
    """A kernel on the LCF template, of which nothing but the numbers is said."""
    class Bare(tk.LCF):
        inputs = dict(a=tk.st(64, 64))

    kernel = Bare()
    for name, value in given.items():
        setattr(kernel, name, value)
    return kernel


def pipe(stages=2, bytes=16, consumers=1, **more):
    return tk.SharedAllocator().pipe(stages, bytes, consumers, **more)


def sem():
    return tk.SharedAllocator().semaphores()


KERNEL = {
    "rt_cols": (
        lambda x: tk.rt(12),
        ValueError, "rt: cols is 12, allowed for fp32 are multiples of 8"),
    "rt_cols_half": (
        lambda x: tk.rt(8, BFloat16),
        ValueError, "rt: cols is 8, allowed for bf16 are multiples of 16"),
    "rt_cols_fp8": (
        lambda x: tk.rt(16, E4M3),
        ValueError, "rt: cols is 16, allowed for e4m3 are multiples of 32"),
    "rt_wide": (
        lambda x: tk.rt(264),
        ValueError, "rt: cols is 264"),
    "rt_dtype": (
        lambda x: tk.rt(16, cutlass.Int32),
        TypeError, "rt: dtype is int32"),
    "cv_cols": (
        lambda x: tk.cv(12),
        ValueError, "cv: cols is 12"),
    "narrow_dst": (
        lambda x: tk.apply_narrow(tk.rt_fl(64), lambda y: y, tk.rt_fl(64)),
        TypeError, "apply_narrow: dst is 64 x 64 fp32 in registers, allowed are register tiles of bf16 and fp16"),
    "narrow_width": (
        lambda x: tk.apply_narrow(tk.rt_bf(64), lambda y, z: y, tk.rt_fl(64), tk.cv(32)),
        ValueError, "apply_narrow: operand b is column vector of 32, dst is 64 x 64 bf16"),
    "narrow_type": (
        lambda x: tk.apply_narrow(tk.rt_bf(64), lambda y: y, tk.rt_hf(64)),
        TypeError, "apply_narrow: operand a is 64 x 64 fp16 in registers, .* allowed are fp32 and dst's type"),
    "narrow_what": (
        lambda x: tk.apply_narrow(tk.rt_bf(64), lambda y: y, "rows"),
        TypeError, "apply_narrow: operand a is 'rows'"),
    "scratch_room": (
        lambda x: ring(64, 64).scratch(tk.st(64, 128)),
        ValueError, "scratch: 1 tiles of 64 x 64 bf16 have no room for 64 x 128 bf16"),
    "shared_cols_size": (
        lambda x: tk.load_shared_cols(tk.cv(64), tk.SharedAllocator().vector(32)[None, 0]),
        ValueError, "load_shared_cols: v is column vector of 64"),
    "columns_range": (
        lambda x: tk.columns(tk.rt_fl(64), 32, 40),
        ValueError, "columns: 32 and 40 of 64"),
    "columns_below": (
        lambda x: tk.columns(tk.rt_fl(64), -8, 16),
        ValueError, "columns: -8 and 16 of 64"),
    "columns_none": (
        lambda x: tk.columns(tk.cv(64), 8, 0),
        ValueError, "columns: 8 and 0 of 64"),
    "columns_dtype": (
        lambda x: tk.columns(tk.rt_bf(64), 0, 24),
        TypeError, "columns: 0 and 24 of 64 x 64 bf16 in registers, allowed are fp32 tiles, and 16 bits in multiples"),
    "mma_steps": (
        lambda x: tk.mm_ABt(tk.rt(64), one(64, 64), one(64, 64), k=(0, 24)),
        ValueError, r"mm_ABt: k is \(0, 24\), allowed are multiples of 16 from 0 to 64"),
    "add_shape": (
        lambda x: tk.add(tk.rt_fl(64), tk.rt_fl(64), tk.rt_fl(32)),
        ValueError, "add: operand b is 64 x 32 fp32 .*dst is 64 x 64"),
    "add_dtype": (
        lambda x: tk.add(tk.rt_bf(64), tk.rt_hf(64), 1.0),
        TypeError, "add: operand a is 64 x 64 fp16 .*use copy"),
    "add_vector": (
        lambda x: tk.add(tk.rt_fl(64), tk.rt_fl(64), tk.rv()),
        ValueError, "add: operand b is row vector"),
    "add_none": (
        lambda x: tk.add(tk.rt_fl(64), tk.rt_fl(64), None),
        TypeError, "add: operand b is None"),
    "mul_fp8": (
        lambda x: tk.mul(tk.rt(32, E4M3), tk.rt(32, E4M3), 2.0),
        TypeError, "mul: dst is 64 x 32 e4m3"),
    "exp2_half": (
        lambda x: tk.exp2(tk.rt_bf(16), tk.rt_bf(16)),
        TypeError, "exp2: dst is 64 x 16 bf16"),
    "apply_shape": (
        lambda x: tk.apply(tk.rt_fl(8), lambda a: a, tk.rt_fl(16)),
        ValueError, "apply: operand a is 64 x 16"),
    "sub_row_vector": (
        lambda x: tk.sub_row(tk.rt_fl(8), tk.rt_fl(8), tk.cv(8)),
        TypeError, "sub_row: operand v is column vector of 8"),
    "mul_row_dtype": (
        lambda x: tk.mul_row(tk.rt_bf(16), tk.rt_bf(16), tk.rv()),
        TypeError, "mul_row: operand dst is 64 x 16 bf16"),
    "div_row_vector": (
        lambda x: tk.div_row(tk.rt_fl(8), tk.rt_fl(8), 2.0),
        TypeError, "div_row: operand v is 2.0"),
    "add_col_size": (
        lambda x: tk.add_col(tk.rt_fl(16), tk.rt_fl(16), tk.cv(8)),
        ValueError, "add_col: operand v is column vector of 8"),
    "mul_col_vector": (
        lambda x: tk.mul_col(tk.rt_fl(16), tk.rt_fl(16), tk.rv()),
        TypeError, "mul_col: operand v is row vector"),
    "fma_outer_block": (
        lambda x: tk.fma_outer(tk.rt_fl(64), tk.rt_fl(64), tk.rv(), [Float32(1.0)] * 3),
        ValueError, "fma_outer: block has 3 values"),
    "row_max_dst": (
        lambda x: tk.row_max(tk.cv(64), tk.rt_fl(64)),
        TypeError, "row_max: operand dst is column vector"),
    "row_sum_a": (
        lambda x: tk.row_sum(tk.rv(), tk.rt_bf(64)),
        TypeError, "row_sum.*: operand a is 64 x 64 bf16"),
    "copy_shape": (
        lambda x: tk.copy(tk.rt_bf(64), tk.rt_fl(32)),
        ValueError, "copy: src is 64 x 32 fp32"),
    "copy_dtype": (
        lambda x: tk.copy(tk.rt_bf(64), tk.rt_hf(64)),
        TypeError, "copy: from fp16 to bf16"),
    "copy_fp8": (
        lambda x: tk.copy(tk.rt(64, E4M3), tk.rt_fl(64)),
        TypeError, "copy: from fp32 to e4m3"),
    "fill_fp8_rows": (
        lambda x: tk.right_fill(tk.rt(32, E4M3), 3, 0.0),
        TypeError, "64 x 32 e4m3"),
    "mm_d_dtype": (
        lambda x: tk.mm_ABt(tk.rt_bf(64), one(64, 64), one(64, 64)),
        TypeError, "mm_ABt: operand d is 64 x 64 bf16"),
    "mm_a_ring": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), ring(64, 64), one(64, 64)),
        TypeError, "mm_ABt: operand a must be .*one shared tile"),
    "mm_b_ring": (
        lambda x: tk.mma_AB(tk.rt_fl(64), one(64, 64), ring(64, 64)),
        TypeError, "mma_AB: operand b must be one shared tile"),
    "mm_a_dtype": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 64, Float32), one(64, 64)),
        TypeError, "mm_ABt: operand a is 64 x 64 fp32"),
    "mm_b_dtype": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 64), one(64, 64, Float32)),
        TypeError, "mm_ABt: operand b is 64 x 64 fp32"),
    "mm_mixed": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 64), one(64, 64, Float16)),
        TypeError, "operand a is bf16 and operand b fp16"),
    "mm_fp8_AB": (
        lambda x: tk.mm_AB(tk.rt_fl(64), one(64, 64, E4M3), one(64, 64, E4M3)),
        TypeError, "mm_AB: operands of 8 bits must have K contiguous"),
    "mm_AtB_registers": (
        lambda x: tk.mm_AtB(tk.rt_fl(64), tk.rt_bf(64), one(64, 64)),
        TypeError, "mm_AtB: operand a is transposed"),
    "mm_rows": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(32, 64), one(64, 64)),
        ValueError, "mm_ABt: operand a is 32 x 64 bf16: its 32 rows"),
    "mm_k": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 32), one(64, 64)),
        ValueError, r"operand a is 64 x 32 bf16 \(K = 32\), operand b is 64 x 64 bf16 \(K = 64\)"),
    "mm_k_step": (
        lambda x: tk.mm_AtB(tk.rt_fl(64), one(24, 64), one(24, 64)),
        ValueError, "mm_AtB: K is 24, allowed for bf16 are multiples of 16"),
    "mm_n": (
        lambda x: tk.mm_ABt(tk.rt_fl(48), one(64, 64), one(64, 64)),
        ValueError, "mm_ABt: operand d has 48 columns"),
    "mm_panels": (
        lambda x: tk.mm_AB(tk.rt_fl(48), one(64, 64), one(64, 192)),
        ValueError, "mm_AB: operand d has 48 columns, which straddle operand b's panels of 64"),
    "mm_a_part": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(128, 64), one(64, 64), a_part=2),
        ValueError, "mm_ABt: a_part is 2, allowed are 0 to 1"),
    "mm_b_part": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 64), one(64, 64), b_part=1),
        ValueError, "mm_ABt: b_part is 1, allowed are 0 to 0"),
    "store_ring": (
        lambda x: tk.store(ring(64, 64), tk.rt_fl(64)),
        TypeError, "store: the shared operand must be one tile"),
    "store_shape": (
        lambda x: tk.store(one(64, 64), tk.rt_fl(32)),
        ValueError, "store: the register tile is 64 x 32 fp32"),
    "store_dtype": (
        lambda x: tk.store(one(64, 64), tk.rt_hf(64)),
        TypeError, "store: src is 64 x 64 fp16 .*dst is 64 x 64 bf16"),
    "store_fp8": (
        lambda x: tk.store(one(64, 64, E4M3), tk.rt_fl(64)),
        TypeError, "store: src is 64 x 64 fp32"),
    "store_T_shape": (
        lambda x: tk.store_T(one(64, 32), tk.rt_fl(32)),
        ValueError, "store_T: the register tile is 64 x 32"),
    "store_T_cols": (
        lambda x: tk.store_T(one(24, 64), tk.rt_fl(24)),
        ValueError, "store_T: src is 64 x 24 fp32"),
    "store_T_fp32": (
        lambda x: tk.store_T(one(64, 64, Float32), tk.rt_fl(64)),
        TypeError, "store_T: .*allowed are fp32 to bf16 and fp16"),
    "load_dtype": (
        lambda x: tk.load(tk.rt_fl(64), one(64, 64)),
        TypeError, "load: dst is 64 x 64 fp32 .*src is 64 x 64 bf16"),
    "load_not_a_tile": (
        lambda x: tk.load(tk.rv(), one(64, 64)),
        TypeError, "load: the register operand must be a register tile, got row vector"),
    "load_rows_rank": (
        lambda x: tk.load_rows(tk.rv(), x, 0, 64),
        ValueError, "load_rows: the global tensor has 2 dimensions"),
    "load_cols_kind": (
        lambda x: tk.load_cols(tk.rv(), x[0, None], 0, 64),
        TypeError, "load_cols: the operand in registers is row vector"),
    "store_rows_kind": (
        lambda x: tk.store_rows(x[0, None], tk.cv(64), 0, 64),
        TypeError, "store_rows: the operand in registers is column vector"),
    "store_elements_rank": (
        lambda x: tk.store_elements(x[0, None], tk.rt_fl(64), 0, 0),
        ValueError, "store_elements: the global tensor has 1 dimensions"),
    "store_narrow_dtype": (
        lambda x: tk.store_narrow(x, tk.rt_fl(64), 0, 64),
        ValueError, "store_narrow: src is 64 x 64 fp32 in registers, dst is"),
    "load_elements_ring": (
        lambda x: tk.load_elements(ring(64, 64, Float32), x, 0, 0, 128, 0),
        TypeError, "load_elements: dst must be one shared tile"),
    "load_elements_dtype": (
        lambda x: tk.load_elements(one(64, 64), x, 0, 0, 128, 0),
        TypeError, "load_elements: src is fp32, dst is 64 x 64 bf16"),
    "load_elements_threads": (
        lambda x: tk.load_elements(one(64, 64, Float32), x, 0, 0, 96, 0),
        ValueError, "load_elements: .*96 threads"),
    "copy_async_width": (
        lambda x: tk.copy_async(tk.SharedAllocator().vector(8, dtype=BFloat16), 0, x, (0, 0)),
        TypeError, "copy_async: src is fp32, dst bf16"),
    "bulk_load_bytes": (
        lambda x: tk.bulk_load(0, 0, 24, 0),
        ValueError, "bulk_load: bytes is 24"),
    "bulk_store_bytes": (
        lambda x: tk.bulk_store(0, 0, 0),
        ValueError, "bulk_store: bytes is 0"),
    "bulk_add_bytes": (
        lambda x: tk.bulk_add(0, 0, -16),
        ValueError, "bulk_add: bytes is -16"),
    "pairs_half": (
        lambda x: ring(64, 64).pairs,
        TypeError, "pairs: the tile is 64 x 64 bf16"),
    "stacked_wide": (
        lambda x: ring(64, 128).stacked(2),
        ValueError, "stacked: 64 x 128 bf16 is wider"),
    "stacked_stages": (
        lambda x: ring(64, 64).stacked(2),
        ValueError, "stacked: n is 2, allowed are divisors of the 1 stages"),
    "sync_barrier": (
        lambda x: tk.sync(16, 128),
        ValueError, "sync: barrier is 16"),
    "sync_threads": (
        lambda x: tk.sync_arrive(1, 100),
        ValueError, "sync_arrive: threads is 100"),
    "ring_stages": (
        lambda x: tk.ring(0),
        ValueError, "ring: stages is 0"),
    "pipe_stages": (
        lambda x: tk.SharedAllocator().pipe(2, 16, 0),
        ValueError, "Pipe: consumers is 0"),
    "post_fields": (
        lambda x: tk.SharedAllocator().mailbox(2, 1, 1).post(tk.ring(1), 3),
        ValueError, "post: 1 values, the mailbox has 2"),
    "schedule_kind": (
        lambda x: tk.Schedule(3, "fastest"),
        ValueError, "Schedule: kind is 'fastest'"),
    "schedule_counter": (
        lambda x: tk.Schedule(3, "dynamic"),
        ValueError, "Schedule: counter is None"),
    "schedule_cluster": (
        lambda x: tk.Schedule(3, "dynamic", 2, x),
        NotImplementedError, "Schedule: cluster is 2"),
    "schedule_fetched": (
        lambda x: tk.Schedule(3, "dynamic", 1, x).following(1),
        ValueError, "following: fetched is None"),
    "registers_many": (
        lambda x: tk.specialise(lambda: None, lambda wg: None, 2, (40, 248)),
        ValueError, "specialise: registers 40 . 2 x 248"),
    "registers_step": (
        lambda x: tk.specialise(lambda: None, lambda wg: None, 2, (24, 100)),
        ValueError, "specialise: registers are 24 and 100"),
    "consumers": (
        lambda x: tk.specialise(lambda: None, lambda wg: None, 4),
        ValueError, "specialise: consumers is 4"),
    "turns": (
        lambda x: tk.Turns(15, 0),
        ValueError, "Turns: groups is 15 from barrier 2, allowed are 1 to 15"),
    "lcf_lag": (
        lambda x: _bare(stages=2, lag=2).run(None),
        ValueError, "LCF: lag is 2 with 2 stages, allowed are 0 to 1"),
    "lcf_lag_below": (
        lambda x: _bare(lag=-1).run(None),
        ValueError, "LCF: lag is -1 with 4 stages"),
    "lcf_stages": (
        lambda x: _bare(stages=0, lag=0).run(None),
        ValueError, "LCF: stages is 0"),
    "lcf_consumers": (
        lambda x: _bare(consumers=0).run(None),
        ValueError, "LCF: consumers is 0"),
    "lcf_memory": (
        lambda x: _bare(stages=30).run(None),
        ValueError, "SharedAllocator: with 30 tiles of 64 x 64 bf16 the block has 245760 bytes .*allowed are 231424"),
    "memory_tiles": (
        lambda x: tk.SharedAllocator().tile(tk.st(64, 64), 40),
        ValueError, "SharedAllocator: with 40 tiles of 64 x 64 bf16 the block has 327680 bytes"),
    "memory_vector": (
        lambda x: tk.SharedAllocator().vector(1 << 16),
        ValueError, "SharedAllocator: with a tensor of 65536 fp32 the block has 262144 bytes"),
    "memory_array": (
        lambda x: tk.SharedAllocator().allocate_array(BFloat16, 1 << 17),
        ValueError, "SharedAllocator: with an array of 131072 bf16 the block has 262144 bytes"),
    "quad_sum_dst": (
        lambda x: tk.quad_sum(tk.rt_fl(64)),
        TypeError, "quad_sum: operand dst is 64 x 64 fp32 in registers, allowed is a row vector"),
    "finite_dst": (
        lambda x: tk.finite_or_zero(tk.rt_fl(64), tk.rv()),
        TypeError, "finite_or_zero: operand dst is 64 x 64 fp32"),
    "finite_src": (
        lambda x: tk.finite_or_zero(tk.rv(), tk.cv(64)),
        TypeError, "finite_or_zero: operand src is column vector of 64"),
    "row_sum_v": (
        lambda x: tk.row_sum(tk.rv(), tk.rt_fl(64), tk.cv(64)),
        TypeError, "row_sum: operand v is column vector of 64, allowed is a row vector"),
    "zero_shared": (
        lambda x: tk.zero(one(64, 64)),
        TypeError, "zero: dst is SharedTile.*allowed are register tiles and vectors"),
    "neg_infty_shared": (
        lambda x: tk.neg_infty(one(64, 64)),
        TypeError, "neg_infty: dst is SharedTile"),
    "fill_dst": (
        lambda x: tk.fill(3, 1.0),
        TypeError, "fill: dst is 3, allowed are register tiles and vectors"),
    "fill_value": (
        lambda x: tk.fill(tk.rv(), tk.rv()),
        TypeError, "fill: value is row vector, allowed is a number"),
    "right_fill_diagonal": (
        lambda x: tk.right_fill(tk.rt_fl(64), 3, 0.0, diagonal=-2),
        ValueError, "right_fill: diagonal is -2, allowed are False, True and numbers from 1 on"),
    "right_fill_t": (
        lambda x: tk.right_fill(tk.rv(), 3, 0.0),
        TypeError, "right_fill: t is row vector, allowed is a register tile"),
    "left_fill_t": (
        lambda x: tk.left_fill(tk.cv(8), 3, 0.0),
        TypeError, "left_fill: t is column vector of 8"),
    "left_fill_diagonal": (
        lambda x: tk.left_fill(tk.rt_fl(64), 3, 0.0, diagonal=1.5),
        ValueError, "left_fill: diagonal is 1.5"),
    "columns_x": (
        lambda x: tk.columns(tk.rv(), 0, 8),
        TypeError, "columns: x is row vector, allowed are register tiles and column vectors"),
    "fma_outer_number": (
        lambda x: tk.fma_outer(tk.rt_fl(64), tk.rt_fl(64), tk.rv(), 3.0),
        TypeError, "fma_outer: block is 3.0 .float., allowed is a list of numbers"),
    "mm_k_pair": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 64), one(64, 64), k=64),
        TypeError, "mm_ABt: k is 64, allowed is a pair"),
    "mma_wait_most": (
        lambda x: tk.mma_wait(9),
        ValueError, "mma_wait: n is 9, allowed are 0 to 7"),
    "mma_wait_below": (
        lambda x: tk.mma_wait(-1),
        ValueError, "mma_wait: n is -1"),
    "store_wait_below": (
        lambda x: tk.store_wait(-1),
        ValueError, "store_wait: n is -1, allowed are numbers from 0 on"),
    "store_elements_src": (
        lambda x: tk.store_elements(x, tk.rv(), 0, 0),
        TypeError, "store_elements: src is row vector, allowed is a register tile"),
    "store_narrow_src": (
        lambda x: tk.store_narrow(x, tk.rv(), 0, 64),
        TypeError, "store_narrow: src is row vector"),
    "shared_cols_src": (
        lambda x: tk.load_shared_cols(tk.cv(64), 3),
        TypeError, "load_shared_cols: src is 3, allowed is a tensor of fp32"),
    "copy_async_tile": (
        lambda x: tk.copy_async(one(64, 64, Float32), 0, x, (0, 0)),
        TypeError, "copy_async: dst is SharedTile"),
    "copy_async_arrive": (
        lambda x: tk.copy_async_arrive(None),
        TypeError, "copy_async_arrive: sem is None"),
    "prefetch_tensor": (
        lambda x: tk.prefetch(x),
        TypeError, "prefetch: the global operand is .*allowed is a descriptor"),
    "load_src": (
        lambda x: tk.load_async(one(64, 64), None, (0, 0), sem()),
        TypeError, "load_async: the global operand is None, allowed is a descriptor"),
    "init_arrivals": (
        lambda x: tk.init(sem(), 0),
        ValueError, "init: arrivals is 0, allowed are 1 to 1048575"),
    "init_sem": (
        lambda x: tk.init(None, 1),
        TypeError, "init: sem is None, allowed is a Semaphore"),
    "wait_sem": (
        lambda x: tk.wait(None, 0),
        TypeError, "wait: sem is None"),
    "arrive_sem": (
        lambda x: tk.arrive(3),
        TypeError, "arrive: sem is 3"),
    "arrive_at_sem": (
        lambda x: tk.arrive_at(None, 0),
        TypeError, "arrive_at: sem is None"),
    "arrive_cluster_blocks": (
        lambda x: tk.arrive_cluster(sem(), 33),
        ValueError, "arrive_cluster: blocks is 33, allowed are 1 to 16"),
    "expect_below": (
        lambda x: tk.expect_bytes(sem(), -16),
        ValueError, "expect_bytes: bytes is -16, allowed are 0 to 1048575"),
    "expect_most": (
        lambda x: tk.expect_bytes(sem(), 1 << 21),
        ValueError, "expect_bytes: bytes is 2097152"),
    "expect_sem": (
        lambda x: tk.expect_bytes(None, 16),
        TypeError, "expect_bytes: sem is None"),
    "remote_floats": (
        lambda x: tk.store_remote(tk.SharedAllocator().vector(4).iterator, [1.0, 2.0], sem(), 0),
        TypeError, r"store_remote: values is \[1.0, 2.0\], allowed is a list of Float32"),
    "remote_three": (
        lambda x: tk.store_remote(tk.SharedAllocator().vector(4).iterator, [Float32(1.0)] * 3, sem(), 0),
        ValueError, "store_remote: 3 values, allowed are 1, 2 and 4"),
    "pipe_bytes": (
        lambda x: pipe(bytes=1 << 21),
        ValueError, "Pipe: bytes is 2097152, allowed are 0 to 1048575"),
    "pipe_copies": (
        lambda x: pipe(copies=-1),
        ValueError, "Pipe: copies is -1"),
    "mailbox_consumers": (
        lambda x: tk.SharedAllocator().mailbox(1, 2, 0),
        ValueError, "Mailbox: consumers is 0"),
    "producer_warps": (
        lambda x: tk.specialise(lambda: None, lambda wg: None, 2, (), 5),
        ValueError, "specialise: producer_warps is 5, allowed are 1 to 4"),
    "schedule_no_cluster": (
        lambda x: tk.Schedule(3, "static", 0),
        ValueError, "Schedule: cluster is 0, allowed is 1 or more"),
}
HOST = {
    "gl_dtype": (
        lambda x: tk.gl.load(x, tk.st(64, 64)),
        TypeError, "gl.load: x is fp32, the tile is 64 x 64 bf16"),
    "gl_rank": (
        lambda x: tk.gl.load(x[0, None], tk.st(64, 32, Float32)),
        ValueError, "gl.load: x has 1 dimensions"),
    "gl_rows": (
        lambda x: tk.gl.store(x, tk.st(264, 32, Float32)),
        ValueError, "gl.store: the tile is 264 x 32 fp32, allowed are up to 256 rows"),
    "gl_add_fp8": (
        lambda x: tk.gl.add(x, tk.st(64, 32, E4M3)),
        TypeError, "gl.add: the tile is 64 x 32 e4m3"),
    "gl_add_int": (
        lambda x: tk.gl.add(x, tk.st(64, 32, cutlass.Int32)),
        TypeError, "gl.add: the tile is 64 x 32 int32"),
    "gl_store_ends_inside_16_bytes": (
        lambda x: tk.gl.store(_strided(x, 64, 6), tk.st(64, 32, Float32)),
        ValueError, "gl.store: x has 6 columns, allowed for fp32 are multiples of 4"),
    "gl_add_ends_inside_16_bytes": (
        lambda x: tk.gl.add(_strided(x, 64, 63), tk.st(64, 32, Float32)),
        ValueError, "gl.add: x has 63 columns, allowed for fp32 are multiples of 4"),
    "gl_multicast": (
        lambda x: tk.gl.load(x, tk.st(64, 32, Float32), 3),
        ValueError, "gl.load: multicast is 3"),
    "gl_multicast_rows": (
        lambda x: tk.gl.load(x, tk.st(24, 32, Float32), 2),
        ValueError, "gl.load: multicast is 2 for a tile of 24 x 32"),
    "gl_packed": (
        lambda x: tk.gl.load(tk.packed(_heads(x), 3), tk.st(64, 32, Float32)),
        ValueError, "gl.load: x's rows are 3 by .* between each other, the tile is 64 x 32"),
    "packed_rank": (
        lambda x: tk.packed(x, 2),
        ValueError, "packed: x has 2 dimensions, allowed are 3 and 4"),
    "packed_depth": (
        lambda x: tk.packed(_heads(x), 4),
        ValueError, "packed: n is 4, x's depth is 6, allowed are divisors of it"),
    "packed_none": (
        lambda x: tk.packed(_heads(x), 0),
        ValueError, "packed: n is 0, x's depth is 6"),
    "ragged_rank": (
        lambda x: tk.ragged(x),
        ValueError, "ragged: x has 2 dimensions, allowed are 3"),
    "ragged_store_rank": (
        lambda x: tk.ragged_store(x),
        ValueError, "ragged_store: x has 2 dimensions, allowed are 3"),
    "part_of_two": (
        lambda x: tk.gl.load(x, tk.st(64, 32, Float32)).part(3),
        ValueError, "part: the descriptor is a gl.load of a tensor that is not ragged"),
    "part_of_a_load": (
        lambda x: tk.gl.load(tk.ragged_store(_heads(x)), tk.st(8, 32, Float32)).part(3),
        ValueError, "part: the descriptor is a gl.load of a tensor that is not ragged"),
    "gl_columns": (
        lambda x: tk.gl.load(_view(x, 1, 0), tk.st(64, 32, Float32)),
        ValueError, r"gl.load: x's stride 1 \(columns\) is 64"),
    "gl_stride": (
        lambda x: tk.gl.store(_strided(x, 10), tk.st(64, 32, Float32)),
        ValueError, "gl.store: x's stride 0 is 10, allowed are multiples of 4"),
    "gl_aligned": (
        lambda x: tk.gl.add(cute.make_tensor(x.iterator + 1, x.layout), tk.st(64, 32, Float32)),
        ValueError, "gl.add: x is aligned to 4 bytes"),
}


class Host:
    """body(x) in the host function, and an empty kernel."""

    def __init__(self, body):
        self.body = body

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: cuda.CUstream):
        self.body(x)
        self.kernel().launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self):
        pass


class Move:
    """body(load, tile, semaphore, store) in a kernel: what load_async and store_async refuse."""

    def __init__(self, body):
        self.body = body

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: cuda.CUstream):
        type = tk.st(64, 32, Float32)
        self.kernel(tk.gl.load(x, type), tk.gl.store(x, type)).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, load: tk.gl, store: tk.gl):
        self.body(load, tk.SharedAllocator().tile(tk.st(64, 32, Float32)), tk.SharedAllocator().semaphores(), store)


MOVES = {
    "load_ring": (
        lambda g, t, s, d: tk.load_async(t, g, (0, 0), s),
        TypeError, "load_async: the shared operand must be one tile"),
    "load_coord": (
        lambda g, t, s, d: tk.load_async(t[0], g, (0, 0, 0), s),
        ValueError, "load_async: coord has 3 numbers, the global tensor has 2"),
    "store_coord": (
        lambda g, t, s, d: tk.store_async(d, t[0], (0,)),
        ValueError, "store_async: coord has 1 numbers"),
    "load_type": (
        lambda g, t, s, d: tk.load_async(one(32, 32, Float32), g, (0, 0), s),
        TypeError, "load_async: the shared tile is 32 x 32 fp32, the descriptor moves 64 x 32 fp32"),
    "load_a_store": (
        lambda g, t, s, d: tk.load_async(t[0], d, (0, 0), s),
        TypeError, "load_async: the descriptor is a gl.store, allowed is gl.load"),
    "store_a_load": (
        lambda g, t, s, d: tk.store_async(g, t[0], (0, 0)),
        TypeError, "store_async: the descriptor is a gl.load, allowed is gl.store and gl.add"),
    "load_sem": (
        lambda g, t, s, d: tk.load_async(t[0], g, (0, 0), None),
        TypeError, "load_async: sem is None, allowed is a Semaphore"),
    "store_src": (
        lambda g, t, s, d: tk.store_async(t[0], t[0], (0, 0)),
        TypeError, "store_async: the global operand is .*allowed is a descriptor"),
}
GROUPS = {"kernel": (KERNEL, OneBlock), "host": (HOST, Host), "move": (MOVES, Move)}


def build(group, case):
    bodies, kernel = GROUPS[group]
    x = tensor("fp32", 64, 64)
    return kernel(bodies[case][0]), ((x,),) if kernel is OneBlock else (x,)

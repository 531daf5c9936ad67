"""What the tile layer refuses of register tiles and vectors, and between them and global memory: see errors.py."""
import cutlass
from cutlass import BFloat16, Float32
from cutlass import Float8E4M3FN as E4M3

import tkq.tile as tk


def _table(dtype=Float32, cols=64):
    return tk.SharedAllocator().allocate_tensor(dtype, tk.factors(tk.WARPGROUP, cols), 16)


REGISTERS = {
    "pair_d": (
        lambda x: tk.complex_mm_AB(tk.pair(64, BFloat16), tk.pair(64, BFloat16), None),
        TypeError, "complex_mm_AB: operand d is a pair of 64 x 64 bf16 in registers, allowed is a pair .* of Float32"),
    "pair_b": (
        lambda x: tk.complex_mm_AB(tk.pair(64), tk.pair(64, BFloat16), None),
        TypeError, "complex_mm_AB: operand b is None, allowed is a SharedPair"),
    "pair_split": (
        lambda x: tk.complex_mm_AB(tk.pair(64), tk.split_pair(64), tk.SharedPair(None, None, None)),
        TypeError, r"complex_mm_AB: operand b is SharedPair.*, allowed is a SplitSharedPair"),
    "pair_split_sum": (
        lambda x: tk.complex_fma_conj(tk.pair(64), _table(cols=32), tk.pair(64), tk.rv()),
        ValueError, "complex_fma_conj: the table is .*, allowed are Float32"),
    "pair_table": (
        lambda x: tk.complex_mul_narrow(tk.pair(64, BFloat16), tk.pair(64), _table(cols=32)),
        ValueError, "complex_mul_narrow: the table is .*, allowed are Float32"),
    "pair_width": (
        lambda x: tk.complex_mul_narrow(tk.pair(32, BFloat16), tk.pair(64), _table()),
        ValueError, "complex_mul_narrow: operand a is a pair of 64 x 64 fp32"),
    "pair_powers": (
        lambda x: tk.complex_mul_powers(tk.pair(64, BFloat16), tk.pair(64), _table()),
        ValueError, "complex_mul_powers: the table is"),
    "pair_rows": (
        lambda x: tk.complex_fma_conj(tk.pair(64), tk.pair(64), tk.pair(64), tk.cv(64)),
        TypeError, "complex_fma_conj: operand v is column vector of 64, allowed is a row vector"),
    "pair_mul_table": (
        lambda x: tk.complex_mul_table(tk.pair(64), tk.pair(32), _table()),
        ValueError, "complex_mul_table: operand a is a pair of 64 x 32 fp32"),
    "pair_to_table": (
        lambda x: tk.complex_to_table(_table(), tk.pair(64, BFloat16)),
        TypeError, "complex_to_table: operand a is a pair of 64 x 64 bf16"),
    "pair_copy": (
        lambda x: tk.complex_copy(tk.pair(64), tk.pair(64), conjugate=True),
        TypeError, "complex_copy: operand dst is a pair of 64 x 64 fp32"),
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
    "triangle_size": (
        lambda x: tk.apply_triangle(tk.rt_bf(32), lambda y: y, tk.rt_fl(32)),
        ValueError, "apply_triangle: dst is 64 x 32 bf16 in registers, allowed are tiles of 64 x 64"),
    "triangle_apart": (
        lambda x: tk.apply_triangle(tk.rt_bf(64), lambda y: y, tk.rt_fl(64), apart=2),
        ValueError, "apply_triangle: apart is 2, allowed are 0 and 1"),
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
    "exp2_polynomial_every": (
        lambda x: tk.exp2_polynomial(tk.rt_fl(64), tk.rt_fl(64), -1),
        ValueError, "exp2_polynomial: every is -1"),
    "copy_e4m3_type": (
        lambda x: tk.copy_e4m3(tk.rt_bf(64), tk.rt_fl(64)),
        TypeError, "copy_e4m3: dst is 64 x 64 bf16"),
    "copy_e4m3_shape": (
        lambda x: tk.copy_e4m3(tk.rt(64, E4M3), tk.rt_fl(32)),
        ValueError, "copy_e4m3: src is 64 x 32 fp32"),
    "exp2_e4m3_type": (
        lambda x: tk.exp2_e4m3(tk.rt_bf(64), tk.rt_fl(64), 1.0, tk.rv(), (0,)),
        TypeError, "exp2_e4m3: dst is 64 x 64 bf16"),
    "exp2_e4m3_shape": (
        lambda x: tk.exp2_e4m3(tk.rt(64, E4M3), tk.rt_fl(32), 1.0, tk.rv(), (0,)),
        ValueError, "exp2_e4m3: src is 64 x 32 fp32"),
    "exp2_e4m3_shift": (
        lambda x: tk.exp2_e4m3(tk.rt(64, E4M3), tk.rt_fl(64), 1.0, 0.0, (0,)),
        TypeError, "exp2_e4m3: shift is 0.0"),
    "exp2_e4m3_chosen": (
        lambda x: tk.exp2_e4m3(tk.rt(64, E4M3), tk.rt_fl(64), 1.0, tk.rv(), (0, 8)),
        ValueError, "exp2_e4m3: chosen are .0, 8., allowed are groups from 0 to 7"),
    "fill_fp8_rows": (
        lambda x: tk.right_fill(tk.rt(32, E4M3), 3, 0.0),
        TypeError, "64 x 32 e4m3"),
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
    "decay_outer_row": (
        lambda x: tk.decay_outer(tk.rt_fl(64), tk.rt_fl(64), tk.cv(64), tk.cv(64)),
        TypeError, "decay_outer: operand row is column vector of 64"),
    "decay_outer_col": (
        lambda x: tk.decay_outer(tk.rt_fl(64), tk.rt_fl(64), tk.rv(), tk.cv(32)),
        ValueError, "decay_outer: operand col is column vector of 32, operand a is 64 x 64 fp32"),
    "load_from_rank": (
        lambda x: tk.load_from(tk.rt_fl(64), x[0, None], 0, 0),
        ValueError, "load_from: the global tensor has 1 dimensions"),
    "load_from_dst": (
        lambda x: tk.load_from(tk.rv(), x, 0, 0),
        TypeError, "load_from: "),
    "store_elements_src": (
        lambda x: tk.store_elements(x, tk.rv(), 0, 0),
        TypeError, "store_elements: src is row vector, allowed is a register tile"),
    "store_narrow_src": (
        lambda x: tk.store_narrow(x, tk.rv(), 0, 64),
        TypeError, "store_narrow: src is row vector"),
    "shared_cols_src": (
        lambda x: tk.load_shared_cols(tk.cv(64), 3),
        TypeError, "load_shared_cols: src is 3, allowed is a tensor of fp32"),
    "init_sem": (
        lambda x: tk.init(None, 1),
        TypeError, "init: sem is None, allowed is a Semaphore"),
}

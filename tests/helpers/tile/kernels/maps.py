"""Maps, row operations, reductions, fills, copies: a group of operations a kernel, one output tile an operation."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk

from .common import any_strides, get, one_block, put, put_rows, sym, tensor

ELEMENTWISE = {
    "add": lambda d, a, b: tk.add(d, a, b),
    "add_number": lambda d, a, b: tk.add(d, a, 1.5),
    "sub": lambda d, a, b: tk.sub(d, a, b),
    "mul": lambda d, a, b: tk.mul(d, a, b),
    "mul_in_place": lambda d, a, b: (tk.copy(d, a), tk.mul(d, d, d)),
    "exp2": lambda d, a, b: tk.exp2(d, a),
    "log2": lambda d, a, b: tk.log2(d, b),
    "tanh": lambda d, a, b: tk.tanh(d, a),
    "apply": lambda d, a, b: tk.apply(d, cute.arch.fmax, a, b),
    "apply_number": lambda d, a, b: tk.apply(d, lambda x, y: x * y + Float32(1.0), a, 3.0),
    "fill": lambda d, a, b: tk.fill(d, 2.5),
    "zero": lambda d, a, b: tk.zero(d),
    "neg_infty": lambda d, a, b: tk.neg_infty(d),
}
ROWS = {
    "add_row": lambda d, a, v, w: tk.add_row(d, a, v),
    "sub_row": lambda d, a, v, w: tk.sub_row(d, a, v),
    "mul_row": lambda d, a, v, w: tk.mul_row(d, a, v),
    "div_row": lambda d, a, v, w: tk.div_row(d, a, v),
    "add_col": lambda d, a, v, w: tk.add_col(d, a, w),
    "mul_col": lambda d, a, v, w: tk.mul_col(d, a, w),
    "mul_outer": lambda d, a, v, w: tk.mul_outer(d, a, v, w),
    "decay_outer": lambda d, a, v, w: tk.decay_outer(d, a, v, w),
    "fma_outer": lambda d, a, v, w: (tk.copy(d, a), tk.fma_outer(d, a, v, [Float32(2.0), Float32(-3.0)])),
    "fma_outer_one": lambda d, a, v, w: (tk.zero(d), tk.fma_outer(d, a, v, [Float32(0.5)])),
    "vector_mul": lambda d, a, v, w: _with_vectors(d, a, v, w),
}
REDUCTIONS = {
    "row_max": lambda d, a, v: tk.row_max(d, a),
    "row_max_from": lambda d, a, v: tk.row_max(d, a, v),
    "row_sum": lambda d, a, v: tk.row_sum(d, a),
    "row_sum_from": lambda d, a, v: tk.row_sum(d, a, v),
    "row_sum_partial": lambda d, a, v: _sum_twice(d, a),
    "finite_or_zero": lambda d, a, v: tk.finite_or_zero(d, v),
}
VECTORS = {
    "fill": lambda d, a, b: tk.fill(d, 2.5),
    "zero": lambda d, a, b: tk.zero(d),
    "neg_infty": lambda d, a, b: tk.neg_infty(d),
    "copy": lambda d, a, b: tk.copy(d, a),
    "apply": lambda d, a, b: tk.apply(d, cute.arch.fmax, a, b),
    "exp2": lambda d, a, b: tk.exp2(d, a),
    "sub": lambda d, a, b: tk.sub(d, a, b),
    "sub_number": lambda d, a, b: tk.sub(d, a, 1.5),
}
FILLS = [(name, dict(diagonal=diagonal)) for name in ("right_fill", "left_fill") for diagonal in (False, True, 4)]
FILLS += [("right_fill", dict(diagonal=diagonal, end=9)) for diagonal in (True, 16)]


def _sum_twice(d, a):
    tk.zero(d)
    tk.row_sum_partial(d, a, d)
    tk.row_sum_partial(d, a, d)
    tk.quad_sum(d)


def _with_vectors(d, a, v, w):
    """Vectors take the maps too."""
    v2, w2 = tk.rv(), tk.cv(w.cols)
    tk.mul(v2, v, 2.0)
    tk.add(w2, w, w)
    tk.mul_outer(d, a, v2, w2)


def _vectors(cols, v, w):
    row, col = tk.rv(), tk.cv(cols)
    tk.load_rows(row, v, 0, cute.size(v))
    tk.load_cols(col, w, 0, cute.size(w))
    return row, col


def elementwise(dtype):
    """The operations that dtype allows."""
    return {k: f for k, f in ELEMENTWISE.items() if dtype == "fp32" or k not in ("exp2", "log2", "tanh")}


def build_elementwise(cols, dtype):
    def body(a, b, out):
        type = tk.element_type(dtype)
        ta, tb, td = tk.rt(cols, type), tk.rt(cols, type), tk.rt(cols, type)
        get(ta, a)
        get(tb, b)
        for k, op in enumerate(elementwise(dtype).values()):
            op(td, ta, tb)
            put(out[k, None, None], td)

    out = tensor(dtype, len(elementwise(dtype)), 64, cols)
    return one_block(body, (tensor(dtype, 64, cols), tensor(dtype, 64, cols), out))


def build_rows(cols):
    def body(a, v, w, out):
        ta, td = tk.rt(cols), tk.rt_fl(cols)
        get(ta, a)
        row, col = _vectors(cols, v, w)
        for k, op in enumerate(ROWS.values()):
            op(td, ta, row, col)
            put(out[k, None, None], td)

    return one_block(body, (tensor("fp32", 64, cols), tensor("fp32", 64), tensor("fp32", cols),
                             tensor("fp32", len(ROWS), 64, cols)))


def build_reductions(cols):
    def body(a, v, out):
        ta, td, row = tk.rt_fl(cols), tk.rv(), tk.rv()
        get(ta, a)
        tk.load_rows(row, v, 0, cute.size(v))
        for k, op in enumerate(REDUCTIONS.values()):
            op(td, ta, row)
            put_rows(out[k, None, None], td)

    return one_block(body, (tensor("fp32", 64, cols), tensor("fp32", 64), tensor("fp32", len(REDUCTIONS), 64, 4)))


def build_fills(cols, dtype):
    """Each of FILLS with each limit of a run-time list: (64, cols), (limits,), (fills, limits, 64, cols)."""
    @cute.jit
    def body(a, limits, out):
        t = tk.rt(cols, tk.element_type(dtype))
        for i in cutlass.range(cute.size(limits), unroll=1):
            for k in cutlass.range_constexpr(len(FILLS)):
                get(t, a)
                getattr(tk, FILLS[k][0])(t, limits[i], -1.0, **FILLS[k][1])
                put(out[k, i, None, None], t)

    n = cute.sym_int()
    return one_block(body, (tensor(dtype, 64, cols), tensor("int32", n), tensor(dtype, len(FILLS), n, 64, cols)))


def build_copies(cols, dtype):
    """fp32 -> dtype -> fp32, and dtype -> dtype."""
    def body(a, narrow, wide):
        half = {"bf16": tk.rt_bf, "fp16": tk.rt_hf}[dtype]
        x, y, z, w = tk.rt(cols), half(cols), half(cols), tk.rt(cols)
        get(x, a)
        tk.copy(y, x)
        tk.copy(z, y)
        tk.copy(w, z)
        put(narrow, z)
        put(wide, w)

    return one_block(body, (tensor("fp32", 64, cols), tensor(dtype, 64, cols), tensor("fp32", 64, cols)))


def build_columns(cols):
    """The right half of a tile and of a column vector, as views."""
    def body(a, w, out):
        t = tk.rt_fl(cols)
        get(t, a)
        col = tk.cv(cols)
        tk.load_cols(col, w, 0, cute.size(w))
        d, half = tk.rt_fl(cols // 2), cols // 2
        tk.mul_col(d, tk.columns(t, half, half), tk.columns(col, half, half))
        put(out, d)

    return one_block(body, (tensor("fp32", 64, cols), tensor("fp32", cols), tensor("fp32", 64, cols // 2)))


def build_half_columns(cols, dtype):
    """A 16-bit tile without its first and its last 16 columns, as a view."""
    def body(a, out):
        t, n = tk.rt(cols, tk.element_type(dtype)), cols - 32
        get(t, a)
        d = tk.rt(n, t.dtype)
        tk.copy(d, tk.columns(t, 16, n))
        put(out, d)

    return one_block(body, (tensor(dtype, 64, cols), tensor(dtype, 64, cols - 32)))


def build_vectors(cols):
    """VECTORS of row vectors, as every thread has them (.., 64, 4), and of column vectors, as every quad has them
    (.., 32, cols)."""
    def body(v, v2, w, w2, rows, columns):
        (a, b), d = [_vectors(cols, *x) for x in ((v, w), (v2, w2))], (tk.rv(), tk.cv(cols))
        for k, op in enumerate(VECTORS.values()):
            for kind in range(2):
                op(d[kind], a[kind], b[kind])
            put_rows(rows[k, None, None], d[0])
            for j in range(cols // 4):
                columns[k, tk.thread_in_warpgroup() // 4, tk.first_col() + 8 * (j // 2) + j % 2] = d[1].tensor[j]

    n = len(VECTORS)
    return one_block(body, (*(tensor("fp32", size) for size in (64, 64, cols, cols)), tensor("fp32", n, 64, 4),
                             tensor("fp32", n, 32, cols)))


def build_accumulate(dtype, cols):
    """y[2 :, 1 :] += x, y of any size."""
    def body(x, y):
        t = tk.rt_fl(cols)
        get(t, x)
        tk.store_elements(y, t, 2, 1, accumulate=True)

    return one_block(body, (tensor("fp32", 64, cols), any_strides(dtype, sym(), sym())))


def build_load_from(src, dst, cols):
    """y = x[2 :, 1 :], x of any size and strides."""
    def body(x, y):
        t = tk.rt(cols, tk.element_type(dst))
        tk.load_from(t, x, 2, 1)
        put(y, t)

    return one_block(body, (any_strides(src, sym(), sym()), tensor(dst, 64, cols)))


def build_narrow(cols, dtype):
    """store_narrow, from row 3 of a tensor whose size comes at run time."""
    def body(x, y):
        t = tk.rt_fl(cols)
        get(t, x)
        tk.store_narrow(y, t, 3, cute.size(y, mode=[0]))

    y = cute.runtime.make_fake_tensor(tk.element_type(dtype), (sym(), sym(8)), (cute.sym_int64(divisibility=8), 1),
                                      assumed_align=16)
    return one_block(body, (tensor("fp32", 64, cols), y))


def build_global(cols, dtype):
    """load_rows, load_cols, store_rows and store_elements at the end of their tensors, whose sizes come at run time."""
    def body(v, w, tile, rows):
        row, col, t = tk.rv(), tk.cv(cols), tk.rt_fl(cols)
        tk.load_rows(row, v, 3, cute.size(v))
        tk.load_cols(col, w, 5, cute.size(w))
        tk.fill(t, 1.0)
        tk.mul_outer(t, t, row, col)
        tk.store_elements(tile, t, 2, 1)
        tk.store_rows(rows, row, 1, cute.size(rows))

    v, w, rows = (tensor(name, sym()) for name in ("fp32", dtype, "fp32"))
    return one_block(body, (v, w, any_strides(dtype, sym(), sym()), rows))

"""Complex register tiles: products on the tensor cores, products with factors from tables, sums, conversions."""
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk

from .common import get, one_block, put, tensor

RESULTS = ("product", "factors", "powers", "sum", "table", "rounded")
SPLIT_RESULTS = ("product", "factors", "powers", "sum", "rounded")
COLS = 64


def root(i, j):
    """exp(i (row / 64) column), as `fill_powers` takes it."""
    angle = Float32(i) * Float32(1 / 64) * Float32(j)
    return cute.math.cos(angle), cute.math.sin(angle)


def read(x):
    found = tk.pair(COLS)
    for part, tile in enumerate((found.real, found.imag)):
        get(tile, x[part, None, None])
    return found


def build_pairs(dtype):
    """a, b (2, 64, 64) fp32, real and imaginary parts, v (64): out (len(RESULTS), 2, 64, 64) fp32."""
    kind = tk.element_type(dtype)

    def write(out, name, x):
        for part, tile in enumerate((x.real, x.imag)):
            put(out[RESULTS.index(name), part, None, None], tile)

    @cute.jit
    def body(a, b, v, out):
        al = tk.SharedAllocator()
        right, inputs = al.tile(tk.st(64, COLS, kind), 3), al.vector(8)
        wide = al.allocate_tensor(Float32, tk.factors(tk.WARPGROUP, COLS), 16)
        narrow_table = al.allocate_tensor(kind, tk.factors(tk.WARPGROUP, COLS), 16)
        steps = al.allocate_tensor(Float32, tk.powers(tk.WARPGROUP), 16)
        x, y, z, narrow, row = read(a), read(b), tk.pair(COLS), tk.pair(COLS, kind), tk.rv()
        tk.load_rows(row, v, 0, cute.size(v))
        tk.store(right[0], y.real)
        tk.store(right[1], y.imag)
        tk.mul(z.imag, y.imag, -1.0)
        tk.store(right[2], z.imag)
        tk.complex_to_table(wide, y)
        tk.complex_to_table(narrow_table, y)
        tk.fill_powers(steps, root)
        tk.publish()
        tk.sync_block()
        tk.complex_copy(narrow, x)
        tk.complex_mm_AB(z, narrow, tk.SharedPair(right[0], right[1], right[2]))
        tk.mma_wait()
        write(out, "product", z)
        tk.complex_mul_narrow(narrow, x, wide, conjugate=True)
        write(out, "factors", narrow)
        tk.complex_mul_powers(narrow, x, steps)
        write(out, "powers", narrow)
        tk.zero(z.real)
        tk.zero(z.imag)
        tk.complex_fma_conj(z, x, y, row)
        write(out, "sum", z)
        tk.complex_mul_table(z, x, narrow_table)
        tk.complex_mul_table(z, narrow_table, wide, True)
        write(out, "table", z)
        tk.complex_copy(narrow, x, conjugate=True)
        write(out, "rounded", narrow)
        four = tk.narrow_four([Float32(0.0)] * 4, kind)  # what a table of 16 bits is made of
        at = tk.factor_place(0)
        if at[0] < 0:
            inputs[0, 0] = Float32(four[0])

    tensors = [tensor("fp32", 2, 64, COLS) for _ in range(2)]
    return one_block(body, (*tensors, tensor("fp32", 64), tensor("fp32", len(RESULTS), 2, 64, COLS)))


def build_split_pairs(dtype):
    """As `build_pairs`, of split pairs, and of a sum of products with a table: out (len(SPLIT_RESULTS), 2, 64, 64)."""
    kind = tk.element_type(dtype)

    def write(out, name, x):
        high, low = (x.high, x.low) if isinstance(x, tk.SplitPair) else (x, None)
        for part, of in enumerate(("real", "imag")):
            wide = tk.rt(COLS)
            tk.copy(wide, getattr(high, of))
            if low is not None:
                rest = tk.rt(COLS)
                tk.copy(rest, getattr(low, of))
                tk.add(wide, wide, rest)
            put(out[SPLIT_RESULTS.index(name), part, None, None], wide)

    @cute.jit
    def body(a, b, v, out):
        al = tk.SharedAllocator()
        right = al.tile(tk.st(64, COLS, kind), 6)
        wide = al.allocate_tensor(Float32, tk.factors(tk.WARPGROUP, COLS), 16)
        steps = al.allocate_tensor(Float32, tk.powers(tk.WARPGROUP), 16)
        y, z, narrow, row = read(b), tk.pair(COLS), tk.split_pair(COLS, kind), tk.rv()
        tk.mul(z.real, y.imag, -1.0)
        tk.zero(z.imag)
        tk.complex_copy(narrow, z)
        tk.store(right[2], narrow.high.real)
        tk.store(right[5], narrow.low.real)
        tk.complex_copy(narrow, y)
        tk.store(right[0], narrow.high.real)
        tk.store(right[1], narrow.high.imag)
        tk.store(right[3], narrow.low.real)
        tk.store(right[4], narrow.low.imag)
        tk.complex_to_table(wide, read(a))
        tk.fill_powers(steps, root)
        tk.publish()
        tk.sync_block()
        tk.complex_copy(narrow, read(a))
        tk.complex_mm_AB(z, narrow, tk.SplitSharedPair(tk.SharedPair(right[0], right[1], right[2]),
                                                       tk.SharedPair(right[3], right[4], right[5])))
        tk.mma_wait()
        write(out, "product", z)
        tk.complex_mul_narrow(narrow, read(b), wide, conjugate=True)
        write(out, "factors", narrow)
        tk.complex_mul_powers(narrow, read(a), steps)
        write(out, "powers", narrow)
        tk.zero(z.real)
        tk.zero(z.imag)
        tk.load_rows(row, v, 0, cute.size(v))
        tk.complex_fma_conj(z, wide, read(b), row)
        write(out, "sum", z)
        tk.complex_copy(narrow, read(a), conjugate=True)
        write(out, "rounded", narrow)

    tensors = [tensor("fp32", 2, 64, COLS) for _ in range(2)]
    return one_block(body, (*tensors, tensor("fp32", 64), tensor("fp32", len(SPLIT_RESULTS), 2, 64, COLS)))

"""Register tiles and vectors against PyTorch: maps, rows and columns, reductions, fills, copies, plain memory."""
import functools
import math

import pytest
import torch

from tests.helpers.tile import cases
from tests.helpers.tile.run import DTYPES, normal, poisoned, run, same

INF = math.inf
EPS = 2.0 ** -23  # of fp32

# What each operation of tests/helpers/tile/kernels/maps.py means. d(..) is fp64: a tolerance follows, otherwise it is
# exact.
ELEMENTWISE = {
    "add": lambda a, b: a + b,
    "add_number": lambda a, b: a + 1.5,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mul_in_place": lambda a, b: a * a,
    "exp2": lambda a, b: torch.exp2(a.double()),
    "log2": lambda a, b: torch.log2(b.double()),
    "tanh": lambda a, b: torch.tanh(a.double()),
    "apply": torch.maximum,
    "apply_number": lambda a, b: a.double() * 3.0 + 1.0,
    "fill": lambda a, b: torch.full_like(a, 2.5),
    "zero": lambda a, b: torch.zeros_like(a),
    "neg_infty": lambda a, b: torch.full_like(a, -INF),
}
ROWS = {
    "add_row": lambda a, v, w: a + v,
    "sub_row": lambda a, v, w: a - v,
    "mul_row": lambda a, v, w: a * v,
    "div_row": lambda a, v, w: a.double() / v.double(),
    "add_col": lambda a, v, w: a + w,
    "mul_col": lambda a, v, w: a * w,
    "mul_outer": lambda a, v, w: a * w * v,
    "decay_outer": lambda a, v, w: a.double() * torch.exp2((v - w).double()),
    "fma_outer": lambda a, v, w: a.double() * (1.0 + v.double() * _halves(a, 2.0, -3.0)),
    "fma_outer_one": lambda a, v, w: a.double() * (0.5 * v.double()),
    "vector_mul": lambda a, v, w: a * (w + w) * (v * 2.0),
}
REDUCTIONS = {
    "row_max": lambda a, v: a.amax(1),
    "row_max_from": lambda a, v: torch.maximum(a.amax(1), v),
    "row_sum": lambda a, v: a.double().sum(1),
    "row_sum_from": lambda a, v: a.double().sum(1) + v.double(),
    "row_sum_partial": lambda a, v: a.double().sum(1) * 2.0,
    "finite_or_zero": lambda a, v: torch.where(v == -INF, 0.0, v),
}


def _halves(a, left, right):
    n = a.shape[1] // 2
    return torch.tensor([left] * n + [right] * n, dtype=torch.float64, device=a.device)


def close(got, expected, ulps, floor, what):
    """|got - expected| <= ulps * eps of got's type * |expected| + floor; infinities equal."""
    infinite = torch.isinf(expected)
    assert torch.equal(got.double()[infinite], expected[infinite]), f"{what}: infinities differ"
    error = (got.double() - expected)[~infinite].abs()
    limit = ulps * torch.finfo(got.dtype).eps * expected[~infinite].abs() + floor
    assert (error <= limit).all(), f"{what}: error {error.max().item():.3e}, {int((error > limit).sum())} beyond"


def _allowed(dtype):
    return [n for n in ELEMENTWISE if dtype == "fp32" or n not in ("exp2", "log2", "tanh")]


@functools.cache
def elementwise(cols, dtype):
    a, b = normal(dtype, 64, cols), (normal("fp32", 64, cols, seed=1).abs() + 0.01).to(DTYPES[dtype])
    names = _allowed(dtype)
    out = poisoned(dtype, len(names), 64, cols)
    run("maps:build_elementwise", (cols, dtype), (a, b, out))
    return a, b, dict(zip(names, out))


@pytest.mark.parametrize("cols,dtype,name", [(*x, name) for x in cases.ELEMENTWISE for name in _allowed(x[1])])
def test_elementwise(cols, dtype, name):
    a, b, out = elementwise(cols, dtype)
    expected = ELEMENTWISE[name](a, b)
    if expected.dtype is not torch.float64:
        same(out[name], expected, name)
    elif dtype == "fp32":  # exp2, log2, tanh, near 0 absolute; a * 3 + 1 fused or not
        ulps = {"tanh": 2 ** 12}.get(name, 2)  # 2 ** -11, 3e-6
        floors = {"exp2": 0.0, "tanh": 0.0, "log2": 2.0 ** -21, "apply_number": 2.0 ** -23}
        close(out[name], expected, ulps, floors[name], name)
    else:
        close(out[name], expected, 0.501, 2.0 ** -24, name)  # rounded from fp32


@functools.cache
def with_vectors(cols):
    a, v, w = normal("fp32", 64, cols), normal("fp32", 64, seed=2).abs() + 0.5, normal("fp32", cols, seed=3)
    out = poisoned("fp32", len(ROWS), 64, cols)
    run("maps:build_rows", (cols,), (a, v, w, out))
    return a, v[:, None], w, dict(zip(ROWS, out))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("cols", (16, 48))
def test_rows_and_columns(name, cols):
    a, v, w, out = with_vectors(cols)
    expected = ROWS[name](a, v, w)
    if expected.dtype is torch.float64:
        close(out[name], expected, 3, 2e-7 * (name == "fma_outer"), name)
    else:
        same(out[name], expected, name)


def reductions(a, v):
    out = poisoned("fp32", len(REDUCTIONS), 64, 4)
    run("maps:build_reductions", (a.shape[1],), (a, v, out))
    return dict(zip(REDUCTIONS, out))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("cols", (8, 24, 64, 176))
def test_reductions(name, cols):
    a, v = normal("fp32", 64, cols), normal("fp32", 64, seed=4) * 2.0
    v[3], v[40], v[63] = -INF, INF, -INF
    got, expected = reductions(a, v)[name], REDUCTIONS[name](a, v)[:, None].expand(64, 4)
    if expected.dtype is torch.float64:
        close(got, expected, 2, cols * EPS * a.abs().max().item(), name)
    else:
        same(got, expected.contiguous(), name)


def test_row_max_drops_nan():
    a, v = normal("fp32", 64, 24), normal("fp32", 64, seed=5)
    a[::3, ::2] = math.nan
    out = reductions(a, v)
    largest = a.nan_to_num(-INF).amax(1)
    same(out["row_max"], largest[:, None].expand(64, 4).contiguous())
    same(out["row_max_from"], torch.maximum(largest, v)[:, None].expand(64, 4).contiguous())


@pytest.mark.parametrize("cols,dtype", cases.FILLS)
@pytest.mark.sampled(when=lambda cols: cols < 256)
def test_fills(cols, dtype):
    limits = [-1000, -70, -64, -3, 0, 1, 7, 8, 13, cols - 1, cols, cols + 1, 300]
    kinds = [(right, n, None) for right in (True, False) for n in (0, 1, 4)] + [(True, 1, 9), (True, 16, 9)]
    a, out = normal(dtype, 64, cols), poisoned(dtype, len(kinds), len(limits), 64, cols)
    run("maps:build_fills", (cols, dtype), (a, torch.tensor(limits, dtype=torch.int32, device="cuda"), out))
    row, col = torch.arange(64, device="cuda")[:, None], torch.arange(cols, device="cuda")
    for i, limit in enumerate(limits):
        for k, (right, n, end) in enumerate(kinds):
            below = (col < limit + (row // n if n else 0 * row)) & (col < (cols if end is None else end))
            expected = torch.where(~below if right else below, torch.full_like(a, -1.0), a)
            same(out[k, i], expected, f"{'right' if right else 'left'}_fill {limit} diagonal={n} end={end}")


@pytest.mark.parametrize("cols,dtype", ((64, "fp16"), (16, "bf16"), (176, "bf16")))
def test_copy_rounds_to_nearest_even(cols, dtype):
    g = torch.Generator("cuda").manual_seed(cols)
    a = normal("fp32", 64, cols) * torch.exp2(torch.randint(-30, 20, (64, cols), device="cuda", generator=g).float())
    half = torch.finfo(DTYPES[dtype])
    a[0, :8] = torch.tensor([INF, -INF, 0.0, -0.0, half.max * 1.5, -half.max, half.tiny / 2, half.smallest_normal])
    a[1] = 1.0 + half.eps * (torch.arange(cols, device="cuda") % 8 + 0.5)  # half-way cases, to even both ways
    narrow, wide = poisoned(dtype, 64, cols), poisoned("fp32", 64, cols)
    run("maps:build_copies", (cols, dtype), (a, narrow, wide))
    same(narrow, a.to(DTYPES[dtype]))
    same(wide, a.to(DTYPES[dtype]).float())


def test_columns():
    a, w, out = normal("fp32", 64, 64), normal("fp32", 64, seed=1), poisoned("fp32", 64, 32)
    run("maps:build_columns", (64,), (a, w, out))
    same(out, a[:, 32:] * w[32:])


def test_columns_of_16_bits():
    a, out = normal("bf16", 64, 64), poisoned("bf16", 64, 32)
    run("maps:build_half_columns", (64, "bf16"), (a, out))
    same(out, a[:, 16:48].contiguous())


VECTORS = {name: ELEMENTWISE[name] for name in ("fill", "zero", "neg_infty", "apply", "exp2", "sub")}
VECTORS = {**VECTORS, "copy": lambda a, b: a, "sub_number": lambda a, b: a - 1.5}
VECTOR_ORDER = ("fill", "zero", "neg_infty", "copy", "apply", "exp2", "sub", "sub_number")  # the kernel's


@functools.cache
def vectors(cols):
    v, v2, w, w2 = (normal("fp32", size, seed=i) for i, size in enumerate((64, 64, cols, cols)))
    rows, columns = poisoned("fp32", len(VECTORS), 64, 4), poisoned("fp32", len(VECTORS), 32, cols)
    run("maps:build_vectors", (cols,), (v, v2, w, w2, rows, columns))
    return (v, v2, dict(zip(VECTOR_ORDER, rows))), (w, w2, dict(zip(VECTOR_ORDER, columns)))


@pytest.mark.parametrize("name", VECTOR_ORDER)
def test_maps_of_vectors(name):
    """Every thread has its rows' values, every quad all of the columns'."""
    (v, v2, rows), (w, w2, columns) = vectors(24)
    for got, expected in ((rows[name], VECTORS[name](v, v2)[:, None].expand(64, 4)),
                          (columns[name], VECTORS[name](w, w2).expand(32, 24))):
        if name == "exp2":
            close(got, expected, 2, 0.0, name)
        else:
            same(got, expected.contiguous(), name)


@pytest.mark.parametrize("dtype,cols", cases.ACCUMULATED)
@pytest.mark.parametrize("shape", ((70, 40), (66, 20), (40, 9), (2, 30)))
def test_store_elements_adds(dtype, cols, shape):
    """What is in the tensor and under the tile becomes the sum, rounded once; what is around stays."""
    rows, width = shape
    x, around = normal("fp32", 64, cols), normal(dtype, width + 3, rows + 2, seed=7).t()
    expected = around.clone()
    n, m = max(min(64, rows - 2), 0), max(min(cols, width - 1), 0)
    inside = expected[1:-1, 1:-2][2:2 + n, 1:1 + m]
    inside.copy_((inside.float() + x[:n, :m]).to(DTYPES[dtype]))
    run("maps:build_accumulate", (dtype, cols), (x, around[1:-1, 1:-2]))
    same(around, expected)


@pytest.mark.parametrize("src,dst,cols", cases.LOADED_FROM)
@pytest.mark.parametrize("shape", ((70, 70), (66, 20), (40, 9), (2, 30)))
@pytest.mark.parametrize("turned", (False, True))
def test_load_from(src, dst, cols, shape, turned):
    """Inside a tensor with NaN around: zeros past its end."""
    rows, width = shape
    around = poisoned(src, *((width + 3, rows + 2) if turned else (rows + 2, width + 3)))
    around = around.t() if turned else around
    x = around[1:-1, 1:-2]
    x.copy_(normal(src, rows, width))
    y, expected = poisoned(dst, 64, cols), torch.zeros(64, cols, device="cuda", dtype=DTYPES[dst])
    part = x[2:66, 1:1 + cols]
    expected[:part.shape[0], :part.shape[1]] = part.to(DTYPES[dst])
    run("maps:build_load_from", (src, dst, cols), (x, y))
    same(y, expected)


@pytest.mark.parametrize("cols,dtype", cases.NARROW_STORES)
def test_store_narrow(cols, dtype):
    """Inside a tensor that is NaN around: rows and columns beyond it stay."""
    x = normal("fp32", 64, cols)
    for rows, width in ((67, cols), (100, cols), (66, cols - 8), (20, 8), (4, cols), (3, cols)):
        storage = poisoned(dtype, rows + 2, cols + 16)
        expected = storage.clone()
        n = min(rows - 3, 64)
        expected[4:4 + n, 8:8 + width] = x[:n, :width].to(DTYPES[dtype])
        run("maps:build_narrow", (cols, dtype), (x, storage[1:rows + 1, 8:8 + width]))
        same(storage, expected, f"{rows} x {width}")


@pytest.mark.parametrize("cols,dtype", ((64, "fp32"), (16, "bf16"), (32, "fp16")))
@pytest.mark.parametrize("shape", ((64, 100), (66, 65), (20, 7), (3, 2), (300, 40)))
@pytest.mark.parametrize("columns_first", (False, True))
def test_plain_global_memory(cols, dtype, shape, columns_first):
    """load_rows, load_cols repeat the last one; store_rows and store_elements keep inside."""
    rows, width = shape
    v, w = normal("fp32", rows), normal(dtype, width)
    out = poisoned("fp32", rows + 5)
    around = poisoned(dtype, width + 3, rows + 2).t() if columns_first else poisoned(dtype, rows + 2, width + 3)
    tile, before = around[1:-1, 1:-2], around.clone()
    run("maps:build_global", (cols, dtype), (v, w, tile, out[:-5]))

    row = v[(torch.arange(64, device="cuda") + 3).clamp(max=rows - 1)]
    col = w[(torch.arange(cols, device="cuda") + 5).clamp(max=width - 1)].float()
    product = (col * row[:, None]).to(DTYPES[dtype])
    n, m = max(min(64, rows - 2), 0), max(min(cols, width - 1), 0)
    before[1:-1, 1:-2][2:2 + n, 1:1 + m] = product[:n, :m]
    same(around, before, "store_elements")
    expected = poisoned("fp32", rows + 5)
    n = max(min(64, rows - 1), 0)
    expected[1:1 + n] = row[:n]
    same(out, expected, "store_rows")

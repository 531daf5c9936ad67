"""A GEMM's tensors as its kernels see them: fake arguments to compile for, and views to make descriptors of."""
import cutlass.cute as cute
from cutlass import Int32, Int64

from ... import tile as tk
from .spec import BYTES, GemmSpec


def products(spec: GemmSpec):
    """The tile layer's product for these operands: from zero, and accumulating."""
    name = {(False, False): "AB", (False, True): "ABt", (True, False): "AtB", (True, True): "AtBt"}[spec.transposed]
    return getattr(tk, f"mm_{name}"), getattr(tk, f"mma_{name}")


# ---- views, in the host function ---------------------------------------------------------------------


def matrix(x: cute.Tensor, transpose=False) -> cute.Tensor:
    """(rows, cols), or (rows, cols, batch) of (batch, rows, cols)."""
    order = [0, 1] if cute.rank(x) == 2 else [1, 2, 0]
    return _select(x, [order[1], order[0], *order[2:]] if transpose else order)


def weights(b: cute.Tensor, spec: GemmSpec) -> cute.Tensor:
    """b (K, N), or as it is stored, (N, K); gated (K, N / 2, 2) or (N / 2, K, 2); and the batch last."""
    x = matrix(b)
    if spec.epilogue.gate:
        K, N, *batch = x.shape
        sk, sn, *batch_stride = x.stride
        width, apart = (sn, N // 2 * sn) if spec.epilogue.gate == "split" else (2 * sn, sn)
        if spec.load == "tma" and not isinstance(apart, int):
            apart = cute.assume(apart, divby=16 // BYTES[spec.dtype])
        if spec.load == "tma" and not isinstance(width, int):
            width = cute.assume(width, divby=16 // BYTES[spec.dtype])
        x = cute.make_tensor(x.iterator, cute.make_layout((K, N // 2, 2, *batch),
                                                          stride=(sk, width, apart, *batch_stride)))
    return _select(x, [1, 0, *range(2, cute.rank(x))]) if spec.transposed[1] else x


def column_vector(x, spec: GemmSpec):
    """bias (N,); gated (N / 2, 2)."""
    if x is None or not spec.epilogue.gate:
        return x
    half = x.shape[0] // 2
    stride = (1, half) if spec.epilogue.gate == "split" else (2, 1)
    return cute.make_tensor(x.iterator, cute.make_layout((half, 2), stride=stride))


def residual(x, spec: GemmSpec):
    """c (M, N[, batch]); in pairs (M, N / 2[, batch]) of int32 or, of fp32, int64."""
    if x is None:
        return None
    x = matrix(x)
    if not spec.epilogue.residual_pairs:
        return x
    shape, stride = list(x.shape), list(x.stride)
    shape[1] = shape[1] // 2
    stride = [stride[0] // 2, 1, *(s // 2 for s in stride[2:])]
    layout = cute.make_layout(tuple(shape), stride=tuple(stride))
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Int64 if spec.out == "fp32" else Int32), layout)


def of_batch(x, batch):
    """The matrix of a batch, where there are any."""
    return x if x is None or cute.rank(x) == 2 else x[(*(None,) * (cute.rank(x) - 1), batch)]


def _select(x, modes):
    return cute.make_tensor(x.iterator, cute.select(x.layout, modes))


def parts_of_tile(ring: tk.SharedTile, part: tk.st, parts: int) -> tk.SharedTile:
    """A ring of b's tiles as a ring of ``parts`` parts each: of a tile stored (N, K), rows; of one stored (K, N),
    columns, whole swizzles of them."""
    if parts == 1:
        return ring
    return tk.SharedTile(cute.make_tensor(ring.staged.iterator, part.layout(parts * ring.stages).outer), part)


# ---- what to compile for ---------------------------------------------------------------------------------


def fakes(spec: GemmSpec):
    """Fake (a, b, out, bias, c, alpha, beta): any sizes, and what the spec's paths ask of strides. bias and c are None
    where the epilogue has none."""
    from cutlass import Float32

    from ...runtime.compile import fake

    e = spec.epilogue
    M, K, B = fake.sym(), fake.sym(), fake.sym()
    tma_half = e.gate and spec.load == "tma" and spec.b_major == "n"
    N = fake.sym(16 if tma_half else 2 if e.gate or e.residual_pairs else 1)

    def tensor(dtype, shape, rows_contiguous, unit, batched):
        """unit: elements that base and strides are multiples of."""
        pitch = fake.sym64(divisibility=unit)
        strides = (pitch, 1) if rows_contiguous else (1, pitch)
        if batched:
            shape, strides = (B, *shape), (fake.sym64(divisibility=unit), *strides)
        return fake.tensor(dtype, shape, strides, align=unit * BYTES[dtype])

    def unit(dtype, path):
        return 16 // BYTES[dtype] if path == "tma" else 1

    a_t, b_t = spec.transposed
    load, batched = unit(spec.dtype, spec.load), bool(spec.batch)
    a = tensor(spec.dtype, (M, K), not a_t, load, "a" in spec.batch)
    b = tensor(spec.dtype, (K, N), not b_t, load, "b" in spec.batch)
    out = tensor(spec.out, (M, fake.sym() if e.gate else N), True, unit(spec.out, spec.store), batched)
    bias = fake.tensor(e.bias, (N,), (1,), align=BYTES[e.bias]) if e.bias else None
    c = tensor(spec.out, (M, N), True, 2 if e.residual_pairs else 1, batched) if e.residual else None
    return a, b, out, bias, c, Float32(1.0), Float32(0.0)

"""tkq.quantize_fp8: what PyTorch sees of the quantiser."""
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from tkq.granularity import BLOCKS
from tkq.norms.spec import MAX_N, NormSpec
from tkq.quantize.catalog import TWO_PHASE, has_workspace, rows_recipe, tiles_recipe, way
from tkq.quantize.spec import EDGE, GRANULARITIES, VECTOR, TileSpec
from tkq.quantize.workspace import workspace_size
from tkq.reference import fp8
from tkq.runtime import arguments, function
from tkq.runtime.call import alloc, check, counters, dtypes, ops
from tkq.runtime.call.replay import CallCache
from tkq.runtime.device import arch

# True: of calls `has_workspace`, whose kernels may take counters
_call_cache = {False: CallCache(), True: CallCache(by_stream=True)}
_tensor = arguments.checker("quantize_fp8", "x")
_ways, _options = (arguments.checker("quantize_fp8", "granularity", name) for name in ("transpose", "dtype"))
OWN_SCALES = ("row", "1x128")  # whose transpose has other scales than x


def quantize_fp8(x: Tensor, granularity: str = "row", dtype: torch.dtype = torch.float8_e4m3fn, *,
                 transpose: bool = False):
    """x in float8 with scales: x ~ q * scale, as ``tkq.fp8_gemm`` takes them.

    Args:
        x: (M, N), bfloat16, float16 or float32; a row's elements are contiguous, rows any distance apart.
        granularity: what shares a scale:
            "tensor"  everything. x is read twice, once for its largest element; small x once.
            "row"     a row. With the transpose x is read twice, small x once; twice too without it where rows have more
                      than 262144 elements. Small: up to two 128 by 128 an SM, one of float32 or of rows
                      (columns, with the transpose) that are not whole vectors.
            "1x128"   128 columns of a row.
            "128x128" 128 rows by 128 columns.
            Or the member of torch.nn.functional.ScalingType: TensorWise, RowWise, BlockWise1x128, BlockWise128x128.
        dtype: float8_e4m3fn (largest 448) or float8_e5m2 (57344).
        transpose: the float8 of x.t() too, with scales of its own: "row"'s are of a column of x, "1x128"'s of 128 rows
            of one.

    Returns:
        (q, scale), with transpose (q, scale, qt, scale_t). q: (M, N), contiguous. qt: (N, M), contiguous. scale,
        float32: (1,); (M, 1); (M, ceil(N / 128)), a column of M one after the other: strides (1, M rounded up to 4);
        (ceil(M / 128), ceil(N / 128)). scale_t: the same for x.t(); for "tensor" and "128x128" it is scale, or its t().

        As a of ``fp8_gemm``: q and scale. As b: q.t() and scale.t().

        scale = max(amax / largest, 2^-126), amax being the largest |x| of those that share it. So zeros have the scale
        2^-126 and q = 0. Where an x is NaN, so are its scale and all q that share it. Where one is infinite, so is the
        scale: q is NaN there and 0 elsewhere, and q * scale NaN throughout.

    Raises:
        TypeError: x is no dense tensor of bf16, fp16 or fp32; granularity is no word or ScalingType; dtype is not
            e4m3 or e5m2; transpose is no bool.
        ValueError: granularity is another word; not 2-D, a row that is not contiguous.
        NotImplementedError: a gradient asked for.
        RuntimeError: a GPU other than Hopper.

    One kernel is launched; by rows of more than 262144 elements, without the transpose, three are.

    CPU tensors take ``tkq.reference.fp8.quantize_fp8``.

    Example::

        x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
        q, scale = tkq.quantize_fp8(x, "row")  # (256, 512) float8_e4m3fn; (256, 1) float32
        again = q.float() * scale  # (256, 512) float32
    """
    if type(transpose) is not bool or type(granularity) is not str:  # what is asked below takes all that is equal
        granularity, transpose = _ways(granularity, transpose)
    found = None if ops.traced() else _call_cache[has_workspace(granularity, transpose)].take(x, granularity, dtype,
                                                                                            transpose)
    if found is None:
        granularity, dtype = _options(granularity, dtype)
    if found is not None:
        q, scale, qt, scale_t = found[:4]
    elif ops.direct(x):
        q, scale, qt, scale_t, *_ = (_launched if x.is_cuda else _cpu)(x, granularity, dtype, transpose)
    else:
        check.refuse_gradient("quantize_fp8", x=x)
        _check(x, granularity, dtype, transpose)
        q, scale, qt, scale_t = _op(x, granularity, dtype, transpose, 1)
    if not transpose:
        return q, scale
    return q, scale, qt, _transposed(granularity, scale, scale_t)


def _transposed(granularity, scale, scale_t):
    """The scales of x.t()."""
    if granularity == "tensor":
        return scale
    return scale.t() if granularity == "128x128" else scale_t


def quantize_padded(x: Tensor, granularity: str, dtype: torch.dtype, unit: int) -> tuple:
    """`quantize_fp8` with the transpose, which has columns of zeros added to a multiple of ``unit``: for products that
    sum over rows. What is traced adds them to x, and cuts them off q and scale, in the op, when it runs: one graph for
    any number of rows."""
    if ops.direct(x):
        return _cut(quantize_fp8(_padded(x, unit), granularity, dtype, transpose=True), granularity, x.shape[0])
    check.refuse_gradient("quantize_fp8", x=x)
    _check(x, granularity, dtype, True)
    q, scale, qt, scale_t = _op(x, granularity, dtype, True, unit)
    return q, scale, qt, _transposed(granularity, scale, scale_t)


def _padded(x, unit):
    missing = -x.shape[0] % unit if unit > 1 else 0
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _cut(found, granularity, m):
    """(q, scale, ...) of padded rows -> of the first m. The scales of all, or of 128 rows, are those of zeros too."""
    q, scale, *transposed = found
    if q.shape[0] == m:
        return found
    if granularity != "tensor":
        scale = scale[:m if granularity in OWN_SCALES else -(-m // EDGE)]
    return q[:m], scale, *transposed


def _check(x, granularity, dtype, transpose):
    """granularity and dtype, as functions go on with them."""
    _tensor(x)
    check.rank("x", x, 2)
    if x.numel():
        check.last_dim_contiguous("x", x)
    return _options(granularity, dtype)


def _cuda(x: Tensor, granularity: str, dtype: torch.dtype, transpose: bool,
          unit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, x = x.shape[0], _padded(x, unit)
    found = (_call_cache[has_workspace(granularity, transpose)].take(x, granularity, dtype, transpose)
             or _launched(x, *_options(granularity, dtype), transpose))
    return tuple(x.new_empty(0) if t is None else t for t in _cut(found[:4], granularity, m))


def _launched(x, granularity, dtype, transpose):
    """(q, scale, qt, scale_t, what the kernel wrote beside them), None for what there is not."""
    try:
        m, n = x.shape
        aligned = x.data_ptr() & 15
        index = x.get_device()
        by_rows = granularity == "row" and not transpose and n <= MAX_N  # one kernel for any number of rows
        run, largest, shared = _runs(granularity, x.dtype, min(m, 2) if by_rows else m, n, x.stride(), aligned, dtype,
                                     transpose, index)
        q = alloc.empty(index, (m, n), (n, 1), dtype)
        scale = alloc.empty(index, *_scales(granularity, m, n), torch.float32)
        qt = scale_t = amax = workspace = None
        if largest is None:
            arguments = x, None, None, q, None, None, None, None, scale, 0.0, None
        else:
            if transpose:
                qt = alloc.empty(index, (n, m), (m, 1), dtype)
                if granularity in OWN_SCALES:
                    scale_t = alloc.empty(index, *_scales(granularity, n, m), torch.float32)
            if shared:
                workspace = counters.workspace(index, workspace_size(largest))
            elif largest:
                amax = alloc.empty(index, (largest,), (1,), torch.int32)
            arguments = x, q, scale, qt, scale_t, workspace if shared else amax
        run(*arguments)
        found = q, scale, qt, scale_t, amax
        constants = () if workspace is None else (workspace,)
        _call_cache[has_workspace(granularity, transpose)].add((x, granularity, dtype, transpose), run, arguments,
                                                               found, constants)
        return found
    except Exception:
        # What a launch stumbles over; the words for a user are found only when something is wrong.
        _check(x, granularity, dtype, transpose)
        if not x.numel():
            return *_cpu(x, granularity, dtype, transpose), None
        raise


def _largest_of(granularity, m, n, transpose):
    """Of how many the largest is found before a tile is written: of all; or of each row, and then of each column, both
    padded to whole tiles."""
    return 1 if granularity == "tensor" else sum(-(-size // EDGE) * EDGE for size in ((m, n) if transpose else (m,)))


def _scales(granularity, m, n):
    """Shape and strides of the scales of (m, n)."""
    if granularity == "row":
        return (m, 1), (1, 1)
    columns = -(-n // EDGE)
    if granularity == "1x128":
        return (m, columns), (1, -(-m // 4) * 4)
    return ((1,), (1,)) if granularity == "tensor" else ((-(-m // EDGE), columns), (columns, 1))


def _scale_buffer(granularity, m, n, device):
    """The scales of (m, n), where torch's dispatcher is to see how they are made."""
    return torch.empty_strided(*_scales(granularity, m, n), dtype=torch.float32, device=device)


@lru_cache(4096)
def _runs(granularity, x, m, n, strides, aligned, out, transpose, index):
    """(kernel, of how many it finds the largest in memory; None of the norms' kernel; does it take a workspace for it
    that calls share?) for a kind of call. aligned: x's address modulo 16. Raises where something is wrong, and where
    there is nothing to quantise."""
    readable = m * n and (n == 1 or strides[1] == 1)
    if granularity not in GRANULARITIES or not readable:
        raise ValueError
    arch.require_hopper(arch.device(index))
    size, names = x.itemsize, (dtypes.name_of(x), dtypes.name_of(out))
    if granularity == "row" and not transpose and n <= MAX_N:
        width = 16 // size
        while n % width or (m > 1 and strides[0] % width) or aligned % (width * size):
            width //= 2
        norm = NormSpec("rmsnorm", n, names[0], vector=width, out=names[1], scale="row")
        return function(rows_recipe(norm)), None, False
    wide = not (n % VECTOR or (m > 1 and strides[0] % VECTOR) or aligned)
    spec = TileSpec(granularity, *names, transpose, wide, m % VECTOR == 0 or not transpose)
    chosen = way(spec, -(-m // EDGE) * -(-n // EDGE), arch.num_sms(arch.device(index)))
    largest = _largest_of(granularity, m, n, transpose) if granularity in TWO_PHASE else 0
    return function(tiles_recipe(spec, chosen)), largest, has_workspace(granularity, transpose)


def _cpu(x: Tensor, granularity: str, dtype: torch.dtype,
         transpose: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    granularity, dtype = _check(x, granularity, dtype, transpose)
    block = BLOCKS[granularity]
    q, found = fp8.quantize_fp8(x, block, dtype)
    scale = _scale_buffer(granularity, *x.shape, x.device).copy_(found.view(-1) if granularity == "tensor" else found)
    if not transpose:
        return q, scale, x.new_empty(0), x.new_empty(0)
    qt, found = fp8.quantize_fp8(x.t(), block, dtype)
    own = granularity in OWN_SCALES
    scale_t = _scale_buffer(granularity, *reversed(x.shape), x.device).copy_(found) if own else x.new_empty(0)
    return q, scale, qt.contiguous(), scale_t


def _op_cpu(x, granularity, dtype, transpose, unit):
    return _cut(_cpu(_padded(x, unit), granularity, dtype, transpose), granularity, x.shape[0])


def _fake(x: Tensor, granularity: str, dtype: torch.dtype, transpose: bool,
          unit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (m, n), (granularity, dtype) = x.shape, _options(granularity, dtype)
    padded = -(-m // unit) * unit if unit > 1 else m
    strides = _scales(granularity, padded, n)[1]  # of what `_cut` leaves
    scale = torch.empty_strided(_scales(granularity, m, n)[0], strides, dtype=torch.float32, device=x.device)
    own = transpose and granularity in OWN_SCALES
    return (x.new_empty((m, n), dtype=dtype), scale,
            x.new_empty((n, padded), dtype=dtype) if transpose else x.new_empty(0),
            _scale_buffer(granularity, n, padded, x.device) if own else x.new_empty(0))


_op = ops.torch_op("quantize_fp8", cuda=_cuda, cpu=_op_cpu, fake=_fake)

"""tkq.grouped_gemm: what PyTorch sees of the products of groups."""
from functools import lru_cache
from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from tkq.gemm import tuned
from tkq.gemm.dense.spec import TMA_BYTES
from tkq.gemm.grouped.plan import plan, recipe
from tkq.gemm.grouped.spec import HALF, MOST_GROUPS, GroupedSpec, granularity, shapes_allowed
from tkq.gemm.grouped.stored import CONFIGS
from tkq.reference import grouped
from tkq.runtime import arguments, function
from tkq.runtime.call import alloc, autocast, check, dtypes, ops
from tkq.runtime.call.replay import Address, CallCache
from tkq.runtime.device import arch

FP8 = ("e4m3", "e5m2")
_out_dtype = arguments.checker("grouped_gemm", "out_dtype")
_tensors = arguments.checker("grouped_gemm", "a", "b", "offsets", "scale_a", "scale_b")
_NO_SCALES = (0, 0, 0, 0)
_call_cache = CallCache()


def grouped_gemm(a: Tensor, b: Tensor, offsets: Tensor, *, scale_a: Optional[Tensor] = None,
                 scale_b: Optional[Tensor] = None, out_dtype: Optional[torch.dtype] = None) -> Tensor:
    """Products of groups in one launch (mixture of experts), whose sizes are read on the device: no synchronisation,
    and a CUDA graph may be replayed with other sizes.

    With b (G, K, N): c[i] = a[i] @ b[g] for the rows i of each group g. With b (K, N), the gradient of such weights:
    c[g] = a[:, g] @ b[g, :] for the columns of a and rows of b that are group g's.

    Args:
        a: (M, K). bfloat16, float16, or float8 with scales. Row-major; with b (K, N) column-major: the ``.t()`` of a
            row-major (K, M).
        b: (G, K, N), as a; float8 in any mix. K- or N-contiguous; K-contiguous (the ``.transpose(1, 2)`` of a row-major
            (G, N, K)) in float8. Or (K, N), row-major.
            Of float8 with b (K, N), both have K contiguous: a is row-major, b column-major.
        offsets: (G,) int32: where each group ends, in rows (in K, with b (K, N)). It begins where the one before ends,
            the first at 0. Groups may be empty. Rows from the last group's end on belong to none: they are not written.
            Any values: one below 0 counts as 0, one past the end as the end, one below an offset before it as that
            one, so its group is empty. Nothing outside the tensors is read or written.
        scale_a, scale_b: for float8, float32, any strides.
            With b (G, K, N): (M, 1) and (G, 1, N) ("row" of ``tkq.quantize_fp8``); or (M, ceil(K / 128)) ("1x128") and
            (G, ceil(K / 128), ceil(N / 128)) ("128x128").
            With b (K, N): (M, 1) and (1, N) ("row"); each group's own, (G, M, 1) and (G, 1, N); or (M, ceil(K / 128))
            and (ceil(K / 128), N) ("1x128" both), which count 128 from the first of all K on, wherever groups begin:
            those of the transposes that ``tkq.quantize_fp8(x, "1x128", transpose=True)`` makes. (A block that two
            groups have part of has one scale: where it is NaN, it is so for both.)
        out_dtype: bfloat16, float16 or float32. Not given: a's, for float8 bfloat16.

    K and N are multiples of 8, with float8 K of 16; with float32 results N of 4 is enough; all bases and pitches are
    multiples of 16 bytes. With b (K, N) M is a multiple of 8, and K may be anything; of float8 M may be, too.

    Returns:
        (M, N), or (G, M, N): contiguous. Groups of no K give zeros (times their scales, which should be finite).

    Raises:
        TypeError: a or b is no dense tensor of bf16, fp16, e4m3 or e5m2; offsets is no dense tensor of int32; scale_a
            or scale_b is no dense tensor of fp32; out_dtype is not bf16, fp16 or fp32; dtypes that do not go together.
        ValueError: sizes, strides, scales or devices that do not go together.
        NotImplementedError: sizes that are not such multiples, more than 1024 groups, a gradient of float8.
        RuntimeError: a GPU other than Hopper.

    Differentiable once, in a and b where b is (G, K, N) of 16 bits. Under torch.autocast a and b are cast,
    but for float8. CPU tensors take ``tkq.reference.grouped.grouped_gemm``.

    Example::

        x = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16)  # tokens, sorted by their expert
        experts = torch.randn(4, 64, 128, device="cuda", dtype=torch.bfloat16)
        offsets = torch.tensor([10, 10, 70, 100], device="cuda", dtype=torch.int32)  # where each expert's rows end
        y = tkq.grouped_gemm(x, experts, offsets)  # (100, 128) bfloat16
    """
    if ops.traced() or autocast.on():
        a, b = autocast.lowered(a, b)
    return _routed(a, b, offsets, scale_a, scale_b, out_dtype)


def _routed(a, b, offsets, scale_a=None, scale_b=None, out_dtype=None):
    """Of the types that there are."""
    if not ops.traced():
        found = _call_cache.take(a, b, offsets, scale_a, scale_b, out_dtype)
        if found is not None:
            return found
    out_dtype = _out_dtype(out_dtype)
    mode = ops.route(a, b, offsets, scale_a, scale_b)
    if mode == "direct":
        return (_launched if a.is_cuda else _cpu)(a, b, offsets, scale_a, scale_b, out_dtype)
    if mode == "record" and scale_a is scale_b is None and b.dim() != 2 and not b.shape[-1] % 8:
        return _Function.apply(a, b, offsets, out_dtype)
    check.refuse_tangent("grouped_gemm", a=a, b=b)
    _check(a, b, offsets, scale_a, scale_b, out_dtype)
    if b.dim() == 2 or scale_a is not None:
        check.refuse_gradient("grouped_gemm", a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    elif b.shape[-1] % 8 and torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        # float32 results may have such an N; in the backward it is summed over, which takes multiples of 8
        wide = F.pad(b, (0, -b.shape[-1] % 8))
        return grouped_gemm(a, wide, offsets, out_dtype=out_dtype)[:, :b.shape[-1]].contiguous()
    return _op(a, b, offsets, scale_a, scale_b, out_dtype)


def _cuda(a: Tensor, b: Tensor, offsets: Tensor, scale_a: Optional[Tensor], scale_b: Optional[Tensor],
          out_dtype: Optional[torch.dtype]) -> Tensor:
    found = _call_cache.take(a, b, offsets, scale_a, scale_b, out_dtype)
    return _launched(a, b, offsets, scale_a, scale_b, out_dtype) if found is None else found


def _launched(a, b, offsets, scale_a, scale_b, out_dtype):
    try:
        return _product(a, b, offsets, scale_a, scale_b, out_dtype)
    except Exception:
        # What a launch stumbles over; the words for a user are found only when something is wrong.
        _check(a, b, offsets, scale_a, scale_b, out_dtype)
        _aligned(a=a, b=b)
        raise


def _product(a, b, offsets, scale_a, scale_b, out_dtype):
    scales, index = False, a.get_device()
    rows = columns = _NO_SCALES
    if scale_a is not None or scale_b is not None:
        scales = (scale_a.dtype, scale_a.shape, scale_b.dtype, scale_b.shape, scale_a.get_device(),
                  scale_b.get_device())
        rows, columns = _of_rows(scale_a), _of_columns(scale_b)
    kernel, blocks, shape, stride, out = _launcher(
        (a.dtype, a.shape, a.stride(), index), (b.dtype, b.shape, b.stride(), b.get_device()),
        (offsets.dtype, offsets.shape, offsets.stride(), offsets.get_device()), scales, out_dtype)
    c = alloc.empty(index, shape, stride, out)
    if kernel is None:  # nothing to multiply
        return c.zero_()
    kernel(a, b, c, offsets, rows, columns, blocks)
    if scales:
        rows, columns = (Address(scale_a), *rows[1:]), (Address(scale_b), *columns[1:])
    _call_cache.add((a, b, offsets, scale_a, scale_b, out_dtype), kernel, (a, b, c, offsets, rows, columns, blocks), c)
    return c


def run(spec, a, b, c, offsets, scales=(None, None), config=None, blocks=None):
    """The kernel of a spec, with no more checks than its own: for tests and tuning, with a config and a number of
    blocks (at least a cluster) instead of the plan's."""
    num_sms, n = arch.num_sms(a.device), b.shape[-1]
    config = config or plan(spec, a.shape[0], n, offsets.shape[0], num_sms)
    blocks = (blocks or num_sms) // config.cluster * config.cluster
    function(recipe(spec, config))(a, b, c, offsets, _of_rows(scales[0]), _of_columns(scales[1]), blocks)


def _of_rows(scale):
    """(address, stride of groups, of rows, of steps) of scale_a: (M, steps), or each group's."""
    if scale is None:
        return _NO_SCALES
    *group, row, step = scale.stride()
    return scale.data_ptr(), group[0] if group else 0, row, step


def _of_columns(scale):
    """(address, stride of groups, of columns, of steps) of scale_b: (steps, N), or each group's."""
    if scale is None:
        return _NO_SCALES
    *group, step, column = scale.stride()
    return scale.data_ptr(), group[0] if group else 0, column, step


def clear() -> None:
    """All kernels of earlier calls."""
    _launcher.cache_clear()
    _call_cache.clear()


def _facts(x):
    return x.dtype, x.shape, x.stride(), x.get_device()


@lru_cache(4096)
def _launcher(a, b, offsets, scales, out_dtype):
    """(kernel, blocks, the result's shape, strides and type) for a kind of call: the cache in front of the checks and
    planning.

    kernel is None where there is nothing to multiply."""
    spec, shape, out = _spec(a, b, offsets, scales, out_dtype)
    index, (m, k), groups = a[3], a[1], offsets[1][0]
    if any(other != index for other in (b[3], offsets[3], *(scales[4:] if scales else ()))):
        raise ValueError("grouped_gemm: several devices")
    if not (m and k and shape[-1] and groups):
        return None, 0, shape, alloc.strides(shape), out
    device = arch.device(index)
    arch.require_hopper(device)
    num_sms = arch.num_sms(device)
    config = tuned.chosen(CONFIGS, spec, (m, shape[-1], k, groups), device)
    config = config or plan(spec, m, shape[-1], groups, num_sms)
    blocks = num_sms // config.cluster * config.cluster
    return function(recipe(spec, config)), blocks, shape, alloc.strides(shape), out


def _spec(a, b, offsets, scales, out_dtype):
    """Everything that can be wrong with shapes, strides and dtypes; (what it asks for, the result's shape and type)."""
    (a_dtype, shape_a, stride_a, _), (b_dtype, shape_b, stride_b, _) = a, b
    is_fp8 = dtypes.name_of(a_dtype) in FP8
    _dtype("a", a_dtype, (*HALF, *FP8))
    _dtype("b", b_dtype, FP8 if is_fp8 else (dtypes.name_of(a_dtype),))
    if len(shape_a) != 2:
        raise ValueError(f"a: has {len(shape_a)} dimensions, shape {tuple(shape_a)}; allowed: 2")
    if len(shape_b) not in (2, 3):
        raise ValueError(f"b: has {len(shape_b)} dimensions, shape {tuple(shape_b)}; allowed: 3 or 2")
    _dtype("offsets", offsets[0], ("int32",))
    along_k, (m, k), n, groups = len(shape_b) == 2, shape_a, shape_b[-1], offsets[1][0] if offsets[1] else 0
    wanted = (groups, k, n)[along_k:]
    if len(offsets[1]) != 1 or tuple(shape_b) != wanted:
        raise ValueError(f"grouped_gemm: a is {tuple(shape_a)}, b {tuple(shape_b)}, offsets {tuple(offsets[1])}; "
                         "allowed are (M, K), (G, K, N) and (G,), or (M, K), (K, N) and (G,)")
    if groups > MOST_GROUPS:
        raise NotImplementedError(f"offsets: {groups} groups, supported are up to {MOST_GROUPS}")
    if groups > 1 and offsets[2][0] != 1:
        raise ValueError(f"offsets: strides are {offsets[2]}, allowed is contiguous")
    out = _out_dtype(out_dtype) or (torch.bfloat16 if is_fp8 else a_dtype)
    unit = TMA_BYTES // a_dtype.itemsize
    multiple = unit if along_k and not is_fp8 else 1  # M and N, where they are contiguous
    for name, size, step in (("N", n, max(TMA_BYTES // out.itemsize, multiple)), ("M", m, multiple),
                             ("K", k, 1 if along_k else unit)):
        if size % step:
            raise NotImplementedError(f"grouped_gemm: {name} is {size}, supported are multiples of {step}: a is "
                                      f"{tuple(shape_a)}, b {tuple(shape_b)}")
    kind = _scales(is_fp8, "k" if along_k else "m", (m, n, k, groups), scales)
    if m and k and n and groups:
        b_major = _majors(is_fp8, along_k, shape_a, stride_a, shape_b, stride_b, a_dtype.itemsize)
    else:  # nothing to multiply: strides say nothing
        b_major = "n" if along_k and not is_fp8 else "k"
    spec = GroupedSpec("k" if along_k else "m", dtypes.name_of(a_dtype), dtypes.name_of(b_dtype), dtypes.name_of(out),
                       *kind, b_major)
    return spec, (groups, m, n) if along_k else (m, n), out


def _dtype(name, dtype, allowed):
    if dtypes.name_of(dtype) not in allowed:
        raise TypeError(f"{name}: dtype is {dtype}, allowed are {', '.join(allowed)}")


def _scales(is_fp8, along, sizes, scales):
    if not is_fp8:
        if scales:
            raise ValueError("scale_a, scale_b: given with operands of 16 bits, allowed with float8")
        return "none", "none"
    if not scales:
        raise ValueError("scale_a, scale_b: got None, float8 needs both")
    for name, dtype in (("scale_a", scales[0]), ("scale_b", scales[2])):
        _dtype(name, dtype, ("fp32",))
    kind = granularity(along, sizes, scales[1], scales[3])
    if kind is None:
        raise ValueError(f"scale_a, scale_b: shapes are {tuple(scales[1])} and {tuple(scales[3])}; allowed are "
                         f"{shapes_allowed(along, sizes)}")
    return kind


def _majors(is_fp8, along_k, shape_a, stride_a, shape_b, stride_b, size):
    """b's contiguous dimension, "k" or "n", where strides are such that TMA takes them."""
    m_major = along_k and not is_fp8
    a_pitch, a_step = (stride_a[1], stride_a[0]) if m_major else stride_a
    if a_step != 1 or a_pitch * size % TMA_BYTES:
        what = "column" if m_major else "row"
        raise ValueError(f"a: strides are {stride_a}, allowed is {what}-major with a pitch of a multiple of 16 bytes")
    *group, k, n = stride_b
    b_major = "n" if n == 1 and not is_fp8 else "k" if k == 1 and not m_major else None
    if b_major is None:
        allowed = ("row-major" if m_major else "column-major: pass .t().contiguous().t()" if along_k else
                   "K-contiguous: pass .transpose(1, 2).contiguous().transpose(1, 2)")
        raise ValueError(f"b: strides are {stride_b}, allowed is {allowed}")
    if any(step * size % TMA_BYTES for step in (*group, k if b_major == "n" else n)):
        raise ValueError(f"b: strides are {stride_b}, allowed are multiples of 16 bytes")
    return b_major


def _check(a, b, offsets, scale_a, scale_b, out_dtype):
    """The same for tensors, by name: what they are and where."""
    _tensors(a, b, offsets, scale_a, scale_b)
    given = dict(a=a, b=b, offsets=offsets, scale_a=scale_a, scale_b=scale_b)
    if (scale_a is None) != (scale_b is None):
        raise ValueError("scale_a, scale_b: one is None, allowed are both or neither")
    scales = scale_a is not None and (scale_a.dtype, scale_a.shape, scale_b.dtype, scale_b.shape)
    found = _spec(_facts(a), _facts(b), _facts(offsets), scales, out_dtype)
    check.same_device(**given)
    return found


def _aligned(**operands):
    for name, x in operands.items():
        if x.numel() and x.data_ptr() % TMA_BYTES:
            raise ValueError(f"{name}: begins at an address that is not a multiple of {TMA_BYTES} bytes: copy it")


def _cpu(a: Tensor, b: Tensor, offsets: Tensor, scale_a: Optional[Tensor], scale_b: Optional[Tensor],
         out_dtype: Optional[torch.dtype]) -> Tensor:
    _, shape, out = _check(a, b, offsets, scale_a, scale_b, out_dtype)
    _aligned(a=a, b=b)  # the GPU's rule, so that what works here works there
    if a.is_meta or not offsets.numel():
        return a.new_zeros(shape, dtype=out)
    return grouped.grouped_gemm(a, b, offsets, scale_a, scale_b, out)


def _fake(a: Tensor, b: Tensor, offsets: Tensor, scale_a: Optional[Tensor], scale_b: Optional[Tensor],
          out_dtype: Optional[torch.dtype]) -> Tensor:
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (offsets.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=out_dtype or (torch.bfloat16 if scale_a is not None else a.dtype))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx, dc):
    return *_gradients(ctx, dc), None, None, None, None


def _recorded(ctx, a, b, offsets, out_dtype):
    """In plain eager mode, of 16 bits."""
    ctx.save_for_backward(a, b, offsets)
    return (_cuda if a.is_cuda else _cpu)(a, b, offsets, None, None, out_dtype)


def _recorded_backward(ctx, dc):
    return *_gradients(ctx, dc), None, None


def _gradients(ctx, dc):
    """da[i] = dc[i] @ b[g].t(), db[g] = a[g].t() @ dc[g]. Rows of no group get zeros."""
    a, b, offsets = ctx.saved_tensors
    dc = dc.to(a.dtype).contiguous()
    da = db = None
    if ctx.needs_input_grad[0]:
        da = _routed(dc, b.transpose(1, 2), offsets)
        if offsets.numel():
            number = offsets.new_ones(da.shape[0]).cumsum(0)  # of each row, from 1 on; not arange, which is no DTensor
            da = torch.where((number <= offsets.amax())[:, None], da, 0)
    if ctx.needs_input_grad[1]:
        db = _routed(a.t(), dc, offsets)
    return da, db


_op = ops.torch_op("grouped_gemm", cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_backward)
_Function = ops.eager_function("GroupedGemm", forward=_recorded, backward=_recorded_backward, of="grouped_gemm")


def tunable(a, b, offsets, *, scale_a=None, scale_b=None, out_dtype=None):
    """For ``tkq.tune``: a call of ``grouped_gemm``."""
    _tensors(a, b, offsets, scale_a, scale_b)
    spec, shape, out = _check(a, b, offsets, scale_a, scale_b, out_dtype)
    _aligned(a=a, b=b)
    (m, k), n, groups = a.shape, b.shape[-1], offsets.shape[0]

    def call(config, c, a, b, offsets, scale_a, scale_b):
        run(spec, a, b, c, offsets, (scale_a, scale_b), config)
        return c

    sizes = m, n, k, groups
    last = max(int(offsets.max()), 0) if groups and spec.along == "m" else None  # rows behind it belong to none
    return tuned.Tunable(tuned.problem("grouped_gemm", spec, sizes, a.device), CONFIGS,
                         (a, b, offsets, scale_a, scale_b), torch.empty(shape, dtype=out, device=a.device), call,
                         clear, lambda c: c[:last])

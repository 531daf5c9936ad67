"""tkq.gemm: what PyTorch sees of the matrix product."""
from functools import lru_cache
from typing import Optional

import torch
from torch import Tensor

from tkq import reference
from tkq.gemm.plan import launch
from tkq.gemm.spec import DTYPES, OUT_DTYPES, GemmSpec, fits_tma, fits_tma_store, is_k_major
from tkq.runtime import arch, check, dtypes, function, ops

_OUT = (torch.bfloat16, torch.float16, torch.float32)


def gemm(a: Tensor, b: Tensor, *, out_dtype: Optional[torch.dtype] = None) -> Tensor:
    """a @ b with float32 accumulation, rounded once.

    Args:
        a: (M, K), bfloat16 or float16.
        b: (K, N), as a. M and N may be anything, also 0; K is a multiple of 8 (0 gives zeros).
            Either may be row- or column-major, so ``x.t()`` costs nothing. Fast are operands whose base and leading
            stride are multiples of 16 bytes, with N such that a row of the result is one too; others are correct.
        out_dtype: bfloat16, float16 or float32; a's where not given.

    Returns:
        (M, N), contiguous.

    Raises:
        TypeError: a or b not a tensor, of another dtype than allowed, or not of one dtype; another out_dtype.
        ValueError: not 2-D, sizes that do not go together, K not a multiple of 8, two devices, an operand that is
            contiguous in neither dimension.
        NotImplementedError: a gradient asked for.
        RuntimeError: a GPU other than Hopper.

    CPU tensors take ``tkq.reference.gemm``.
    """
    check.refuse_gradient("gemm", a=a, b=b)
    if ops.direct(a, b):
        return (_cuda if a.is_cuda else _cpu)(a, b, out_dtype)
    check.tensor("a", a)
    check.tensor("b", b)
    return _op(a, b, out_dtype)


def _check(a, b, out_dtype):
    """Everything that can be wrong with a call; names the argument, what came and what is allowed."""
    for name, x in (("a", a), ("b", b)):
        check.dtype(name, x, DTYPES)
        check.rank(name, x, 2)
    check.same_device(a=a, b=b)
    if b.dtype != a.dtype:
        raise TypeError(f"gemm: b is {b.dtype}, a is {a.dtype}; both must have one dtype")
    if out_dtype is not None and out_dtype not in _OUT:
        raise TypeError(f"gemm: out_dtype is {out_dtype}, allowed are {', '.join(OUT_DTYPES)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"gemm: a is {tuple(a.shape)}, b is {tuple(b.shape)}; allowed are (M, K) and (K, N)")
    if a.shape[1] % 8:
        raise ValueError(f"gemm: a is {tuple(a.shape)} and b {tuple(b.shape)}: K is {a.shape[1]}, "
                         "allowed are multiples of 8: pad with zeros")
    for name, x in (("a", a), ("b", b)):
        if 1 not in x.stride() and 1 not in x.shape and x.numel():
            raise ValueError(f"gemm: {name} has strides {x.stride()}, allowed are those with a 1: "
                             "call .contiguous()")


def _cuda(a: Tensor, b: Tensor, out_dtype: Optional[torch.dtype]) -> Tensor:
    try:
        return _product(a, b, out_dtype)
    except Exception:
        # The compiled function checks every dtype, shape, stride, address and device before it launches; the words for
        # a user are found only when something is wrong.
        _check(a, b, out_dtype)
        raise


def _product(a, b, out_dtype):
    c = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype, device=a.device)
    if c.numel() and a.shape[1] and a.shape[1] % 8 == 0:
        run(a, b, c)
        return c
    _check(a, b, out_dtype)  # nothing is launched that would
    return c.zero_()


def run(a, b, c, config=None, blocks=None, *, accumulate=False, room=False):
    """c = a @ b, with no more checks than the compiled function makes. c (M, N): its rows are contiguous, their pitch
    is free. K is any number from 8 on (from 1 on where it is contiguous in neither a nor b); where it is not a multiple
    of 8, what follows a row of K numbers, up to 16 bytes, is zero.

    accumulate: c += a @ b, see GemmSpec. room: what follows a row of c, up to 16 bytes, may be overwritten: with zeros,
    or added to.
    For tests and tuning: a Config and a number of blocks (at most; at least a cluster) instead of the plan's."""
    (m, k), n = a.shape, b.shape[1]
    (a_m, a_k), (b_k, b_n) = a.stride(), b.stride()
    a_is_k, b_is_k = is_k_major(m, a_m, a_k), is_k_major(n, b_n, b_k)
    if a_is_k is None or b_is_k is None or a.device != b.device:
        raise ValueError("gemm: a and b must be contiguous in one dimension, and on one device")
    load = (fits_tma(a.data_ptr(), *((a_m, m) if a_is_k else (a_k, k)), 2)
            and fits_tma(b.data_ptr(), *((b_n, n) if b_is_k else (b_k, k)), 2))
    ends = n if not room else 16  # a row that ends anywhere ends with a unit of 16 bytes, its room included
    store = load and fits_tma_store(c.data_ptr(), c.stride(0), m, ends, c.element_size())
    kernel, planned = _launcher(a.dtype, c.dtype, a_is_k, b_is_k, load, store, accumulate, m, n, k, a.device, config)
    kernel(a, b, c, blocks or planned)


@lru_cache(4096)
def _launcher(dtype, out, a_is_k, b_is_k, load, store, accumulate, m, n, k, device, config):
    """(kernel, blocks) for a kind of call: the cache in front of planning and of the table of kernels."""
    arch.require_hopper(device)
    spec = GemmSpec(dtypes.name_of(dtype), dtypes.name_of(out), "k" if a_is_k else "m", "k" if b_is_k else "n",
                    "tma" if load else "elements", "tma" if store else "elements", accumulate)
    recipe, blocks = launch(spec, m, n, k, arch.processors(device), config)
    return function(recipe), blocks


def _cpu(a: Tensor, b: Tensor, out_dtype: Optional[torch.dtype]) -> Tensor:
    _check(a, b, out_dtype)
    return reference.gemm(a, b, out_dtype)


def _fake(a: Tensor, b: Tensor, out_dtype: Optional[torch.dtype]) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype)


_op = ops.torch_op("gemm", cuda=_cuda, cpu=_cpu, fake=_fake)

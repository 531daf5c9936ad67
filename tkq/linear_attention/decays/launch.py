"""From torch tensors to the kernels of decays for each column."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention.decays.spec import DecaySpec
from tkq.linear_attention.spec import COLUMN_DIMS
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

DTYPES = torch.bfloat16, torch.float16, torch.float32
LONG = 64  # tokens of a block with gradients, as `kernel` has it
_launchers: dict = {}  # (device, spec) -> the kernel's function


def recipe(spec: DecaySpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.decays.kernel:ColumnDecays", (spec,))


def supported(g: Tensor) -> bool:
    """Is there a kernel for it? (B, S, HV, K), of any sizes."""
    return g.is_cuda and g.dim() == 4 and g.dtype in DTYPES and g.shape[3] in COLUMN_DIMS


def decays(g: Tensor, A_log: Tensor, bias: Tensor, bound: float | None) -> Tensor:
    """As `column_decays`, of a g that is `supported`. A_log: (HV,), bias: (HV * K,), float32, contiguous."""
    y = torch.empty(g.shape, device=g.device, dtype=torch.float32)
    if y.numel():
        rows = rows_of(g)
        _launcher(g, bound, False)(rows, (A_log, bias, y.view(rows.shape), None, None), bound or 0.0)
    return y


def gradients(dy: Tensor, g: Tensor, A_log: Tensor, bias: Tensor, bound: float | None) -> tuple:
    """(that of g, of A_log (HV,), of bias (HV * K,)): of g's dtype, the others float32. The same bits in each run."""
    dg = torch.empty(g.shape, device=g.device, dtype=g.dtype)
    if not dg.numel():
        return dg, torch.zeros_like(A_log), torch.zeros_like(bias)
    rows = rows_of(g)
    sums = torch.empty(-(-rows.shape[0] // LONG), 2, rows.shape[1], device=g.device, dtype=torch.float32)
    _launcher(g, bound, True)(rows, (A_log, bias, rows_of(dy), dg.view(rows.shape), sums), bound or 0.0)
    of_bias, of_A = sums.sum(0)
    return dg, of_A.view(A_log.shape[0], -1).sum(1), of_bias


def rows_of(x: Tensor) -> Tensor:
    """(B S, HV K), of x where its memory is like that, at multiples of 16 bytes; else of a copy."""
    rows = x.reshape(x.shape[0] * x.shape[1], -1)
    even = rows.stride(1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0
    return rows if even else rows.clone(memory_format=torch.contiguous_format)


def _launcher(g, bound, gradient):
    spec = DecaySpec(dtypes.name_of(g.dtype), g.shape[3], bound is not None, gradient)
    key = g.get_device(), spec
    if key not in _launchers:
        arch.require_hopper(g.device)
        _launchers[key] = function(recipe(spec))
    return _launchers[key]

"""From torch tensors to the launches of transforms of many points: columns, rows, columns back."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from tkq.convolution.fft.long.plan import column_plan, row_plan
from tkq.convolution.fft.long.spec import COLS, SEGMENT, ColumnSpec, LargestSpec, RowSpec, Size, size_of
from tkq.convolution.fft.plan import SMS
from tkq.convolution.fft.tensors import Given, aligned, filter_of, launcher
from tkq.runtime import Recipe
from tkq.runtime.call import dtypes

WORKSPACE = 256 << 20  # bytes, of what lies between passes: as many heads at a time


def column_recipe(spec: ColumnSpec, back: bool) -> Recipe:
    if spec.radix_first:
        kernel = "radix_first_back:RadixFirstBack" if back else "radix_first:RadixFirstColumns"
    else:
        kernel = "back:ColumnsBack" if back else "columns:Columns"
    return Recipe(f"tkq.convolution.fft.long.{kernel}", (spec, column_plan(spec, back)))


def largest_recipe(spec: LargestSpec) -> Recipe:
    return Recipe("tkq.convolution.fft.long.largest:Largest", (spec,))


def row_recipe(spec: RowSpec, gradient: bool) -> Recipe:
    kernel = "RowsGradient" if gradient else "Rows"
    return Recipe(f"tkq.convolution.fft.long.rows:{kernel}", (spec, row_plan(spec, gradient)))


def forward(g: Given, conjugate: bool, dtype: torch.dtype | None = None) -> Tensor:
    """y, contiguous, causal; conjugate: of the filter's mirror image. dtype: of y, u's where there is none; float32 is
    also allowed, without a gate behind."""
    B, H, L = g.u.shape
    u, pre, post, taps = (aligned(t) for t in (g.u, g.pre, g.post, filter_of(g)[None]))
    y = torch.empty_like(u, dtype=dtype, memory_format=torch.contiguous_format)
    size = size_of(L, g.split)
    for heads in slices(H, (B + 1) * size.bytes):
        u_, pre_, post_, taps_, y_ = (t if t is None else t[:, heads] for t in (u, pre, post, taps, y))
        x, largest = columns(u_, pre_, size)
        k, of_filter = columns(taps_, None, size)
        exponents = rows((x, largest, k, of_filter), size, conjugate, False)
        _back((x, exponents, largest, of_filter, post_, y_), size, -2 * size.above)
    return y if y.shape[2] == L else y[..., :L].contiguous()


def filter_gradient(g: Given, dy: Tensor) -> Tensor:
    """(H, L) float32: of as many taps as there are tokens; or a few more."""
    B, H, L = g.u.shape
    u, dy, pre, post = (aligned(t) for t in (g.u, dy, g.pre, g.post))
    found, size = torch.empty(1, H, u.shape[2], dtype=torch.float32, device=u.device), size_of(L, g.split)
    for heads in slices(H, 2 * B * size.bytes):
        u_, pre_, dy_, post_, found_ = (t if t is None else t[:, heads] for t in (u, pre, dy, post, found))
        x, largest = columns(u_, pre_, size)
        other, of_other = columns(dy_, post_, size)
        exponents = rows((x, largest, other, of_other), size, False, True)
        _back((x[:, :1], exponents, None, None, None, found_), size, 0)
    return found[0]


def columns(x: Tensor, gate: Tensor | None, size: Size) -> tuple[Tensor, Tensor]:
    """Transformed, (H, B, planes, N), and notes of the largest numbers."""
    B, H, L = x.shape
    spec = ColumnSpec(dtypes.name_of(x.dtype), size.radix, gate is not None, size.split)
    to = torch.empty(H, B, size.planes, size.points, dtype=torch.float16, device=x.device)
    largest = torch.empty(H, B, -(-L // SEGMENT), dtype=torch.int32, device=x.device)
    launcher(x, largest_recipe(LargestSpec(spec.dtype, spec.gate)))(x, (gate, largest))
    recipe = column_recipe(spec, False)
    launcher(x, recipe)(x, (gate, largest, to.view(-1, size.row), size.above),
                        _blocks(recipe, H * B * size.row // spec.cols))
    return to, largest


def rows(operands, size: Size, conjugate: bool, gradient: bool) -> Tensor:
    """In place of the first one; exponents. operands: transformed columns, notes, the same of the other one."""
    x, largest, other, of_other = operands
    notes = (largest, of_other) if gradient else (None, None)
    exponents = torch.empty(len(x), size.tiles, dtype=torch.int32, device=x.device)
    recipe = row_recipe(RowSpec(size.rows, size.split), gradient)
    launcher(x, recipe)(x.view(-1, COLS), (other.view(-1, COLS), *notes, exponents, x.shape[1], size.above,
                                           -1 if conjugate else 1), _blocks(recipe, len(x) * size.tiles))
    return exponents


def _back(given, size, exponent):
    """given: as the kernel has them."""
    x, exponents, *notes, gate, y = given
    wide = y.dtype == torch.float32
    spec = ColumnSpec(dtypes.name_of(y.dtype), size.radix, gate is not None, size.split, wide and notes[0] is not None)
    recipe = column_recipe(spec, True)
    exponent -= round(math.log2(size.scale ** 3 * size.points))
    launcher(x, recipe)(x, (exponents, *notes, gate, y, exponent),
                        _blocks(recipe, x.shape[0] * x.shape[1] * size.row // spec.cols))


def _blocks(recipe, items):
    """Of a launch: as many as work at a time, or as there is work for."""
    config = recipe.args[1]
    return max(1, min(SMS * config.blocks, -(-items // config.warpgroups)))


def slices(heads, each):
    """Slices of the heads, of which the workspace holds one at a time."""
    n = max(1, min(heads, WORKSPACE // each))
    return [slice(first, min(first + n, heads)) for first in range(0, heads, n)]

"""Tensors of a call as kernels take them, and the kernels' functions."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.reference.long_convolution import _taps
from tkq.runtime import function
from tkq.runtime.device import arch

_launchers: dict = {}  # (device, recipe) -> the kernel's function; as many as kinds of call


class Given(NamedTuple):
    """As `tkq.fft_conv` has them; split: is its precision "split"?"""

    u: Tensor
    k: Tensor
    d: Tensor | None
    causal: bool
    pre: Tensor | None
    post: Tensor | None
    split: bool = False


def filter_of(g: Given) -> Tensor:
    """(H, taps) float32: what reaches no token left out, not causal: what reaches the same ones added; and d."""
    L, k = g.u.shape[2], g.k
    taps = _taps(k, L, g.causal)[:, :L] if k.shape[1] else k.new_zeros(len(k), 1)
    if g.d is not None:
        taps = taps.clone()
        taps[:, 0] += g.d
    return taps


def vector_of(*tensors: Tensor | None) -> int:
    """8 elements in one access (of float32 in two) where addresses, strides and the number of tokens allow it, or 1."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr() | x.shape[2] * 2
            for dim in (0, 1):
                if x.shape[dim] > 1:
                    bits |= x.stride(dim) * x.itemsize
    return 1 if bits % 16 else 8


def readable(x: Tensor | None) -> Tensor | None:
    """x, or a copy where neighbouring tokens are no neighbours in memory."""
    if x is None or x.stride(2) == 1 or x.shape[2] == 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def aligned(x: Tensor | None) -> Tensor | None:
    """x, or a copy where not 8 elements at a time can be read: with zeros behind the end, up to a multiple of 8."""
    x = readable(x)
    return x if x is None or vector_of(x) == 8 else torch.nn.functional.pad(x, (0, -x.shape[2] % 8)).contiguous()


def launcher(x: Tensor, recipe):
    """The function of a kernel, on x's GPU."""
    key = x.get_device(), recipe
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(recipe)
    return _launchers[key]

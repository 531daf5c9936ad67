"""A filter's spectrum as the kernel of whole sequences takes it."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.convolution.fft.config import FftConfig
from tkq.convolution.fft.spec import FftSpec
from tkq.convolution.fft.tensors import launcher
from tkq.runtime import Recipe

SMS = 132
TAPS = Recipe("tkq.convolution.fft.whole.taps:FilterTaps", ())


def filter_recipe(mirrored: bool) -> Recipe:
    return Recipe("tkq.convolution.fft.whole.filters:FilterSpectra", (mirrored,))


def spectra(taps: Tensor, mirrored: bool) -> tuple[Tensor, Tensor]:
    """(spectra (H, 16, 4, 128, 8) fp16, what they are divided by (H,) fp32): for each tile of two k1 and each block of
    8 kb what a thread has of them, its digit ka throughout: of its two k1 the real and the imaginary parts of two
    neighbours kb. taps: (H, up to 32768) float32. mirrored: of the filter's mirror image."""
    taps = taps if taps.stride(1) == 1 else taps.contiguous()
    found = torch.empty(len(taps), 16, 4, 128, 8, dtype=torch.float16, device=taps.device)
    divided = torch.empty(len(taps), dtype=torch.float32, device=taps.device)
    launcher(taps, filter_recipe(mirrored))(taps, (found, divided), min(SMS, len(taps)))
    return found, divided


def gradient_recipe(spec: FftSpec) -> Recipe:
    return Recipe("tkq.convolution.fft.whole.gradient:WholeFilterGradient", (spec, FftConfig(4)))


def filter_gradient(u: Tensor, dy: Tensor, pre: Tensor | None, post: Tensor | None, spec: FftSpec) -> Tensor:
    """(H, L) float32: of each head the sum over its sequences. Neighbouring tokens are neighbours in memory."""
    B, H, L = u.shape
    parts = max(1, min(B, SMS // (2 * H)))
    sums = torch.empty(H, parts, 16, 8, 128, 4, dtype=torch.float32, device=u.device)
    launcher(u, gradient_recipe(spec))(u, (dy, pre, post, sums, parts), min(SMS, 2 * H * parts))
    total, found = sums[:, 0] if parts == 1 else sums.sum(1), torch.empty(H, L, dtype=torch.float32, device=u.device)
    launcher(u, TAPS)(total, found, min(SMS, H))
    return found


def in_order(found: Tensor) -> Tensor:
    """(H, 32768) complex64, of the frequencies in their order: for tests."""
    digits = found.view(-1, 16, 4, 4, 8, 4, 2, 2, 2).permute(0, 2, 5, 8, 3, 4, 1, 6, 7)  # kb, ka, k1, part
    return torch.view_as_complex(digits.float().reshape(len(found), -1, 2))

"""A filter's spectrum as the kernel of whole sequences takes it."""
from __future__ import annotations

import torch
from torch import Tensor

POINTS = 32768
EXPONENT = 23  # where it begins in an fp32


def arranged(taps: Tensor, conjugate: bool) -> tuple[Tensor, Tensor]:
    """(spectra (H, 16, 4, 128, 8) fp16, what they are divided by (H,) fp32): for each tile of two k1 and each block of
    8 kb what a thread has of them, its digit ka throughout: of its two k1 the real and the imaginary parts of two
    neighbours kb. taps: (H, up to 32768) complex64, moved to frequencies k - 1/4."""
    parts = torch.view_as_real(torch.fft.fft(taps, POINTS))
    most = parts.view(len(taps), -1).abs().amax(1).view(torch.int32) >> EXPONENT  # NaN is the largest
    exponent = most.clamp_(2, 253)
    down, up = (((e << EXPONENT).view(torch.float32)) for e in (254 - exponent, exponent))
    digits = parts.view(-1, 4, 4, 2, 4, 8, 16, 2, 2)  # kb: block, lane, neighbour; ka: warp, row; k1: tile, half; part
    found = (digits * down.view(-1, *[1] * 8)).half().permute(0, 6, 1, 4, 5, 2, 7, 8, 3)
    if conjugate:
        found = found * found.new_tensor([1, -1]).view(2, 1)
    return found.reshape(len(taps), 16, 4, 128, 8), up

"""From torch tensors to the launches of whole sequences: filters' spectra, gradients."""
from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tkq.convolution.fft.config import FftConfig
from tkq.convolution.fft.plan import SMS, WHOLE
from tkq.convolution.fft.spec import FftSpec
from tkq.convolution.fft.tensors import launcher, vector_of
from tkq.runtime import Recipe

SPECTRUM = 128 << 10  # bytes, of a sequence
WORKSPACE = 512 << 20  # bytes, of spectra: a launch has some 15 sequences for each SM, or 16
TAPS = Recipe("tkq.convolution.fft.whole.taps:FilterTaps", ())


def recipe(spec: FftSpec, config: FftConfig = WHOLE) -> Recipe:
    """Of the convolution, which finds in the filter's spectrum whether that is mirrored."""
    spec = dataclasses.replace(spec, conjugate=False)
    return Recipe("tkq.convolution.fft.whole.kernel:WholeSequence", (spec, config))


def filter_recipe(mirrored: bool) -> Recipe:
    return Recipe("tkq.convolution.fft.whole.filters:FilterSpectra", (mirrored,))


def spectra(taps: Tensor, mirrored: bool) -> tuple[Tensor, Tensor]:
    """(spectra (H, 16, 4, 128, 8) fp16, exponents of what they are divided by (H,) int32, of 1 127): for each tile of
    two k1 and each block of 8 kb what a thread has of them, its digit ka throughout: of its two k1 the real and the
    imaginary parts of two neighbours kb. taps: (H, up to 32768) float32. mirrored: of the filter's mirror image."""
    taps = taps if taps.stride(1) == 1 else taps.contiguous()
    found = torch.empty(len(taps), 16, 4, 128, 8, dtype=torch.float16, device=taps.device)
    exponents = torch.empty(len(taps), dtype=torch.int32, device=taps.device)
    launcher(taps, filter_recipe(mirrored))(taps, (found, exponents), min(SMS, len(taps)))
    return found, exponents


def kept_recipe(spec: FftSpec) -> Recipe:
    """Of the spectra of sequences, where these alone are asked for."""
    return Recipe("tkq.convolution.fft.whole.spectra:WholeSpectra", (spec, WHOLE))


def gradient_recipe(spec: FftSpec) -> Recipe:
    """Of the products of kept spectra, whatever else the spec says of these."""
    plain = FftSpec(spec.dtype, spec.rows, blocks=spec.blocks)
    return Recipe("tkq.convolution.fft.whole.gradient:WholeFilterGradient", (plain,))


def kept(B: int, H: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the spectra of sequences and their exponents."""
    return (torch.empty(H, B, 16, 4, 128, 8, dtype=torch.float16, device=device),
            torch.empty(H, B, dtype=torch.int32, device=device))


def kept_spectra(x: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of x times a gate (B, H, L), neighbouring tokens neighbours in memory."""
    B, H, _ = x.shape
    found = kept(B, H, x.device)
    spec = FftSpec("bf16", 64, pre=gate is not None, vector=vector_of(x, gate), blocks=8)
    launcher(x, kept_recipe(spec))(x, (gate, *found), min(SMS, B * H))
    return found


class Sums:
    """A filter's gradient, some heads at a time: as many as a workspace has room for the spectra of."""

    def __init__(self, B: int, H: int, device: torch.device):
        n = max(1, min(H, WORKSPACE // (2 * SPECTRUM * max(1, B))))
        self.heads = [slice(first, min(first + n, H)) for first in range(0, H, n)]
        self.sums = torch.empty(H, 16, 8, 128, 4, dtype=torch.float32, device=device)

    def add(self, heads: slice, v, w, spec: FftSpec) -> None:
        """The products of these heads' spectra, as `kept`."""
        launcher(v[0], gradient_recipe(spec))(v[0], (v[1], *w, self.sums[heads]))

    def taps(self, L: int) -> Tensor:
        """(H, L) float32"""
        H = len(self.sums)
        found = torch.empty(H, L, dtype=torch.float32, device=self.sums.device)
        launcher(found, TAPS)(self.sums, found, min(SMS, H))
        return found


def filter_gradient(u: Tensor, dy: Tensor, pre: Tensor | None, post: Tensor | None, spec: FftSpec) -> Tensor:
    """(H, L) float32: of each head the sum over its sequences. Neighbouring tokens are neighbours in memory."""
    B, H, L = u.shape
    found = Sums(B, H, u.device)
    for heads in found.heads:
        v, w = (kept_spectra(*(t if t is None else t[:, heads] for t in of)) for of in ((u, pre), (dy, post)))
        found.add(heads, v, w, spec)
    return found.taps(L)


def gradients(operands, spectrum, spec: FftSpec) -> tuple[Tensor, Tensor]:
    """(du, as `filter_gradient`): dy's spectra are made once. operands: u, dy, gates. spectrum: `spectra` of the mirror
    image of the filter. spec: of the launch that convolves dy with that."""
    u, dy, pre, post = operands
    (B, H, L), du = u.shape, torch.empty(u.shape, dtype=u.dtype, device=u.device)
    found = Sums(B, H, u.device)
    for heads in found.heads:
        u_, dy_, pre_, post_, du_ = (t if t is None else t[:, heads] for t in (u, dy, pre, post, du))
        w = kept(B, dy_.shape[1], u.device)
        arguments = *(t[heads] for t in spectrum), post_, pre_, du_, *w
        launcher(u, recipe(spec))(dy_, arguments, min(SMS, B * dy_.shape[1]))
        found.add(heads, kept_spectra(u_, pre_), w, spec)
    return du, found.taps(L)


def in_order(found: Tensor) -> Tensor:
    """(H, 32768) complex64, of the frequencies in their order: for tests."""
    digits = found.view(-1, 16, 4, 4, 8, 4, 2, 2, 2).permute(0, 2, 5, 8, 3, 4, 1, 6, 7)  # kb, ka, k1, part
    return torch.view_as_complex(digits.float().reshape(len(found), -1, 2))

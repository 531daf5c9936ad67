"""From torch tensors to launches."""
from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from tkq.convolution.fft.config import FftConfig
from tkq.convolution.fft.long import circular
from tkq.convolution.fft.long import launch as long
from tkq.convolution.fft.plan import (
    SMS,
    blocks_of,
    gradient_plan,
    has_transform,
    plan,
    splits_of,
    tiles_of,
    transform_rows,
    twice,
)
from tkq.convolution.fft.spec import SHARED_BLOCKS, FftSpec
from tkq.convolution.fft.tensors import Given, filter_of, launcher, readable, vector_of
from tkq.convolution.fft.whole import launch as of_whole
from tkq.runtime import Recipe
from tkq.runtime.call import dtypes

LONG = 8192  # tokens, above which a filter's gradient takes several passes
_quarters: dict = {}  # (points, device) -> what `quarter` makes: as many as sizes of transforms, to 4096 numbers each


def recipe(spec: FftSpec, config: FftConfig) -> Recipe:
    """Which kernel a spec gets, the first of:

        whole           `whole.kernel`   8 blocks in bf16
        in_registers    `in_registers`   one block; in bf16 also two
        split           `kernel`         one block, by split operands
        otherwise       `blocks`         4 blocks in bf16; 2, 4 or 8 in fp16
    """
    if spec.whole:
        return of_whole.recipe(spec, config)
    kernel = "in_registers:InRegisters" if spec.in_registers else "kernel:FftConv" if spec.split else \
        "blocks:BlockedFftConv"
    return Recipe(f"tkq.convolution.fft.{kernel}", (spec, config))


def gradient_recipe(spec: FftSpec, config: FftConfig) -> Recipe:
    """Of the filter's, of sequences of one block or two."""
    return Recipe("tkq.convolution.fft.filter_gradient:FilterGradient", (spec, config))


def forward(g: Given, conjugate: bool = False) -> Tensor:
    """y, contiguous; conjugate: of the filter's mirror image, the gradient of what is convolved."""
    B, H, L = g.u.shape
    if not g.u.numel():
        return g.u.new_empty(B, H, L)
    if not g.causal and not has_transform(L):
        return _of_twice(g, conjugate) if twice(L) else circular.forward(g, conjugate)
    if transform_rows(L, g.causal, g.split) is None:
        return long.forward(g, conjugate)
    u, pre, post = (readable(t) for t in (g.u, g.pre, g.post))
    y = torch.empty(B, H, L, dtype=u.dtype, device=u.device)
    spec = spec_of((u, pre, post, y), g, conjugate)
    config = plan(spec, B)
    if spec.whole:
        spectra = of_whole.spectra(filter_of(g), conjugate)
        launcher(u, recipe(spec, config))(u, (*spectra, pre, post, y), min(SMS, B * H))
        return y
    if spec.in_registers:
        blocks = min(SMS, H * tiles_of(spec, B))
        launcher(u, recipe(spec, config))(u, (tables(g, spec), pre, post, y), blocks)
        return y
    splits = splits_of(spec, config, B, H)
    blocks, workspace = min(SMS, H * splits), None
    if spec.blocks > SHARED_BLOCKS:
        workspace = torch.empty(blocks, config.warpgroups, spec.kept, 16, 128, 4, dtype=torch.float16, device=u.device)
    launcher(u, recipe(spec, config))(u, (spectrum(g, spec), pre, post, y, splits, workspace), blocks)
    return y


def spec_of(tensors, g: Given, conjugate: bool = False) -> FftSpec:
    """Of a launch on such tensors, some of them None."""
    L = g.u.shape[2]
    return FftSpec(dtypes.name_of(g.u.dtype), transform_rows(L, g.causal), g.causal, g.pre is not None,
                   g.post is not None, conjugate, vector_of(*tensors), blocks_of(L, g.causal), g.split)


def spectra_recipe(spec: FftSpec) -> Recipe:
    """Of the filters' spectra for kernels of that spec, whatever else it says of these."""
    plain = FftSpec(spec.dtype, spec.rows, spec.causal, conjugate=spec.conjugate, blocks=spec.blocks)
    return Recipe("tkq.convolution.fft.filter_spectra:FilterSpectra", (plain,))


def taps_recipe(spec: FftSpec) -> Recipe:
    """Of the filters' gradients, of the sums of kernels of that spec."""
    return Recipe("tkq.convolution.fft.filter_taps:FilterTaps", (FftSpec("bf16", spec.rows, spec.causal,
                                                                         blocks=spec.blocks),))


def tables(g: Given, spec: FftSpec) -> Tensor:
    """Spectra of the filters, with d in their first taps, as kernels `in_registers` have them."""
    taps = readable(filter_of(g)[None])[0]
    found = torch.empty(len(taps), spec.head_words, dtype=torch.int32, device=taps.device)
    launcher(taps, spectra_recipe(spec))(taps, found)
    return found


def spectrum(g: Given, spec: FftSpec) -> Tensor:
    """Of the filter, with d in its first tap: (H, blocks, points, 2), for kernels that are not `in_registers`. Causal
    ones at frequencies k - 1/4, of part m of several with the taps before it as the negative imaginary part."""
    taps = filter_of(g)
    if not spec.causal:
        return torch.view_as_real(torch.fft.fft(taps, spec.points))[:, None]
    by = quarter(spec.points, taps.device)
    if spec.blocks == 1:
        return torch.view_as_real(torch.fft.fft(taps * by[:taps.shape[1]], spec.points))[:, None]
    taps = torch.nn.functional.pad(taps, (spec.points, spec.blocks * spec.points - taps.shape[1]))
    taps = taps.view(len(taps), spec.blocks + 1, spec.points)
    return torch.view_as_real(torch.fft.fft(torch.complex(taps[:, 1:], -taps[:, :-1]) * by))


def quarter(points: int, device: torch.device) -> Tensor:
    """exp(2 pi i n / 4 points), which moves frequencies by 1/4. What has been made stays, but for what a CUDA graph
    captures, whose memory is the graph's."""
    found = _quarters.get((points, device))
    if found is None:
        angle = torch.arange(points, dtype=torch.float32, device=device) * (math.pi / 2 / points)
        found = torch.polar(torch.ones_like(angle), angle)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # once: other streams read it, too
            _quarters[points, device] = found
    return found


def gradients(g: Given, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(du, as `filter_gradient`). Of whole sequences what both are made of is made once."""
    mirrored = Given(dy, g.k, g.d, g.causal, g.post, g.pre, g.split)
    rows = transform_rows(g.u.shape[2], g.causal, g.split)
    if not g.u.numel() or rows is None or not spec_of((g.u,), g).whole:
        return forward(mirrored, conjugate=True), filter_gradient(g, dy)
    operands = [readable(t) for t in (g.u, dy, g.pre, g.post)]
    spec = dataclasses.replace(spec_of(operands, mirrored), keeps=True)
    du, found = of_whole.gradients(operands, of_whole.spectra(filter_of(g), True), spec)
    return du, _of_taps(found, max(1, g.k.shape[1]), g.causal)


def filter_gradient(g: Given, dy: Tensor) -> Tensor:
    """dk (H, taps) float32, of as many taps as k has, of one at least: d's is that of the first one."""
    _, H, L = g.u.shape
    taps = max(1, g.k.shape[1])
    if not g.u.numel():
        found = torch.zeros(H, L, dtype=torch.float32, device=g.u.device)
    else:
        if g.causal or (has_transform(L) and not g.split):
            found = _filter_gradient(g, dy, min(taps, L))
        elif not twice(L):
            found = circular.filter_gradient(g, dy)
        else:  # each of the tokens, and those that are up to L before it
            u, pre, post = (None if t is None else torch.cat((t, t), 2) for t in (g.u, g.pre, g.post))
            later = torch.cat((torch.zeros_like(dy), dy), 2)
            found = _filter_gradient(Given(u, g.k, None, True, pre, post, g.split), later,
                                     min(taps, L))
    return _of_taps(found, taps, g.causal)


def _of_taps(found: Tensor, taps: int, causal: bool) -> Tensor:
    """found, of as many taps as tokens or fewer: of so many."""
    L = found.shape[1]
    if taps <= L:
        return found[:, :taps].contiguous()
    if causal or not L:
        return torch.nn.functional.pad(found, (0, taps - L))
    return found.repeat(1, -(-taps // L))[:, :taps].contiguous()


def _filter_gradient(g, dy, taps):
    """(H, taps), up to as many as tokens."""
    rows = transform_rows(g.u.shape[2], g.causal, g.split)
    if rows is not None and spec_of((g.u,), g).whole:
        u, dy, pre, post = (readable(t) for t in (g.u, dy, g.pre, g.post))
        return of_whole.filter_gradient(u, dy, pre, post, spec_of((u, dy, pre, post), g))[:, :taps]
    if g.causal and (g.split or g.u.shape[2] > LONG):
        return long.filter_gradient(g, dy)[:, :taps]
    u, dy, pre, post = (readable(t) for t in (g.u, dy, g.pre, g.post))
    B, H, L = u.shape
    spec = spec_of((u, dy, pre, post), g)
    config = gradient_plan(spec, B)
    lags = -(-L // spec.points) if g.causal else 1
    splits = splits_of(spec, config, B, H)
    sums = torch.empty(H, lags, splits, 16, spec.summed_threads, 4, dtype=torch.float32, device=u.device)
    launcher(u, gradient_recipe(spec, config))(u, (dy, pre, post, sums, splits), min(SMS, H * splits))
    found = torch.empty(H, taps, dtype=torch.float32, device=u.device)
    launcher(u, taps_recipe(spec))(sums, found)
    return found


def _of_twice(g, conjugate):
    """Circular, of any number of tokens: what is causal of the tokens written twice, in its second half."""
    L, taps = g.u.shape[2], filter_of(g)
    if conjugate:
        taps = torch.nn.functional.pad(taps, (0, L - taps.shape[1])).flip(1).roll(1, 1)
    u, pre, post = (None if t is None else torch.cat((t, t), 2) for t in (g.u, g.pre, g.post))
    return forward(Given(u, taps, None, True, pre, post, g.split))[..., L:].contiguous()

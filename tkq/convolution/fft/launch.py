"""From torch tensors to launches."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from tkq.convolution.fft.config import FftConfig
from tkq.convolution.fft.long import launch as long
from tkq.convolution.fft.plan import SMS, blocks_of, plan, splits_of, tiles_of, transform_rows, whole
from tkq.convolution.fft.spec import COLUMN_SCALE, SHARED_BLOCKS, FftSpec, row_scale
from tkq.convolution.fft.tensors import Given, filter_of, launcher, readable, vector_of
from tkq.convolution.fft.whole.launch import filter_gradient as whole_gradient
from tkq.convolution.fft.whole.launch import spectra
from tkq.runtime import Recipe
from tkq.runtime.call import dtypes

LONG = 8192  # tokens, above which a filter's gradient takes several passes
_quarters: dict = {}  # (points, device) -> what `quarter` makes: as many as sizes of transforms, to 4096 numbers each


def recipe(spec: FftSpec, config: FftConfig) -> Recipe:
    kernel = "whole.kernel:WholeSequence" if spec.whole else \
        "in_registers:InRegisters" if spec.in_registers else "kernel:FftConv" if spec.split else \
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
    if not g.causal and not whole(L):
        return _of_twice(g, conjugate)
    if transform_rows(L, g.causal, g.split) is None:
        return long.forward(g, conjugate)
    u, pre, post = (readable(t) for t in (g.u, g.pre, g.post))
    y = torch.empty(B, H, L, dtype=u.dtype, device=u.device)
    spec = spec_of((u, pre, post, y), g, conjugate)
    config = plan(spec, B)
    if spec.whole:
        launcher(u, recipe(spec, config))(u, (*spectra(filter_of(g), conjugate), pre, post, y), min(SMS, B * H))
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


def spectrum(g: Given, spec: FftSpec) -> Tensor:
    """Of the filter, with d in its first tap: (H, blocks, points, 2). Causal ones at frequencies k - 1/4, of part m of
    several with the taps before it as the negative imaginary part, which those in registers see to themselves."""
    taps = filter_of(g)
    if not spec.causal:
        return torch.view_as_real(torch.fft.fft(taps, spec.points))[:, None]
    by = quarter(spec.points, taps.device)
    if spec.blocks == 1:
        return torch.view_as_real(torch.fft.fft(taps * by[:taps.shape[1]], spec.points))[:, None]
    if spec.in_registers:
        n = spec.blocks * spec.points
        taps = taps if taps.shape[1] == n else torch.nn.functional.pad(taps, (0, n - taps.shape[1]))
        return torch.view_as_real(torch.fft.fft(taps.unflatten(1, (spec.blocks, spec.points)) * by))
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


def filter_gradient(g: Given, dy: Tensor) -> Tensor:
    """dk (H, taps) float32, of as many taps as k has, of one at least: d's is that of the first one."""
    _, H, L = g.u.shape
    taps, found = max(1, g.k.shape[1]), torch.zeros(H, L, dtype=torch.float32, device=g.u.device)
    if g.u.numel():
        if g.causal or (whole(L) and not g.split):
            found = _filter_gradient(g, dy)[:, :L]
        else:  # each of the tokens, and those that are up to L before it
            u, pre, post = (None if t is None else torch.cat((t, t), 2) for t in (g.u, g.pre, g.post))
            later = torch.cat((torch.zeros_like(dy), dy), 2)
            found = _filter_gradient(Given(u, g.k, None, True, pre, post, g.split), later)[:, :L]
    if taps <= L:
        return found[:, :taps].contiguous()
    if g.causal or not L:
        return torch.nn.functional.pad(found, (0, taps - L))
    return found.repeat(1, -(-taps // L))[:, :taps].contiguous()


def _filter_gradient(g, dy):
    """(H, points)"""
    rows = transform_rows(g.u.shape[2], g.causal, g.split)
    if rows is not None and spec_of((g.u,), g).whole:
        u, dy, pre, post = (readable(t) for t in (g.u, dy, g.pre, g.post))
        return whole_gradient(u, dy, pre, post, spec_of((u, dy, pre, post), g))
    if g.causal and (g.split or g.u.shape[2] > LONG):
        return long.filter_gradient(g, dy)
    u, dy, pre, post = (readable(t) for t in (g.u, dy, g.pre, g.post))
    B, H, L = u.shape
    spec = spec_of((u, dy, pre, post), g)
    config = FftConfig(min(2, tiles_of(spec, B)))
    lags = -(-L // spec.points) if g.causal else 1
    splits = splits_of(spec, config, B, H)
    sums = torch.empty(H, lags, splits, 16, 128, 4, dtype=torch.float32, device=u.device)
    launcher(u, gradient_recipe(spec, config))(u, (dy, pre, post, sums, splits), min(SMS, H * splits))
    # (part, block of columns, half of rows, warp, row, columns, column, part of a number) of each head; of columns the
    # first half are even frequencies
    tiles = sums.view(H, lags, splits, 8, 2, 4, 8, 4, 2, 2).permute(0, 1, 2, 5, 4, 6, 3, 7, 8, 9).reshape(
        H, lags, splits * spec.transforms, spec.rows, 64, 2)
    tiles = tiles.sum(2).view(H, lags, spec.rows, 2, 32, 2).permute(0, 1, 4, 3, 2, 5)
    spectra = torch.view_as_complex(tiles.reshape(H, lags, spec.points, 2))
    found = torch.fft.ifft(spectra) * (1.0 / (row_scale(spec.rows) * COLUMN_SCALE) ** 2)
    if not g.causal:
        return found[:, 0].real
    found = found * quarter(spec.points, u.device).conj_physical()
    taps = found.real.clone()
    taps[:, :-1] -= found.imag[:, 1:]  # taps before those of a lag belong to the lag before
    return taps.view(H, lags * spec.points)


def _of_twice(g, conjugate):
    """Circular, of any number of tokens: what is causal of the tokens written twice, in its second half."""
    L, taps = g.u.shape[2], filter_of(g)
    if conjugate:
        taps = torch.nn.functional.pad(taps, (0, L - taps.shape[1])).flip(1).roll(1, 1)
    u, pre, post = (None if t is None else torch.cat((t, t), 2) for t in (g.u, g.pre, g.post))
    return forward(Given(u, taps, None, True, pre, post, g.split))[..., L:].contiguous()

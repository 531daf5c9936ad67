"""Is a result the oracle's? None, or what is wrong with it in one line."""
import math

import torch

from .oracles import WIDE

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20, torch.float8_e4m3fn: 2**-3,
            torch.float8_e5m2: 2**-2}  # relative; of float32 what its sums of a few hundred products lose
FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


def results(found, wanted):
    """What a call returned, against a list of ``Wanted``."""
    found = list(found) if isinstance(found, (tuple, list)) else [found] * (found is not None)
    quantised = [w for w in wanted if isinstance(w.tolerance, tuple) and w.tolerance[0] == "float8"]
    if len(found) != len(wanted) + len(quantised):
        return f"{len(found)} results, expected {len(wanted) + len(quantised)}"
    for w in quantised:
        wrong = float8(found.pop(0), found.pop(0), w)
        if wrong:
            return wrong
    rest = wanted[len(quantised):]
    return next(filter(None, map(tensor, found, rest)), None)


def tensor(got, wanted):
    """One result against one ``Wanted``: its type, shape, NaN, infinities and values."""
    what, dtype = wanted.name, wanted.dtype
    wrong = _form(got, what, wanted.value.shape, dtype)
    if wrong or got.is_meta:
        return wrong
    got, value = got.detach().cpu().to(WIDE), wanted.value.detach()
    if wanted.rows is not None:
        got, value = got[wanted.rows], value[wanted.rows]
    largest = torch.finfo(dtype).max
    if dtype not in FLOAT8:
        value = torch.where(value.abs() > largest, torch.copysign(torch.tensor(math.inf, dtype=WIDE), value), value)
    lacks, expected = torch.isnan(got), torch.isnan(value)
    if (lacks != expected).any():
        return f"{what}: NaN in {int(lacks.sum())} places, expected in {int(expected.sum())}"
    got, value = got[~expected], value[~expected]
    infinite = torch.isinf(got) | torch.isinf(value)
    near = (got.abs() >= largest * 0.99) & (value.abs() >= largest * 0.99) & (got * value > 0)
    wrong = infinite & (got != value) & ~near
    if wrong.any():
        return f"{what}: {got[wrong][0].item()}, expected {value[wrong][0].item()}"
    return _values(got[~infinite], value[~infinite], wanted)


def _form(got, what, shape, dtype):
    if not isinstance(got, torch.Tensor):
        return f"{what}: is a {type(got).__name__}"
    if got.dtype != dtype:
        return f"{what}: dtype {got.dtype}, expected {dtype}"
    if tuple(got.shape) != tuple(shape):
        return f"{what}: shape {tuple(got.shape)}, expected {tuple(shape)}"
    return None


def _values(got, value, wanted):
    if not got.numel():
        return None
    rounding, least = ROUNDING[wanted.dtype], torch.finfo(wanted.dtype).tiny * 2
    largest, rms = value.abs().max().item(), value.square().mean().sqrt().item()
    size = value.abs() + rms
    if not isinstance(wanted.tolerance, tuple):
        allowed = wanted.tolerance * rounding * size + least + 2e-6
    elif wanted.tolerance[0] == "beside":
        allowed = wanted.tolerance[1] * rounding * size + wanted.tolerance[2]
    elif wanted.tolerance[0] == "abs":
        allowed = torch.full_like(value, wanted.tolerance[1] + 64 * rounding * largest)
    else:
        allowed = 2 * rounding * size + least + 4 * wanted.tolerance[1] * max(rms, largest)
    off = (got - value).abs() - allowed
    if not (off > 0).any():
        return None
    at = off.argmax()
    return f"{wanted.name}: {got[at].item():.6g}, expected {value[at].item():.6g} (root mean square {rms:.3g})"


def float8(quantised, scale, wanted):
    """Values times scales, against what was quantised."""
    if quantised.is_meta:
        return None
    wrong = _form(quantised, wanted.name, wanted.value.shape, wanted.dtype) or (
        None if scale.dtype == torch.float32 else f"{wanted.name}: scales are {scale.dtype}")
    if wrong:
        return wrong
    value = wanted.value.reshape(math.prod(quantised.shape[:-1]), quantised.shape[-1])
    scale = scale.detach().cpu().to(WIDE)
    got = quantised.detach().cpu().to(WIDE).reshape(value.shape) * _spread(scale, wanted.tolerance[1], value.shape)
    allowed = value.abs() * ROUNDING[wanted.dtype] + (scale.max().item() if scale.numel() else 0) * 2**-8
    if not torch.isfinite(value).all() or torch.isnan(allowed).any():
        return None
    off = (got - value).abs()
    return f"{wanted.name}: off by {off.max().item():.3g}" if (off > allowed).any() else None


def _spread(scale, granularity, shape):
    """A scale for each element."""
    rows, columns = shape
    if granularity == "tensor":
        return scale.reshape(1, 1)
    if granularity == "row":
        return scale
    if granularity == "128x128":
        scale = scale.repeat_interleave(128, 0)[:rows]
    return scale.repeat_interleave(128, 1)[:, :columns]

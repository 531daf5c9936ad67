"""From torch tensors to a launch of Hedgehog's attention."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.plan import key_plan, plan, query_plan, segments, window_plan
from tkq.linear_attention.hedgehog.spec import GradientSpec, HedgehogSpec, WindowSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

THREADS = 128  # of a warpgroup
KEPT = 64  # columns of maps whose features gradients are made of
CONTIGUOUS = torch.contiguous_format
_launchers: dict = {}  # what decides the kernel -> its function; as many as kinds of call


def recipe(spec: HedgehogSpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.hedgehog.kernel:HedgehogAttention", (spec, plan(spec)))


class Given(NamedTuple):
    """What a launch takes, as `kernel.Operands` has it."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_map: Tensor
    k_map: Tensor
    linear: Tensor
    window: Tensor


class Made(NamedTuple):
    """What a forward gives: o; of each token 1 over its denominator and the largest score in its window, (B, S, H)
    fp32; features of queries and keys, (B, S, H, 2 F), as `kernel.Operands` has them, None where they are not kept."""

    o: Tensor
    inverse: Tensor
    most: Tensor
    q_features: Tensor | None
    k_features: Tensor | None


def start(given: Given, keep: bool = False) -> tuple:
    """(`Made`, (the function of the one launch, its arguments), or None where there were none or two). keep: features,
    of maps of 64 columns."""
    q, k, v, *others = given
    (B, S, H, D), device, F = v.shape, v.device, given.q_map.shape[2]
    keep = keep and F == KEPT
    o = torch.empty(v.shape, device=device, dtype=v.dtype)
    inverse, most = (torch.empty(B, S, H, device=device, dtype=torch.float32) for _ in range(2))
    kept = [torch.empty(B, S, H, 2 * F, device=device, dtype=v.dtype) if keep else None for _ in range(2)]
    made = Made(o, inverse, most, *kept)
    if not o.numel():
        return made, None
    scale, how = exponents(D), segments(B * H, S, arch.num_sms(device))
    if how is None:
        call = _launcher(given, keep=keep), (q, (k, v, o, *others, inverse, most, None, None, *kept), scale, 1, 1, 1)
        call[0](*call[1])
        return made, call
    count, each, finer = how
    blocks = (count - 1) * finer
    states = torch.empty(blocks, B, H, D // CHUNK, F, THREADS, device=device, dtype=torch.float32)
    sums = torch.empty(blocks, B, H, 2 * F, device=device, dtype=torch.float32)
    rest = k, v, o, *others, inverse, most, states, sums
    _launcher(given, "states")(q, (*rest, None, None), scale, blocks, each // finer, finer)
    _launcher(given, "outputs", keep)(q, (*rest, *kept), scale, count, each, finer)
    return made, None


def exponents(D: int) -> float:
    """What scores are multiplied by to be exponents of 2."""
    return D**-0.5 / math.log(2)


def features(given: Given) -> tuple:
    """(q_features, k_features) of `Made`, by a forward."""
    return start(given, True)[0][3:]


def _launcher(given, part=None, keep=False):
    F = given.q_map.shape[2]
    return _function(given.q, ("forward", F, part, keep),
                     lambda dtype, D: recipe(HedgehogSpec(dtype, D, F, part, keep)))


def _function(x, what, recipe_of):
    """The function of the kernel that `what` and x (.., D) decide. recipe_of: its recipe, of x's dtype and D."""
    key = *what, x.get_device(), x.dtype, x.shape[-1]
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(recipe_of(dtypes.name_of(x.dtype), x.shape[-1]))
    return _launchers[key]


def window_recipe(spec: WindowSpec) -> Recipe:
    """The kernel's of the window's part of the gradients."""
    return Recipe("tkq.linear_attention.hedgehog.window_kernel:WindowGradients", (spec, window_plan(spec)))


class Window(NamedTuple):
    """What the launch for the window takes, as `window_kernel.Operands` has it, but for gradients. inverse: of each
    token 1 over its denominator. delta: o do. less: what features' gradients without weights have of features, or None:
    then the factors' gradients are of no use."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    inverse: Tensor
    delta: Tensor
    less: Tensor | None
    linear: Tensor
    window: Tensor


def window_gradients(given: Window, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """As `reference.hedgehog.in_window`: dq, dk and dv are added to, the factors' gradients of each token come out,
    (2, B, S, H) fp32, linear's and window's; tokens are neighbours in memory, as those that sum them up read them."""
    q, k, v, do, inverse, delta, less, linear, window = given
    B, S, H = inverse.shape
    found = torch.empty(2, B, H, S, device=q.device, dtype=torch.float32)
    if q.numel():
        launch = _function(q, ("window",), lambda dtype, D: window_recipe(WindowSpec(dtype, D)))
        numbers = inverse, delta, delta if less is None else less
        launch(q, (k, v, do, dq, dk, dv, *numbers, linear.contiguous(), window.contiguous(), found), q.shape[3]**-0.5)
    return found.transpose(2, 3)


def queries_recipe(spec: GradientSpec) -> Recipe:
    """The kernel's of the gradients of queries."""
    return Recipe("tkq.linear_attention.hedgehog.query_kernel:QueryGradients", (spec, query_plan(spec)))


class OfQueries(NamedTuple):
    """What the launch for queries takes, as `query_tiles.Operands` has it, but for what it gives."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    o: Tensor
    q_map: Tensor
    q_features: Tensor
    k_features: Tensor
    inverse: Tensor
    most: Tensor
    largest: Tensor
    linear: Tensor
    window: Tensor


class Queries(NamedTuple):
    """What it gives: dq; of each token (B, S, H) fp32 delta = o do, and share, what its largest scores get less; the
    gradients of each token of linear and of window, (2, B, S, H) fp32, neighbours in memory as those that sum them up
    read them; dq_map (B, H, D, F) fp32, sequences' numbers of a row neighbours, likewise."""

    dq: Tensor
    delta: Tensor
    share: Tensor
    of_factors: Tensor
    dq_map: Tensor


def query_gradients(given: OfQueries) -> Queries:
    """Of queries, whose map has 64 columns."""
    q, *others = given
    B, S, H, D = q.shape
    dq = torch.empty_like(q, memory_format=CONTIGUOUS)
    delta, share = torch.empty(2, B, S, H, device=q.device, dtype=torch.float32)
    found, dmap = torch.empty(2, B, H, S, device=q.device, dtype=torch.float32), _map_gradients(q, given.q_map)
    launch = _function(q, ("queries",), lambda dtype, D: queries_recipe(GradientSpec(dtype, D)))
    launch(q, (*others, dq, delta, share, found, dmap), exponents(D))
    return Queries(dq, delta, share, found.transpose(2, 3), dmap)


def keys_recipe(spec: GradientSpec) -> Recipe:
    """The kernel's of the gradients of keys and values."""
    return Recipe("tkq.linear_attention.hedgehog.key_kernel:KeyGradients", (spec, key_plan(spec)))


class OfKeys(NamedTuple):
    """What the launch for keys and values takes, as `key_tiles.Operands` has it, but for what it gives."""

    k: Tensor
    q: Tensor
    v: Tensor
    do: Tensor
    k_map: Tensor
    k_features: Tensor
    q_features: Tensor
    inverse: Tensor
    most: Tensor
    delta: Tensor
    share: Tensor
    largest: Tensor
    linear: Tensor
    window: Tensor


def key_gradients(given: OfKeys) -> tuple:
    """(dk, dv, dk_map as `Queries` has dq_map); the map has 64 columns."""
    k, *others = given
    dk, dv = (torch.empty_like(x, memory_format=CONTIGUOUS) for x in (k, given.v))
    dmap = _map_gradients(k, given.k_map)
    launch = _function(k, ("keys",), lambda dtype, D: keys_recipe(GradientSpec(dtype, D)))
    launch(k, (*others, dk, dv, dmap), exponents(k.shape[3]))
    return dk, dv, dmap


def _map_gradients(x, of):
    """Room for a map's gradients of all sequences, (B, H, D, F)."""
    H, D, F = of.shape
    return torch.empty(H, D, len(x), F, device=x.device, dtype=torch.float32).permute(2, 0, 1, 3)

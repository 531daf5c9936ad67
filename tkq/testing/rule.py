"""The rule by which numerics are judged: at most twice PyTorch's own error at the same precision, and no bias.

    from tkq.testing import assert_2x
    assert_2x(my_kernel(x), truth=f(x.double()), same_precision=f(x))

An absolute bound says little: how far a bf16 result may be from the truth depends on the operation, its sizes and its
data. So the same computation in PyTorch, at the same precision and on the same inputs, says what is to be expected.
Source: the tests of FlashAttention (Dao et al., 2022); the test for a bias is ours.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tkq.runtime import check


@dataclass(frozen=True)
class Errors:
    """What ``errors`` found, over the places where the truth is finite.

    worst: the largest error.
    allowed: what it may be.
    theirs: PyTorch's largest.
    bias: the mean signed error.
    bias_allowed: what its size may be.
    count: of the places.
    """

    worst: float
    allowed: float
    theirs: float
    bias: float
    bias_allowed: float
    count: int


def assert_2x(ours: Tensor, truth: Tensor, same_precision: Tensor, ulps: float = 1.0, what: str = "",
              bias_ulps: float = 0.0, cancelled: float = 0.0) -> None:
    """``ours`` is as good as PyTorch's result, or AssertionError says in which way it is not.

    Three things are asked for:

    - ``ours`` is NaN exactly where ``truth`` is, and has its infinities;
    - max abs(ours - truth) <= 2 max abs(same_precision - truth) + ``ulps`` units in the last place of the largest
      value;
    - the mean of ours - truth is small beside PyTorch's mean error: errors of rounding cancel, those of a wrong
      constant or of a truncation do not.

    Args:
        ours: the result to judge, of any floating dtype. Where it comes from a kernel, fill the output with NaN before
            the launch: what the kernel did not write then shows.
        truth: the result in float64, or in float32 where that is beyond doubt; of ours' shape.
        same_precision: PyTorch's result, from inputs and through intermediate results of the same dtypes as ours; of
            ours' shape.
        ulps: units in the last place of ours' dtype at the largest finite value, allowed beside twice PyTorch's error:
            PyTorch may happen to be exact.
        what: comes first in the message.
        bias_ulps: units in the last place by which all results may be off in one direction, where that is known.
        cancelled: where the result is what is left of two float32 numbers, the larger one: an ulp of it is allowed too.

    Raises:
        AssertionError: the rule does not hold, or the shapes differ: broadcast, they would be compared with others.
        TypeError, ValueError: what is no tensor; several devices, or meta, where there are no values to compare.
    """
    _check(ours=ours, truth=truth, same_precision=same_precision)
    _require(ours.shape == truth.shape, f"{what}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}")
    _require(same_precision.shape == truth.shape, f"{what}: shape of same_precision {tuple(same_precision.shape)}, "
             f"expected {tuple(truth.shape)}")
    wrong_where = not_finite(ours, truth)
    _require(not wrong_where, f"{what}: {wrong_where}")
    found = errors(ours, truth, same_precision, ulps, bias_ulps, cancelled)
    if found is None:
        return
    _require(found.worst <= found.allowed,
             f"{what}: error {found.worst:.3e}, allowed {found.allowed:.3e} (PyTorch {found.theirs:.3e})")
    _require(abs(found.bias) <= found.bias_allowed,
             f"{what}: mean signed error {found.bias:.3e}, allowed {found.bias_allowed:.3e}")


def _check(**tensors) -> None:
    check.same_device(**tensors)
    for name, x in tensors.items():
        check.tensor(name, x)  # of None nothing has been said
        if x.is_meta:
            raise ValueError(f"{name}: is on meta, where it has no values; allowed are the CPU and GPUs")


def _require(holds: bool, said: str) -> None:
    """Where Python is asked to leave assertions out (-O), too."""
    if not holds:
        raise AssertionError(said)


def not_finite(ours: Tensor, truth: Tensor) -> str:
    """In words, where NaNs and infinities differ; "" where they do not."""
    nans, infinite = torch.isnan(truth), torch.isinf(truth)
    mine = torch.isnan(ours)
    if not torch.equal(mine, nans):
        return f"NaN in {int(mine.sum())} places, expected {int(nans.sum())}"
    return "" if torch.equal(ours.double()[infinite], truth.double()[infinite]) else "infinities differ"


def errors(ours: Tensor, truth: Tensor, same_precision: Tensor, ulps: float = 1.0, bias_ulps: float = 0.0,
           cancelled: float = 0.0) -> Errors | None:
    """The numbers that ``assert_2x`` compares, for a report or a rule of your own; None where nothing is finite.

    Arguments as ``assert_2x``; all three tensors are of one shape, which is not looked at here."""
    finite = torch.isfinite(truth)
    if not finite.any():
        return None
    wanted = truth.double()
    error = (ours.double() - wanted)[finite]
    peer = (same_precision.double() - wanted)[finite].nan_to_num(0.0, 0.0, 0.0)
    ulp = torch.finfo(ours.dtype).eps * wanted[finite].abs().max().item()
    rest = torch.finfo(torch.float32).eps * cancelled
    theirs = peer.abs().max().item()
    noise = peer.abs().mean().item() + (ulp + rest) * 0.25
    return Errors(worst=error.abs().max().item(), allowed=2 * theirs + ulps * ulp + rest, theirs=theirs,
                  bias=error.mean().item(),
                  bias_allowed=noise * (0.1 + 5 / error.numel() ** 0.5) + bias_ulps * ulp, count=error.numel())

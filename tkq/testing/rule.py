"""The rule by which numerics are judged: at most twice PyTorch's own error at the same precision, and no bias.

    from tkq.testing import assert_2x
    assert_2x(my_kernel(x), truth=f(x.double()), same_precision=f(x))

An absolute bound says little: how far a bf16 result may be from the truth depends on the operation, its sizes and its
data. So the same computation in PyTorch, at the same precision and on the same inputs, says what is to be expected.

It is asked of each block of rows by itself. Under a causal mask the gradients of the first keys, which all queries see,
are far larger than those of the last ones, whose errors might be as large as they are and yet be within what is allowed
for the first: a late row's error is judged against late rows.
Source: the tests of FlashAttention (Dao et al., 2022); the blocks and the test for a bias are ours.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tkq.runtime.call import check

BLOCK = 64  # rows, as a warpgroup's tile has


@dataclass(frozen=True)
class Errors:
    """What ``errors`` found, over the places where the truth is finite.

    worst, allowed, theirs: of the block of rows that comes nearest to what is allowed, or goes farthest beyond it.

    worst: the largest error.
    allowed: what it may be.
    theirs: PyTorch's largest.
    bias: the mean signed error of the whole.
    bias_allowed: what its size may be.
    count: of the places of the whole.
    where: the block, as an index in words: ``[0, 4032:4097, 3]``; "" where one block is all there is.
    """

    worst: float
    allowed: float
    theirs: float
    bias: float
    bias_allowed: float
    count: int
    where: str = ""


def assert_2x(ours: Tensor, truth: Tensor, same_precision: Tensor, ulps: float = 1.0, what: str = "",
              bias_ulps: float = 0.0, cancelled: float = 0.0, block: int | None = BLOCK) -> None:
    """``ours`` is as good as PyTorch's result, or AssertionError says in which way it is not.

    Three things are asked for:

    - ``ours`` is NaN exactly where ``truth`` is, and has its infinities;
    - in each block of rows, max abs(ours - truth) <= 2 max abs(same_precision - truth) + ``ulps`` units in the last
      place of the block's largest value;
    - the mean of ours - truth is small beside PyTorch's mean error: errors of rounding cancel, those of a wrong
      constant or of a truncation do not.

    Rows are counted along the longest dimension but the last, apart for each index of the others: in (rows, columns)
    blocks of rows, in (batch, sequence, heads, head_dim) blocks of the sequence for each head of each batch. A vector,
    such as the gradient of a norm's weight, is cut into blocks of its elements.

    Args:
        ours: the result to judge, of any floating dtype. Where it comes from a kernel, fill the output with NaN before
            the launch: what the kernel did not write then shows.
        truth: the result in float64, or in float32 where that is beyond doubt; of ours' shape.
        same_precision: PyTorch's result, from inputs and through intermediate results of the same dtypes as ours; of
            ours' shape.
        ulps: units in the last place of ours' dtype at the block's largest finite value, allowed beside twice PyTorch's
            error: PyTorch may happen to be exact.
        what: comes first in the message.
        bias_ulps: units in the last place of the largest value by which all results may be off in one direction, where
            that is known.
        cancelled: where the result is what is left of two float32 numbers, the larger one: an ulp of it is allowed too.
        block: rows of a block, 1 or more; a rest of fewer rows is shared out among the blocks. None: all is one block.

    Raises:
        AssertionError: the rule does not hold, or the shapes differ: broadcast, they would be compared with others.
        TypeError, ValueError: what is no tensor of real floating numbers; several devices, or meta, where there are no
            values to compare; ulps, bias_ulps or cancelled that are no finite numbers from 0 on; a block of no rows.
    """
    _check(ours=ours, truth=truth, same_precision=same_precision)
    _require(ours.shape == truth.shape, f"{what}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}")
    _require(same_precision.shape == truth.shape, f"{what}: shape of same_precision {tuple(same_precision.shape)}, "
             f"expected {tuple(truth.shape)}")
    wrong_where = not_finite(ours, truth)
    _require(not wrong_where, f"{what}: {wrong_where}")
    found = errors(ours, truth, same_precision, ulps, bias_ulps, cancelled, block)
    if found is None:
        return
    _require(found.worst <= found.allowed, f"{what}{found.where and ' ' + found.where}: error {found.worst:.3e}, "
             f"allowed {found.allowed:.3e} (PyTorch {found.theirs:.3e})")
    _require(abs(found.bias) <= found.bias_allowed,
             f"{what}: mean signed error {found.bias:.3e}, allowed {found.bias_allowed:.3e}")


def _check(**tensors) -> None:
    check.same_device(**tensors)
    for name, x in tensors.items():
        check.tensor(name, x)  # of None nothing has been said
        if x.is_meta:
            raise ValueError(f"{name}: is on meta, where it has no values; allowed are the CPU and GPUs")
        if not x.is_floating_point():
            raise TypeError(f"{name}: dtype is {x.dtype}, allowed are floating ones")


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
           cancelled: float = 0.0, block: int | None = BLOCK) -> Errors | None:
    """The numbers that ``assert_2x`` compares, for a report or a rule of your own; None where nothing is finite.

    Arguments as ``assert_2x``; all three tensors are of one shape, which is not looked at here."""
    for name, x in (("ulps", ulps), ("bias_ulps", bias_ulps), ("cancelled", cancelled)):
        try:
            holds = not isinstance(x, bool) and 0 <= float(x) < float("inf")
        except (TypeError, ValueError):
            raise TypeError(f"{name}: got {x!r}, allowed are numbers") from None
        if not holds:
            raise ValueError(f"{name}: got {x!r}, allowed are finite numbers from 0 on")
    if block is not None:
        check.size("block", block)
    finite = torch.isfinite(truth)
    if not finite.any():
        return None
    wanted = truth.double().where(finite, 0)
    error = (ours.double() - wanted).where(finite, 0)
    peer = (same_precision.double() - wanted).where(finite, 0).nan_to_num(0.0, 0.0, 0.0)
    eps, rest = torch.finfo(ours.dtype).eps, torch.finfo(torch.float32).eps * cancelled
    blocks = Blocks.of(wanted.shape, block)
    worst, theirs = blocks.largest(error), blocks.largest(peer)
    allowed = 2 * theirs + ulps * eps * blocks.largest(wanted) + rest
    at = blocks.nearest(worst, allowed)
    ulp, count = eps * wanted.abs().max().item(), int(finite.sum())
    noise = peer.abs().sum().item() / count + (ulp + rest) * 0.25
    return Errors(worst=worst[at].item(), allowed=allowed[at].item(), theirs=theirs[at].item(),
                  bias=error.sum().item() / count,
                  bias_allowed=noise * (0.1 + 5 / count ** 0.5) + bias_ulps * ulp, count=count, where=blocks.named(at))


@dataclass(frozen=True)
class Blocks:
    """Which rows of a tensor are judged together.

    shape: the tensor's. axis: along which rows are counted, of -1 where each element is a row. count: of blocks along
    it."""

    shape: tuple
    axis: int
    count: int

    @staticmethod
    def of(shape, block: int | None) -> Blocks:
        """Those of a tensor: along its longest dimension but the last, the first of equal ones."""
        shape = tuple(shape)
        leading = shape[:-1] or shape
        axis = leading.index(max(leading)) if leading else 0
        count = 1 if block is None or not shape else max(1, shape[axis] // block)
        return Blocks(shape, axis, count)

    @property
    def whole(self) -> bool:
        """Is all of the tensor one block?"""
        return self.count == 1 and (len(self.shape) < 2 or all(
            n == 1 for i, n in enumerate(self.shape[:-1]) if i != self.axis))

    def largest(self, x: Tensor) -> Tensor:
        """Of the absolute values in each block: (others, blocks)."""
        if not self.shape:
            return x.abs().view(1, 1)
        rows = self.shape[self.axis]
        x = x.abs()
        x = (x if len(self.shape) == 1 else x.amax(-1)).movedim(self.axis, -1).reshape(-1, rows)
        of_row = (torch.arange(rows, device=x.device) * self.count // rows).expand_as(x)
        return x.new_zeros(len(x), self.count).scatter_reduce(1, of_row, x, "amax")

    def nearest(self, worst: Tensor, allowed: Tensor) -> tuple[int, int]:
        """The block whose error is the largest part of what is allowed."""
        ratio = (worst / allowed).nan_to_num(0.0, torch.inf)  # 0 of 0 is exact
        return divmod(int(ratio.argmax()), self.count)

    def named(self, at: tuple[int, int]) -> str:
        """The block as an index in words."""
        if self.whole:
            return ""
        other, number = at
        rows = self.shape[self.axis]
        ends = [-(-i * rows // self.count) for i in (number, number + 1)]
        words, leading = [], self.shape[:-1] or self.shape
        for i in reversed(range(len(leading))):
            if i == self.axis:
                words.append(f"{ends[0]}:{ends[1]}")
            else:
                other, index = divmod(other, leading[i])
                words.append(str(index))
        return f"[{', '.join(reversed(words))}]"

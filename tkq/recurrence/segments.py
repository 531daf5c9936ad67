"""Scans of few columns and many tokens: the tokens in segments, which run side by side."""
from __future__ import annotations

from torch import Tensor

from tkq.recurrence.plan import segments_of


class Segments:
    """Segment i of a tensor's tokens is a sequence of its own, in a view: (B, T, C) as (B n, T / n, C). Three launches:
    what each segment makes of a state of 0, with the product of its factors; a scan of these n, which has the states
    that come into segments; the scan of all segments from these states. Always in the same order: the same bits in
    every run, but not those of a scan of one segment."""

    def __init__(self, a: Tensor, count: int):
        (B, T, C), self.count = a.shape, count
        self.size = B * count, T // count, C

    def view(self, x: Tensor | None) -> Tensor | None:
        """None of None."""
        if x is None:
            return None
        return x.as_strided(self.size, (self.size[1] * x.stride(1), *x.stride()[1:]), x.storage_offset())

    def ends(self, x: Tensor) -> Tensor:
        """Of segments' states (B n C,) a tensor (B, n, C), as a scan takes it."""
        return x.view(-1, self.count, self.size[2])

    def incoming(self, state: Tensor | None, behind: Tensor, reverse: bool) -> Tensor:
        """What comes into each segment, (B n, C): of the first `state`, of the others what is behind those before."""
        B, n, C = behind.shape
        found = behind.new_empty(B, n, C)
        first = found[:, n - 1 if reverse else 0]
        first.zero_() if state is None else first.copy_(state)
        if reverse:
            found[:, :-1] = behind[:, 1:]
        else:
            found[:, 1:] = behind[:, :-1]
        return found.view(-1, C)


def segments(spec, num_sms: int, *tensors: Tensor | None) -> Segments | None:
    """None where one segment is as fast, or where the tensors' sequences do not follow each other."""
    given = [x for x in tensors if x is not None]
    B, T, C = given[0].shape
    count = segments_of(spec, B * C, T, num_sms)
    together = all(x.shape[0] == 1 or x.stride(0) == T * x.stride(1) for x in given)
    return Segments(given[0], count) if count > 1 and together else None

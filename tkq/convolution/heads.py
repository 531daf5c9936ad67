"""The l2 norm of heads behind the activation: what the kernels along channels do with a token's channels."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from tkq.convolution.spec import EPS
from tkq.utils import rsqrt


class Normed(NamedTuple):
    """channel: a thread's first. channels: those below this one are normed. lanes: neighbours that share a head."""

    channel: Any
    channels: Any
    lanes: int

    def total(self, x):
        """The sum over a head's lanes, the same bits in all of them."""
        for shift in range(self.lanes.bit_length() - 1):
            x = x + cute.arch.shuffle_sync_bfly(x, offset=1 << shift)
        return x

    def sums(self, y, others=()):
        """Of the squares of a head, or of its products with others."""
        found = Float32(0.0)
        for a, b in zip(y, others or y, strict=True):
            found = cute.math.fma(a, b, found)
        return self.total(found)

    def forward(self, y):
        """y / sqrt(its head's sum of squares + EPS)."""
        scale = cutlass.select_(self.channel < self.channels, rsqrt(self.sums(y) + EPS), Float32(1.0))
        return [x * scale for x in y]

    def backward(self, y, dy):
        """y's gradient, of that of what `forward` makes of it."""
        here, scale = self.channel < self.channels, rsqrt(self.sums(y) + EPS)
        along = scale * scale * self.sums(y, dy)
        return [cutlass.select_(here, scale * (d - along * x), d) for d, x in zip(dy, y, strict=True)]

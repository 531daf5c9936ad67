"""What was asked for, as far as a kernel of gates for each column depends on it: the compile key."""
from __future__ import annotations

from dataclasses import dataclass

from tkq.linear_attention.spec import COLUMN_DIMS, DTYPES, VALUE_DIMS

STATES, NUMBERS = (None, "fp32", "bf16"), (None, "int32", "int64")


@dataclass(frozen=True)
class ChannelSpec:
    """A pass of linear attention whose gates are of each column of k.

    dtype: of q, k and v. head_dim, value_dim: K and V. initial, final: dtypes of the states that come in and go out, or
    None. reverse: from the last token to the first, each of which sees those behind it.
    delta: beta's dtype, with the delta rule. Reversed it is the gradient of the corrected values that comes out, and q
        in the place of which are the keys (see `delta.gradients`). updates: with delta, not reversed: the corrected
        values come out.
    of_values: gates are of the columns of v, which are K, and not of those of q and k, which are V; o is fp32.
    dot: also o times another tensor, x, element by element and from parts of o that are exact: each is multiplied by
        x with its decays, rounded as where x is v and v is x (see `gradients`); with of_values.
    narrow: o is of dtype; with of_values. sums: in the place of dots, the sum over each token and those behind it of
        less - dots, less another tensor; with dot, reversed. end: and what all of a sequence get besides; with sums.
    pairs: two passes that have the same state, or whose states add up (see `value_pairs`); with dot. rest:
        to o another tensor is added; with pairs, reversed.
    packed, pool: as `LinearSpec` has them; the latter without of_values.
    l2norm: q and k are divided by their lengths; with delta, bf16, not reversed, without updates. bounded: gates are
        made of what a projection gives, and none is below `bounded.config.LOWEST` (see `bounded.kernel`); with l2norm,
        K 128, V above 64, without a pool. reach: sequences are cut in segments, and which chunks reach these is given
        (see `overlap.segments.OverlappingSegments`); with bounded, without packed."""

    dtype: str
    head_dim: int
    value_dim: int
    initial: str | None = None
    final: str | None = None
    reverse: bool = False
    delta: str | None = None
    updates: bool = False
    of_values: bool = False
    dot: bool = False
    narrow: bool = False
    sums: bool = False
    end: bool = False
    pairs: bool = False
    rest: bool = False
    packed: str | None = None
    pool: str | None = None
    l2norm: bool = False
    bounded: bool = False
    reach: bool = False

    def __post_init__(self):
        rows = COLUMN_DIMS if self.of_values else VALUE_DIMS
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("head_dim", self.head_dim, COLUMN_DIMS),
                                   ("value_dim", self.value_dim, rows), ("initial", self.initial, STATES),
                                   ("final", self.final, STATES), ("delta", self.delta, STATES),
                                   ("packed", self.packed, NUMBERS), ("pool", self.pool, NUMBERS)):
            if got not in allowed:
                raise ValueError(f"ChannelSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        self._check_ways()
        self._check_values()

    def _check_ways(self):
        if self.updates and (self.reverse or not self.delta):
            raise ValueError("ChannelSpec: updates, allowed is with delta and not reversed")
        if self.of_values and self.delta:
            raise ValueError("ChannelSpec: of_values and delta, allowed is one of them")
        if self.l2norm and (not self.delta or self.reverse or self.updates or self.dtype != "bf16"):
            raise ValueError("ChannelSpec: l2norm, allowed is with delta and bf16, not reversed, without updates")
        if self.bounded and (not self.l2norm or self.pool or self.head_dim != 128 or self.value_dim <= 64):
            raise ValueError("ChannelSpec: bounded, allowed is with l2norm, head_dim 128 and value_dim above 64, "
                             "without pool")
        if self.reach and (not self.bounded or self.packed):
            raise ValueError("ChannelSpec: reach, allowed is with bounded, without packed")
        if self.pool and (self.reverse or self.of_values or self.initial is None or self.initial != self.final):
            raise ValueError("ChannelSpec: pool, allowed is not reversed, without of_values, with initial and final of "
                             "one dtype")

    def _check_values(self):
        for name in ("dot", "narrow"):
            if getattr(self, name) and not self.of_values:
                raise ValueError(f"ChannelSpec: {name}, allowed is with of_values")
        if self.sums and not (self.dot and self.reverse):
            raise ValueError("ChannelSpec: sums, allowed is with dot, reversed")
        if self.end and not self.sums:
            raise ValueError("ChannelSpec: end, allowed is with sums")
        if self.pairs and (not self.dot or (self.reverse and self.final)):
            raise ValueError("ChannelSpec: pairs, allowed is with dot, and reversed without final")
        if self.rest and not (self.pairs and self.reverse):
            raise ValueError("ChannelSpec: rest, allowed is with pairs, reversed")


@dataclass(frozen=True)
class SumsSpec:
    """Sums over each token and those behind it (`sums.ColumnSums`). what: "sums"; "totals", those of chunks of 64
    tokens alone. end: is there what is added to all? packed: dtype of cu_seqlens, or None. pool: none of the states
    that `engine.packed` finds for the engine."""

    what: str = "sums"
    end: bool = False
    packed: str | None = None
    pool = None

    def __post_init__(self):
        if self.packed not in (None, "int32", "int64"):
            raise ValueError(f"SumsSpec: packed is {self.packed!r}, allowed are None, int32, int64")
        if self.what not in ("sums", "totals"):
            raise ValueError(f"SumsSpec: what is {self.what!r}, allowed are sums, totals")
        if self.what == "totals" and self.end:
            raise ValueError("SumsSpec: end, allowed is without totals")


@dataclass(frozen=True)
class BoundedReachSpec:
    """Which chunks reach segments (`bounded.reach.BoundedReach`). beta: its dtype."""

    beta: str

    def __post_init__(self):
        if self.beta not in ("fp32", "bf16"):
            raise ValueError(f"BoundedReachSpec: beta is {self.beta!r}, allowed are fp32, bf16")

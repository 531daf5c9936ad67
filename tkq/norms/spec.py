"""What a normalisation was asked for. Frozen, of plain values: its repr is the compile key."""
from dataclasses import dataclass
from typing import Optional

from .. import granularity
from ..dtypes import LARGEST, WIDTH
from ..reduction import geometry

KINDS = ("rmsnorm", "layernorm")
OUT_WIDTH = {**WIDTH, "e4m3": 8, "e5m2": 8}
SCALES = ("row", "1x128")
HEADS = ("rows", "weight")
GROUP = granularity.GROUP  # columns that share a scale of "1x128"
MAX_N = 1 << 18


@dataclass(frozen=True)
class NormSpec:
    """kind: "rmsnorm" or "layernorm". N: columns. x: element type of the input. weight, bias: theirs, or None.

    vector: elements of one access, a power of two that divides N; the widest stream's takes 16 bytes at most. Every row
    starts at a multiple of that many elements, and weight and bias at a multiple of that many of theirs or of 16 bytes.

    Options, all off by default:
    residual: element type of what is added to x before the norm. total: type in which that sum is written (x itself
        where there is no residual). out: type of the result, where it is not x's.
    scale: with out "e4m3" or "e5m2": one scale for each "row", or "1x128", for each 128 columns of a row.
    offset: a number is added to the weight. stats: rstd is written, and layernorm's mean, for a backward pass: of the
        sum as it is written, where that is what the backward reads (see `rounded`).
    heads: rows lie two strides apart, as (R, H, N): "rows", or "weight" where each head has a weight of its own too.
    """

    kind: str
    N: int
    x: str
    weight: Optional[str] = None
    bias: Optional[str] = None
    vector: int = 1
    residual: Optional[str] = None
    total: Optional[str] = None
    out: Optional[str] = None
    scale: Optional[str] = None
    offset: bool = False
    stats: bool = False
    heads: Optional[str] = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind: got {self.kind!r}, allowed are {', '.join(KINDS)}")
        for name in ("x", "weight", "bias", "residual", "total", "out"):
            dtype = getattr(self, name)
            allowed = OUT_WIDTH if name == "out" and self.scale else WIDTH
            if dtype not in allowed and (name == "x" or dtype is not None):
                raise TypeError(f"{name}: got dtype {dtype}, allowed are {', '.join(allowed)}")
        if not 1 <= self.N <= MAX_N:
            raise NotImplementedError(f"x: got N = {self.N} columns, allowed are 1 to {MAX_N}")
        if self.vector < 1 or self.widest % self.vector:
            allowed = f"allowed for N = {self.N} in {self.x} are the divisors of {self.widest}"
            raise ValueError(f"vector: got {self.vector}, {allowed}")
        self._check_options()

    def _check_options(self):
        if self.scale is not None and (self.scale not in SCALES or self.out not in LARGEST):
            raise ValueError(f"scale: got {self.scale!r} with out {self.out!r}, allowed are "
                             f"{', '.join(SCALES)} with out {' or '.join(map(repr, LARGEST))}")
        if self.heads is not None and self.heads not in HEADS:
            raise ValueError(f"heads: got {self.heads!r}, allowed are {', '.join(HEADS)}")
        if self.weight is None and (self.offset or self.heads == "weight"):
            raise ValueError("offset, heads: there is no weight that they could be for")

    @property
    def plain(self) -> bool:
        """Without any of the options."""
        return self == NormSpec(self.kind, self.N, self.x, self.weight, self.bias, self.vector)

    @property
    def result(self) -> str:
        """Element type of the result."""
        return self.out or self.x

    @property
    def width(self) -> int:
        """Bits of an element of x."""
        return WIDTH[self.x]

    @property
    def loaded(self) -> int:
        """Bits that come in for an element of a row: x and the residual."""
        return self.width + WIDTH.get(self.residual, 0)

    @property
    def rounded(self) -> bool:
        """Does a backward pass read the sum with a residual from fewer bits than it was computed with? Then the
        statistics written are of the rounded sum, and the result's of the sum itself: with the other's mean, a row of
        one number would not be 0 when it is centred. A result in float8 has no backward pass."""
        return self.stats and self.scale is None and self.residual is not None and WIDTH.get(self.total, 32) < 32

    @property
    def exchanges(self) -> int:
        """Numbers, or pairs of them, that a row's warps exchange: its statistics (layernorm's: one pair for the result
        and, at the same time, one for the backward pass), and later its scale."""
        return 2 if self.scale == "row" or (self.rounded and self.kind == "layernorm") else 1

    @property
    def access(self) -> int:
        """Bits of the widest stream's access: 128 where nothing stands against it."""
        return self.vector * self._widest_element

    @property
    def widest(self) -> int:
        """Elements of the widest access that N allows."""
        return geometry.vector(self.N, self._widest_element)

    @property
    def _widest_element(self) -> int:
        return max(OUT_WIDTH[t] for t in (self.x, self.residual, self.total, self.out) if t)

"""What a causal convolution was asked for: the compile key."""
from __future__ import annotations

from dataclasses import dataclass

BITS = {"bf16": 16, "fp16": 16, "fp32": 32}
WIDTHS = range(2, 9)
LAYOUTS = "channels", "time"
GRADIENTS = None, "x", "weights", "both"
HEADS = 0, 64, 128
EPS = 1e-6  # added to a head's sum of squares, as fla and transformers have it
INDEX = None, "int32", "int64"
MOST_COLUMNS = 8  # of a pool's row, that a step has in registers


@dataclass(frozen=True)
class ConvSpec:
    """dtype: of x and y. weight: of the weight. width: taps. bias: its dtype, None without. silu: behind it.

    vector: neighbours in one access, along channels or along time.
    layout: which of the two is contiguous in x, y and their gradients.
    state: dtype of the initial state, None without. packed: dtype of cu_seqlens, None without. Both are of the layout
        along channels alone.
    numbers: cu_seqlens' place has numbers of tokens, whose runs are the sequences.
    head: channels of a head, of which the first ones have an l2 norm behind the activation, or 0. Along channels.
    gradients: None for the forward; of a backward, what it makes: dx ("x"), sums for dweight and dbias ("weights").
    """

    dtype: str
    weight: str
    width: int
    bias: str | None = None
    silu: bool = False
    vector: int = 1
    layout: str = "channels"
    state: str | None = None
    packed: str | None = None
    gradients: str | None = None
    numbers: bool = False
    head: int = 0

    def __post_init__(self):
        kinds = tuple(BITS)
        for name, got, allowed in (
                ("dtype", self.dtype, kinds), ("weight", self.weight, kinds), ("width", self.width, tuple(WIDTHS)),
                ("bias", self.bias, (None, *kinds)), ("layout", self.layout, LAYOUTS),
                ("state", self.state, (None, *kinds)), ("packed", self.packed, INDEX),
                ("gradients", self.gradients, GRADIENTS), ("vector", self.vector, vectors(self.dtype)),
                ("head", self.head, HEADS)):
            if got not in allowed:
                raise ValueError(f"ConvSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        if self.layout == "time" and (self.state or self.packed):
            raise NotImplementedError("ConvSpec: layout is 'time', allowed with an initial state or cu_seqlens is "
                                      "'channels'")
        if self.head and (self.layout == "time" or self.head not in (16 * self.vector, 32 * self.vector)):
            raise ValueError(f"ConvSpec: head is {self.head}, vector {self.vector}, layout {self.layout!r}; allowed "
                             "are heads of 16 or 32 vectors along channels")
        if self.numbers and (self.state or not self.packed):
            raise ValueError("ConvSpec: numbers is True, allowed with a dtype of theirs, packed, and without a state")

    @property
    def backward(self) -> bool:
        return self.gradients is not None

    @property
    def of_x(self) -> bool:
        """Does a backward write dx?"""
        return self.gradients in ("x", "both")

    @property
    def of_weights(self) -> bool:
        """Does it write sums for dweight and dbias?"""
        return self.gradients in ("weights", "both")


@dataclass(frozen=True)
class SumsSpec:
    """dweight and dbias from the sums of parts. width: taps. weight, bias: dtypes of the results. groups: of many
    runs, the sums of groups of them, which are parts again."""

    width: int
    weight: str = "fp32"
    bias: str | None = None
    groups: bool = False


@dataclass(frozen=True)
class StepSpec:
    """A step with a pool of states. dtype: of x and y. weight, bias, state, indices: dtypes, None without. width: taps.
    silu: behind the convolution. columns: of a row of the pool, 0 where they are known at run time alone. several: x
    and y have a dimension of tokens."""

    dtype: str
    weight: str
    width: int
    bias: str | None = None
    silu: bool = False
    state: str = "bf16"
    indices: str | None = None
    columns: int = 0
    several: bool = False

    def __post_init__(self):
        kinds = tuple(BITS)
        for name, got, allowed in (
                ("dtype", self.dtype, kinds), ("weight", self.weight, kinds), ("width", self.width, tuple(WIDTHS)),
                ("bias", self.bias, (None, *kinds)), ("state", self.state, kinds), ("indices", self.indices, INDEX),
                ("columns", self.columns, (0, *range(self.width - 1, MOST_COLUMNS + 1)))):
            if got not in allowed:
                raise ValueError(f"StepSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")


def vectors(dtype: str) -> tuple[int, ...]:
    """Elements of one access, up to 16 bytes."""
    most = 128 // BITS.get(dtype, 256)
    return tuple(1 << i for i in range(most.bit_length()))

"""What a scan was asked for: the compile key."""
from __future__ import annotations

from dataclasses import dataclass

BITS = {"bf16": 16, "fp16": 16, "fp32": 32}
LAYOUTS = "channels", "time"
GRADIENTS = None, "a", "b", "both"


@dataclass(frozen=True)
class ScanSpec:
    """dtype: of a, b, h and their gradients. vector: neighbours in one access, along channels or along time. layout:
    which of the two is contiguous.

    state: dtype of the initial state, None without. final: a forward writes the final state, a backward has its
    gradient. gradients: None for the forward; of a backward, what it makes: da, db. of_state: a backward writes the
    initial state's gradient, too. reverse: along time, from the last token to the first (along channels the same
    kernel goes both ways). ends: of h, da and db nothing is written, but the final state or dstate, and the product of
    all factors: what a segment of the tokens makes of the state that comes into it.
    """

    dtype: str
    vector: int = 1
    layout: str = "channels"
    state: str | None = None
    final: bool = False
    gradients: str | None = None
    of_state: bool = False
    reverse: bool = False
    ends: bool = False

    def __post_init__(self):
        kinds = tuple(BITS)
        for name, got, allowed in (
                ("dtype", self.dtype, kinds), ("layout", self.layout, LAYOUTS), ("state", self.state, (None, *kinds)),
                ("gradients", self.gradients, GRADIENTS), ("vector", self.vector, vectors(self.dtype))):
            if got not in allowed:
                raise ValueError(f"ScanSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        if self.of_state and not self.backward:
            raise ValueError("ScanSpec: of_state is True, allowed is False where gradients is None")
        if self.reverse and self.layout == "channels":
            raise ValueError("ScanSpec: reverse is True, allowed is False where layout is 'channels'")

    @property
    def backward(self) -> bool:
        return self.gradients is not None

    @property
    def of_a(self) -> bool:
        """Does a backward write da?"""
        return self.gradients in ("a", "both") and not self.ends

    @property
    def of_b(self) -> bool:
        """Does it write db?"""
        return self.gradients in ("b", "both") and not self.ends

    @property
    def reads_h(self) -> bool:
        """Is there an h: which a forward writes, and a backward reads for da?"""
        return self.of_a if self.backward else not self.ends


def vectors(dtype: str) -> tuple[int, ...]:
    """Elements of one access, up to 16 bytes."""
    most = 128 // BITS.get(dtype, 256)
    return tuple(1 << i for i in range(most.bit_length()))

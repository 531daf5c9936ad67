"""What a normalisation was asked for. Frozen, of plain values: its repr is the compile key."""
from dataclasses import dataclass
from typing import Optional

from .. import reduction_plan as geometry

KINDS = ("rmsnorm", "layernorm")
WIDTH = {"bf16": 16, "fp16": 16, "fp32": 32}
MAX_N = 1 << 18


@dataclass(frozen=True)
class NormSpec:
    """kind: "rmsnorm" or "layernorm". N: columns. x: element type of input and output. weight, bias: theirs, or None.

    vector: elements of x in one access, a power of two that divides N. Every row starts at a multiple of that many
    elements, and weight and bias at a multiple of that many of theirs or of 16 bytes.
    """

    kind: str
    N: int
    x: str
    weight: Optional[str] = None
    bias: Optional[str] = None
    vector: int = 1

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind: got {self.kind!r}, allowed are {', '.join(KINDS)}")
        for name in ("x", "weight", "bias"):
            dtype = getattr(self, name)
            if dtype not in WIDTH and (name == "x" or dtype is not None):
                raise TypeError(f"{name}: got dtype {dtype}, allowed are {', '.join(WIDTH)}")
        if not 1 <= self.N <= MAX_N:
            raise NotImplementedError(f"x: got N = {self.N} columns, allowed are 1 to {MAX_N}")
        if self.vector < 1 or self.widest % self.vector:
            allowed = f"allowed for N = {self.N} in {self.x} are the divisors of {self.widest}"
            raise ValueError(f"vector: got {self.vector}, {allowed}")

    @property
    def width(self) -> int:
        """Bits of an element of x."""
        return WIDTH[self.x]

    @property
    def widest(self) -> int:
        """Elements of the widest access that N allows."""
        return geometry.vector(self.N, self.width)

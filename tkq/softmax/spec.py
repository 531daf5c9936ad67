"""What a softmax was asked for. Frozen, of plain values: its repr is the compile key."""
from dataclasses import dataclass

from .. import reduction_plan as geometry
from ..row_plan import ACCESS_BITS, WIDTH

MAX_N = 1 << 18


@dataclass(frozen=True)
class SoftmaxSpec:
    """N: columns. x: element type of all tensors. vector: elements of one access.

    log: log-softmax. backward: the gradient, from the output and its gradient.
    shifted: rows begin anywhere in 16 bytes, all tensors' alike; accesses are whole units of 16 bytes all the same.
    Where not, vector divides N and every row starts at a multiple of that many elements.
    """

    N: int
    x: str
    vector: int = 1
    log: bool = False
    backward: bool = False
    shifted: bool = False

    def __post_init__(self):
        if self.x not in WIDTH:
            raise TypeError(f"x: got dtype {self.x}, allowed are {', '.join(WIDTH)}")
        if not 1 <= self.N <= MAX_N:
            raise NotImplementedError(f"x: got N = {self.N} columns, allowed are 1 to {MAX_N}")
        whole = ACCESS_BITS // self.width
        widest = whole if self.shifted else geometry.vector(self.N, self.width)
        if self.vector < 1 or widest % self.vector or (self.shifted and self.vector != whole):
            raise ValueError(f"vector: got {self.vector} for N = {self.N} in {self.x}, shifted {self.shifted}; "
                             f"allowed are the divisors of {widest}")

    @property
    def width(self) -> int:
        """Bits of an element."""
        return WIDTH[self.x]

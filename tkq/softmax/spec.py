"""What a softmax was asked for. Frozen, of plain values: its repr is the compile key."""
from dataclasses import dataclass

from ..rows.one_pass.plan import WIDTH, check_vector

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
        check_vector(self)

    @property
    def width(self) -> int:
        """Bits of an element."""
        return WIDTH[self.x]

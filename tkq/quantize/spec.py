"""What a caller of the quantiser asked for: the part that decides which code is compiled. Pure Python."""
from dataclasses import dataclass

from .. import granularity
from ..dtypes import LARGEST

GRANULARITIES = granularity.NAMES
INPUTS = ("bf16", "fp16", "fp32")
EDGE = granularity.GROUP  # of a block of 128 x 128; columns of one of 1 x 128
VECTOR = 8  # elements that a thread takes at once, along rows and along columns


@dataclass(frozen=True)
class TileSpec:
    """Quantising tile by tile. By rows only with the transpose, or where rows are too long for the norms' kernel
    without a norm (`rows`), which reads x once.

    step: "amax", the largest |x| of all (of each row and column), or "quantise" (by it, where the granularity is
    "tensor" or "row"). wide, wide_t: are rows of x and of the result whole vectors of VECTOR elements, and rows of the
    transposed result? transpose: is there one?

    Raises:
        NotImplementedError: a value that no kernel takes, by name.
    """

    granularity: str
    x: str = "bf16"
    out: str = "e4m3"
    transpose: bool = False
    wide: bool = True
    wide_t: bool = True
    step: str = "quantise"

    def __post_init__(self):
        allowed = {"granularity": GRANULARITIES, "x": INPUTS, "out": tuple(LARGEST),
                   "step": ("amax", "quantise")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise NotImplementedError(f"quantize_fp8: {name} is {getattr(self, name)!r}, supported are "
                                          f"{', '.join(values)}")

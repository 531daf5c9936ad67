"""What a long convolution was asked for: the compile key."""
from __future__ import annotations

from dataclasses import dataclass

DTYPES = "bf16", "fp16"
COLS = 64  # of a tile: points that follow each other in memory
ROWS = 64  # of a tile
VECTORS = 1, 8
BLOCKS = 1, 2, 4, 8
SHARED_BLOCKS = 4  # up to as many, spectra of blocks before are in shared memory
TRANSFORM_ROWS = 2, 4, 8, 16, 32, 64
MOST_POINTS = COLS * ROWS
MOST_TOKENS = 1 << 22  # of a sequence, in several passes
COLUMN_SCALE = 0.125  # of a factor of 64 points: it keeps the length of a vector


def row_scale(rows: int) -> float:
    """Of a factor of that many points, a power of 2 near 1 / sqrt(rows): 1 and -1 are exact then."""
    return 2.0 ** -((rows.bit_length() - 1) // 2)


@dataclass(frozen=True)
class FftSpec:
    """dtype: of u and y. rows: of a transform, which has 64 times as many points, and a sequence as many tokens.
    causal: of frequencies k - 1/4. pre, post: gates before and after. conjugate: with the conjugate of the filter's
    spectrum: the gradient. vector: elements in one access. blocks: of 4096 tokens that a sequence has at most; of
    causal ones with 64 rows alone. split: operands of products are the sum of two fp16 numbers; of one block alone.
    keeps: leaves the sequences' spectra in memory, too (`whole.kept`), of whole ones alone.

    A tile of 64 x 64 numbers is 64 / rows sequences. Causal, each is the input of a complex transform. Otherwise two
    are the real and the imaginary part of one, in two tiles."""

    dtype: str
    rows: int
    causal: bool = True
    pre: bool = False
    post: bool = False
    conjugate: bool = False
    vector: int = 8
    blocks: int = 1
    split: bool = False
    keeps: bool = False

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("rows", self.rows, TRANSFORM_ROWS),
                                   ("vector", self.vector, VECTORS), ("blocks", self.blocks, BLOCKS)):
            if got not in allowed:
                raise ValueError(f"FftSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        if self.blocks > 1 and not (self.causal and self.rows == ROWS):
            raise ValueError(f"FftSpec: blocks is {self.blocks}, allowed is 1 but for causal ones of {ROWS} rows")
        if self.blocks > 1 and self.split:
            raise ValueError(f"FftSpec: blocks is {self.blocks}, allowed is 1 where operands are split")
        if self.keeps and not self.whole:
            raise ValueError(f"FftSpec: keeps is True, allowed is False but for {BLOCKS[-1]} blocks in bf16")

    @property
    def points(self) -> int:
        return self.rows * COLS

    @property
    def above(self) -> int:
        """Sequences are brought below 2 ** (above + 1). A transform of 4096 of them, times a filter's spectrum below
        2 (1 + i), is then below 2 ** 15 in its length, as its parts are, in whatever order they are added; a sum of
        blocks' below fp16's 65504."""
        return 6 if self.blocks <= 2 or self.whole else 7 - (self.blocks.bit_length() - 1)

    @property
    def kept(self) -> int:
        """Spectra of blocks before that are in shared memory or, of many blocks, in global memory: all but the first's
        and the last's."""
        return max(0, self.blocks - 2)

    @property
    def table_words(self) -> int:
        """32-bit words of a table of a spectrum, of kernels `in_registers`: a complex number of each of a tile's
        elements, fp16, or fp32."""
        return ROWS * COLS * (2 if self.exact else 1)

    @property
    def head_words(self) -> int:
        """Of a head: a table of each of the filter's parts, and four words, of which the first is what products are
        multiplied by, fp32."""
        return self.blocks * self.table_words + 4

    @property
    def summed_threads(self) -> int:
        """Threads of a warpgroup whose numbers the sums of a filter's gradient are: of transforms that a warp has, all
        warps' are added up."""
        return 32 if self.rows <= 16 else 128

    @property
    def summed_transforms(self) -> int:
        """Transforms that these have each a sum of."""
        return self.transforms * self.summed_threads // 128

    @property
    def exact(self) -> bool:
        """Are factors between products fp32? A bf16 result is rounded more coarsely than fp16 ones are."""
        return self.dtype != "bf16"

    @property
    def in_registers(self) -> bool:
        """Does a warpgroup have all of its sequences' tokens in registers? See `in_registers.InRegisters`."""
        return not self.split and self.blocks <= (1 if self.exact else 2)

    @property
    def halved_rows(self) -> bool:
        """Is the transform of a tile's rows, too, two of half as many (`tables.halved_row`)? Of complex numbers these
        are half the work; of real ones, as causal tiles are, there is nothing to gain."""
        return not self.causal and not self.split

    @property
    def whole(self) -> bool:
        """Does a thread block have a whole sequence in shared memory? See `whole.kernel.WholeSequence`."""
        return not self.exact and self.blocks == BLOCKS[-1]

    @property
    def transforms(self) -> int:
        """Of a tile, or of two."""
        return ROWS // self.rows

    @property
    def tiles(self) -> int:
        """Of 64 x 64 numbers in, and as many out."""
        return 1 if self.causal else 2

    @property
    def sequences(self) -> int:
        """Of these tiles."""
        return self.transforms * self.tiles

    def sequence(self, tile: int, row):
        """Which of them a tile's row belongs to. row: also at run time."""
        return row // self.rows * self.tiles + tile

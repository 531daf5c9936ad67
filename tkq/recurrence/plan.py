"""From a spec and sizes to a config. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import WARP, ScanConfig
from .spec import BITS, ScanSpec

SMS = 132
BLOCKS = 240  # with accesses of several channels: nearly two an SM
SHORTEST, SEGMENT = 8192, 256  # tokens of a scan in segments, of a segment
MOST_BITS = 512 * 32  # of a token of all columns


def plan(spec: ScanSpec, columns: int) -> ScanConfig:
    """All blocks reside at once, each with all tokens of its columns: the fewer there are, the more warps each has, and
    so runs in flight. Along time runs are of 128 bytes of each line, of a backward of 64."""
    if spec.layout == "time":
        rows = min((512 if spec.backward else 1024) // BITS[spec.dtype], 8 * spec.vector)
        return ScanConfig(rows, 8 if columns <= SMS * WARP else 4)
    if columns <= SMS * WARP * spec.vector:
        return ScanConfig(32 if spec.vector * BITS[spec.dtype] < 32 and not spec.backward else 16, 12)
    return ScanConfig(8 if spec.backward or spec.vector > 2 else 16, 8)


def widest(vector: int, dtype: str, columns: int) -> int:
    """Of the channels that addresses and strides allow in one access, how many are taken: up to 8 bytes, where that
    leaves blocks for every SM."""
    most = 64 // BITS[dtype]
    while most > 1 and columns < BLOCKS * WARP * most:
        most //= 2
    return min(vector, most)


def segments_of(spec: ScanSpec, columns: int, tokens: int) -> int:
    """Segments of the tokens. One, but of few columns and many tokens, whose steps would take longer than reading a and
    b twice: a power of two that divides the tokens."""
    if tokens < SHORTEST or columns * BITS[spec.dtype] > MOST_BITS:
        return 1
    count = 1
    while count * columns < SMS * WARP and tokens % (2 * count) == 0 and tokens // (2 * count) >= SEGMENT:
        count *= 2
    return count

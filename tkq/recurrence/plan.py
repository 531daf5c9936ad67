"""From a spec and sizes to a config. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import WARP, ScanConfig
from .spec import BITS, ScanSpec

SMS = 132
SHORTEST, SEGMENT = 8192, 256  # tokens of a scan in segments, of a segment
MOST_BITS = 512 * 32  # of a token of all columns


def plan(spec: ScanSpec, columns: int) -> ScanConfig:
    """Along channels: registers for 64 accesses of a run of a forward, for 48 of a backward; as many warps as let all
    blocks reside at once, each with all of its columns' tokens. Along time: runs of 64 bytes of each line."""
    if spec.layout == "time":
        return ScanConfig(rows=min(512 // BITS[spec.dtype], 8 * spec.vector), warps=4)
    blocks = -(-columns // (WARP * spec.vector))
    return ScanConfig(rows=16 if spec.backward else 32, warps=12 if blocks <= SMS else 4)


def widest(vector: int, dtype: str, columns: int) -> int:
    """Of the channels that addresses and strides allow in one access, how many are taken: up to 4 bytes, where that
    leaves a block for every SM."""
    most = 32 // BITS[dtype]
    while most > 1 and columns < SMS * WARP * most:
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

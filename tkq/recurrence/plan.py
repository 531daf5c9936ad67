"""From a spec and sizes to a config. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import WARP, ScanConfig
from .spec import BITS, ScanSpec

BLOCKS = 120  # that accesses of several channels are to leave
SHORTEST, SEGMENT = 8192, 256  # tokens of a scan in segments, of a segment
MOST_BITS = 512 * 32  # of a token of all columns


def plan(spec: ScanSpec, columns: int, num_sms: int) -> ScanConfig:
    """All blocks reside at once, each with all tokens of its columns: the fewer there are, the more warps each has, and
    so runs in flight. Along time runs are of 128 bytes of each line: with 64 a backward in fp32 took 249.7 us, with 128
    195.9; a backward in 16 bits has no registers for that. 16 bits are converted ahead of a backward's turn alone: a
    forward in bf16 took 54.3 us with that, 52.9 without (8 sequences of 2048 tokens and 2048 channels, an H200)."""
    if spec.layout == "time":
        narrow = spec.backward and BITS[spec.dtype] == 16
        rows, warps = min(32 if narrow else 1024 // BITS[spec.dtype], 8 * spec.vector), 3 if narrow else 4
        return ScanConfig(rows, 8 if columns <= num_sms * WARP else warps)
    few = columns <= num_sms * WARP * spec.vector
    if spec.vector == 4:
        rows, warps = 8 if spec.backward or spec.dtype == "fp32" else 16, 8
    elif spec.backward and spec.vector == 2 and not few:
        rows, warps = 8, 8
    else:
        rows, warps = 16, 12 if few else 8
    if few and spec.vector == 1 and not spec.backward and BITS[spec.dtype] == 16:
        rows = 32
    return ScanConfig(rows, warps, convert_early=spec.backward)


def widest(vector: int, spec: ScanSpec, columns: int) -> int:
    """Of the channels that addresses and strides allow in one access, how many are taken: up to 8 bytes, of a forward
    in fp32 up to 16, where that leaves about a block for every SM. 8 sequences of 2048 tokens and 2048 channels, an
    H200: a forward in fp32 took 107.8 us by single channels, 101.8 by two, 100.3 by four; a backward in bf16 92.8 by
    two, 84.5 by four."""
    most = 2 if spec.backward and spec.dtype == "fp32" else 4
    while most > 1 and columns < BLOCKS * WARP * most:
        most //= 2
    return min(vector, most)


def segments_of(spec: ScanSpec, columns: int, tokens: int, num_sms: int) -> int:
    """Segments of the tokens. One, but of few columns and many tokens, whose steps would take longer than reading a and
    b twice: a power of two that divides the tokens."""
    if tokens < SHORTEST or columns * BITS[spec.dtype] > MOST_BITS:
        return 1
    count = 1
    while count * columns < num_sms * WARP and tokens % (2 * count) == 0 and tokens // (2 * count) >= SEGMENT:
        count *= 2
    return count

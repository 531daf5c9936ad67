"""From a spec and sizes to a config. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import MOST_WARPS, WARP, ScanConfig
from .spec import BITS, ScanSpec

BLOCKS = 120  # that accesses of several channels are to leave
SHORTEST, SHORTEST_LINE, SEGMENT = 8192, 65536, 256  # tokens of a scan in segments, likewise along time, of a segment
MOST_BITS = 512 * 32  # of a token of all columns
LANE_TOKENS, MOST_PIECES = 16, 8  # of a run along time: of each lane at most
LINE_BLOCKS = 16  # of an SM, that are to be left where blocks have several lines


def plan(spec: ScanSpec, columns: int, tokens: int, num_sms: int) -> ScanConfig:
    """Along channels all blocks reside at once, each with all tokens of its columns: the fewer there are, the more
    warps each has, and so runs in flight. 16 bits are converted before the state comes, but in a backward alone: a
    forward in bf16 took 54.3 us with that, 52.9 without (8 sequences of 2048 tokens and 2048 channels, an H200)."""
    if spec.layout == "time":
        return _plan_of_lines(spec, columns, tokens, num_sms)
    few = columns <= num_sms * WARP * spec.vector
    if spec.vector == 4:
        of_thread, warps = 8 if spec.backward or spec.dtype == "fp32" else 16, 8
    elif spec.backward and spec.vector == 2 and not few:
        of_thread, warps = 8, 8
    else:
        of_thread, warps = 16, 12 if few else 8
    if few and spec.vector == 1 and not spec.backward and BITS[spec.dtype] == 16:
        of_thread = 32
    return ScanConfig(of_thread, warps, convert_early=spec.backward)


def _plan_of_lines(spec: ScanSpec, lines: int, tokens: int, num_sms: int) -> ScanConfig:
    """A block has a line, and a warp for each of its runs, or for each second, third..: up to 8, or 15 where lines are
    few. Of a short line a run has fewer lanes, or fewer tokens of each; and where there are many short lines, a block
    takes some of them one after the other, so that warps load the next run of theirs while others wait: 4096 blocks of
    16 runs took 50.0 us in bf16, 16384 of 4 runs 62.0; in fp32 96.6 and 94.4 (2 sequences of 8192, 8 of 2048 tokens,
    2048 channels, an H200)."""
    narrow, few = BITS[spec.dtype] == 16, lines <= 2 * num_sms
    vectors = -(-tokens // spec.vector)
    lanes = min(WARP, _power_of_2(vectors))
    of_lane = 8 if few and narrow and spec.backward else LANE_TOKENS
    pieces = min(MOST_PIECES, of_lane // spec.vector, _power_of_2(-(-vectors // lanes)))
    runs = -(-vectors // (lanes * pieces))
    groups = 1  # of lines
    while 2 * groups * runs <= (16 if narrow else 4) and lines * lanes >= 2 * groups * LINE_BLOCKS * num_sms * WARP:
        groups *= 2
    most = MOST_WARPS if few and (narrow or lines <= num_sms) else 4 if spec.backward and not narrow else 8
    warps = -(-runs * groups // -(-runs * groups // most))
    blocks = _resident(spec) // warps if spec.vector == 128 // BITS[spec.dtype] else 0
    return ScanConfig(pieces * spec.vector, warps, blocks, lanes=lanes, line_groups=groups)


def _resident(spec: ScanSpec) -> int:
    """Warps of an SM for which there are to be registers, without more than a few being spilled."""
    if spec.backward and (spec.state or spec.of_state):
        return 24
    return 28 if spec.backward and spec.dtype == "fp32" else 32


def _power_of_2(n: int) -> int:
    """The first one that is n or more."""
    return 1 << (n - 1).bit_length()


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
    b twice: a power of two that divides the tokens. A line has an SM of its own, so that few are less than half as
    many: 32 lines of 65536 tokens took 22.8 us in segments, 26.4 in one launch, 24 of 8192 13.8 and 7.3."""
    time = spec.layout == "time"
    if tokens < (SHORTEST_LINE if time else SHORTEST) or columns * BITS[spec.dtype] > MOST_BITS:
        return 1
    count, enough = 1, num_sms // 2 if time else num_sms * WARP
    while count * columns < enough and tokens % (2 * count) == 0 and tokens // (2 * count) >= SEGMENT:
        count *= 2
    return count

"""Which float8 products take the kernel whose blocks share K, and in which shape: those of small M, up to 128, and
those of more whose tiles are few. Pure Python."""
from dataclasses import replace
from typing import Optional

from ...runtime.compile.recipe import Recipe
from ..dense.small_m_config import WIDTHS
from ..dense.small_m_plan import FEWEST_STEPS, HBM, MOST_M, fit_to_spec
from .config import STEP
from .small_m_config import SmallMFp8Config
from .spec import Fp8Spec

# Measured on an H100 (docs/attempts/gemm.md):
STREAMS = 32  # rows of A; with more, tiles are as fast where K is not shared
ROWS = 64  # of B's transpose to a block: with 128, nothing was faster by more than 1 %
SM_READ = {False: 110, True: 60}  # bytes a nanosecond that one SM reads of A and B; where sums are promoted
ENOUGH = 0.9  # of what HBM gives, from which on more blocks gain nothing
WAVES = range(3, 7)  # of blocks on each SM: the last one weighs, so they are shorter (four share K), and one
# begins under the other's end (two on an SM, so that all can be in clusters)
TILES_STEPS = 32  # of K, from which on blocks share it that have part of A's rows


def plan(spec: Fp8Spec, M: int, N: int, K: int, num_sms: int) -> Optional[SmallMFp8Config]:
    """The configuration; None where tiles (``fp8.plan``) are as fast."""
    if M > MOST_M:
        return of_tiles(spec, M, N, K, num_sms)
    m, blocks, steps = next(width for width in WIDTHS if width >= M), -(-N // ROWS), -(-K // STEP)
    if M <= STREAMS and -(-blocks // num_sms) in WAVES and steps // 4 >= FEWEST_STEPS:
        return fit_to_spec(SmallMFp8Config(m, ROWS, 4, pdl=True), spec, places=2)
    split = splits(SM_READ[spec.promote] * ROWS / (ROWS + m), blocks, steps, num_sms)
    if M > STREAMS and split == 1:
        return None
    return fit_to_spec(SmallMFp8Config(m, ROWS, split, pdl=True), spec, places=1)


def of_tiles(spec: Fp8Spec, M: int, N: int, K: int, num_sms: int) -> Optional[SmallMFp8Config]:
    """Where tiles of 128 rows and 64 columns leave half of the SMs without one: as many blocks share K as find
    place. Promoted sums rather have 128 columns, a warpgroup's more to go on with while one waits, and four blocks."""
    steps = -(-K // STEP)
    rows, split = ROWS, splits(0, tiles(M, N, ROWS), steps, num_sms) if steps >= TILES_STEPS else 1
    if spec.promote and split == 2 and 4 * tiles(M, N, 2 * ROWS) <= num_sms // 2:
        rows, split = 2 * ROWS, 4
    return fit_to_spec(SmallMFp8Config(MOST_M, rows, split, pdl=True), spec, places=1) if split > 1 else None


def tiles(M: int, N: int, rows: int) -> int:
    """Of the widest kernel, with ``rows`` columns of B to a block."""
    return -(-M // MOST_M) * -(-N // rows)


def splits(rate: float, tiles: int, steps: int, num_sms: int) -> int:
    """How many blocks share K: as few as read B about as fast as HBM gives it. Clusters of four and eight fit badly on
    all SMs: they may take half of them. rate: bytes of B a nanosecond that a block reads."""
    found = 1
    for split in (2, 4, 8):
        fits = tiles * split <= (num_sms if split == 2 else num_sms // 2)
        if found * tiles * rate >= ENOUGH * HBM or not fits or steps // split < FEWEST_STEPS:
            break
        found = split
    return found


def recipe(spec: Fp8Spec, config: SmallMFp8Config) -> Recipe:
    """What to compile. The result goes out element by element, whatever its strides allow."""
    spec = replace(spec, store="direct")
    return Recipe("tkq.gemm.fp8.small_m_kernel:SmallMFp8Gemm", (spec, config.check(spec)))

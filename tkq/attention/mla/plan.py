"""From a spec and sizes to a config. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import MlaConfig
from .spec import MlaSpec

ROWS = 64  # of a page, or a multiple: tiles that TMA loads
RARE_RESCALING = dict(rise=8, scores_in_flight=1, branch_free=True, lazy_row_max=True, partials_in_fragments=True)


def plan(spec: MlaSpec, page: int = 1, tiles: int = 1, together: int = 1) -> MlaConfig:
    """page: rows of a page. tiles: of queries. together: blocks that read the same keys."""
    if spec.float8:  # widening and the scores take longer than the memory; timed with 128 heads and lists
        return MlaConfig(**RARE_RESCALING)
    return loaded(0 if spec.sparse else multicast(page, tiles, together))


def loaded(blocks: int) -> MlaConfig:
    """Of tiles that TMA loads for so many blocks; 0: by cp.async. With 16 heads, and with lists of rows, the memory is
    waited for, not what rescales sums, and partial results are short."""
    if blocks == 2:
        return MlaConfig(multicast=2, **RARE_RESCALING)
    return MlaConfig(multicast=blocks)


def multicast(page: int, tiles: int, together: int) -> int:
    """Blocks that a tile is loaded for, with a tile of queries each; 0: not by TMA."""
    if page % ROWS:
        return 0
    return 2 if together % 2 == 0 and tiles % together == 0 else 1

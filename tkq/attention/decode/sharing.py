"""Is a shared prefix read once for the whole batch? From sizes that the host knows. Pure Python."""
from __future__ import annotations

from .plan import row_tiles

# Cost of the second launch and of merging, in elements of a cache that could be read meanwhile: 16 MB in 16 bits, 5 us
# at an H100's nominal 3.35 TB/s. An estimate, not measured.
SECOND_LAUNCH = 1 << 23
MERGED = 4  # times that each number of O passes through memory: both parts are read, one is written, and the result


def whole_pages(prefix_len: int, page: int) -> int:
    """Keys of the pages that are full of the prefix."""
    return prefix_len // page * page


def pays(shared: int, sequences: int, queries: int, heads: tuple, dims: tuple, ragged: bool = False) -> bool:
    """Does it save time to read ``shared`` keys once and not for each of the sequences?

    queries: of each sequence; of ragged ones, of all together. heads: of q and of K/V. dims: D and Dv. Each tile of 64
    packed queries reads all keys that it sees: sequences have tiles of their own, over the prefix all queries are
    packed together."""
    group = heads[0] // heads[1]
    rows = queries if ragged else sequences * queries
    together = row_tiles(rows, group)
    # of ragged queries at least: one tile for each sequence, and no tile with more rows than it can have
    apart = max(sequences, together) if ragged else sequences * row_tiles(queries, group)
    saved = (apart - together) * shared * heads[1] * sum(dims)
    return saved > SECOND_LAUNCH + MERGED * rows * heads[0] * dims[1]

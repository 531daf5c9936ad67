"""Is a shared prefix read once for the whole batch? From sizes that the host knows. Pure Python.

Both ways read the keys behind the prefix. What differs, in microseconds: by each sequence, its own tiles of queries
read the prefix, mostly from L2. Read once, the tiles of all queries together do; two launches more begin and end; what
the prefix comes to is divided into parts, that are written and read in fp32; and two results are written and read in
the place of one. Rates and launches were fitted to times of commit e6fa563f;
tests/cpu/attention/decode/test_cascade_cpu.py holds the choices against those of 6809244a."""
from __future__ import annotations

from ..plan import LEAST, ROWS, row_tiles

SHARED_RATE = 3.3e6  # elements of 16 bits in a microsecond that tiles read of keys that others read as well: 6.6 TB/s
OWN_RATE = 2.1e6  # the same, of results that one kernel writes and another reads: 4.2 TB/s
LAUNCHES = 19.0  # of the prefix and of merging, with what their blocks do before and behind all reading
PARTS = 264  # blocks of threads that share the prefix, two on each of 132 SMs
SPLIT = 4  # times that a number of a part passes through memory, in elements of 16 bits: written and read in fp32
MERGED = 4  # the same of O, in 16 bits: both results are written and read, and theirs is written; one is either way


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
    saved = (apart - together) * shared * heads[1] * sum(dims) / SHARED_RATE
    splits = min(PARTS, together * heads[1] * -(-shared // LEAST))
    parts = splits * min(rows * group, ROWS) * dims[1] * SPLIT
    return saved > LAUNCHES + (parts + MERGED * rows * heads[0] * dims[1]) / OWN_RATE

"""The plan of `tkq.plan_decode`: one tensor of int32, and what each word of it is. Pure Python.

    header          HEADER words: see below
    starts          of each part RECORD words, of the sequence in which its work begins: which, its length, where its
                    work begins, positions of each of its tasks
    lengths         of each sequence in the batch; -1: the length that was given cannot be
    prefix          B + 1: positions of work before each sequence, and of all together
    counters        one for each task (sequence, K/V head, tile of queries): splits that have arrived; 0 between calls
    tiles           of ragged queries LISTED words for each tile: its sequence, first query and number of queries. The
                    tile stands for a sequence above: of the keys that its last query sees

A task is a sequence, a K/V head and a tile of 64 packed queries. Its keys are counted in blocks; a position is a block,
behind ``overhead`` positions for the task itself; with fixed splits a position is a split. Part ``i`` of the work has
the positions from ``i * part`` on. Of latent attention `balance` divides the work: ``overhead`` is 0, and a sequence's
positions are its blocks and the gap behind them.
"""
HEADER = 16
MOST_PARTS, RECORD, LISTED = 512, 4, 3
STARTS = HEADER
LENGTHS = STARTS + MOST_PARTS * RECORD
MAGIC, BATCH, HEADS_KV, GROUP, QUERIES, KEY_BLOCK, FIXED, LEFT, PARTS, PART, TOTAL, OVERHEAD = range(12)
BAD_LENGTH, BEYOND_CACHE, BAD_PAGE, OTHER_CALL = range(12, 16)  # flags: 0, or 1 where it was found
NUMBER = 0x746B7131  # what MAGIC holds: the layout's version


def size(batch: int, heads_kv: int, tiles: int) -> int:
    """Words of a plan."""
    return listed(batch, heads_kv, tiles)


def prefix(batch):
    return LENGTHS + batch


def counters(batch):
    return LENGTHS + 2 * batch + 1


def listed(batch, heads_kv, tiles):
    """Where the tiles of ragged queries are listed: behind all else."""
    return counters(batch) + batch * heads_kv * tiles

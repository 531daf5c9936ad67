"""In which order tiles are taken, as producers, consumers and host count."""
import struct

from tkq.attention.common.integers import _chosen, _dsl, ceil_div, least, most


def tile_of_task(index, tiles, heads, l2_section, longest_first):
    """Task ``index`` as (head of all batches, tile).

    longest_first: heads are worked on in sections of ``l2_section``, whose K and V fit in L2 together, and inside a
    section the last tiles, which of a causal problem see the most keys, come first: dealt out dynamically, the blocks
    end together. Otherwise head by head."""
    if not longest_first:
        return index // tiles, index % tiles
    tasks = l2_section * tiles
    number, within = index // tasks, index % tasks
    width = least(l2_section, heads - number * l2_section)  # the last section may be narrow
    return number * l2_section + within % width, tiles - 1 - within // width


def heads_in_l2_section(kv_bytes, l2_section_bytes, heads_per_kv, heads):
    """How many query heads share a section: as many as the K/V heads, of ``kv_bytes`` each, that fit. Not more than
    there are (``heads``): a section's tasks, counted in 32 bits, are then no more than all tasks."""
    return least(most(l2_section_bytes // kv_bytes, 1), heads // heads_per_kv) * heads_per_kv


def even_l2_section(l2_section, heads_per_kv, heads):
    """``l2_section``, or fewer where that leaves the last section of ``heads`` less narrow: with few tasks in it there
    is nothing to fill up the wait for its longest with."""
    kv_heads, at_most = heads // heads_per_kv, most(l2_section // heads_per_kv, 1)
    return ceil_div(kv_heads, most(ceil_div(kv_heads, at_most), 1)) * heads_per_kv


def part_in_order(number, parts, splits_per_kv_head, l2_section, tail_heads):
    """Part ``number`` in the order of work, of ``parts`` of all K/V heads, ``splits_per_kv_head`` of each: the first
    parts of a group of K/V heads before their second ones, and so on, then the next group. A group has, in whole
    sections, at most as many parts as run at once (``tail_heads`` less one or two): a part's dK and dV are ready when
    the next one needs them."""
    together = most((tail_heads - 1) // l2_section, 1) * l2_section
    group = number // (together * splits_per_kv_head)
    within = number - group * (together * splits_per_kv_head)
    width = least(together, parts // splits_per_kv_head - group * together)
    return (group * together + within % width) * splits_per_kv_head + within // width


def work_rank(blocks):
    """0 to 30, the fewer the more work: of a sequence, by the key blocks of its longest task, in steps of half a power
    of 2. Those of a lower rank come first."""
    bits = _float_bits(most(blocks, 1))  # the exponent and the first bit behind it
    return most(30 - ((bits >> 22) - 254), 0)


def _float_bits(n):
    if isinstance(n, int):
        return struct.unpack("i", struct.pack("f", n))[0]
    return _dsl().Float32(n).bitcast(_dsl().Int32)


def serial_heads(heads, l2_section, tail_heads):
    """Of ``tile_of_task``'s heads, in order, those before the last section."""
    return most(heads - tail_heads, 0) // l2_section * l2_section


def serial_block(block, blocks, now):
    """Block ``block`` in order, where those of a head are worked on from the last to the first, ``now``."""
    return _chosen(now, blocks - 1 - block, block)


def blocks_before(block, blocks, now):
    """How many blocks come before ``block``, of the first ``blocks``: from the last to the first, ``now``, else from
    the first to the last."""
    return _chosen(now, blocks - 1 - block, block)


def l2_section_of(rows, row_bytes, l2_section_bytes, heads):
    """For ``tile_of_task``, K/V heads that are worked on together: as many as fit into ``l2_section_bytes`` of L2, with
    ``row_bytes`` for each of ``rows`` queries."""
    kv_bytes = most(least(rows, 1 << 15) * row_bytes, 1)  # 32 bits
    return heads_in_l2_section(kv_bytes, l2_section_bytes, 1, heads)


def zero_ahead_of(l2_section, tail_heads, tiles):
    """Lower bound on tiles zeroed ahead, of K/V heads with ``tiles`` each, so that no task can wait for a tile that
    waits for it: two L2 sections plus the tail."""
    return (2 * l2_section + tail_heads) * tiles

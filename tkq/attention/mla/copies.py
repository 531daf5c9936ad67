"""Rows of 1152 bytes into swizzled tiles, 16 bytes a lane."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

import tkq.tile as tk
from tkq.attention.decode.copies import copy16
from tkq.attention.decode.plan import ROWS
from tkq.attention.mla.tiles import rows_of

PANEL, WARP_ROWS = 128, 16  # bytes of a row in one of a tile's panels; rows of a tile that a warp has
GROUPS = 4  # of a warp's rows: eight lanes to a panel's row


def row_of(group):
    """Which of the warp's rows this lane copies, in the group."""
    return 4 * group + tk.lane_id() // 8


def copy_panels(tile, stage, rows, source, to=0):
    """The warp's rows, panels ``source`` (first, end) of each, to a tile's panels from ``to`` on. rows: the address of
    each group's row, 0: not there, zeros. Swizzled as TMA would write them."""
    chunk, warp, (first, end) = tk.lane_id() % 8, tk.warp_id() % 4, source
    base = Int32(tile.staged.iterator.toint()) + stage * tile.type.bytes + to * (ROWS * PANEL) + warp * (
        WARP_ROWS * PANEL)
    for group, at in enumerate(rows):
        row = row_of(group)
        place = base + row * PANEL + (chunk ^ (row % 8)) * 16
        size = cutlass.select_(at != Int64(0), Int32(16), Int32(0))
        at = at + Int64(chunk * 16)
        for panel in range(first, end):
            copy16(place + (panel - first) * (ROWS * PANEL), at + panel * PANEL, size)


def query_rows(g, s):
    """Addresses of the task's packed queries, as `copy_panels` takes them."""
    x, addresses = rows_of(g.q, g, s), []
    for group in range(GROUPS):
        row = s.tile * ROWS + tk.warp_id() % 4 * WARP_ROWS + row_of(group)
        at = x.iterator.toint() + Int64(cute.crd2idx((row, 0), x.layout)) * 2
        addresses.append(cutlass.select_(row < g.queries * g.group, at, Int64(0)))
    return addresses

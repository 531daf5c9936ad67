"""Rows of 1152 bytes into swizzled tiles, 16 bytes a lane."""
import cutlass
from cutlass import Int32, Int64

import tkq.tile as tk
from tkq.attention.decode.copies import copy16

ROWS, PANEL, WARP_ROWS = 64, 128, 16  # rows of a tile, bytes of a row in one of its panels, rows of a warp
GROUPS = 4  # of a warp's rows: eight lanes to a panel's row


def row_of(group):
    """Which of the warp's rows this lane copies, in the group."""
    return 4 * group + tk.lane_id() // 8


def copy_panels(tile, stage, rows, first, panels):
    """The warp's rows, panels first .. first + panels of each, to a tile of as many. rows: the address of each group's
    row, 0: not there, zeros. As TMA would write them."""
    chunk, warp = tk.lane_id() % 8, tk.warp_id() % 4
    base = Int32(tile.staged.iterator.toint()) + stage * (ROWS * PANEL * panels) + warp * (WARP_ROWS * PANEL)
    for group, at in enumerate(rows):
        row = row_of(group)
        to = base + row * PANEL + (chunk ^ (row % 8)) * 16
        size = cutlass.select_(at != Int64(0), Int32(16), Int32(0))
        at = at + Int64(chunk * 16)
        for panel in range(panels):
            copy16(to + panel * (ROWS * PANEL), at + (first + panel) * PANEL, size)

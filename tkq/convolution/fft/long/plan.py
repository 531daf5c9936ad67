"""Which configuration a kernel of transforms of many points gets: from the spec."""
from __future__ import annotations

from tkq.convolution.fft.long.config import LongConfig
from tkq.convolution.fft.long.spec import ColumnSpec, RowSpec


def column_plan(spec: ColumnSpec, back: bool) -> LongConfig:
    """Where the radix comes first, two warpgroups if there is room for their tiles. Else, of one part or two, two
    blocks of two warpgroups; of four one of three, in fp32 back one of two."""
    if spec.radix_first:
        return LongConfig(2 if spec.tile_bytes <= 65536 else 1)
    if spec.radix < 4:
        return LongConfig(2, 2)
    return LongConfig(2 if back and spec.dtype == "fp32" else 3)


def row_plan(spec: RowSpec, gradient: bool) -> LongConfig:
    """Three warpgroups, for the filter's gradient two; of split operands one."""
    return LongConfig(1 if spec.split else 2 if gradient else 3)

"""What a launch takes, as torch passes it and the kernel's host function unpacks it."""
from typing import Any, NamedTuple


class BlockLists(NamedTuple):
    """Of a block mask, all int32: num (B, H, row blocks), how many blocks of keys need the mask; indices (B, H, row
    blocks, at most), which; full_num, full_indices: those that need none, or None. B and H are the queries', of stride
    0 where a mask serves all."""

    num: Any
    indices: Any
    full_num: Any = None
    full_indices: Any = None


class Captured(NamedTuple):
    """What stands in the slots of a graph, None where there is none."""

    tensors: Any = None
    numbers: Any = None


class FlexScalars(NamedTuple):
    """scale: of the scores. q_per, kv_per: tiles in a listed block."""

    scale: Any
    q_per: Any
    kv_per: Any
    num_sms: Any

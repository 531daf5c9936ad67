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
    """scale: of the scores. num_sms: of the device."""

    scale: Any
    num_sms: Any


class BackwardLists(NamedTuple):
    """queries: a ``BlockLists`` whose rows are blocks of keys and whose numbers are blocks of queries. states: (B, H,
    blocks of queries, blocks of 64 keys), what each is: 0 not listed, 1 with the mask, 2 full; or None."""

    queries: Any
    states: Any = None


class Functions(NamedTuple):
    """``Captured`` of the score function, perhaps with its derivative, and of the mask, or None."""

    score: Any = None
    mask: Any = None


class CaptureOperands(NamedTuple):
    """Of the kernel that makes gradients of captured tensors. functions: ``Functions``. slopes: ``Captured``
    of the graph of these derivatives. gradients: a tuple of fp32 tensors as the captured ones, of 1 element where those
    have no dimension, to which is added."""

    functions: Any
    slopes: Any
    gradients: Any


class MaskSizes(NamedTuple):
    """Of a mask (queries, keys), of a block of it (rows, columns)."""

    queries: Any
    keys: Any
    rows: Any
    columns: Any

"""What all specs of attention refuse: fields that no kernel takes together."""
from typing import Any

DTYPES = ("bf16", "fp16")
PACKS = (1, 2, 4, 8, 16, 32, 64)  # query heads of one K/V head that share a tile of rows


def of_operands(op: str, spec: Any) -> None:
    """Of a forward in 16 bits.

    Raises:
        NotImplementedError: a dtype, sinks or a pack that no kernel takes.
    """
    of_dtype(op, spec)
    if spec.sinks not in (None, "fp32", spec.dtype):
        raise NotImplementedError(f"{op}: sinks are {spec.sinks}, supported are fp32 and q's {spec.dtype}")
    if spec.pack not in PACKS:
        raise NotImplementedError(f"{op}: pack is {spec.pack}, supported are {', '.join(map(str, PACKS))}")


def of_dtype(op: str, spec: Any) -> None:
    """Of 16 bits.

    Raises:
        NotImplementedError: another dtype.
    """
    if spec.dtype not in DTYPES:
        raise NotImplementedError(f"{op}: q is {spec.dtype}, supported are {', '.join(DTYPES)}")


def of_masks(op: str, spec: Any) -> None:
    """Of a forward.

    Raises:
        ValueError: limits that exclude each other, or that need one that is not there.
    """
    if spec.causal and spec.right:
        raise ValueError(f"{op}: causal and right: causal is the limit on the right")
    if spec.long_window and not spec.left:
        raise ValueError(f"{op}: long_window belongs to left")
    of_lengths(op, spec)


def of_lengths(op: str, spec: Any) -> None:
    """Of packed sequences.

    Raises:
        ValueError: lengths of sequences that are not packed.
    """
    if (spec.seqused_q or spec.seqused_k) and not spec.varlen:
        raise ValueError(f"{op}: seqused_q and seqused_k belong to varlen")


def of_backward(spec: Any, widths: tuple) -> None:
    """Of a backward, whose tiles have one of these widths.

    Raises:
        NotImplementedError: a dtype or a width that no kernel takes.
        ValueError: as `of_lengths`.
    """
    of_dtype("attention backward", spec)
    if spec.width not in widths:
        raise NotImplementedError(f"attention backward: tiles of {spec.width} columns, supported are "
                                  f"{', '.join(map(str, widths))}")
    of_lengths("attention backward", spec)

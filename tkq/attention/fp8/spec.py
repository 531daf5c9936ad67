"""What a caller of float8 attention asked for: the part that decides which code is compiled."""
from dataclasses import dataclass, replace
from typing import ClassVar

from tkq.attention.common import refusals

HEAD_DIMS = tuple(range(32, 257, 32))
WIDTHS = (64, 128, 256)  # of tiles. A head_dim between two of them takes the wider; TMA fills it up with zeros
OUT_DTYPES = ("bf16", "fp16")
ACCUMULATE = ("two_level", "fast")
KEYS_TOGETHER = 128  # of V: it is transposed in as many, the last ones filled up with zeros
QUANTIZED_TOGETHER = 8  # columns that a thread quantises at once
MEAN_ROWS = 128  # tokens of k whose sums are found apart
DESCALES = ("", "q", "k", "v", "qk", "qv", "kv", "qkv")


def width(head_dim: int) -> int:
    """Of the tile that holds ``head_dim`` columns."""
    return next(w for w in WIDTHS if head_dim <= w)


@dataclass(frozen=True)
class Fp8Spec:
    """``AttentionSpec`` for q, k and v of e4m3; the fields of its names mean the same, so that masks, statistics and
    scheduler of ``tkq.attention.forward`` take either.

    out: dtype of o. accumulate: "two_level" adds each key block's P V to O in float32; "fast" lets the tensor cores
    add. descales: of which operands there are factors. varlen: packed sequences, delimited by cu_seqlens; seqused_q,
    seqused_k: only the first rows of each are in use.

    Raises:
        NotImplementedError: what no kernel takes, by name.
    """

    head_dim: int = 128
    causal: bool = False
    lse: bool = False
    out: str = "bf16"
    accumulate: str = "two_level"
    descales: str = ""
    left: bool = False
    right: bool = False
    long_window: bool = False
    varlen: bool = False
    seqused_q: bool = False
    seqused_k: bool = False
    dtype: ClassVar[str] = "e4m3"
    pack: ClassVar[int] = 1
    softcap: ClassVar[bool] = False
    sinks: ClassVar[None] = None

    def __post_init__(self):
        if self.head_dim not in HEAD_DIMS:
            raise NotImplementedError(f"flash_attn_fp8: head_dim is {self.head_dim}, supported are multiples of "
                                      f"{HEAD_DIMS[0]} up to {HEAD_DIMS[-1]}")
        for name, known in (("out", OUT_DTYPES), ("accumulate", ACCUMULATE), ("descales", DESCALES)):
            if getattr(self, name) not in known:
                raise NotImplementedError(f"flash_attn_fp8: {name} is {getattr(self, name)!r}, supported are "
                                          f"{', '.join(map(repr, known))}")
        refusals.of_masks("flash_attn_fp8", self)

    @property
    def head_dim_v(self) -> int:
        """Columns of v and o."""
        return self.head_dim

    @property
    def two_level(self) -> bool:
        """Is each P V added in float32?"""
        return self.accumulate == "two_level"

    @property
    def longest_first(self) -> bool:
        """Do the last queries see many more keys than the first?"""
        return (self.causal or self.right) and not self.left

    @property
    def sides(self) -> bool:
        """May a row, or a part of a tile, see no key of a block that is visited?"""
        return self.causal or self.right or self.left or self.varlen

    def kernel(self) -> "Fp8Spec":
        """The spec of the kernel that serves this one: head_dim rounded up to a tile's width."""
        return replace(self, head_dim=width(self.head_dim))


@dataclass(frozen=True)
class TransposeSpec:
    """Of V that is transposed. keys_contiguous: its keys are contiguous, not its columns."""

    keys_contiguous: bool = False


@dataclass(frozen=True)
class TransposePackedSpec:
    """Of V of packed sequences that is transposed. seqused_k: only the first keys of each are in use."""

    seqused_k: bool = False


@dataclass(frozen=True)
class GatherPagesSpec:
    """Of K and V of a paged cache that are put together."""


@dataclass(frozen=True)
class QuantizeSpec:
    """Of q, k and v that become e4m3. dtype: theirs. rotate: the head_dim, where q and k are multiplied by a Hadamard
    matrix; else 0. smooth_k: the mean of k's tokens is subtracted. rope: q and k get their positions first."""

    dtype: str = "bf16"
    rotate: int = 0
    smooth_k: bool = False
    rope: bool = False

    def __post_init__(self):
        if self.rotate not in (0, *WIDTHS):
            raise NotImplementedError(f"quantize_qkv: rotate of rows of {self.rotate}, supported are "
                                      f"{', '.join(map(str, WIDTHS))}")
        if self.dtype not in ("bf16", "fp16", "fp32"):
            raise NotImplementedError(f"quantize_qkv: q is {self.dtype}, supported are bf16, fp16, fp32")

"""What a pointwise kernel was asked for. Frozen, of plain values: their repr is the compile key."""
from dataclasses import dataclass
from typing import Optional

WIDTH = {"bf16": 16, "fp16": 16, "fp32": 32}
KINDS = ("swiglu", "geglu", "geglu_tanh")
PACKINGS = ("apart", "split", "interleaved")
GRADIENTS = (None, "both", "gate", "up")
POSITIONS = ("offset", "offsets", "ids", "token")
INDEX = ("int32", "int64")
MAX_ROTARY_DIM = 1 << 12


def _one_of(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(map(repr, allowed))}")


def _element(name, dtype):
    if dtype not in WIDTH:
        raise TypeError(f"{name}: got dtype {dtype}, allowed are {', '.join(WIDTH)}")


def _power_of_two(name, value, most):
    if value < 1 or value > most or value & (value - 1):
        raise ValueError(f"{name}: got {value}, allowed are powers of two up to {most}")


@dataclass(frozen=True)
class GatedSpec:
    """kind: "swiglu", "geglu" or "geglu_tanh". dtype: of all tensors.

    packing: gate and up "apart", or in one tensor of 2 N columns: "split" in halves or "interleaved" by column.
    vector: columns of the result that a thread takes at a time; it divides N and all strides.
    gradients: None for the forward; "both", "gate" or "up" for a backward that writes those.
    rank: dimensions of the tensors, 2 or 3.
    """

    kind: str
    dtype: str
    packing: str = "apart"
    vector: int = 1
    gradients: Optional[str] = None
    rank: int = 2

    def __post_init__(self):
        _one_of("kind", self.kind, KINDS)
        _one_of("rank", self.rank, (2, 3))
        _element("dtype", self.dtype)
        _one_of("packing", self.packing, PACKINGS)
        _one_of("gradients", self.gradients, GRADIENTS)
        if self.packing != "apart" and self.gradients in ("gate", "up"):
            raise ValueError(f"gradients: got {self.gradients!r}, allowed for packed tensors are None and 'both'")
        _power_of_two("vector", self.vector, widest_gated(self.dtype, self.packing))

    @property
    def backward(self) -> bool:
        return self.gradients is not None


def widest_gated(dtype: str, packing: str) -> int:
    """Columns of the result whose gates fill 16 bytes; whose gates and ups together do where they interleave."""
    return 128 // WIDTH[dtype] // (2 if packing == "interleaved" else 1)


@dataclass(frozen=True)
class RopeSpec:
    """dtype: of x and the result. table: of cos and sin. rotary_dim: columns that rotate.

    rest: columns beyond them, copied; 0 also in place, where they stay as they are.
    interleaved: neighbours form a pair, not the columns i and i + rotary_dim / 2.
    vector: elements of x in one access.
    positions: where a token's row of the table comes from: "offset" (its index in its sequence, plus an integer),
        "offsets" (plus its sequence's integer), "ids" (an integer of its own), "token" (the table has a row a token).
    index: the type of offsets or ids, else None.
    varlen: x is (total, H, D) and cu_seqlens says where sequences begin. Otherwise x is (B, S, H, D).
    tensors: 1, or 2 for q and k in one launch.
    """

    dtype: str
    table: str
    rotary_dim: int
    rest: int = 0
    interleaved: bool = False
    vector: int = 1
    positions: str = "offset"
    index: Optional[str] = None
    varlen: bool = False
    tensors: int = 1

    def __post_init__(self):
        _element("x", self.dtype)
        _element("cos", self.table)
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > MAX_ROTARY_DIM:
            raise NotImplementedError(
                f"rotary_dim: got {self.rotary_dim}, allowed are even numbers from 2 to {MAX_ROTARY_DIM}")
        if self.rest < 0:
            raise ValueError(f"rest: got {self.rest}, allowed are 0 and more")
        _one_of("positions", self.positions, POSITIONS)
        tensor = self.positions in ("offsets", "ids")
        _one_of("index", self.index, INDEX if tensor else (None,))
        _one_of("tensors", self.tensors, (1, 2))
        _power_of_two("vector", self.vector, 128 // WIDTH[self.dtype])
        if self.pitch % self.vector or self.rest % self.vector:
            raise ValueError(f"vector: got {self.vector}, which does not divide {self.pitch} and {self.rest}")

    @property
    def pitch(self) -> int:
        """Elements that begin at a multiple of the vector: half the rotated columns, or all where pairs interleave."""
        return self.rotary_dim if self.interleaved and self.vector > 1 else self.rotary_dim // 2

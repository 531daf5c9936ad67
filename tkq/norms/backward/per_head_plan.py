"""Spec and plan of the backward pass of a norm with a weight for each head. Pure: no torch, no DSL."""
import math
from dataclasses import dataclass
from typing import Optional

from ...dtypes import WIDTH
from ...reduction import geometry
from ..spec import KINDS

MAX_D = 4096
THREADS_EACH = 512  # of an SM: their registers fill it


@dataclass(frozen=True)
class PerHeadSpec:
    """kind: "rmsnorm" or "layernorm". D: columns of a head. dy, x, weight: element types. dx, dresidual: types in which
    the gradient of the input is written, None: not. dresidual_out: type of what is added to it, or None. dweight,
    dbias: types of theirs, or None. offset: a number is added to the weight. vector: elements of one access, at most 16
    bytes of the widest stream."""

    kind: str
    D: int
    dy: str
    x: str
    weight: str
    dx: Optional[str]
    dresidual: Optional[str]
    dresidual_out: Optional[str]
    dweight: Optional[str]
    dbias: Optional[str]
    offset: bool
    vector: int

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind: got {self.kind!r}, allowed are {', '.join(KINDS)}")
        for name in ("dy", "x", "weight", "dx", "dresidual", "dresidual_out", "dweight", "dbias"):
            dtype = getattr(self, name)
            if dtype not in WIDTH and (dtype is not None or name in ("dy", "x", "weight")):
                raise TypeError(f"{name}: got dtype {dtype}, allowed are {', '.join(WIDTH)}")
        if not 1 <= self.D <= MAX_D:
            raise NotImplementedError(f"backward of {self.kind} with a weight for each head: x: got heads of "
                                      f"{self.D} columns, allowed are 1 to {MAX_D}")
        if self.vector < 1 or self.widest % self.vector:
            raise ValueError(f"vector: got {self.vector}, allowed for D = {self.D} are the divisors of {self.widest}")

    @property
    def widest(self) -> int:
        streams = (self.dy, self.x, self.dx, self.dresidual, self.dresidual_out)
        return geometry.vector(self.D, max(WIDTH[s] for s in streams if s))

    @property
    def access(self) -> int:
        """Bits of the widest stream's access."""
        return self.vector * max(WIDTH[s] for s in (self.dy, self.x, self.dx, self.dresidual, self.dresidual_out) if s)


@dataclass(frozen=True)
class PerHeadConfig:
    """threads_per_row, threads: of a block. rows_per_thread: rows that a thread loads before it waits for any."""

    threads_per_row: int
    threads: int
    rows_per_thread: int
    load: str = "registers"
    cluster: int = 1

    def tile(self, spec: PerHeadSpec) -> geometry.Tile:
        return geometry.tile(spec.D, spec.vector, self.threads_per_row, self.threads, 1)


def plan(spec: PerHeadSpec) -> PerHeadConfig:
    """Eight elements of a row in a thread. x, dy, weight and the sums are held in registers, so fewer rows at once
    where there is one more stream, or a block is large."""
    threads = 1
    while threads * 8 < spec.D:
        threads *= 2
    return PerHeadConfig(threads, max(threads, 256), 4 if threads <= 256 and spec.dresidual_out is None else 2)


def blocks(config: PerHeadConfig, rows: int, heads: int, num_sms: int) -> int:
    """How many blocks share the rows. A thread keeps its head, so all blocks' rows together are whole positions: a
    multiple of `heads`. No more blocks than rows keep busy, and about as many as are resident."""
    at_once = config.threads // config.threads_per_row
    step = heads // math.gcd(heads, at_once)
    resident = max(1, num_sms * THREADS_EACH // config.threads)
    wanted = min(resident, -(-rows // (at_once * config.rows_per_thread)))
    return max(1, wanted // step) * step

"""What the roles of the 16-bit GEMM see: the tiles in shared memory, what came in, a tile of the result, what is
shared, a consumer's registers."""
from dataclasses import dataclass
from typing import Any

from cutlass import Int32

from ... import tile as tk
from ..epilogue import registers as ep
from .config import STEP, STORE_ROW_BYTES, Config
from .spec import BYTES, GemmSpec


@dataclass(frozen=True)
class Tiles:
    """The types of the tiles in shared memory. parts: of B's, loaded by themselves: two where gated, for the gate and
    for up. n_stores: epilogue subtiles of a tile of the result, ``store_n`` columns each."""

    a: tk.st
    b: tk.st
    b_part: tk.st
    out: tk.st
    parts: int
    n_stores: int
    store_n: int

    @staticmethod
    def of(spec: GemmSpec, config: Config) -> "Tiles":
        x, dtype, parts = config, tk.element_type(spec.dtype), 2 if spec.epilogue.gate else 1
        a_t, b_t = spec.transposed
        width, store_n = x.n // parts, STORE_ROW_BYTES // BYTES[spec.out]
        return Tiles(
            a=tk.st(STEP, x.m, dtype) if a_t else tk.st(x.m, STEP, dtype),
            b=tk.st(x.n, STEP, dtype) if b_t else tk.st(STEP, x.n, dtype),
            b_part=tk.st(width, STEP, dtype) if b_t else tk.st(STEP, width, dtype),
            out=tk.st(64, store_n, tk.element_type(spec.out)), parts=parts, n_stores=width // store_n, store_n=store_n)


@dataclass(frozen=True)
class Globals:
    a: tk.gl
    b: tk.gl
    out: Any  # tk.gl, or the tensor itself where it is stored by elements
    inputs: ep.Inputs
    rows: Int32  # of cluster tiles
    cols: Int32
    batches: Int32
    steps: Int32  # of K

    @property
    def counter(self):
        """The address of wave sync's counter, which is in the place of a bias."""
        return self.inputs.bias.iterator.toint()


@dataclass(frozen=True)
class Shared:
    a: tk.SharedTile  # a ring of stages
    b: tk.SharedTile
    b_parts: tk.SharedTile  # the same memory: gate and up of each stage, where b has them apart; otherwise b
    out: tk.SharedTile  # BUFFERS subtiles for each consumer
    pipe: tk.Pipe


@dataclass(frozen=True)
class State:
    """A consumer's registers."""

    acc: tk.RegTile
    pending: list  # a finished tile in 16 bits, in subtiles; before that, c. Empty where nothing waits
    bias: Any  # of the tile's columns: a list, of one or of gate's and up's
    full: tk.Ring  # the stage to multiply next
    done: tk.Ring  # the stage to release next


@dataclass(frozen=True)
class Tile:
    """Where a tile of the result lies, in tiles of a block."""

    batch: Int32
    row: Int32
    col: Int32

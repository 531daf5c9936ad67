"""What the roles of `LinearAttention` share: tensors and numbers, shared memory, a block's task, registers."""
from dataclasses import dataclass
from typing import Any, Optional

import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk


@dataclass(frozen=True, kw_only=True)
class Globals:
    """What comes into a kernel, of the engine or of a package beside it; None is what it has none of."""

    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: Any = None
    dv: Optional[tk.gl] = None
    x: Optional[tk.gl] = None
    g: Optional[cute.Tensor] = None
    beta: Optional[cute.Tensor] = None
    initial: Optional[cute.Tensor] = None
    final: Optional[cute.Tensor] = None
    dots: Optional[cute.Tensor] = None
    scale: Float32
    tokens: Int32
    heads_per_k: Int32
    heads_per_v: Int32
    heads_per_x: Any = None
    ssd: Any = None
    cu: Optional[cute.Tensor] = None
    state_indices: Optional[cute.Tensor] = None
    checkpoints: Optional[cute.Tensor] = None
    every: Optional[Int32] = None
    decays: Optional[cute.Tensor] = None
    q2: Optional[tk.gl] = None
    k2: Optional[tk.gl] = None
    v2: Optional[tk.gl] = None
    inverse: Optional[tk.gl] = None  # that is read
    kept: Optional[tk.gl] = None  # that is written
    segments: Any = None
    less: Optional[tk.gl] = None
    reach: Optional[cute.Tensor] = None
    own: Any = None  # what only the package has


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile  # of each stage those of the state's warpgroups, one behind the other
    x: Any  # likewise
    dots: Any
    o: tk.SharedTile
    p: tk.SharedTile
    rest: Any  # of p, with dots
    gate: Any
    delta: Any
    diagonal: Any
    second: Any
    neighbours: Any
    tokens: tk.Pipe
    scores: tk.Pipe


@dataclass(frozen=True)
class Task:
    """One head of one sequence, the row of its states, and where its V begins, in tiles of 64. first: None, or its
    segment's first chunk. stored_from: None, or the first chunk whose outputs are stored (see
    `overlap.segments.ChunkRange`)."""

    batch: Int32
    state: Int32
    head: Int32
    head_k: Int32
    head_v: Int32
    part: Int32
    chunks: Int32
    first: Any
    stored_from: Any = None


@dataclass(frozen=True)
class State:
    """Registers of 64 rows of V."""

    s: tk.RegTile  # the state, transposed: V by K
    s16: tk.RegTile  # the same, rounded: an operand
    v: tk.RegTile  # a chunk's values, transposed
    u: tk.RegTile  # the same, with what decays to the chunk's end
    rest: tk.RegTile  # what rounding took from these
    o: tk.RegTile  # outputs, transposed: V by tokens
    x: tk.RegTile  # another tensor's rows, as v
    w: tk.RegTile  # with the delta rule: what the state gives for keys, then what it takes up; or second outputs
    at_query: tk.ColVec
    to_end: tk.ColVec
    beta: tk.ColVec
    erase: tk.ColVec

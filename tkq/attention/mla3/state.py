"""What the roles of the MLA kernel see: what came in, what is shared, and the consumers' registers."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk
from tkq.attention.mla.state import Globals, Operands, Scalars  # noqa

HALF, ROPE = 256, 64  # columns: of half of the values, and of the part of a key that is no value



@dataclass(frozen=True)
class Shared:
    q7: tk.SharedTile  # columns 448 to 511 of Q, as the end of a tile of 256
    q_rope: tk.SharedTile
    left: tk.SharedTile
    right: tk.SharedTile
    rope: tk.SharedTile  # P as well, once the scores of its block are there
    there: cute.Tensor  # (4, stages): one bit for each of a producer warp's rows
    bad: cute.Tensor  # (4, stages)
    correct: cute.Tensor  # (64, 2): factors of O's rows
    inverse: cute.Tensor  # (64, 1): of a segment
    left_pipe: tk.Pipe
    right_pipe: tk.Pipe
    rope_pipe: tk.Pipe
    p_full: tk.Semaphore
    s_full: tk.Semaphore


@dataclass(frozen=True)
class Scores:
    q_left: tk.RegTile
    q_right: tk.RegTile  # three panels of four
    s: tk.RegTile
    max: tk.RowVec
    norm: tk.RowVec
    correct: tk.RowVec
    shift: tk.RowVec
    first: Any
    end: Any
    fault: Any
    ring: tk.Ring
    rope: tk.Ring


@dataclass(frozen=True)
class Values:
    o: tk.RegTile
    o2: tk.RegTile
    correct: tk.RowVec
    ring: tk.Ring
    rope: tk.Ring
    ahead: tk.Ring

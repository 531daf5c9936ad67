"""What the parts of the queries' kernel share: what came in, what lies in shared memory."""
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk

DELTA, INVERSE, MOST = range(3)  # columns of `Shared.numbers`


class Operands(NamedTuple):
    """q, k, v, do, o: (B, S, H, D). q_map: (H, D, 64). q_features, k_features: (B, S, H, 128). inverse, most: (B, S, H)
    fp32. largest: of inverse, (B, H) fp32. linear, window: factors, (H,) fp32. Made here: dq (B, S, H, D); delta, share
    (B, S, H) fp32; of_factors (2, B, H, S) fp32, gradients of linear and of window; dmap (B, H, D, 64) fp32."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    o: cute.Tensor
    q_map: cute.Tensor
    q_features: cute.Tensor
    k_features: cute.Tensor
    inverse: cute.Tensor
    most: cute.Tensor
    largest: cute.Tensor
    linear: cute.Tensor
    window: cute.Tensor
    dq: cute.Tensor
    delta: cute.Tensor
    share: cute.Tensor
    of_factors: cute.Tensor
    dmap: cute.Tensor


@dataclass(frozen=True)
class Globals:
    x: tk.gl  # queries
    a: tk.gl  # do
    y: tk.gl  # keys
    b: tk.gl  # values
    x_map: tk.gl
    of_x: tk.gl  # features, by sides
    of_y: tk.gl
    o: tk.gl
    inverse: cute.Tensor
    most: cute.Tensor
    largest: cute.Tensor
    linear: cute.Tensor
    window: cute.Tensor
    dx: tk.gl
    delta: cute.Tensor
    share: cute.Tensor
    of_factors: cute.Tensor
    dmap: cute.Tensor
    scale: Float32
    tokens: Int32


@dataclass(frozen=True)
class Shared:
    x_map: tk.SharedTile
    x: tk.SharedTile
    a: tk.SharedTile
    y: tk.SharedTile
    b: tk.SharedTile
    o: tk.SharedTile
    of_x: tk.SharedTile  # features of each side
    state: tk.SharedTile  # of each side, rounded: 64 features by D
    of_y: tk.SharedTile  # features of each side, in the room of its state
    dy: tk.SharedTile  # of each side
    ds: tk.SharedTile  # gradients of scores: of the chunk's own keys, of those of the chunk before
    out: tk.SharedTile  # dq, by halves of its columns; of 128 columns in the room of x
    sums: cute.Tensor  # of features, of each side
    less: cute.Tensor  # of each side
    numbers: cute.Tensor  # of a chunk's rows
    power: cute.Tensor  # by which float16's dy is too small; of each side
    map_pipe: tk.Pipe
    queries: tk.Pipe
    gradients: tk.Pipe
    outputs: tk.Pipe
    keys: tk.Pipe
    values: tk.Pipe
    x_features: tk.Pipe
    states: tk.Pipe
    y_features: tk.Pipe
    deltas: tk.Pipe
    dys: tk.Pipe
    pairs: tk.Pipe

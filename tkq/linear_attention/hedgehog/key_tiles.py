"""What the parts of the keys' kernel share: what came in, what lies in shared memory."""
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk


class Operands(NamedTuple):
    """k, q, v, do: (B, S, H, D). k_map: (H, D, 64). k_features, q_features: (B, S, H, 128). inverse, most, delta,
    share: (B, S, H) fp32. largest: of inverse, (B, H) fp32. linear, window: factors, (H,) fp32. Made here: dk, dv
    (B, S, H, D); dmap (B, H, D, 64) fp32."""

    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    k_map: cute.Tensor
    k_features: cute.Tensor
    q_features: cute.Tensor
    inverse: cute.Tensor
    most: cute.Tensor
    delta: cute.Tensor
    share: cute.Tensor
    largest: cute.Tensor
    linear: cute.Tensor
    window: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    dmap: cute.Tensor


@dataclass(frozen=True)
class Globals:
    x: tk.gl  # keys
    a: tk.gl  # values
    y: tk.gl  # queries
    b: tk.gl  # do
    x_map: tk.gl
    of_x: tk.gl  # features, by sides
    of_y: tk.gl
    inverse: cute.Tensor
    most: cute.Tensor
    delta: cute.Tensor
    share: cute.Tensor
    largest: cute.Tensor
    linear: cute.Tensor
    window: cute.Tensor
    dx: tk.gl
    dv: tk.gl
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
    of_x: tk.SharedTile  # features of each side
    state: tk.SharedTile  # of each side, rounded: 64 features by D
    of_y: tk.SharedTile  # features of each side, in the room of its state
    dy: tk.SharedTile  # of each side
    p: tk.SharedTile  # weights: of the chunk's own queries, of those of the chunk behind
    dv: tk.SharedTile  # in the room of p
    ds: tk.SharedTile  # gradients of scores likewise
    sums: cute.Tensor  # of features, of each side
    behind: cute.Tensor  # of the chunk behind, for each side: weights, deltas
    map_pipe: tk.Pipe
    keys: tk.Pipe
    values: tk.Pipe
    queries: tk.Pipe
    gradients: tk.Pipe
    x_features: tk.Pipe
    states: tk.Pipe
    read: tk.Pipe
    y_features: tk.Pipe
    dys: tk.Pipe
    pairs: tk.Pipe


def visited(t, i):
    """The i-th chunk that is visited: from the last to the first."""
    return t.chunks - 1 - i

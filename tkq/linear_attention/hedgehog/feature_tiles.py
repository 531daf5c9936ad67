"""What the parts of the features' kernel share: what came in, what lies in shared memory, the order of chunks."""
from dataclasses import dataclass
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.hedgehog.config import WARPS
from tkq.linear_attention.hedgehog.spec import FeatureSpec

FEATURES = 64  # columns of a map
SIDES = 2  # features of y, of -y: a warpgroup each has their state
STATE_WARPS = SIDES * WARPS


class Operands(NamedTuple):
    """x, y: (B, S, H, D), queries and keys; of keys: keys and queries. a, b: do and v; of keys: v and do. x_map, y_map:
    (H, D, 64). inverse, delta: (B, S, H) fp32. largest: (B, H) fp32. linear: (H,) fp32. dx, dv: (B, S, H, D); dv: of
    keys, or None. less: (B, S, H) fp32 of queries, or None. dmap: (B, H, D, 64) fp32."""

    x: cute.Tensor
    y: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor
    x_map: cute.Tensor
    y_map: cute.Tensor
    inverse: cute.Tensor
    delta: cute.Tensor
    largest: cute.Tensor
    linear: cute.Tensor
    dx: cute.Tensor
    dv: Optional[cute.Tensor]
    less: Optional[cute.Tensor]
    dmap: cute.Tensor


@dataclass(frozen=True)
class Globals:
    x: tk.gl
    y: tk.gl
    a: tk.gl
    b: tk.gl
    x_map: tk.gl
    y_map: tk.gl
    inverse: cute.Tensor
    delta: cute.Tensor
    largest: cute.Tensor
    linear: cute.Tensor
    dx: tk.gl
    dv: Optional[tk.gl]
    less: Optional[cute.Tensor]
    dmap: cute.Tensor
    tokens: Int32


@dataclass(frozen=True)
class Shared:
    maps: tk.SharedTile  # x's, y's
    x: tk.SharedTile
    a: tk.SharedTile
    y: tk.SharedTile
    b: tk.SharedTile
    of_y: tk.SharedTile  # features of each side
    state: tk.SharedTile  # of each side, rounded: 64 features by D
    dy: tk.SharedTile
    out: tk.SharedTile
    parts: cute.Tensor  # of each warp of the state: what a chunk adds to sums
    sums: cute.Tensor  # of features, of each side, for two chunks
    power: cute.Tensor  # as `near_power` has it: the gradients have no register for it
    map_pipe: tk.Pipe
    tokens: tk.Pipe
    others: tk.Pipe
    values: tk.Pipe
    states: tk.Pipe
    dys: tk.Pipe


def visited(spec: FeatureSpec, t, i):
    """The i-th chunk that is visited."""
    return t.chunks - 1 - i if spec.of == "keys" else i


def near_power(spec: FeatureSpec, g: Globals, t):
    """(1 / p, p): a power of 2 near the largest weight of keys before the window; of bfloat16, which has exponents for
    all weights, 1."""
    if spec.dtype == "bf16":
        return Float32(1.0), Float32(1.0)
    bits = (g.largest[t.batch, t.head] * g.linear[t.head]).bitcast(Int32) & Int32(0x7F800000)
    bits = cutlass.max(bits, Int32(0x00800000))  # not 0
    return (Int32(0x7F000000) - bits).bitcast(Float32), bits.bitcast(Float32)

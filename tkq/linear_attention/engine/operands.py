"""What a launch of `LinearAttention` takes."""
from typing import NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Int32


class Operands(NamedTuple):
    """q, k: (B, S, H, K). v: (B, S, Hv, V). o: (B, S, HO, V), HO a multiple of H and Hv: neighbouring heads of o share
    one of theirs. g: None, (HO,) or (B, S, HO) fp32. beta: None, or (B, S, HO), also of `LinearSpec.kept`. initial,
    final: (B, HO, K, V) or None, of any strides; (B, HO, V, K) with state_v_first. x: None, or as v, of any heads that
    divide HO. dots: (ceil(V / 64), B, S, HO) fp32, the sums of o times x of 64 columns each. dv: None, or as o: with
    updates what `Delta` keeps. cu: None, or (N + 1,), where N packed sequences begin and end: then B is 1, and states
    are N. state_indices: None, or (N,), rows of a pool, which is initial and final. checkpoints, every: None, or (B,
    rows, HO, K, V) of any strides, for states behind each `every`-th chunk (see `checkpoints.Checkpoints`). Of segments
    (`Segmented`) states are B * N, and decays None or (B * N, HO) fp32; o is None with part "states". q2, or k2 and v2:
    as q, k and v (see `second.Second`); with q2 its outputs are dv. inverse: None, or (B, S, HO, 64): of each token the
    row of its chunk's inverse. less: None, or as o. Summed, o, dv and less have half of the heads. reach:
    None, or (B * N, HO) int32, as `Segmented` has it, or (B, N - 1, HO), as `OverlappingSegments` does."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    g: Optional[cute.Tensor]
    beta: Optional[cute.Tensor]
    initial: Optional[cute.Tensor]
    final: Optional[cute.Tensor]
    x: Optional[cute.Tensor]
    dots: Optional[cute.Tensor]
    dv: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    state_indices: Optional[cute.Tensor]
    checkpoints: Optional[cute.Tensor]
    every: Optional[Int32]
    decays: Optional[cute.Tensor]
    q2: Optional[cute.Tensor]
    k2: Optional[cute.Tensor]
    v2: Optional[cute.Tensor]
    inverse: Optional[cute.Tensor]
    less: Optional[cute.Tensor]
    reach: Optional[cute.Tensor]

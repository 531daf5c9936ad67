"""What both kernels of gates for each column have: arguments, tasks, barriers."""
from dataclasses import dataclass
from typing import NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Int32

from tkq.linear_attention.config import CHUNK

SCORES_BARRIER, OUT_BARRIER = 1, 2  # named barriers: of the scores' warpgroup, of the state's (one each)


class Operands(NamedTuple):
    """q, k: (B, S, H, K). v: (B, S, Hv, V). o: (B, S, HO, V), HO a multiple of H and Hv: neighbouring heads of o share
    one of theirs. g: (B, S, HO, K) fp32, with gates of values (B, S, HO, V). beta: None, or (B, S, HO). initial, final:
    (B, HO, K, V) or None, of any strides. x: None, or as v, of any heads that divide HO. dots: None, or as o, o
    times x. dv: None, or as o: with the delta rule, reversed, o times beta; with updates what times beta is o. cu:
    None, or (N + 1,), where N packed sequences begin and end: then B is 1, and states are N. state_indices: None, or
    (N,), rows of a pool, which is initial and final. less: None, or as dots, which are then the sums over each token
    and those behind it of less - o times x. end: None, or (B, HO, V), of packed sequences (N, HO, V): added to all.
    second, v2, o2, rest: None, or with pairs, as `value_pairs` has them: second as q, v2 as v, o2 and rest as dots."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    g: cute.Tensor
    beta: Optional[cute.Tensor]
    initial: Optional[cute.Tensor]
    final: Optional[cute.Tensor]
    x: Optional[cute.Tensor]
    dots: Optional[cute.Tensor]
    dv: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    state_indices: Optional[cute.Tensor]
    less: Optional[cute.Tensor] = None
    end: Optional[cute.Tensor] = None
    second: Optional[cute.Tensor] = None
    v2: Optional[cute.Tensor] = None
    o2: Optional[cute.Tensor] = None
    rest: Optional[cute.Tensor] = None


@dataclass(frozen=True)
class Task:
    """One head of one sequence, where its V begins, in tiles of 64, the row of its states, and how many tokens are
    written."""

    batch: Int32
    head: Int32
    head_k: Int32
    head_v: Int32
    part: Int32
    state: Int32
    tokens: Int32


def chunks(spec, g, t):
    """Of a task. Counted where it is used: a register that all had from the start would be one too many."""
    return ((t.tokens if spec.packed else g.tokens) + (CHUNK - 1)) >> 6


def order(spec, g, t, i):
    """The i-th chunk that is visited."""
    return chunks(spec, g, t) - 1 - i if spec.reverse else i

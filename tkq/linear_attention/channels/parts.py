"""What both kernels of gates for each column have: arguments, tasks, barriers."""
from dataclasses import dataclass
from typing import NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Int32

from tkq.runtime.compile import fake

SCORES_BARRIER, OUT_BARRIER = 1, 2  # named barriers: of the scores' warpgroup, of the state's (one each)


class Operands(NamedTuple):
    """q, k: (B, S, H, K). v: (B, S, Hv, V). o: (B, S, HO, V), HO a multiple of H and Hv: neighbouring heads of o share
    one of theirs. g: (B, S, HO, K) fp32, with gates of values (B, S, HO, V). beta: None, or (B, S, HO). initial, final:
    (B, HO, K, V) or None, of any strides. x: None, or as v, of any heads that divide HO. dots: None, or as o, o
    times x. dv: None, or as o: with the delta rule, reversed, o times beta; with
    updates what times beta is o."""

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


@dataclass(frozen=True)
class Task:
    """One head of one sequence, and where its V begins, in tiles of 64."""

    batch: Int32
    head: Int32
    head_k: Int32
    head_v: Int32
    part: Int32


def transposed(states, t):
    """V by K of the task's head, of states (B, HV, K, V)."""
    x = states[t.batch, t.head, None, None]
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0]))


def any_strides(dtype, shape):
    """None without a dtype."""
    strides = tuple(fake.sym64() for _ in shape)
    return dtype and fake.tensor(dtype, shape, strides, align=4 if dtype == "fp32" else 2)

"""Flash attention forward with limits on both sides: pairs of blocks that share the key tiles that both see."""
from dataclasses import dataclass
from typing import Any, Optional

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import const_expr

import tkq.tile as tk
from tkq.attention import forward
from tkq.attention.launch import Numbers, Operands, Sequences
from tkq.attention.pair_config import PairConfig
from tkq.attention.pair_consumer import PairConsumer
from tkq.attention.pair_producer import PairProducer
from tkq.attention.spec import AttentionSpec
from tkq.attention.state import Globals


@dataclass(frozen=True)
class PairGlobals(Globals):
    k_alone: Any = None  # k and v, as one block loads a tile for itself
    v_alone: Any = None


class PairForward(forward.AttentionForward):
    """``AttentionForward`` of rows that see a number of keys on either side of their own. Two blocks have 128 rows each,
    one below the other, and key tiles that both see come out of L2 once, for both. One tile only the second block sees,
    its last one, and one only the first, its first one. Both have to be at the same stage of their pipes where they
    share a tile: so the second block's own one comes while the first is still at that of the task before.

      slots          0           1        2        ..  s        0'           1'
      second block   its last    shared   shared   ..  shared   its last'    shared'  ..
      first block    (empty)     shared   shared   ..  shared   its first    shared'  ..

    Where there is no such tile, the slot is empty, and consumers let it pass. Roles and pipes are those of
    ``AttentionForward`` without a bridge."""

    def __init__(self, spec: AttentionSpec, config: PairConfig):
        if spec.varlen or spec.pack > 1 or not spec.far or not (spec.causal or spec.right):
            raise ValueError(f"PairForward: {spec}, needed are limits far left and right, one length, no packing")
        super().__init__(spec, config.check(spec.head_dim, spec.head_dim_v))
        self.producer, self.consumer = PairProducer(spec, config), PairConsumer(spec, config)

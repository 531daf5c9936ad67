"""Values as the state takes them up, made beside the scores: the part of `LinearAttention` that knows of it."""
from typing import Any

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK, LinearConfig
from tkq.tile.dtypes import element_type


class TakenUp:
    """Where two warpgroups make scores in turn, the state is what all wait for. So they also multiply a chunk's values
    by what they decay by to its end, and leave them in shared memory, a tile a stage of scores, from where tensor cores
    take them, and the values themselves."""

    def __init__(self, spec: Any, config: LinearConfig):
        self.dtype, self.there = element_type(spec.dtype), config.scores > 1

    def shared(self, al: tk.SharedAllocator, tile, stages: int) -> Any:
        """Room for them; None where the state makes them in registers."""
        return al.tile(tile, stages) if self.there else None

    def make(self, s, stage, out):
        """A chunk's, by a warpgroup of scores, once factors are there. stage: of tokens. out: of scores."""
        if self.there:
            values, to_end = tk.rt(CHUNK, self.dtype), tk.rv()
            tk.load(values, s.v[stage])
            tk.load_rows(to_end, s.gate.to_end[None, out], 0, CHUNK)
            tk.apply_narrow(values, lambda v, f: v * f, values, to_end)
            tk.store(s.taken_up[out], values)

"""How the state of one head lies in the registers of warps."""
from __future__ import annotations

from dataclasses import dataclass

LANES = 32


@dataclass(frozen=True)
class StepConfig:
    """A warp has all rows of K of a slice of V, or its part of them with `k_warps`; a lane of it has `k_values` by
    `v_values` numbers.

    k_lanes: lanes along K. k_values: of a lane, `k_run` of which are neighbours. v_values: of a lane, neighbours.
    read_ahead: of several tokens, the next is read while one is worked on. threads: those of a block that registers are
    divided for: not the block's own number, which is up to `MOST_WARPS` warps. k_warps: those of a block that share a
    slice of V; more than one have the block to themselves."""

    k_lanes: int
    k_values: int
    k_run: int
    v_values: int
    read_ahead: bool = True
    threads: int = 512
    k_warps: int = 1

    @property
    def v_lanes(self) -> int:
        """Lanes along V."""
        return LANES // self.k_lanes

    @property
    def rows(self) -> int:
        """Of K that a warp has."""
        return self.k_lanes * self.k_values

    @property
    def columns(self) -> int:
        """Of V that a warp has."""
        return self.v_lanes * self.v_values

"""Mamba-2's forward, as a launch of the engine."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.launch import Given, Steps


class SsdSaved(NamedTuple):
    """What a forward is given, and its gradients need. cu: where packed sequences begin and end."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    initial: Tensor | None = None
    softplus: bool = False
    limit: tuple = (0.0, float("inf"))
    cu: Tensor | None = None

    @property
    def steps(self) -> Steps:
        return Steps(self.dt, self.A, self.dt_bias, self.softplus, *self.limit)


def forward(saved: SsdSaved, final: torch.dtype | None = None, gated: bool = True) -> Given:
    """The forward's launch."""
    gated = gated and saved.z is not None
    return Given(saved.C, saved.B, saved.x, initial=saved.initial, final=final, x=saved.z if gated else None,
                 steps=saved.steps._replace(skip=saved.D, gated=gated), state_v_first=True, cu=saved.cu)

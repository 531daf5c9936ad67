"""What was asked for, as far as a step's kernel depends on it: frozen dataclasses, the compile key."""
from __future__ import annotations

from dataclasses import dataclass

from tkq.linear_attention.spec import DTYPES

DIMS = tuple(range(32, 257, 16))  # of K and of V
GATES = ("none", "head", "token", "channel")
LAYOUTS = ("k", "v", "any")
STATES = ("fp32", "bf16")
WIDE = ("fp32", "bf16", "fp16")
INDICES = ("int32", "int64")


@dataclass(frozen=True)
class SsdSpec:
    """A state space's own operands, by their types; None for what there is not.

    tokens: operands have a dimension of tokens. a, dt, skip, bias: of A, dt, D and dt_bias. z: o is gated by it.
    softplus: of dt. expanded: of A, dt, D and dt_bias those that come with a number for each row of x, the same one but
        in D."""

    dt: str
    a: str = "fp32"
    skip: str | None = None
    bias: str | None = None
    z: bool = False
    softplus: bool = False
    tokens: bool = False
    expanded: tuple[str, ...] = ()

    def __post_init__(self):
        for name, got, none in (("dt", self.dt, False), ("a", self.a, False), ("skip", self.skip, True),
                                ("bias", self.bias, True)):
            if got not in WIDE and not (none and got is None):
                raise ValueError(f"SsdSpec: {name} is {got!r}, allowed are {', '.join(WIDE)}{' and None' * none}")
        if not set(self.expanded) <= {"A", "dt", "D", "dt_bias"}:
            raise ValueError(f"SsdSpec: expanded is {self.expanded!r}, allowed are of A, dt, D and dt_bias")


@dataclass(frozen=True)
class StepSpec:
    """A step of linear attention.

    dtype: of q, k, v and o. head_dim, value_dim: K and V. gate: "none"; a logarithm of a decay for each "head", "token"
    and head, or "channel" of k. state: its dtype. layout: along which of K and V 16 bytes of a state are neighbours
    that one access takes; "any" for none. v_first: a state is (V, K), else (K, V). indices, accepted: types of
    state_indices and num_accepted_tokens, or None. delta: beta's dtype, with the delta rule. l2norm: q and k are
    divided by their lengths. ssd: of a state space, where q is C, k is B, v is x. several: there may be any number of
    tokens, else one."""

    dtype: str
    head_dim: int
    value_dim: int
    gate: str = "none"
    state: str = "fp32"
    layout: str = "v"
    v_first: bool = False
    indices: str | None = None
    accepted: str | None = None
    delta: str | None = None
    l2norm: bool = False
    ssd: SsdSpec | None = None
    several: bool = False

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("head_dim", self.head_dim, DIMS),
                                   ("value_dim", self.value_dim, DIMS), ("gate", self.gate, GATES),
                                   ("state", self.state, STATES), ("layout", self.layout, LAYOUTS),
                                   ("indices", self.indices, (None, *INDICES)),
                                   ("accepted", self.accepted, (None, *INDICES)),
                                   ("delta", self.delta, (None, "fp32", "bf16"))):
            if got not in allowed:
                raise ValueError(f"StepSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        if self.accepted and not self.indices:
            raise ValueError("StepSpec: accepted, allowed is with indices")
        if self.ssd and (self.delta or self.l2norm or self.gate != "none"):
            raise ValueError("StepSpec: ssd with a gate, delta or l2norm, allowed is one of them")
        if self.several and self.ssd and not self.ssd.tokens:
            raise ValueError("StepSpec: several, allowed is with tokens")

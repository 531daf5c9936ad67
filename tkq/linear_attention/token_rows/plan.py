"""Which launches go by rows of tokens, and how they are laid out. From specs alone."""
from __future__ import annotations

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.plan import SHARED
from tkq.linear_attention.spec import NARROW, LinearSpec
from tkq.linear_attention.token_rows.config import RowsConfig

FACTOR_STAGES = 4  # chunks whose factors are made ahead
GROUPS = 2  # warpgroups of the outputs, in ping-pong by chunks


def by_rows(spec: LinearSpec) -> bool:
    """Mamba-2's gradients of a batch of whole sequences, with P 64 and N 64 or 128: a block a head, however few."""
    P, N = (spec.value_dim, spec.head_dim) if spec.state_v_first else (spec.head_dim, spec.value_dim)
    others = spec.packed or spec.pool or spec.part or spec.checkpoints or spec.second
    backward = spec.ssd is not None and (spec.dot or spec.reverse)
    return backward and not others and P == CHUNK and N in (CHUNK, NARROW)


def plan(spec: LinearSpec) -> RowsConfig:
    """Four stages of tokens, or as many as there is room for; two of the state where that leaves three of tokens."""
    K, V = spec.head_dim, spec.value_dim
    stage, state = 2 * CHUNK * (2 * K + V * (1 + spec.has_x)), (1 + spec.exact) * 2 * CHUNK * max(K, V)
    rest = GROUPS * 2 * CHUNK * CHUNK * (2 if spec.summed else V // CHUNK) + 2048 * FACTOR_STAGES
    most = [(SHARED - rest - n * state) // stage for n in (1, 2)]
    states = 2 if most[1] >= 3 else 1
    return RowsConfig(min(4, most[states - 1]), states)

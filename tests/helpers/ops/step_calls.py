"""Steps of linear attention in the list of every op: their tensors, and calls that give what they wrote to as well."""
import torch
from torch import Tensor

import tkq

F32 = torch.float32


def one_token(t):
    """Of sequences whose states are in a pool, in rows of their own."""
    tokens, rows = (t.rows, 1, 4), torch.arange(t.rows, device=t.device) * 5 % 48
    return dict(q=t(t.rows, 1, 2, 64), k=t(t.rows, 1, 2, 64) / 8, v=t(*tokens, 48), g=-t(*tokens, dtype=F32).abs(),
                beta=t(*tokens, dtype=F32).sigmoid(), state=t(48, 4, 64, 48, dtype=F32), state_indices=rows)


def one_token_of_v_first(t):
    given = one_token(t)
    given["state"] = given["state"].mT.contiguous()
    return given


def one_token_without_beta(t):
    return {name: x for name, x in one_token(t).items() if name != "beta"}


def accepted(t):
    """Tokens whose states have rows of their own."""
    tokens = (2, t.rows, 4)
    return dict(q=t(2, t.rows, 2, 64), k=t(2, t.rows, 2, 64) / 8, v=t(*tokens, 48), g=-t(*tokens, dtype=F32).abs(),
                state=t(96, 4, 64, 48, dtype=F32),
                state_indices=torch.arange(2 * t.rows, device=t.device).view(2, t.rows) * 5 % 96,
                num_accepted_tokens=t.integers(1, 3, 2))


def state_space(t):
    """B, C of two groups."""
    return dict(x=t(t.rows, 4, 48), dt=t(t.rows, 4, dtype=F32).abs(), A=-t(4, dtype=F32).abs(), B=t(t.rows, 2, 64),
                C=t(t.rows, 2, 64), D=t(4), z=t(t.rows, 4, 48), state=t(t.rows, 4, 48, 64, dtype=F32))


def channels(t):
    """Of a convolution, states in rows of a pool."""
    rows = torch.arange(t.rows, device=t.device) * 5 % 48
    return dict(x=t(t.rows, 64), conv_states=t(48, 64, 4), weight=t(64, 4), bias=t(64), cache_indices=rows)


def conv_step(x, conv_states, weight, bias, cache_indices):
    conv_states = _own(conv_states)
    return tkq.causal_conv1d_step(x, conv_states, weight, bias, "silu", cache_indices), conv_states


def _own(state):
    """A copy, as the case's tensors are for several calls. Something else, which is to be refused, as it is."""
    return state.clone() if isinstance(state, Tensor) else state


def linear_attn_step(q, k, v, g, state, state_indices):
    state = _own(state)
    return tkq.linear_attn_step(q, k, v, g, state, None, state_indices), state


def accepting_step(q, k, v, g, state, state_indices, num_accepted_tokens):
    state = _own(state)
    return tkq.linear_attn_step(q, k, v, g, state, None, state_indices, num_accepted_tokens=num_accepted_tokens), state


def delta_step(q, k, v, g, beta, state, state_indices):
    state = _own(state)
    return tkq.gated_delta_rule_step(q, k, v, g, beta, state, None, True, state_indices), state


def delta_step_of_v_first(q, k, v, g, beta, state, state_indices):
    state = _own(state)
    o = tkq.gated_delta_rule_step(q, k, v, g, beta, state, None, False, state_indices, state_v_first=True)
    return o, state


def ssd_step(x, dt, A, B, C, D, z, state):
    state = _own(state)
    return tkq.ssd_step(state, x, dt, A, B, C, D, z, dt_softplus=True), state

"""Results of the ops around a state, on the CPU: contiguous however their operands lie, as their docstrings promise and
the meta device says."""
import pytest
import torch

import tkq


def given():
    """(q, v, a number for each token and head, states, rows). Heads of v come ahead of its tokens in memory."""
    torch.manual_seed(0)
    q, v = torch.randn(2, 5, 2, 32).bfloat16(), torch.randn(2, 2, 5, 32).bfloat16().transpose(1, 2)
    return q, v, torch.rand(2, 5, 2), torch.zeros(2, 2, 32, 32), torch.arange(2)


CALLS = {
    "linear_attn": lambda q, v, b, state, rows: tkq.linear_attn(q, q, v),
    "linear_attn of a pool": lambda q, v, b, state, rows: tkq.linear_attn(
        q, q, v, initial_state=state, state_indices=rows),
    "gated_delta_rule": lambda q, v, b, state, rows: tkq.gated_delta_rule(q, q, v, -b, b),
    "gated_delta_rule of a pool": lambda q, v, b, state, rows: tkq.gated_delta_rule(
        q, q, v, -b, b, initial_state=state, state_indices=rows),
    "mamba2_ssd": lambda q, v, b, state, rows: tkq.mamba2_ssd(v, b, -b[0, 0], q, q, b[0, 0], v),
    "mamba2_ssd of a pool": lambda q, v, b, state, rows: tkq.mamba2_ssd(
        v, b, -b[0, 0], q, q, initial_states=state, state_indices=rows),
    "linear_attn_step": lambda q, v, b, state, rows: tkq.linear_attn_step(q, q, v, None, state),
    "gated_delta_rule_step": lambda q, v, b, state, rows: tkq.gated_delta_rule_step(q, q, v, -b, b, state),
    "ssd_step": lambda q, v, b, state, rows: tkq.ssd_step(state, v, b, -b[0, 0], q, q, b[0, 0], v),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_contiguous(name):
    made = given()
    found, said = CALLS[name](*made), CALLS[name](*(x.to("meta") for x in made))
    assert found.is_contiguous() and found.stride() == said.stride()

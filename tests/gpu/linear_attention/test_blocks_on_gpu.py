"""The gated delta rule's forward by blocks of 16 tokens, where `test_delta_forward` has not looked: gates that forget,
packed sequences, states in a pool; float16, K of 64."""
import pytest
import torch
from torch.nn.functional import normalize

import tkq
from tests.gpu.linear_attention.test_delta_forward import check
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.blocks.config import by_blocks
from tkq.linear_attention.launch import Given, spec_of


def make(S, K=128, V=128, B=1, H=2, HV=4, dtype=torch.bfloat16):
    q, k = (normalize(torch.randn(B, S, H, K, device="cuda"), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(B, S, HV, V, device="cuda").to(dtype)
    return q, k, v, -torch.rand(B, S, HV, device="cuda"), torch.rand(B, S, HV, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_that_forget(dtype):
    """Everything, in the middle of a block and at its ends; also by infinities, whose differences are none."""
    torch.manual_seed(0)
    q, k, v, g, beta = make(300, 64, dtype=dtype)
    at, initial = [5, 16, 47, *range(100, 130)], torch.randn(1, 4, 64, 128, device="cuda")
    g[:, at] = -200.0
    assert by_blocks(spec_of(Given(q, k, v, g, beta)))
    o, state = check(q, k, v, g, beta, initial)
    g[:, at], g[:, 16] = -float("inf"), -1e30
    same, last = tkq.gated_delta_rule(q, k, v, g, beta, None, initial, True)
    assert torch.equal(same, o) and torch.equal(last, state)


def test_packed():
    """Sequences of 0 to 130 tokens between NaN, and of rows of a pool: each as by itself."""
    torch.manual_seed(0)
    lengths = [1, 0, 63, 64, 130, 65]
    cu = torch.tensor([70, *(70 + sum(lengths[:n + 1]) for n in range(len(lengths)))], device="cuda")
    given = [torch.cat([torch.full_like(x[:, :70], float("nan")), x, torch.full_like(x[:, :70], float("nan"))], 1)
             for x in make(sum(lengths))]
    pool, rows = torch.randn(9, 4, 128, 128, device="cuda"), torch.tensor([3, 8, 0, 5, 7, 2], device="cuda")
    with poisoned():
        o, states = tkq.gated_delta_rule(*given, None, pool[rows], True, cu_seqlens=cu)
    assert not o[:, :70].any() and not o[:, 70 + sum(lengths):].any()
    for n, (first, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        alone, last = tkq.gated_delta_rule(*(x[:, first:end] for x in given), None, pool[rows[n]][None], True)
        assert torch.equal(o[:, first:end], alone) and torch.equal(states[n], last[0])
    before = pool.clone()
    with poisoned():
        of_pool, same = tkq.gated_delta_rule(*given, None, pool, True, cu_seqlens=cu, state_indices=rows)
    assert same is pool and torch.equal(of_pool, o) and torch.equal(pool[rows], states)
    assert torch.equal(pool[[1, 4, 6]], before[[1, 4, 6]])

"""Which rows of a pool a step reads and writes: indices of all kinds, accepted tokens."""
import pytest
import torch

import tkq
from tests.helpers.linear_steps import BF16, F32, beta_of, check, make, pool_of
from tests.helpers.sanitizer.guard_pages import guarded


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.sampled(when=lambda dtype, T: (dtype == torch.int32) == (T == 1))
def test_rows_that_the_pool_does_not_have(dtype, T):
    """-1 several times, just behind the end, the ends of the type: o is 0, and no other row has changed."""
    end = torch.iinfo(dtype)
    rows = [4, -1, 10, 1, -1, end.max, end.min, -2, 9, 0, 11, end.max // 2]
    q, k, v, g = make(len(rows), T, 2, 4, 128, 64)
    pool = pool_of(10, 4, 128, 64)
    before, indices = pool.clone(), torch.tensor(rows, device="cuda", dtype=dtype)
    o = check(q, k, v, g, pool, beta_of(v), None, indices)
    there = torch.tensor([0 <= row < 10 for row in rows], device="cuda")
    assert torch.equal(o.flatten(1).any(1), there)
    named = {row for row in rows if 0 <= row < 10}
    assert all(torch.equal(pool[row], before[row]) for row in range(10) if row not in named)
    assert pool._base[:, 4:].isnan().all()


@pytest.mark.parametrize("where", ["front", "end"])
def test_nothing_outside_of_the_pool_is_touched(where):
    """It begins, or ends, where its mapping does, and so do index tensors: an access outside faults."""
    end = torch.iinfo(torch.int64)
    q, k, v, g = make(8, 1, 2, 4, 64, 64)
    pool = guarded(torch.randn(6, 4, 64, 64, device="cuda"), where)
    rows = guarded(torch.tensor([5, 0, -1, 6, 7, -2, end.max, end.min], device="cuda"), where)
    o = check(q, k, v, g, pool, beta_of(v), None, rows)
    assert o.flatten(1).any(1).tolist() == [True, True] + 6 * [False]
    q, k, v, g = make(4, 2, 2, 4, 64, 64)
    rows = guarded(torch.tensor([[5, 6], [0, -1], [8, 9], [-3, 1]], device="cuda"), where)
    accepted = guarded(torch.tensor([1, 1, 2, end.max], device="cuda"), where)
    o = check(q, k, v, g, pool, None, None, rows, accepted)
    assert o.flatten(1).any(1).tolist() == [True, True, False, False]


def test_no_row_at_all():
    q, k, v, g = make(3, 1, 2, 4, 64, 64)
    none = torch.empty(0, 4, 64, 64, device="cuda")
    rows = torch.zeros(3, device="cuda", dtype=torch.int64)
    assert not tkq.linear_attn_step(q, k, v, g, none, None, rows).any()


def test_rows_that_are_not_finite_and_not_named():
    q, k, v, g = make(2, 1, 2, 4, 64, 64)
    pool = pool_of(5, 4, 64, 64)
    pool[1::2] = torch.nan
    o = tkq.linear_attn_step(q, k, v, g, pool, None, torch.tensor([4, 2], device="cuda"))
    assert o.isfinite().all() and pool[::2].isfinite().all() and pool[1::2].isnan().all()


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype, state", [(torch.int32, F32), (torch.int64, BF16)])
@pytest.mark.sampled(when=lambda T, dtype, state: (dtype == torch.int32) == (T in (1, 3, 8)))
def test_accepted_tokens(T, dtype, state):
    """Each number of them, numbers that are none, rows that are not there."""
    N = T + 3
    q, k, v, g = make(N, T, 2, 4, 128, 64)
    rows = torch.randperm(N * T + 4, device="cuda")[:N * T].view(N, T).to(dtype)
    accepted = torch.tensor([*range(T + 2), torch.iinfo(torch.int32).min], device="cuda", dtype=dtype)
    rows[1, T - 1] = -1 if T > 1 else rows[1, 0]  # of a token that nothing is kept of
    pool = pool_of(N * T + 4, 4, 128, 64, state)
    before = pool.clone()
    o = check(q, k, v, g, pool, beta_of(v), None, rows, accepted)
    assert o.flatten(1).any(1).tolist() == [False, *[True] * T, False, False]
    left = {row for n in range(1, T + 1) for row in rows[n].tolist()}
    assert all(torch.equal(pool[row], before[row]) for row in range(len(pool)) if row not in left)


def test_accepted_tokens_go_on_where_they_were():
    """Two rounds of drafts, of which some are accepted, are the recurrence of the accepted ones."""
    q, k, v, g = make(3, 4, 2, 4, 64, 64)
    beta, pool = beta_of(v), pool_of(20, 4, 64, 64)
    rows, accepted = torch.arange(12, device="cuda").view(3, 4), torch.tensor([3, 1, 4], device="cuda")
    plain = pool[rows[:, 0]].clone()
    begin = torch.ones(3, device="cuda", dtype=torch.int64)
    tkq.gated_delta_rule_step(q, k, v, g, beta, pool, state_indices=rows, num_accepted_tokens=begin)
    found = tkq.gated_delta_rule_step(q, k, v, g, beta, pool, state_indices=rows, num_accepted_tokens=accepted)
    for n, tokens in enumerate(accepted.tolist()):
        one = plain[n:n + 1].clone()
        drafts = [x[n:n + 1] for x in (q, k, v, g, beta)]
        tkq.gated_delta_rule_step(*(x[:, :tokens] for x in drafts), one)
        want = tkq.gated_delta_rule_step(*drafts, one)
        torch.testing.assert_close(found[n:n + 1].float(), want.float(), rtol=2**-7, atol=1e-5)
        torch.testing.assert_close(pool[rows[n, 3]], one[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("N, T", [(0, 1), (0, 3), (4, 0)])
def test_nothing_to_do(N, T):
    q, k, v, g = make(N, T, 2, 4, 64, 64)
    pool = pool_of(4, 4, 64, 64)
    before = pool.clone()
    o = tkq.gated_delta_rule_step(q, k, v, g, beta_of(v), pool)
    assert o.shape == v.shape and torch.equal(pool, before)

"""The gated delta rule by blocks of 16 tokens, where `test_delta_forward` has not looked: gates that forget, packed
sequences, states in a pool; float16, K of 64. And what gradients take of a forward, and their own launch."""
import pytest
import torch
from torch.nn.functional import normalize

import tkq
from tests.gpu.linear_attention.test_delta_forward import check
from tests.gpu.linear_attention.test_delta_launches import check as check_launch
from tests.gpu.linear_attention.test_delta_launches import some_small
from tests.helpers.linear_launches import of_gradients
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.blocks.plan import by_blocks
from tkq.linear_attention.launch import Given, launch, spec_of


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


def training(how, reverse):
    """A launch of training, by blocks: 300 tokens, K and V of 128, states, gates; some betas small, 0, or below 0."""
    dtype, K = torch.float16 if how == "fp16" else torch.bfloat16, 64 if how == "narrow keys" else 128
    q, k, v, g, beta = make(300, K, dtype=dtype)
    beta, cu = some_small(v), None
    if how == "alike":  # and gates near 0: errors of rounding add up over a block, and an inverse in one part shows
        k, beta, g = k[:, :1].expand_as(k).contiguous(), torch.full_like(beta, 2.0), 0.1 * g
    if how == "forgets":
        g[:, [5, 16, 47, *range(100, 130)]] = -200.0
    if how == "packed":
        cu = torch.tensor([0, 1, 1, 64, 130, 300], device="cuda")
    states = torch.randn(1 if cu is None else 5, 4, K, 128, device="cuda")
    forward = Given(q, k, v, None if how == "no gates" else g, beta, states, torch.float32, cu=cu)
    return of_gradients(forward, reverse)._replace(blocks=True, inverse=None)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("how", ["usual", "alike", "forgets", "packed", "no gates", "fp16", "narrow keys"])
@pytest.mark.sampled(when=lambda how: how in ("usual", "alike", "forgets"))  # of one kernel each way
def test_training(how, reverse):
    """The forward with what it keeps, and the gradients of values and beta: the same bits each time."""
    torch.manual_seed(0)
    given = training(how, reverse)
    found = check_launch(given, 0.125)
    assert found.inverse is None and (found.dv is None) == reverse
    again = launch(given, 0.125)
    assert all(torch.equal(x, y) for x, y in zip(found, again) if x is not None)

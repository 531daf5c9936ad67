"""tkq.linear_attn_step and tkq.gated_delta_rule_step against the recurrence in float64, beside float32."""
import math

import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.linear_steps import BF16, F32, ROWS, beta_of, check, make, pool_of, rows_of
from tkq.linear_attention.step.plan import most_few, plan
from tkq.linear_attention.step.spec import StepSpec
from tkq.reference.linear_attention import linear_attn as recurrence


@pytest.mark.parametrize("gate", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.sampled(when=lambda gate, delta: delta == (gate in ("token", "channel")))
def test_gates(gate, delta):
    if delta and gate == "head":
        pytest.skip("the delta rule has none of heads")
    q, k, v, g = make(5, 1, 2, 4, 128, 128, gate)
    check(q, k, v, g, pool_of(5 + ROWS, 4, 128, 128), beta_of(v) if delta else None, None, rows_of(5, 5 + ROWS))


@pytest.mark.parametrize("layout", ["v", "k", "any"])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", [F32, BF16])
@pytest.mark.sampled(when=lambda layout, v_first: (layout == "k") == v_first)
def test_pools(layout, v_first, state):
    """Of strides of all kinds, with NaN between matrices, which stays."""
    q, k, v, g = make(3, 1, 2, 4, 128, 64)
    pool = pool_of(3 + ROWS, 4, 128, 64, state, layout, v_first)
    check(q, k, v, g, pool, beta_of(v, BF16), 0.3, rows_of(3, 3 + ROWS, torch.int32), v_first=v_first)
    assert pool._base is not None and pool._base[:, 4:].isnan().all()
    if layout == "any":
        assert pool._base[:, :, -3:].isnan().all() and pool._base[..., -3:].isnan().all()


@pytest.mark.parametrize("K, V", [(32, 32), (48, 80), (64, 64), (80, 112), (128, 256), (144, 48), (208, 32),
                                  (256, 128), (256, 256)])
@pytest.mark.parametrize("layout, state", [("v", F32), ("k", F32), ("v", BF16), ("k", BF16)])
@pytest.mark.sampled(when=lambda K, V, layout, state: (K, V) == (48, 80) or (
    (K, V) == (256, 128) and (layout, state) == ("k", BF16)) or (
    (layout, state) == ("v", F32) and (K, V) in ((32, 32), (128, 256))))
def test_widths(K, V, layout, state):
    q, k, v, g = make(3, 1, 1, 2, K, V)
    v_first = layout == "k"
    check(q, k, v, g, pool_of(3, 2, K, V, state, layout, v_first), beta_of(v), v_first=v_first, l2norm=True)


@pytest.mark.parametrize("T", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.sampled(when=lambda T, K: (K == 128) == (T in (1, 3, 8)))
def test_tokens(T, K):
    q, k, v, g = make(4, T, 2, 4, K, 64, "channel", torch.float16)
    rows = rows_of(4, 4 + ROWS)
    check(q, k, v, g, pool_of(4 + ROWS, 4, K, 64), beta_of(v), None, rows, l2norm=True)
    check(q, k, v, g, pool_of(4 + ROWS, 4, K, 64), None, None, rows)


@pytest.mark.parametrize("N", [1, 3, 300])
def test_many_sequences(N):
    """Warps that are a block each, and, of many states, warps of a block that share one."""
    q, k, v, g = make(N, 1, 4, 16, 128, 128)
    check(q, k, v, g, pool_of(N, 16, 128, 128), beta_of(v), None, rows_of(N, N))


@pytest.mark.parametrize("K, V, gate, delta, layout", [
    (128, 128, "channel", True, "v"), (128, 128, "token", False, "k"), (64, 64, "head", False, "v"),
    (96, 128, "token", False, "v"), (128, 96, "token", True, "v")])
@pytest.mark.sampled(when=lambda K, V, gate, delta, layout: gate == "channel")
def test_many_states(K, V, gate, delta, layout):
    """As kernels of their own have them; every third sequence has no row in the pool, and is skipped."""
    N = 520
    spec = StepSpec("bf16", K, V, layout=layout)
    assert most_few(spec) < 4 * N and plan(spec, many=True) != plan(spec)
    q, k, v, g = make(N, 1, 2, 4, K, V, gate)
    rows = rows_of(N, N + 10)
    rows[::3] = -1
    pool = pool_of(N + 10, 4, K, V, layout=layout, v_first=layout == "k")
    o = check(q, k, v, g, pool, beta_of(v) if delta else None, None, rows, v_first=layout == "k", l2norm=delta)
    assert not o[::3].any() and pool._base[:, 4:].isnan().all()


def test_several_tokens_of_many_sequences():
    """Several warps to a block, each with a slice."""
    q, k, v, g = make(300, 3, 2, 4, 128, 64, "channel", torch.float16)
    check(q, k, v, g, pool_of(300, 4, 128, 64), beta_of(v), None, rows_of(300, 300), l2norm=True)


def test_hard_data():
    """Gates that forget all, and nearly all; beta 2, large states, keys of no length."""
    q, k, v, g = make(6, 2, 2, 4, 128, 128)
    g[1, 0], g[2], g[3, 1, 1] = -math.inf, -200.0, -1e-9
    k[4, 1], k[5] = 0, 10 * k[5]
    pool = pool_of(6, 4, 128, 128)
    pool[0] *= 1e20
    for l2norm in (True, False):
        # the last sequence's keys are long: its state grows as (1 - beta |k|^2), within float32
        check(q, k, v, g, pool.clone(), beta_of(v, most=2.0), 1e-3, l2norm=l2norm)


def test_what_is_not_finite_stays_in_its_column():
    q, k, v, g = make(2, 1, 1, 2, 64, 64)
    pool = pool_of(2, 2, 64, 64)
    pool[0, 0, :, 5], v[1, 0, 1, 7] = math.inf, math.nan
    o = tkq.linear_attn_step(q, k, v, g, pool)
    assert not o[0, 0, 0, 5].isfinite() and o[1, 0, 1, 7].isnan()
    assert o.isfinite().sum() == o.numel() - 2


@pytest.mark.parametrize("gate, delta", [("token", True), ("channel", True), ("token", False)])
def test_a_hundred_steps(gate, delta):
    """One token at a time is the recurrence of all of them, and, for gates of tokens, the op in chunks."""
    q, k, v, g = make(2, 100, 2, 4, 128, 128, gate, decay=0.1)
    beta, state = beta_of(v) if delta else None, torch.zeros(2, 4, 128, 128, device="cuda")
    out = torch.empty_like(v)
    for t in range(100):
        at = slice(t, t + 1)
        given = [x[:, at] for x in (q, k, v, g)]
        if delta:
            out[:, at] = tkq.gated_delta_rule_step(*given, beta[:, at], state)
        else:
            tkq.linear_attn_step(*given, state, out=out[:, at])
    want, last = recurrence(*(x.double() for x in (q, k, v)), g, beta=beta)
    assert (out.double() - want).norm() <= 2**-8 * want.norm()
    assert (state.double() - last).norm() <= 1e-5 * last.norm()
    if gate == "token":
        chunks = (tkq.gated_delta_rule(q, k, v, g, beta, output_final_state=True) if delta
                  else tkq.linear_attn(q, k, v, g, output_final_state=True))
        for a, b in zip((out, state), chunks):
            assert (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


def test_prefill_then_steps():
    q, k, v, g = make(2, 70, 2, 4, 64, 64, decay=0.1)
    beta = beta_of(v)
    _, state = tkq.gated_delta_rule(*(x[:, :65] for x in (q, k, v, g, beta)), output_final_state=True)
    rest = tkq.gated_delta_rule_step(*(x[:, 65:] for x in (q, k, v, g, beta)), state)
    want, last = recurrence(*(x.double() for x in (q, k, v)), g, beta=beta)
    assert (rest.double() - want[:, 65:]).norm() <= 2e-2 * want[:, 65:].norm()
    assert (state.double() - last).norm() <= 2e-2 * last.norm()


def test_lengths_of_q_and_k():
    """The same as with rows normalised before, but for their rounding; rows of 0 give 0."""
    q, k, v, g = make(3, 1, 2, 4, 128, 64)
    q, k = 7.0 * q, k / 64
    k[2], q[1] = 0, 0
    beta, pool = beta_of(v), pool_of(3, 4, 128, 64)
    o = check(q, k, v, g, pool.clone(), beta, l2norm=True)
    assert not o[1].any()
    by_hand = tkq.gated_delta_rule_step(*(F.normalize(x.float(), dim=-1).to(BF16) for x in (q, k)), v, g, beta, pool)
    assert (by_hand.double() - o.double()).norm() <= 2**-6 * o.double().norm()


def test_results_in_out():
    q, k, v, g = make(3, 2, 2, 4, 64, 64)
    pool, wide = pool_of(3, 4, 64, 64), torch.full((3, 4, 4, 128), 7.0, device="cuda", dtype=BF16)
    out = wide[:, 1:3, :, 64:]
    assert check(q, k, v, g, pool, out=out) is out
    out.fill_(7.0)
    assert (wide == 7.0).all()


def test_views_are_read_in_place():
    """Slices of a packed tensor, beta and gates of any strides, one head for all."""
    packed = F.normalize(torch.randn(3, 2, 4, 192, device="cuda"), dim=-1).to(BF16)
    q, k, v = packed.split(64, -1)
    g, beta = (torch.rand(4, 2, 3, device="cuda").permute(2, 1, 0) for _ in range(2))
    k, rows = k[:, :, :1].expand(-1, -1, 4, -1), torch.arange(12, device="cuda")[::4]
    pool = pool_of(9, 4, 64, 64)
    given = q, k, v, -g, beta
    found = tkq.gated_delta_rule_step(*given, one := pool.clone(), state_indices=rows)
    again = tkq.gated_delta_rule_step(*(x.contiguous() for x in given), two := pool.clone(),
                                      state_indices=rows.contiguous())
    assert torch.equal(found, again) and torch.equal(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("state", [F32, BF16])
def test_a_pool_of_more_than_2_31_elements(state):
    """The last rows, beside a small pool with the same states."""
    row = 4 * 128 * 128
    rows = (1 << 31) // row + 40
    if torch.cuda.mem_get_info()[0] < 1.1 * rows * row * state.itemsize:
        pytest.skip("no room for the pool")
    pool = torch.empty(rows, 4, 128, 128, device="cuda", dtype=state)
    q, k, v, g = make(6, 1, 2, 4, 128, 128)
    beta, at = beta_of(v), torch.tensor([rows - 1, 0, rows - 39, rows, 5, 1 << 40], device="cuda")
    small = pool_of(6, 4, 128, 128, state).contiguous()
    for n in (0, 1, 2, 4):
        pool[at[n]] = small[n]
    own = torch.tensor([0, 1, 2, -1, 4, -1], device="cuda")
    found = tkq.gated_delta_rule_step(q, k, v, g, beta, pool, state_indices=at)
    want = tkq.gated_delta_rule_step(q, k, v, g, beta, small, state_indices=own)
    assert torch.equal(found, want)
    assert all(torch.equal(pool[at[n]], small[n]) for n in (0, 1, 2, 4))

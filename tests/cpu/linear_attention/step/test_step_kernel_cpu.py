"""The kernel of steps, its own methods with a warp's numbers in the place of a lane's, against the reference in
float64: which numbers of a state a lane has, sums over lanes, rows of the pool. Each address is checked against its
tensor, and every result and state is written once."""
import math

import pytest
import torch

from tests.helpers.emulation import steps
from tkq.linear_attention.step.kernel import Operands
from tkq.linear_attention.step.launch import Given, Options, spec_of
from tkq.linear_attention.step.plan import plan
from tkq.reference import linear_steps as reference

BF16, F32 = torch.bfloat16, torch.float32
ROWS = 5  # of the pool


def make(K, V, T=1, gate="token", N=2, H=1, HV=2):
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(N, T, H, K), dim=-1).to(BF16) for _ in range(2))
    g = {"none": (), "head": (HV,), "token": (N, T, HV), "channel": (N, T, HV, K)}[gate]
    return q, k, torch.randn(N, T, HV, V).to(BF16), -torch.rand(g) if g else None


def pool_of(layout, state, HV, K, V, v_first):
    """States (ROWS, HV, K, V), or (V, K), with `layout` as StepSpec has it."""
    pool = torch.randn(ROWS, HV, K, V).to(state)
    if layout == "k":
        pool = pool.mT.contiguous().mT
    if layout == "any":
        wide = torch.randn(ROWS, HV, K + 1, V + 3).to(state)
        wide[:, :, :K, :V] = pool
        pool = wide[:, :, :K, :V]
    return pool.mT if v_first else pool


def launched(given, options, scale, warps=1, many=False):
    """o of a launch on CPU tensors; many: as one of many states has it. What was written is written once; unwritten
    results are NaN."""
    o = torch.full_like(given.v, math.nan)
    given = given._replace(o=o)
    spec = spec_of(given, options)
    written = steps.run(spec, Operands(*given), scale, plan(spec, many), warps)
    for offsets in written.values():
        assert len(set(offsets)) == len(offsets), "written twice"
    assert len(written[id(o)]) == o.numel()
    return o


def check(given, options, scale, beta, exact_state, warps=1, many=False):
    """Against the reference in float64; exact_state: is the pool float32?"""
    wide, found = given.state.double(), given.state
    v_first, l2norm = options.v_first, options.l2norm
    want = reference.linear_attn_step(given.q.double(), given.k.double(), given.v.double(), given.g, wide, scale,
                                      given.indices, given.accepted, v_first, beta, l2norm)
    o = launched(given, options, scale, warps, many)
    assert (o.double() - want).norm() <= 2**-8 * want.norm()
    assert (found.double() - wide).norm() <= (2e-7 if exact_state else 2**-8) * wide.norm()
    return o


@pytest.mark.parametrize("K, V, T, gate, delta, state, layout, v_first, l2norm", [
    (128, 32, 1, "token", True, F32, "v", False, True),
    (64, 64, 2, "channel", False, F32, "v", True, False),
    (128, 32, 3, "channel", True, F32, "k", True, True),
    (48, 48, 2, "head", False, BF16, "v", False, False),
    (80, 32, 1, "none", True, BF16, "k", True, False),
    (144, 32, 1, "token", True, BF16, "k", False, True),
    (208, 32, 1, "token", True, F32, "v", False, True),
    (144, 48, 2, "channel", True, F32, "any", False, True),
    (32, 32, 1, "token", True, BF16, "any", True, False)])
def test_states(K, V, T, gate, delta, state, layout, v_first, l2norm):  # noqa: PLR0913
    q, k, v, g = make(K, V, T, gate)
    beta = torch.rand(v.shape[:3]) if delta else None
    pool = pool_of(layout, state, 2, K, V, v_first)
    given = Given(q, k, v, None, g, beta, pool, torch.tensor([3, 0]))
    spec = spec_of(given, Options(v_first, l2norm))
    assert (spec.layout, spec.several) == (layout, T > 1)
    slices = V // plan(spec).columns
    check(given, Options(v_first, l2norm), 0.3, beta, state == F32, warps=2 if slices % 2 == 0 else 1)


@pytest.mark.parametrize("K, V, gate, delta, layout, v_first, k_warps", [
    (128, 128, "token", True, "v", False, 4), (128, 128, "channel", True, "v", True, 4),
    (64, 64, "head", False, "v", False, 2), (96, 128, "none", True, "v", False, 3),
    (128, 96, "token", False, "v", True, 2), (128, 32, "channel", False, "k", True, 1)])
def test_states_of_many(K, V, gate, delta, layout, v_first, k_warps):
    """As launches of many states have them: warps that share a slice add up theirs in shared memory. A sequence without
    a row is skipped by all of them."""
    q, k, v, g = make(K, V, gate=gate)
    beta = torch.rand(v.shape[:3]) if delta else None
    pool = pool_of(layout, F32, 2, K, V, v_first)
    given, options = Given(q, k, v, None, g, beta, pool, torch.tensor([3, -1])), Options(v_first, delta)
    config = plan(spec_of(given, options), True)
    assert config != plan(spec_of(given, options)) and config.k_warps == k_warps
    assert not check(given, options, 0.3, beta, True, many=True)[1].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_that_the_pool_does_not_have(dtype):
    """-1, several times, and values far outside: o is 0 and nothing else is read or written."""
    top = 1 << 31 if dtype == torch.int32 else 1 << 63
    q, k, v, g = make(32, 32, N=9)
    rows = torch.tensor([4, -1, ROWS, 1, -1, top - 1, -top, -(1 << 30), 0], dtype=dtype)
    pool = torch.randn(ROWS, 2, 32, 32)
    o = check(Given(q, k, v, None, g, None, pool, rows), Options(), 1.0, None, True)
    assert torch.equal(o.abs().flatten(1).any(1), (rows >= 0) & (rows < ROWS))


def test_without_indices_sequences_have_the_first_rows():
    q, k, v, g = make(32, 32, N=3)
    pool = torch.randn(ROWS, 2, 32, 32)
    behind = pool[3:].clone()
    check(Given(q, k, v, None, g, None, pool), Options(), 1.0, None, True)
    assert torch.equal(pool[3:], behind)


def test_accepted_tokens():
    """Numbers that are not from 1 to T, rows that are not there: before the first token, and behind others."""
    q, k, v, g = make(32, 32, T=3, N=7)
    rows = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, -1], [8, 99, 9], [10, 11, 12], [13, 14, 15], [-1, 16, 17]])
    accepted = torch.tensor([3, 1, 2, 2, 0, 4, 1])
    pool = torch.randn(18, 2, 32, 32)
    before = pool.clone()
    o = check(Given(q, k, v, None, g, None, pool, rows, accepted), Options(), 1.0, None, True)
    assert o.abs().flatten(1).any(1).tolist() == [True, True, True, False, False, False, False]
    same = (pool == before).flatten(1).all(1)
    assert same.tolist() == [False] * 8 + [True] * 10


@pytest.mark.parametrize("tokens, z, skip, bias, softplus, expanded", [
    (0, True, (2,), True, True, ()), (0, False, (2, 48), True, True, ("A", "dt", "dt_bias")),
    (2, True, (2, 48), False, False, ("dt",)), (3, False, None, True, True, ())])
def test_state_spaces(tokens, z, skip, bias, softplus, expanded):
    torch.manual_seed(1)
    N, H, P, K, lead = 2, 2, 48, 64, (tokens,) if tokens else ()
    x, gate = (torch.randn(N, *lead, H, P).to(BF16) for _ in range(2))
    B, C = (torch.randn(N, *lead, 1, K).to(BF16) / 8 for _ in range(2))
    dt, A, shift = torch.randn(N, *lead, H).to(BF16), -torch.rand(H), torch.randn(H)
    dt, A, shift = (t[..., None].expand(*t.shape, P) if name in expanded else t
                    for name, t in (("dt", dt), ("A", A), ("dt_bias", shift)))
    A = A[..., None].expand(H, P, K) if A.dim() == 2 else A
    D, shift, gate = torch.randn(skip) if skip else None, shift if bias else None, gate if z else None
    pool, rows = torch.randn(ROWS, H, P, K), torch.tensor([4, -1])
    wide = pool.double()
    want = reference.ssd_step(wide, x.double(), dt, A, B.double(), C.double(), D, gate, shift, softplus, rows)
    y = launched(Given(C, B, x, None, A, dt, pool, rows, None, D, gate, shift), Options(True, False, softplus), 1.0)
    assert (y.double() - want).norm() <= 2**-8 * want.norm() and not y[1].any()
    assert (pool.double() - wide).norm() <= 3e-7 * wide.norm()


def test_softplus_keeps_its_digits():
    x = torch.tensor([-80.0, -30.0, -17.0, -1.0, 0.0, 1.0, 20.0, 90.0] * 4)
    found = steps.modules(steps.Machine()).token.softplus(x)
    want = torch.logaddexp(x.double(), torch.zeros(()).double())
    assert ((found.double() - want).abs() <= 1e-5 * want).all()

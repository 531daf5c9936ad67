"""Steps of linear attention on a GPU: their inputs, and how results and states are judged."""
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.reference import linear_steps as reference
from tkq.testing import assert_2x

BF16, F32 = torch.bfloat16, torch.float32
ROWS = 7  # that a pool has more than there are sequences


def make(N, T, H, HV, K, V, gate="token", dtype=BF16, decay=0.5):  # noqa: PLR0913
    """q, k, v, g; keys of length 1."""
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(N, T, H, K, device="cuda"), dim=-1).to(dtype) for _ in range(2))
    g = {"none": (), "head": (HV,), "token": (N, T, HV), "channel": (N, T, HV, K)}[gate]
    return q, k, torch.randn(N, T, HV, V, device="cuda").to(dtype), -decay * torch.rand(g, device="cuda") if g else None


def beta_of(v, dtype=F32, most=1.0):
    return (most * torch.rand(v.shape[:3], device="cuda")).to(dtype)


def pool_of(rows, HV, K, V, state=F32, layout="v", v_first=False):
    """States (rows, HV, K, V), or (V, K): `layout` as `StepSpec` has it, with NaN between the matrices of heads, and
    for "any" between rows of a matrix."""
    first, second = (K, V) if layout != "k" else (V, K)
    more = 3 if layout == "any" else 0
    wide = torch.full((rows, HV + 1, first + more, second + more), torch.nan, device="cuda", dtype=state)
    pool = wide[:, :HV, :first, :second].copy_(torch.randn(rows, HV, first, second, device="cuda"))
    return pool if (layout == "k") == v_first else pool.mT


def rows_of(N, rows, dtype=torch.int64):
    """A row of the pool each, in no order."""
    return torch.randperm(rows, device="cuda")[:N].to(dtype)


def judge(o, state, before, run, tokens, what=""):
    """o and the pool beside `run(wide, pool)`, the reference in float64, or in float32 with what it rounds, which
    returns o and updates the pool. A state is off by as many roundings as there were tokens."""
    exact, narrow = before.double(), before.float()
    want, peer = run(True, exact), run(False, narrow)
    assert_2x(o, want, peer.to(o.dtype), what=f"{what} o")
    assert_2x(state.flatten(0, 2), exact.flatten(0, 2), narrow.to(state.dtype).flatten(0, 2),
              ulps=4 * tokens + 4, bias_ulps=2 * tokens, what=f"{what} state")


def check(q, k, v, g, state, beta=None, scale=None, indices=None, accepted=None, v_first=False,  # noqa: PLR0913
          l2norm=False, out=None):
    """A step, judged. Returns o; the pool is updated."""
    before = state.clone()
    with poisoned():
        if beta is None:
            o = tkq.linear_attn_step(q, k, v, g, state, scale, indices, num_accepted_tokens=accepted,
                                     state_v_first=v_first, out=out)
        else:
            o = tkq.gated_delta_rule_step(q, k, v, g, beta, state, scale, l2norm, indices, num_accepted_tokens=accepted,
                                          state_v_first=v_first, out=out)

    def run(wide, pool):
        given = (x.double() if wide else x.float() for x in (q, k, v))
        return reference.linear_attn_step(*given, g, pool, scale, indices, accepted, v_first, beta, l2norm)

    judge(o, state, before, run, q.shape[1])
    return o


def check_ssd(state, x, *given, dt_softplus=False, indices=None, accepted=None, out=None):
    """A state space's step, judged. given: dt, A, B, C, D, z, dt_bias."""
    before = state.clone()
    with poisoned():
        y = tkq.ssd_step(state, x, *given, dt_softplus, indices, num_accepted_tokens=accepted, out=out)

    def run(wide, pool):
        own = x.double() if wide else x.float()
        return reference.ssd_step(pool, own, *given, dt_softplus, indices, accepted)

    judge(y, state, before, run, x.shape[1] if x.dim() == 4 else 1)
    return y

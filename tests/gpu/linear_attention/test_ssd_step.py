"""tkq.ssd_step against the recurrence in float64, beside float32."""
import pytest
import torch

import tkq
from tests.helpers.linear_steps import BF16, F32, check_ssd, pool_of, rows_of
from tkq.linear_attention.step.plan import most_few, plan
from tkq.linear_attention.step.spec import StepSpec


def make(N, H, G, P, K, T=0, dtype=BF16, z=True):
    """x, dt, A, B, C, D, z, dt_bias, as Mamba-2 has them."""
    torch.manual_seed(0)
    tokens = (N, T) if T else (N,)

    def randn(*shape):
        return torch.randn(*tokens, *shape, device="cuda")

    x, gate, dt = randn(H, P).to(dtype), randn(H, P).to(dtype) if z else None, randn(H).to(dtype)
    B, C = ((randn(G, K) * K**-0.5).to(dtype) for _ in range(2))
    A, D, bias = -4 * torch.rand(H, device="cuda"), torch.randn(H, device="cuda"), torch.randn(H, device="cuda") - 2
    return x, dt, A, B, C, D, gate, bias


@pytest.mark.parametrize("state", [F32, BF16])
@pytest.mark.parametrize("P, K", [(64, 128), (64, 64), (32, 256), (80, 48), (128, 16 * 9)])
@pytest.mark.sampled(when=lambda state, P, K: (P, K) in ((64, 128), (80, 48)) or state == F32)
def test_sizes(state, P, K):
    given = make(5, 4, 2, P, K)
    pool = pool_of(9, 4, K, P, state, "k", True)
    check_ssd(pool, *given, dt_softplus=True, indices=rows_of(5, 9, torch.int32))


@pytest.mark.parametrize("P", [64, pytest.param(80, marks=pytest.mark.slow)])
def test_many_states(P, K=128):
    """As kernels of their own have them; some sequences have no row in the pool."""
    spec = StepSpec("bf16", K, P, layout="k")
    assert most_few(spec) < 4 * 300 and plan(spec, many=True) != plan(spec)
    rows = rows_of(300, 310, torch.int32)
    rows[::3] = -1
    y = check_ssd(pool_of(310, 4, K, P, F32, "k", True), *make(300, 4, 2, P, K), dt_softplus=True, indices=rows)
    assert not y[::3].any()


@pytest.mark.parametrize("T", [1, 2, 4])
def test_tokens(T):
    given = make(3, 4, 1, 64, 128, T)
    check_ssd(pool_of(3, 4, 128, 64, F32, "k", True), *given, dt_softplus=True)


def test_expanded_arguments():
    """As Mamba-2's own step has them, with strides of 0; a D for each row of x."""
    x, dt, A, B, C, D, z, bias = make(4, 6, 1, 64, 128)
    one, two = (pool_of(4, 6, 128, 64, F32, "k", True) for _ in range(2))
    two.copy_(one)
    y = tkq.ssd_step(one, x, dt, A, B, C, D, z, bias, True)
    again = tkq.ssd_step(two, x, dt[..., None].expand(4, 6, 64), A[:, None, None].expand(6, 64, 128), B, C,
                         D[:, None].expand(6, 64), z, bias[:, None].expand(6, 64), True)
    assert torch.equal(y, again) and torch.equal(one, two)
    check_ssd(one, x, dt, A, B, C, torch.randn(6, 64, device="cuda"), z, bias, dt_softplus=True)


@pytest.mark.parametrize("which", ["without", "wide", "fp16"])
def test_types_and_options(which):
    x, dt, A, B, C, D, z, bias = make(3, 4, 2, 64, 64, dtype=torch.float16 if which == "fp16" else BF16)
    pool = pool_of(3, 4, 64, 64, F32, "k", True)
    if which == "without":
        check_ssd(pool, x, dt.abs() / 8, A, B, C, None, None, None)
    elif which == "wide":
        check_ssd(pool, x, dt.float(), A.to(BF16), B, C, D.to(BF16), None, bias.to(BF16), dt_softplus=True)
    else:
        check_ssd(pool, x, dt, A, B, C, D, z, bias, dt_softplus=True)


def test_softplus_of_all_sizes():
    x, _, A, B, C, D, z, _ = make(8, 2, 1, 32, 32)
    dt = torch.tensor([-90.0, -30.0, -17.0, -3.0, 0.0, 1.0, 19.0, 60.0], device="cuda")[:, None].expand(8, 2)
    check_ssd(pool_of(8, 2, 32, 32, F32, "k", True), x, dt, A, B, C, D, z, None, dt_softplus=True)


def test_rows():
    """Those that the pool does not have; drafts of which some were accepted."""
    given = make(5, 4, 1, 64, 64)
    pool = pool_of(6, 4, 64, 64, F32, "k", True)
    before = pool.clone()
    y = check_ssd(pool, *given, dt_softplus=True, indices=torch.tensor([3, -1, 6, 0, -7], device="cuda"))
    assert y.flatten(1).any(1).tolist() == [True, False, False, True, False]
    assert all(torch.equal(pool[row], before[row]) for row in (1, 2, 4, 5))
    given = make(3, 4, 1, 64, 64, 2)
    rows, accepted = torch.tensor([[0, 1], [2, 3], [4, 5]], device="cuda"), torch.tensor([2, 1, 3], device="cuda")
    y = check_ssd(pool, *given, dt_softplus=True, indices=rows, accepted=accepted)
    assert y.flatten(1).any(1).tolist() == [True, True, False]


def test_a_hundred_steps_are_linear_attention():
    """With u = dt x and g = A dt, of v first."""
    x, dt, A, B, C, *_ = make(2, 4, 2, 64, 128, 100)
    dt = dt.float().abs() / 8
    pool = torch.zeros(2, 4, 64, 128, device="cuda")
    y = torch.stack([tkq.ssd_step(pool, *(t[:, i] for t in (x, dt)), A, *(t[:, i] for t in (B, C)))
                     for i in range(100)], 1)
    all_at_once = torch.zeros_like(pool)
    again = tkq.ssd_step(all_at_once, x, dt, A, B, C)
    assert (y.double() - again.double()).norm() <= 2**-8 * y.double().norm()
    assert (pool - all_at_once).norm() <= 1e-5 * pool.norm()
    from tkq.reference.linear_attention import linear_attn

    want, last = linear_attn(C.double(), B.double(), dt[..., None].double() * x.double(), dt * A, 1.0)
    assert (y.double() - want).norm() <= 2**-8 * want.norm()
    assert (pool.double() - last.mT).norm() <= 1e-5 * last.norm()


def test_replayed_and_in_a_graph():
    given = make(4, 4, 1, 64, 128)
    pool, rows = pool_of(9, 4, 128, 64, F32, "k", True), rows_of(4, 9)
    pools = [pool.clone() for _ in range(4)]
    found = [tkq.ssd_step(p, *given, True, rows) for p in pools]
    assert all(torch.equal(y, found[0]) for y in found) and all(torch.equal(p, pools[0]) for p in pools)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tkq.ssd_step(pool, *given, True, rows)
    graph.replay()
    assert torch.equal(y, found[0]) and torch.equal(pool, pools[0])


def test_opcheck():
    given = make(4, 4, 1, 64, 64)
    pool = torch.randn(6, 4, 64, 64, device="cuda")
    torch.library.opcheck(torch.ops.tkq.ssd_step.default, (pool, *given, True, rows_of(4, 6), None))

"""Steps as calls: replayed, in CUDA graphs, compiled, in place."""
import pytest
import torch

import tkq
from tests.helpers.linear_steps import BF16, beta_of, make, pool_of, rows_of


def delta(N=4, K=128, V=128):
    """(q, k, v, g, beta), a pool, rows."""
    q, k, v, g = make(N, 1, 2, 4, K, V)
    return (q, k, v, g, beta_of(v)), pool_of(N + 3, 4, K, V), rows_of(N, N + 3, torch.int32)


def step(given, pool, rows):
    return tkq.gated_delta_rule_step(*given, pool, None, True, rows)


def test_replayed_calls_are_launched_ones():
    given, pool, rows = delta()
    pools = [pool.clone() for _ in range(5)]
    found = [step(given, p, rows) for p in pools]
    assert all(torch.equal(o, found[0]) for o in found) and all(torch.equal(p, pools[0]) for p in pools)


def test_a_replayed_call_that_writes_to_out():
    given, pool, rows = delta()
    want, pools = step(given, pool.clone(), rows), [pool.clone() for _ in range(4)]
    for p in pools:
        out = torch.full_like(want, torch.nan)
        assert tkq.gated_delta_rule_step(*given, p, None, True, rows, out=out) is out and torch.equal(out, want)
    assert all(torch.equal(p, pools[0]) for p in pools)


def test_a_replayed_call_refuses_out_where_values_are():
    given, pool, rows = delta()
    given = *given[:2], given[2].contiguous(), *given[3:]
    for _ in range(3):
        step(given, pool.clone(), rows)
        tkq.gated_delta_rule_step(*given, pool.clone(), None, True, rows, out=torch.empty_like(given[2]))
    with pytest.raises(ValueError, match="gated_delta_rule_step: out shares memory with v"):
        tkq.gated_delta_rule_step(*given, pool.clone(), None, True, rows, out=given[2].view_as(given[2]))


def test_the_same_bits_in_each_run():
    given, pool, rows = delta(300)
    found = [(step(given, p, rows), p) for p in (pool.clone() for _ in range(4))]
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0]))


def test_in_a_cuda_graph():
    """With other numbers and other rows, which nothing looks at before."""
    given, pool, rows = delta()
    step(given, pool.clone(), rows)
    graph, start = torch.cuda.CUDAGraph(), pool.clone()
    with torch.cuda.graph(graph):
        found = step(given, pool, rows)
    for x in given:
        x.copy_(x.flip(0) * 0.5)
    rows.copy_(torch.tensor([6, -1, 2, 3], device="cuda"))
    for _ in range(2):
        graph.replay()
        want = step(given, start, rows)
        assert torch.equal(found, want) and torch.equal(pool, start) and not found[1].any()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_in_one_graph(backend):
    given, pool, rows = delta()
    one, two = pool.clone(), pool.clone()
    compiled = torch.compile(lambda *x: step(x[:5], *x[5:]) + 1, fullgraph=True, backend=backend)
    for _ in range(3):
        assert torch.equal(compiled(*given, one, rows), step(given, two, rows) + 1) and torch.equal(one, two)


def test_opcheck():
    given, pool, rows = delta()
    step(given, pool.clone(), rows)  # the first call brings the ops
    torch.library.opcheck(torch.ops.tkq.gated_delta_rule_step.default,
                          (*given, pool.contiguous(), None, True, rows, None, False))
    q, k, v, g, _ = given
    torch.library.opcheck(torch.ops.tkq.linear_attn_step.default,
                          (q, k, v, g, pool.contiguous(), None, rows, None, False))


def test_a_pool_that_a_backward_needs_has_changed():
    given, pool, rows = delta()
    pool = pool.clone()
    w = torch.ones(1, device="cuda", requires_grad=True)
    for _ in range(3):  # launched and replayed
        y = (pool * w).sum()
        with torch.no_grad():
            step(given, pool, rows)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_no_gradient():
    given, pool, rows = delta()
    given[2].requires_grad_()
    with pytest.raises(NotImplementedError, match="gated_delta_rule_step: v requires a gradient"):
        step(given, pool, rows)
    with torch.no_grad():
        step(given, pool, rows)


def test_in_inference_mode():
    with torch.inference_mode():
        given, pool, rows = delta()
        step(given, pool, rows)
    with pytest.raises(RuntimeError, match="gated_delta_rule_step: state: was made under torch.inference_mode"):
        step([x.clone() for x in given], pool, rows.clone())


def test_autocast():
    given, pool, rows = delta()
    wide = [x.float() for x in given[:3]]
    one, two = pool.clone(), pool.clone()
    with torch.autocast("cuda", BF16):
        found = step((*wide, *given[3:]), one, rows)
    assert torch.equal(found, step(given, two, rows)) and torch.equal(one, two)

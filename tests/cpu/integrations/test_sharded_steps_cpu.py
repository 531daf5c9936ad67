"""Steps on DTensors: a pool of states is written to where it is, and one that would have to move is refused."""
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tkq
from tests.helpers.ops.every_op_sharded import one_rank

BF16 = torch.bfloat16


def delta(N=4):
    """(q, k, v, g, beta), states."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(N, 1, 2, 32), dim=-1).to(BF16) for _ in range(2))
    given = q, k, torch.randn(N, 1, 4, 48).to(BF16), -torch.rand(N, 1, 4), torch.rand(N, 1, 4)
    return given, torch.randn(N, 4, 32, 48)


@pytest.mark.parametrize("tokens, states", [(Shard(0), Shard(0)), (Shard(2), Shard(1)), (Replicate(), Replicate()),
                                            (Replicate(), Shard(1)), (Shard(2), Replicate())])
def test_a_pool_stays_where_it_is(tokens, states):
    given, pool = delta()
    with one_rank("cpu") as mesh:
        own = distribute_tensor(pool.clone(), mesh, [states])
        o = tkq.gated_delta_rule_step(*(distribute_tensor(x, mesh, [tokens]) for x in given), own)
        assert own.placements == (states,)
        want = tkq.gated_delta_rule_step(*given, pool)
        assert torch.equal(o.full_tensor(), want) and torch.equal(own.full_tensor(), pool)


def test_a_pool_that_would_have_to_move_is_refused():
    given, pool = delta()
    with one_rank("cpu") as mesh:
        given = [distribute_tensor(x, mesh, [Replicate()]) for x in given]
        before, own = pool.clone(), distribute_tensor(pool, mesh, [Shard(3)])
        with pytest.raises((NotImplementedError, RuntimeError), match="gated_delta_rule_step: state: is placed as"):
            tkq.gated_delta_rule_step(*given, own)
        assert torch.equal(own.full_tensor(), before)
        rows = distribute_tensor(torch.arange(4), mesh, [Replicate()])
        with pytest.raises((NotImplementedError, RuntimeError), match="written to where it is"):
            tkq.gated_delta_rule_step(*given, distribute_tensor(pool, mesh, [Shard(0)]), state_indices=rows)


def test_a_state_space_by_heads():
    torch.manual_seed(0)
    x, dt, A = torch.randn(3, 4, 48).to(BF16), torch.rand(3, 4), -torch.rand(4)
    B, C, pool = *(torch.randn(3, 2, 32).to(BF16) for _ in range(2)), torch.randn(3, 4, 48, 32)
    with one_rank("cpu") as mesh:
        place = lambda t, d: distribute_tensor(t, mesh, [Shard(d)])
        own = place(pool.clone(), 1)
        y = tkq.ssd_step(own, place(x, 1), place(dt, 1), place(A, 0), place(B, 1), place(C, 1))
        assert torch.equal(y.full_tensor(), tkq.ssd_step(pool, x, dt, A, B, C))
        assert y.placements == (Shard(1),) and torch.equal(own.full_tensor(), pool)

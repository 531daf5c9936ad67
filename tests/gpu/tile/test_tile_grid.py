"""The grid's barrier, and stores into another block of the cluster."""
import pytest
import torch

from tests.helpers.tile import cases
from tests.helpers.tile.run import normal, poisoned, run, same, small_ints


@pytest.mark.parametrize("n", (1, 2, 131, 132))
def test_grid_barrier(n):
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for seed in range(20):
        x, between, out = small_ints("fp32", n, seed=seed), poisoned("fp32", n), poisoned("fp32", n)
        run("grid:build_grid", (), x, between, out, counter)
        same(out, x.sum().expand(n).contiguous())
        assert counter.item() == 0, "ready for the next launch"


@pytest.mark.parametrize("n", (1, 2, 132, 3000))
def test_grid_ticket(n):
    """Each block gets a number of its own, and the last one sees what the others wrote."""
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for seed in range(10):
        x, between, total = small_ints("fp32", n, seed=seed), poisoned("fp32", n), poisoned("fp32", 1)
        tickets = poisoned("int32", n)
        run("grid:build_ticket", (), x, between, tickets, total, counter)
        assert sorted(tickets.tolist()) == list(range(n))
        assert total.item() == x.sum().item()
        assert counter.item() == 0, "ready for the next launch"


@pytest.mark.parametrize("cluster,floats", cases.REMOTE)
def test_store_remote(cluster, floats):
    x, out = normal("fp32", cluster, floats), poisoned("fp32", cluster, cluster, floats)
    run("grid:build_store_remote", (cluster, floats), x, out)
    same(out, x.expand(cluster, cluster, floats).contiguous())


@pytest.mark.parametrize("floats", cases.SENT)
def test_bulk_send(floats):
    x, out = normal("fp32", 2, floats), poisoned("fp32", 3, 2, floats)
    run("grid:build_bulk_send", (floats,), x, out)
    same(out, torch.stack([x.flip(0) * turn for turn in (1, 2, 3)]))

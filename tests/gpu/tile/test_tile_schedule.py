"""Every task is dealt exactly once, whatever their number and the blocks'; the LCF template with each schedule."""
import pytest
import torch

from tests.helpers.tile import cases
from tests.helpers.tile.run import poisoned, run, same, small_ints


def counter_for(kind):
    return torch.zeros(1, dtype=torch.int32, device="cuda") if kind == "dynamic" else None


@pytest.mark.parametrize("kind,cluster,capped", cases.DEALS)
@pytest.mark.parametrize("tasks", (1, 2, 3, 131, 132, 133, 5000))
def test_each_task_once(kind, cluster, capped, tasks):
    counter = counter_for(kind)
    for blocks in (cluster, 4, 132, 264):  # beyond ``tasks`` too, where not capped
        done, first = torch.zeros(tasks, dtype=torch.int32, device="cuda"), poisoned("int32", tasks)
        for launch in range(1, 4):
            run("schedule:build_deal", (kind, cluster, capped), done, first, counter, blocks)
            assert (done == launch * cluster).all(), f"{blocks} blocks, launch {launch}: {done.unique().tolist()} times"
            assert counter is None or counter.item() == 0, f"{blocks} blocks: the counter is left at {counter.item()}"
        assert (first % cluster == 0).all(), f"{blocks} blocks: first blocks are {first.unique().tolist()}"
        if kind == "static" and not capped:
            number = torch.arange(tasks, dtype=torch.int32, device="cuda")
            same(first, number % blocks * cluster, "block b takes b, b + n, ..")


@pytest.mark.parametrize("shape", ((8, 16, 16), (513, 208, 336)))
def test_a_schedule_of_ones_own(shape):
    check_lcf("build_own_schedule", ("static", 2, 3, 1), None, shape)


@pytest.mark.parametrize("kind,consumers,stages,lag", cases.LCFS)
@pytest.mark.parametrize("shape", ((64, 64, 64), (8, 16, 16), (100, 48, 16), (513, 208, 336), (1500, 1040, 128)))
def test_load_compute_finish(kind, consumers, stages, lag, shape):
    check_lcf("build_lcf", (kind, consumers, stages, lag), counter_for(kind), shape)


def check_lcf(builder, options, counter, shape):
    m, n, k = shape
    a, b = small_ints("bf16", m, k, most=2), small_ints("bf16", n, k, most=2, seed=1)
    expected = (a.float() @ b.float().t()).to(torch.bfloat16)
    for blocks in (132, 5):
        c = poisoned("bf16", m, n)
        run(f"schedule:{builder}", options, a, b, c, counter, blocks)
        same(c + 0.0, expected + 0.0, f"{blocks} blocks")  # -0 is 0
        assert counter is None or counter.item() == 0

"""Which role waits for which: rings, pipes, mailboxes, turns, barriers. Results show that none went too early."""
import pytest
import torch

from tests.helpers.tile import cases
from tests.helpers.tile.run import normal, poisoned, run, same, small_ints


@pytest.mark.parametrize("stages,consumers,registers", cases.PIPES)
@pytest.mark.parametrize("n", (1, 2, 3, 7, 300))
def test_pipe(stages, consumers, registers, n):
    x, out = small_ints("fp32", n, 64, 32), poisoned("fp32", consumers, 64, 32)
    run("sync:build_pipe", (stages, consumers, registers), x, out)
    weights = torch.arange(1, n + 1, device="cuda", dtype=torch.float64)
    expected = (x.double() * weights[:, None, None]).sum(0).float()
    for wg in range(consumers):
        assert torch.equal(out[wg], expected), f"warpgroup {wg}"


@pytest.mark.parametrize("stages,producers", ((1, 1), (1, 2), (3, 3)))
@pytest.mark.parametrize("n", (1, 2, 4, 500))
def test_commit(stages, producers, n):
    x, y = normal("fp32", n, 32 * producers), poisoned("fp32", n, 32 * producers)
    run("sync:build_commit", (stages, producers), (x, y))
    same(y, -x)


@pytest.mark.parametrize("warps", cases.PRODUCERS)
@pytest.mark.parametrize("n", (1, 3, 300))
def test_several_producer_warps(warps, n):
    x, y = normal("fp32", n, 32 * warps), poisoned("fp32", n, 32 * warps)
    run("sync:build_producers", (warps,), x, y)
    same(y, -x)


@pytest.mark.parametrize("stages,warps", ((1, 4), (2, 7)))
@pytest.mark.parametrize("n", (1, 2, 3, 400))
def test_mailbox(stages, warps, n):
    x = torch.arange(n, dtype=torch.int32, device="cuda") * 7 - 3
    out = poisoned("int32", warps, n)
    run("sync:build_mailbox", (stages, warps), (x, out))
    same(out, x.expand(warps, n).contiguous())


@pytest.mark.parametrize("groups", (1, 2, 3))
@pytest.mark.parametrize("n", (1, 2, 500))
def test_turns(groups, n):
    out = poisoned("int32", groups, n)
    run("sync:build_turns", (groups,), (out,))
    turn = torch.arange(n * groups, dtype=torch.int32, device="cuda").view(n, groups)
    same(out, turn.t().contiguous())


def test_turns_that_are_not_enabled():
    out = poisoned("int32", 2, 50)
    run("sync:build_no_turns", (), (out,))
    same(out, torch.arange(50, dtype=torch.int32, device="cuda").expand(2, 50).contiguous())


@pytest.mark.parametrize("stages,start", ((1, 0), (2, 0), (3, 5)))
def test_ring(stages, start):
    out = poisoned("int32", 20, 2)
    run("sync:build_ring", (stages, start), (out,))
    assert out.tolist() == [[i % stages, i // stages % 2] for i in range(start, start + 20)]


def test_semaphores():
    x, out = normal("fp32", 128), poisoned("fp32", 128)
    run("sync:build_semaphores", (), (x, out))
    same(out, x.flip(0).contiguous())


def test_named_barrier():
    x, out = normal("fp32", 256), poisoned("fp32", 256)
    run("sync:build_named_barrier", (), (x, out))
    same(out, x.flip(0).contiguous())


@pytest.mark.parametrize("cluster,split", ((2, False), (4, True)))
def test_cluster_barrier(cluster, split):
    x, between, out = small_ints("fp32", 512, 128), poisoned("fp32", 512, 128), poisoned("fp32", 512, 128)
    run("sync:build_cluster", (cluster, split), x, between, out)
    following = x.view(-1, cluster, 128).roll(-1, 1).reshape(512, 128)
    rank = torch.arange(512, device="cuda")[:, None] % cluster
    assert torch.equal(out, following * 10.0 + rank)


def test_ranks_of_threads():
    out = poisoned("int32", 384, 5)
    run("sync:build_who", (), (out,))
    assert out.tolist() == [[t // 32, t // 128, t % 32, t % 128, int(t // 32 % 4 == 0)] for t in range(384)]

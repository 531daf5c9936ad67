"""bench.ops.linear_attention where no GPU is needed: its cases at tiny shapes, and the peer that is plain PyTorch."""
import pytest
import torch

from bench.ops import linear_attention
from bench.peers import common
from bench.peers import linear_attention as peers


@pytest.fixture(autouse=True)
def without_gradients():
    """As the harness calls."""
    with torch.no_grad():
        yield


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(linear_attention, "DIM", 32)
    monkeypatch.setattr(linear_attention, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    monkeypatch.setattr(peers, "_compiled", lambda f: f)


@pytest.mark.parametrize("section", ("forward", "training"))
def test_ours_and_torch_agree(tiny, section):
    jobs = list(linear_attention.BENCH.sections[section](((2, 192, 2),)))
    assert len({job.question.shape for job in jobs}) == len(jobs) == 3
    for job in jobs:
        assert set(job.peer_names) <= set(common.PEERS[job.peer_op])
        given = job.make_inputs(1)
        for name, call in {"tkq": job.ours, **common.find(job.peer_op, ("torch.compile",))[0]}.items():
            assert job.error(name, given, call(*given)) < 0.02, (job.question.shape, name)
            wrong = call(given[0], given[1], 1.1 * given[2], *given[3:])
            assert job.error(name, given, wrong) > 0.05


def test_work_is_counted_once(tiny):
    first, = {job.question.work for job in linear_attention.jobs("forward", ((2, 192, 2),))}
    both, = {job.question.work for job in linear_attention.jobs("training", ((2, 192, 2),))}
    assert both == 3 * first == 12 * 2 * 192 * 2 * 32 * 32


@pytest.mark.parametrize("section", ("packed", "packed_training"))
def test_packed_sequences_are_judged_one_by_one(tiny, section):
    job, = linear_attention.BENCH.sections[section](((3, 192, 4),))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op])
    given = job.make_inputs(1)
    assert job.error("tkq", given, job.ours(*given)) < 0.02
    assert job.error("tkq", given, job.ours(given[0], given[1], 1.1 * given[2], *given[3:])) > 0.05
    cu = given[4]
    assert cu[0] == 0 and cu[-1] == 192 and cu.diff().min() > 0

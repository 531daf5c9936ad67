"""bench.ops.gated_delta_rule where no GPU is needed: its cases at tiny shapes, and what judges them."""
import pytest
import torch

from bench.ops import gated_delta_rule
from bench.peers import common


@pytest.fixture(autouse=True)
def without_gradients():
    """As the harness calls."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("section", ("forward", "training"))
def test_ours_is_what_judges_it(monkeypatch, section):
    monkeypatch.setattr(gated_delta_rule, "DIM", 32)
    monkeypatch.setattr(gated_delta_rule, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    for job in gated_delta_rule.BENCH.sections[section](((2, 192, 4),)):
        assert set(job.peer_names) == set(common.PEERS[job.peer_op])
        given = job.make_inputs(1)
        assert job.error("tkq", given, job.ours(*given)) < 0.02
        assert job.error("tkq", given, job.ours(*given[:4], 1.1 * given[4], *given[5:])) > 0.05


def test_the_gates_of_a_layer_are_judged(monkeypatch):
    monkeypatch.setattr(gated_delta_rule, "DIM", 32)
    monkeypatch.setattr(gated_delta_rule, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    job, = gated_delta_rule.BENCH.sections["gates"](((2, 128, 2),))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op])
    given = job.make_inputs(1)
    assert job.error("tkq", given, job.ours(*given)) < 0.02
    assert job.error("tkq", given, job.ours(*given[:4], given[4] + 1, *given[5:])) > 0.05


@pytest.mark.parametrize("section", ("packed", "packed_training"))
def test_packed_sequences_are_judged_one_by_one(monkeypatch, section):
    monkeypatch.setattr(gated_delta_rule, "DIM", 32)
    monkeypatch.setattr(gated_delta_rule, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    job, = gated_delta_rule.BENCH.sections[section](((3, 192, 4),))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op])
    given = job.make_inputs(1)
    assert job.error("tkq", given, job.ours(*given)) < 0.02
    assert job.error("tkq", given, job.ours(*given[:4], 1.1 * given[4], *given[5:])) > 0.05
    cu = given[6]
    assert cu[0] == 0 and cu[-1] == 192 and cu.diff().min() > 0


def test_many_sequences_stand_beside_the_one_launch_alone():
    of_few, of_many, _ = gated_delta_rule.jobs("forward", ((2, 64, 32), (32, 64, 32)))
    assert gated_delta_rule.SEGMENTS in of_few.peer_names and gated_delta_rule.SEGMENTS in of_few.question.bound.against
    assert gated_delta_rule.SEGMENTS not in (*of_many.peer_names, *of_many.question.bound.against)
    for job in gated_delta_rule.packed_jobs("packed", ((2, 64, 4),)):
        assert set(job.question.bound.against) <= set(job.peer_names)

"""bench.ops.hedgehog where no GPU is needed: its cases at tiny shapes, and what judges them."""
import pytest
import torch

from bench.ops import hedgehog
from bench.peers import common


@pytest.mark.parametrize("section", ("forward", "training"))
def test_ours_is_what_judges_it(monkeypatch, section):
    monkeypatch.setattr(hedgehog, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    job, = hedgehog.BENCH.sections[section](((1, 200, 2),))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op])
    with torch.no_grad():  # as the harness calls
        given = job.make_inputs(1)
        assert job.error("tkq", given, job.ours(*given)) < 0.02
        assert job.error("tkq", given, job.ours(given[0], 1.2 * given[1], *given[2:])) > 0.03
        assert job.error("fla", given, job.ours(*given)) is None

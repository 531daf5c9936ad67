"""bench.ops.scan where no GPU is needed: its cases at tiny shapes, and what judges them."""
import pytest
import torch

from bench.ops import scan
from bench.peers import common


@pytest.mark.parametrize("section", scan.SECTIONS)
def test_ours_is_what_judges_it(section, monkeypatch):
    monkeypatch.setattr(scan, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    job, = scan.BENCH.sections[section](((2, 33, 5),))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op])
    with torch.no_grad():
        given = job.make_inputs(1)
        assert job.error("tkq", given, job.ours(*given)) < 0.01
        a, *more = given
        assert job.error("tkq", given, job.ours(0.8 * a, *more)) > 0.05

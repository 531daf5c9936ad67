"""bench.ops.mla where no GPU is needed: its cases at tiny shapes, and what judges them."""
import pytest
import torch

from bench.ops import mla
from bench.peers import common


@pytest.mark.parametrize("shape, work", [((2, 100, 4, 1), 2 * 2 * 100 * 576),
                                         ((2, 100, 40, 2), 2 * 2 * 40 * (99 + 100) * 1088)])
def test_ours_is_what_judges_it(monkeypatch, shape, work):
    monkeypatch.setattr(mla, "randn", lambda i, *sizes: torch.randn(
        *sizes, generator=torch.Generator().manual_seed(i)).bfloat16())
    job, = mla.BENCH.sections["several"]((shape,))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op]) and job.question.work == work
    given = job.make_inputs(1)
    assert job.error("tkq", given, job.ours(*given)) < 0.01
    other = (given[0] * 0.8, *given[1:])
    assert job.error("tkq", given, job.ours(*other)) > 0.02

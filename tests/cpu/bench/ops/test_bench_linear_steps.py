"""bench.ops.linear_steps where no GPU is needed: its cases at tiny shapes, and what judges them."""
import pytest
import torch

from bench.ops import linear_steps
from bench.peers import common


@pytest.mark.parametrize("section", linear_steps.CASES)
def test_ours_is_what_judges_it(monkeypatch, section):
    monkeypatch.setattr(linear_steps, "DIM", 32)
    monkeypatch.setattr(linear_steps, "ROWS", 48)
    monkeypatch.setattr(linear_steps, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    job, = linear_steps.BENCH.sections[section](((2, 4),))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op])
    given = job.make_inputs(1)
    assert job.ours(*given).isfinite().all()
    assert job.error("tkq", given, None) < 0.01 and job.error("copy", given, None) is None
    function, inputs, ours, exactly = linear_steps.CASES[section]
    wrong = lambda *given: 1.05 * ours(*given)
    monkeypatch.setitem(linear_steps.CASES, section, (function, inputs, wrong, exactly))
    assert linear_steps.error_of(section)("tkq", given, None) > 0.04
    assert job.question.work == 8 * given[-1].numel()

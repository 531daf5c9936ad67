"""bench.ops.mamba2_ssd where no GPU is needed: its cases at tiny shapes, and what judges them."""
import pytest
import torch

from bench.ops import mamba2_ssd
from bench.peers import common, ssd
from bench.peers.linear_attention import chunked


@pytest.fixture(autouse=True)
def without_gradients():
    """As the harness calls."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("section", ("forward", "training"))
@pytest.mark.parametrize("N", [64, 32])
def test_ours_is_what_judges_it(monkeypatch, section, N):
    monkeypatch.setattr(mamba2_ssd, "P", 32)
    monkeypatch.setattr(mamba2_ssd, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    job, = mamba2_ssd.BENCH.sections[section](((2, 128, 4, N),))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op])
    given = job.make_inputs(1)
    assert job.error("tkq", given, job.ours(*given)) < 0.02
    x, dt, *more = given
    assert job.error("tkq", given, job.ours(x, 1.1 * dt + 0.1, *more)) > 0.03


@pytest.mark.parametrize("N", [64, 32])
def test_the_form_that_is_compiled_is_it(monkeypatch, N):
    monkeypatch.setattr(ssd, "_compiled", lambda f: f)
    monkeypatch.setattr(mamba2_ssd, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    given = mamba2_ssd.inputs(1, 2, 128, 4, N)
    assert mamba2_ssd.forward_error(None, given, ssd.compiled()(*given)) < 0.02
    assert chunked is ssd.chunked

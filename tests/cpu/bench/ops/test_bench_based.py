"""bench.ops.based where no GPU is needed: its cases at tiny shapes, and what judges them."""
import pytest
import torch

from bench.ops import based
from bench.peers import based as peers
from bench.peers import common


@pytest.fixture(autouse=True)
def without_gradients():
    """As the harness calls."""
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(based, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())


@pytest.mark.parametrize("section", ("forward", "training"))
def test_ours_is_what_judges_it(section):
    job, = based.BENCH.sections[section](((2, 128, 4),))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op])
    given = job.make_inputs(1)
    assert job.error("tkq", given, job.ours(*given)) < 0.02
    q, *more = given
    assert job.error("tkq", given, job.ours(1.3 * q, *more)) > 0.03


def test_the_form_that_is_compiled_is_it():
    given = based.inputs(1, 2, 192, 3)
    assert based.forward_error(None, given, peers.chunked(*given)) < 0.02


def test_the_square_form_is_not_asked_for_where_it_is_far_off():
    job, = based.BENCH.sections["forward"](((1, 32768, 16),))
    assert "fla parallel" not in job.peer_names and "fla chunks" in job.peer_names

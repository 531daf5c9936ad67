"""bench.ops.decode where no GPU is needed: its cases at tiny shapes, and what judges them."""
import pytest
import torch

from bench.ops import decode
from bench.peers import common


@pytest.mark.parametrize("section", decode.SECTIONS)
def test_ours_is_what_judges_it(section, monkeypatch):
    monkeypatch.setattr(decode, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    job, = decode.BENCH.sections[section](((3, 37, 4, 2, 16),))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op])
    given = job.make_inputs(1)
    lengths = given[3].tolist()
    assert lengths == ([2, 9, 37] if section == "mixed" else [37] * 3)
    pairs = 3 * sum(range(38))
    assert job.question.work == (4 * 4 * decode.D * pairs if section == "chunk" else 8 * sum(lengths) * decode.D)
    assert job.error("tkq", given, job.ours(*given)) < 0.01
    other = (given[0] * 0.8, *given[1:])
    assert job.error("tkq", given, job.ours(*other)) > 0.02
    if job.peer_options["alike"]:
        torchs = common.PEERS["decode"]["torch"](**job.peer_options)
        assert job.error("torch", given, torchs(*given)) < 0.01
    else:
        found, missing = common.find("decode", ("torch",), **job.peer_options)
        assert not found and "one length" in missing["torch"]

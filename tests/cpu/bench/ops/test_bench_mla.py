"""bench.ops.mla where no GPU is needed: its cases at tiny shapes, and what judges them."""
import pytest
import torch

from bench.ops import mla
from bench.peers import common
from bench.peers import mla as peers


@pytest.mark.parametrize("shape, work", [((2, 100, 4, 1), 2 * 2 * 100 * 576),
                                         ((2, 100, 40, 2), 2 * 2 * 40 * (99 + 100) * 1088)])
def test_ours_is_what_judges_it(monkeypatch, shape, work):
    monkeypatch.setattr(mla, "randn", lambda i, *sizes: torch.randn(
        *sizes, generator=torch.Generator().manual_seed(i)).bfloat16())
    job, = mla.BENCH.sections["several"]((shape,))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op]) and job.question.work == work
    check(job)


@pytest.mark.parametrize("section", ["sparse", "float8"])
def test_ours_of_lists_is_what_judges_it(monkeypatch, section):
    monkeypatch.setattr(mla, "randn", lambda i, *sizes: torch.randn(
        *sizes, generator=torch.Generator().manual_seed(i)).bfloat16())
    monkeypatch.setattr(mla, "TOPK", 30)
    job, = mla.BENCH.sections[section](((2, 100, 4, 2),))
    assert set(job.peer_names) == set(common.PEERS[job.peer_op]) and job.question.work == 2 * 2 * 2 * 4 * 30 * 1088
    check(job, 0.01 if section == "sparse" else 0.05)


def test_a_float8_cache_of_656_bytes():
    """As FlashMLA's users pack it: what it means is the cache, but for e4m3's rounding."""
    cache = (torch.randn(3, 64, 576, generator=torch.Generator().manual_seed(0)) * 7).bfloat16()
    found = peers.packed(cache)
    assert found.shape == (3, 64, 1, 656) and found.dtype == torch.float8_e4m3fn
    raw = found[:, :, 0].view(torch.uint8)
    values = raw[..., :512].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    values = (values * raw[..., 512:528].contiguous().view(torch.float32)[..., None]).flatten(-2)
    assert torch.equal(raw[..., 528:].contiguous().view(torch.bfloat16), cache[..., 512:])
    assert 0.01 < (values - cache[..., :512]).norm() / cache[..., :512].float().norm() < 0.04


def check(job, most=0.01):
    given = job.make_inputs(1)
    assert job.error("tkq", given, job.ours(*given)) < most
    other = (given[0] * 0.8, *given[1:])
    assert job.error("tkq", given, job.ours(*other)) > 2 * most

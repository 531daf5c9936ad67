"""bench.ops.attention_fp8 where no GPU is needed: its cases at tiny shapes, and what judges them."""
import itertools

import pytest
import torch

from bench.ops import attention_fp8
from bench.peers import attention, common


@pytest.mark.parametrize("section", ("two_level", "fast"))
def test_ours_is_what_judges_it(section, monkeypatch):
    monkeypatch.setattr(attention_fp8, "TOKENS", 96)
    monkeypatch.setattr(attention_fp8, "WIDTH", 128)
    monkeypatch.setattr(attention, "inputs", lambda b, s, h, kv, d, dv: lambda i: tuple(
        torch.randn(3, b, s, h, d, generator=torch.Generator().manual_seed(i)).bfloat16()))
    full, causal = attention_fp8.BENCH.sections[section](((48, 64),))
    for job, share in ((full, 1), (causal, 2)):
        assert set(job.peer_names) == set(common.PEERS[job.peer_op])
        assert job.question.work == 4 * 2 * 2 * 64 * 48 * 48 / share
        given = job.make_inputs(1)
        assert given[0].shape == (2, 48, 2, 64) and given[0].dtype == torch.float8_e4m3fn
        assert job.error("tkq", given, job.ours(*given)) < 0.01
        assert job.error("tkq", given, job.ours(*given) * 1.1) > 0.05
        bf16 = common.PEERS["attention_fp8"]["tkq, bf16"](**job.peer_options)
        assert job.error("tkq, bf16", given, bf16(*given)) is None


@pytest.mark.parametrize("section", attention_fp8.PACKED)
def test_packed_sequences(section, monkeypatch):
    monkeypatch.setattr(attention_fp8, "WIDTH", 128)
    monkeypatch.setattr(attention_fp8, "BATCHES", (("few", (5, 1, 40)),))
    monkeypatch.setattr(attention, "varlen_inputs", lambda lengths, h, kv, d: lambda i: (
        *torch.randn(3, sum(lengths), h, d, generator=torch.Generator().manual_seed(i)).bfloat16(),
        torch.tensor([0, 5, 6, 46], dtype=torch.int32)))
    full, causal = attention_fp8.BENCH.sections[section](((attention_fp8.TOKENS, 64),))
    for job, pairs in ((full, 25 + 1 + 1600), (causal, 12.5 + 0.5 + 800)):
        assert set(job.peer_names) == set(common.PEERS[job.peer_op])
        assert job.question.work == pytest.approx(4 * 2 * 64 * pairs, rel=0.05)
        given = job.make_inputs(1)
        assert job.error("tkq", given, job.ours(*given)) < 0.01
        assert job.error("tkq", given, job.ours(*given) * 1.1) > 0.05
        bf16 = common.PEERS[job.peer_op]["tkq, bf16"](**job.peer_options)
        assert job.error("tkq, bf16", given, bf16(*given)) is None


def test_bounds_are_the_issue_s():
    found = {(section, job.question.shape.split()[3]): job.question.bound and job.question.bound.at_least
             for section in attention_fp8.BOUNDS
             for job in attention_fp8.BENCH.sections[section](attention_fp8.QUICK)}
    assert found == {("two_level", "D64"): None, ("two_level", "D128"): 0.97, ("two_level", "D256"): None,
                     ("fast", "D64"): 1.10, ("fast", "D128"): 1.05, ("fast", "D256"): 1.02}


def test_variants_can_run(capsys):
    """Those that differ from the plan, of every case; what cannot run is said."""
    from bench.tune import attention_fp8 as tune
    from tkq.attention.fp8.spec import Fp8Spec

    for dim, way in itertools.product((64, 128, 256), ("two_level", "fast")):
        found = tune.candidates(Fp8Spec(dim, accumulate=way))
        assert next(iter(found)) == "plan" and len(found) >= 3 and len(set(found.values())) == len(found)
    assert list(tune.cases("64,128:1024:full,causal:fast; 256:4096:full:two_level"))[-1] == (256, 4096, False,
                                                                                             "two_level")
    with pytest.raises(ValueError, match="mask is half"):
        list(tune.cases("64:1024:half:fast"))

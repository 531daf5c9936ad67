"""bench.ops.pointwise where no GPU is needed: its cases at tiny shapes, and the peers that are plain PyTorch."""
import pytest
import torch

from bench.ops import pointwise
from bench.peers import common
from bench.peers import pointwise as pointwise_peers
from tkq.pointwise import plan
from tkq.pointwise.spec import RopeSpec


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(pointwise, "ROPE_SHAPES", ((2, 8, 3, 16), (2, 8, 1, 16)))
    monkeypatch.setattr(pointwise, "QK_SHAPE", (2, 8, 3, 1, 16))
    monkeypatch.setattr(pointwise, "GATED_SHAPES", ((300, 16), (280, 24)))
    monkeypatch.setattr(pointwise, "_randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).bfloat16())
    monkeypatch.setattr(pointwise, "_inverse", pointwise_peers._turned)  # it launches; the numbers are not looked at
    monkeypatch.setattr(pointwise_peers, "_compiled", lambda f: f)


def jobs():
    return [job for section in ("rope", "gated") for job in pointwise.BENCH.sections[section](())]


def test_every_case_is_a_question_with_peers(tiny):
    found = jobs()
    assert len({(j.question.op, j.question.shape) for j in found}) == len(found) == 12
    for job in found:
        assert set(job.peer_names) <= set(common.PEERS[job.peer_op])
        assert set(job.question.roof.against) <= set(job.peer_names)


def test_ours_and_torch_agree(tiny):
    for job in jobs():
        if job.question.op == "rope backward":
            continue
        inputs = job.make_inputs(1)
        names = [n for n in job.peer_names if n in ("torch", "torch.compile")]
        calls = {"tkq": job.ours, **common.find(job.peer_op, names)[0]}
        assert len(calls) == 1 + len(names)
        for name, call in calls.items():
            error = job.error(name, inputs, call(*inputs))
            assert error is None or error < 0.01, (job.question.op, name)
        assert job.question.op == "rope_qk" or job.error("tkq", inputs, job.ours(*inputs)) is not None


@pytest.mark.parametrize("op", ("rope_qk", "swiglu backward"))
@pytest.mark.parametrize("factor, right", ((1.0, True), (2.0, False)))
def test_a_peer_that_writes_over_its_inputs_is_judged_by_new_ones(op, factor, right, tiny, monkeypatch):
    job = next(job for job in jobs() if job.question.op == op)
    plain = common.find(job.peer_op, ("torch.compile",))[0]["torch.compile"]

    def in_place(*given):
        made = [factor * x for x in plain(*given)]
        spoil(given)
        return made

    def spoil(given):
        for x in given:
            x.mul_(0 if x.dtype == torch.bfloat16 else 1)  # not the tables

    monkeypatch.setitem(pointwise_peers.PEERS[op], "Liger", lambda: in_place)
    spoilt = job.make_inputs(0)
    spoil(spoilt)
    assert (job.error("Liger", spoilt, spoilt[:2]) < 0.01) is right


def test_roofs_move_the_bytes_of_the_question(tiny):
    for job in jobs():
        inputs = job.make_inputs(0)
        roof, = job.question.roof.against
        outputs = common.find(job.peer_op, (roof,))[0][roof](*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        read = [t for t in inputs if t.dtype == torch.bfloat16]  # not the tables, which are float32
        assert sum(t.numel() * 2 for t in (*read, *outputs)) == job.question.work


def test_variants_begin_with_the_planned(tiny):
    for job in pointwise.variant_jobs():
        assert len(job.peer_names) >= 4 and job.question.bound is None
        assert set(job.peer_names) == set(common.PEERS[job.peer_op])


def test_every_variant_of_rope_has_a_name_of_its_own():
    configs = plan.rope_variants(RopeSpec("bf16", "fp32", 128, 0, False, 8), 32)
    assert len({pointwise._rope_name(c) for c in configs}) == len(configs) > 8

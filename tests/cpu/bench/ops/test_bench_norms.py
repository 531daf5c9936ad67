"""bench.ops.norms where no GPU is needed: its cases at tiny shapes, and the peers that are plain PyTorch."""
import pytest
import torch

from bench.core import ops
from bench.ops import foundation, norms
from bench.peers import common
from bench.peers import norms as norms_peers
from bench.tune import norms as tune_norms
from bench.tune import short_norms
from tkq.norms import config, plan
from tkq.reference import norms as reference_norms

SHAPES = ((600, 256), (700, 131072))


def randn(i, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(i)).to(dtype)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(norms, "HEADS", ((2, 8, 3, 16), (1, 40, 5, 64)))
    monkeypatch.setattr(norms, "_randn", randn)
    monkeypatch.setattr(norms_peers, "_compiled", lambda f: f)
    monkeypatch.setattr(norms, "heads_backward", lambda kind, dy, x, w, rstd, **options: reference_norms.norm_backward(
        kind, dy, x, w, rstd, **options))


def jobs(shapes):
    return [job for section in norms.BENCH.sections.values() for job in section(shapes)]


def test_every_case_is_a_question_with_peers(tiny):
    found = jobs(SHAPES)
    assert len({(j.question.op, j.question.shape) for j in found}) == len(found) == 2 * (3 + 1 + 9 + 2)
    for job in found:
        assert set(job.peer_names) <= set(common.PEERS[job.peer_op])
        assert set(job.question.bound.against) <= set(job.peer_names)
        assert ops.title("norms", job.question.section, job.question.op), "the command would leave it out"


def test_ours_and_torch_agree(tiny):
    for job in jobs(SHAPES[:1]):
        if job.question.section == "forward":  # foundation's, which makes its inputs on the GPU
            assert job.make_inputs.__module__ == foundation.__name__
            continue
        inputs = job.make_inputs(1)
        names = [n for n in job.peer_names if n in ("torch.compile", "plain", "copy", "add")]
        for name, call in {"tkq": job.ours, **common.find(job.peer_op, names)[0]}.items():
            error = job.error(name, inputs, call(*inputs))
            assert error is None or error < 0.05, (job.question.op, name)
        if job.question.op != "rmsnorm_quant + residual":
            assert job.error("tkq", inputs, job.ours(*inputs)) is not None


def test_roofs_move_the_bytes_of_the_question(tiny):
    for job in jobs(SHAPES[:1]):
        roof = next((n for n in job.peer_names if n in ("copy", "add")), None)
        if job.question.section == "forward" or roof is None:
            continue
        inputs = job.make_inputs(0)
        outputs = common.find(job.peer_op, (roof,))[0][roof](*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        read = [t for t in inputs if t.numel() >= outputs[0].numel()]
        assert sum(t.numel() * 2 for t in (*read, *outputs)) == job.question.work


@pytest.mark.parametrize("case", tune_norms.CASES)
def test_tuning_knows_how_a_variant_is_called(case):
    spec = tune_norms.spec_of(case, 4096)
    assert plan.variants(spec)[0] == plan.plan(spec)
    if case.startswith(("rmsnorm", "layernorm")):
        assert spec.kind == case.split()[0]
    assert ("residual" in case) == (spec.residual is not None) and ("quant" in case) == (spec.scale is not None)
    assert tune_norms.gigabytes(spec, 1000) > 0


@pytest.mark.parametrize("case, N", short_norms.CASES)
def test_other_ways_of_short_norms_can_run_and_differ(case, N):
    found = short_norms.variants(case, N)
    assert len({variant.recipe for variant in found.values()}) == len(found)
    assert len({variant.words for variant in found.values()}) == len(found)
    for name, variant in found.items():
        if not name.startswith("persistent"):
            config.check(variant.spec, variant.config)
    job = short_norms._job(case, N)
    assert {*short_norms.CASES[case, N], "copy"} <= set(job.peer_names)
    assert ("residual" in case, "bias" in case) == ("residual" in job.question.op, "bias" in job.question.shape)

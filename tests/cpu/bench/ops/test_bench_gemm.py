"""bench.ops.gemm and bench.tune.gemm where no GPU is needed: their cases at tiny shapes, their variants."""
import pytest
import torch

from bench.core import command
from bench.core.results import Case
from bench.ops import gemm
from bench.peers import common as peers
from bench.tune import gemm as tune_gemm
from tkq.gemm.dense.config import Config
from tkq.gemm.dense.plan import recipe
from tkq.testing.timing import Comparison, Timing


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(gemm, "randn", lambda i, *shape: torch.randn(
        *shape, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16))


def test_every_case_has_peers_that_agree(on_cpu):
    """tkq and plain PyTorch; QuACK runs on a GPU only."""
    jobs = [job for name, section in gemm.BENCH.sections.items() if name != "batched"
            for job in section(((7, 24, 16), (33, 8, 40)))]
    assert len({(j.question.section, j.question.shape) for j in jobs}) == len(jobs) == 2 * (3 + 5)
    for job in jobs:
        assert set(job.peer_names) <= set(peers.PEERS[job.peer_op])
        assert set(job.question.bound.against) <= {*job.peer_names, "QuACK"}
        inputs = job.make_inputs(1)
        names = [n for n in job.peer_names if n in ("cuBLAS", "torch", "plain")]
        for name, call in {"tkq": job.ours, **peers.find(job.peer_op, names, **job.peer_options)[0]}.items():
            error = job.error(name, inputs, call(*inputs))
            assert (error is None) if name == "plain" else error < 0.02, (job.question.shape, name)


def test_batched_cases_are_products(on_cpu):
    for job in gemm.batched_jobs(()):
        b, size = job.question.shape.split()
        m, n, k = map(int, size.split("x"))
        assert job.question.work == 2 * int(b[1:]) * m * n * k


def case(section, shape, ours, peer, unit="TFLOP/s", work=1e12):
    timings = tuple(Timing(name, "graph", (ms,) * 7) for name, ms in (("tkq", ours), ("cuBLAS", peer)))
    return Case(section, "gemm", shape, unit, work, Comparison(timings, 1, 1, 1))


def test_judge():
    large = lambda *peers: [case("large", str(i), 1.0, peer) for i, peer in enumerate(peers)]
    assert gemm.judge(large(1.03, 1.0, 1.03, 1.0, 1.0)) == []
    assert "large: geomean 1.005x" in gemm.judge(large(1.02, 0.99, 1.005, 1.005, 1.005))[0]
    assert gemm.judge(large(0.9)) == []  # one of five shapes: the mean is not decided
    few = case("few", "64x8192x8192 a @ b.t()", 0.05, 0.06, "GB/s", 1.0e8)
    assert "2000 GB/s" in gemm.judge([few])[0]
    assert gemm.judge([case("few", "128x8192x8192", 0.05, 0.06, "GB/s", 1.0e8)]) == []


def test_variants_are_kernels():
    for name, shape in ((n, s) for n in tune_gemm.VARIANTS for s in ((4096,) * 3, (16, 8192, 8192), (128, 8192, 8192))):
        if tune_gemm.suits(name, shape):
            epilogue = " + silu" if " defer" in name else ""
            made = recipe(tune_gemm.spec(name + epilogue, "cols"), *shape, 132, tune_gemm.config(name, shape))
            assert isinstance(made.args[1], Config) == (not name.startswith("small M"))
    assert tune_gemm.parts("alone on 128 + gelu") == ("alone", "gelu")


def test_the_command_line_says_that_it_needs_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert command.main(gemm.BENCH, ["--quick"]) == 2
    assert set(gemm.BENCH.shapes) <= set(gemm.BENCH.sections)

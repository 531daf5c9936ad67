"""Products whose blocks keep pace: exact, whatever the blocks have to wait for, and the counter is zero afterwards."""
import math

import pytest
import torch

import tkq
from tests.gpu.gemm.test_gemm import check_run, operands
from tkq.gemm.dense import launch, plan
from tkq.gemm.dense.config import Config
from tkq.runtime.call import counters

WAVE_SYNC = Config(overlap_epilogue=1, pdl=True, wave_sync=16)


def at_zero():
    torch.cuda.synchronize()
    return counters.counter(0).item() == 0


@pytest.mark.parametrize("blocks", (2, 6, None))
def test_rounds(blocks):
    """Whole rounds and one more, of which the last blocks have none; fewer steps than parts."""
    for size in ((2100, 2056, 2048), (700, 1032, 72), (300, 264, 200), (2048, 1536, 1024)):
        check_run(*operands(size, "k", "k"), WAVE_SYNC, blocks=blocks, what="paced")
        assert at_zero()


def test_blocks_that_have_no_processor_yet():
    """Twice as many blocks as run at once: the first ones lose their patience, and end."""
    blocks = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    check_run(*operands((8192, 8192, 256), "k", "k"), WAVE_SYNC, blocks=blocks, what="paced")
    assert at_zero()


def test_graphs_and_streams():
    """A graph has a counter of its own, and so has a stream."""
    a, b = operands((4096, 4096, 1024), "k", "k")
    c = torch.empty(4096, 4096, dtype=a.dtype, device="cuda")
    launch.run(a, b, c, WAVE_SYNC, 12)
    want = c.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launch.run(a, b, c, WAVE_SYNC, 12)
    side, other = torch.cuda.Stream(), torch.empty_like(c)
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        c.zero_(), graph.replay()
        with torch.cuda.stream(side):
            other.zero_()
            launch.run(a, b, other, WAVE_SYNC, 12)
        torch.cuda.synchronize()
        assert torch.equal(c, want) and torch.equal(other, want)
    assert at_zero()


def test_calls_that_a_plan_gives_it(monkeypatch):
    """Again and again, on two streams: a call that comes again has the counter of its own stream."""
    monkeypatch.setattr(plan, "needs_wave_sync", lambda *problem: True)
    launch.clear()
    try:
        a, b = operands((2048, 4096, 1024), "k", "k")
        spec = launch.GemmSpec(b_major="k")
        assert plan.takes_counter(launch.planned_kernel(spec, 2048, 4096, 1024, 132)[0])
        want, side = torch.matmul(a, b), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(5):
            for stream in (torch.cuda.current_stream(), side):
                with torch.cuda.stream(stream):
                    got = tkq.gemm(a, b)
                    assert torch.equal(got, want)
                    got.fill_(math.nan)  # the next call of this stream is given the same memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = tkq.gemm(a, b)
        graph.replay()
        assert torch.equal(got, want) and at_zero()
        with torch.cuda.stream(side):
            assert at_zero()
    finally:
        launch.clear()


def test_the_plan_takes_it_for_large_products():
    m, n, k = 12288, 16384, 8192
    a, b = (torch.randint(-2, 3, s, device="cuda").bfloat16() for s in ((m, k), (n, k)))
    assert plan.takes_counter(launch.planned_kernel(launch.GemmSpec(b_major="k"), m, n, k, 132)[0])
    first = tkq.gemm(a, b.t())
    for _ in range(3):
        got = tkq.gemm(a, b.t())
        assert torch.equal(got, first)
        got.fill_(math.nan)  # the next call is given the same memory
    assert torch.equal(first, torch.matmul(a, b.t())) and at_zero()  # sums are whole numbers: exact in both

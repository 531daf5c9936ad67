"""Float8 products whose blocks keep pace: exact, whatever the blocks have to wait for, and the counter is zero
afterwards."""
import math
from dataclasses import replace

import pytest
import torch

import tkq
from tests.gpu.gemm.test_fp8_gemm import check_exact, spec_of
from tests.helpers.gemm.fp8_cases import operands
from tkq.gemm.fp8 import ops, plan
from tkq.gemm.fp8.plan import BLOCKS, FAST, PROMOTED
from tkq.runtime.call import counters

WAVE_SYNC = {"1x128_128x128": replace(PROMOTED[1], wave_sync=16), "row": replace(FAST[0], wave_sync=16)}


def at_zero():
    torch.cuda.synchronize()
    return counters.counter(0).item() == 0


@pytest.mark.parametrize("kind", WAVE_SYNC)
@pytest.mark.parametrize("blocks", (2, 6, None))
def test_rounds(kind, blocks):
    """Whole rounds and one more, of which the last blocks have none; fewer steps than parts."""
    for size in ((2100, 2056, 4096), (700, 1032, 144), (300, 264, 400), (2048, 1536, 2048)):
        check_exact(kind, size, WAVE_SYNC[kind], blocks=blocks)
        assert at_zero()


def test_other_forms():
    """Sums that are promoted one after the other, and in quarters; a result by elements."""
    check_exact("row", (700, 1032, 2064), replace(PROMOTED[1], wave_sync=16), promote=True, blocks=6)
    check_exact("1x128_128x128", (700, 1032, 2064), replace(BLOCKS[0], wave_sync=16), blocks=6)
    check_exact("1x128_128x128", (700, 1001, 2064), WAVE_SYNC["1x128_128x128"], blocks=6)
    assert at_zero()


def test_blocks_that_have_no_processor_yet():
    """Twice as many blocks as run at once: the first ones lose their patience, and end."""
    blocks = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    check_exact("1x128_128x128", (8192, 8192, 512), WAVE_SYNC["1x128_128x128"], blocks=blocks)
    assert at_zero()


def test_graphs_and_streams():
    """A graph has a counter of its own, and so has a stream."""
    args, spec = operands(4096, 4096, 1024, "1x128_128x128", device="cuda"), spec_of("1x128_128x128", n=4096)
    c = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def run(out):
        ops.run(spec, *args, out, WAVE_SYNC["1x128_128x128"], 12)

    run(c)
    want = c.clone()
    of_graphs, handed_out = counters._of_graphs[0]
    before = next(handed_out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run(c)
    own = of_graphs[before + 1:next(handed_out)]
    side, other = torch.cuda.Stream(), torch.empty_like(c)
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        c.fill_(math.nan), graph.replay()
        with torch.cuda.stream(side):
            other.fill_(math.nan), run(other)
        torch.cuda.synchronize()
        assert torch.equal(c, want) and torch.equal(other, want)
    assert at_zero() and len(own) == 3 and not own.any()


def test_calls_that_a_plan_gives_it(monkeypatch):
    """Again and again, on two streams: a call that comes again has the counter of its own stream."""
    monkeypatch.setattr(plan, "WAVE_SYNC_STEPS", 0)
    monkeypatch.setattr(plan, "WAVE_SYNC_BYTES", 0)
    ops.clear()
    try:
        args = operands(2048, 4096, 1024, "1x128_128x128", device="cuda", whole=True, powers=True)
        spec = spec_of("1x128_128x128", n=4096)
        assert plan.plan(spec, 2048, 4096, 1024, 132).wave_sync
        want = torch.full((2048, 4096), math.nan, dtype=torch.bfloat16, device="cuda")
        ops.run(spec, *args, want, PROMOTED[1])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(4):
            for stream in (torch.cuda.current_stream(), side):
                with torch.cuda.stream(stream):
                    got = tkq.fp8_gemm(*args)
                    assert torch.equal(got, want)
                    got.fill_(math.nan)  # the next call of this stream is given the same memory
        assert at_zero()
        with torch.cuda.stream(side):
            assert at_zero()
    finally:
        ops.clear()

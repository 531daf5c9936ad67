"""Attention's backward with fuse_preprocess, as far as it is arithmetic: its configurations, and which warps make which
rows' statistics."""
import dataclasses
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import given

from tests.cpu.attention.backward.test_attention_backward_packed_cpu import (  # noqa: F401  (warp: of all tests)
    SLOWLY,
    problems,
    warp,
)
from tests.helpers.emulation.written import as_written
from tkq.attention.backward import fuse_preprocess_warps
from tkq.attention.backward import plan as backward_plan
from tkq.attention.backward.fuse_preprocess_warps import PreprocessHelperWarps
from tkq.attention.backward.kernel import BackwardKernel
from tkq.attention.backward.plan import _HELPER_WARPS, plan
from tkq.attention.backward.preprocess import BackwardPreprocess, tile_by_number
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.tile_scheduler import TileScheduler

FUSED = {width: dataclasses.replace(config, fuse_preprocess=True) for width, config in _HELPER_WARPS.items()}


@SLOWLY
@given(problems())
def test_the_kernel_before_begins_with_the_tiles_that_the_background_begins_with(problem):
    """What is left out by one, as the other makes it, must be the same tiles."""
    g, tile = problem.g, problem.config.tile
    found = [tile_by_number(problem.layout, tile, n, g.heads, True) for n in range(min(g.tiles * g.heads, 40))]
    assert found == problem.tiles()[:40]


@pytest.mark.parametrize("width, tile", [(128, 64), (64, 128)])
def test_each_row_of_a_tile_is_read_and_written_by_a_lane(monkeypatch, width, tile):
    """Of 1000 rows; the tile is the last, with 40 of them."""
    rows_of, written = numpy.arange(1000), {}
    lane = numpy.arange(32)

    class Rows:  # [batch, row, head, None] is which row a lane reads, as many numbers as it has lanes
        shape = 1, 1000, 1, width

        def __getitem__(self, at):
            return rows_of[at[1]]

    monkeypatch.setattr(fuse_preprocess_warps, "share", lambda row, i: (row, i))
    for name, value in dict(min=numpy.minimum, max=numpy.maximum, select_=numpy.where,
                            range=lambda n, unroll: range(n)).items():
        monkeypatch.setattr(fuse_preprocess_warps.cutlass, name, value)
    monkeypatch.setattr(fuse_preprocess_warps, "tk", SimpleNamespace(lane_id=lambda: lane))
    monkeypatch.setattr(fuse_preprocess_warps, "Float32", float)
    monkeypatch.setattr(fuse_preprocess_warps, "in_sequences", lambda places, at: at.rows_q)
    spec = BackwardSpec(width=width, varlen=True)
    kernel = PreprocessHelperWarps(spec, FUSED[width], TileScheduler(spec, FUSED[width]))
    assert kernel.config.tile == tile

    def row_sum(x, y, counts):
        assert (x[0] == y[0]).all() and (x[1] == lane % kernel.pre.lanes).all() and counts.all()
        groups = x[0].reshape(-1, kernel.pre.lanes)
        assert (groups == groups[:, :1]).all(), "lanes that share a row read one"
        return x[0]

    def write(rows, stats, place, i, total):
        first, end = place[2:]
        for row, of in zip(i, total):
            assert row not in written
            written[int(row)] = int(of)
            assert of == min(first + row, end - 1)

    kernel.pre.row_sum, kernel.pre.write = row_sum, write
    kernel.number = lambda g, at: 0
    number = 960 // tile
    at = SimpleNamespace(batch=0, head=0, start_q=1000 - 40 - number * tile, number=number, rows_q=number * tile + 40)
    g = SimpleNamespace(helper_warps=SimpleNamespace(rows=SimpleNamespace(o=Rows(), do=Rows())), layout=None,
                        stats=numpy.zeros((1, 1)))
    as_written(PreprocessHelperWarps.statistics)(kernel, g, at)
    assert sorted(written) == list(range(tile))


@pytest.mark.parametrize("width", (64, 128))
def test_long_packed_sequences_are_planned_so(width):
    for causal in (False, True):
        spec = BackwardSpec(width=width, right=causal, varlen=True)
        config = plan(spec, "long")
        assert config.fuse_preprocess
        kernel = BackwardKernel(dataclasses.replace(spec, dtype="fp16"), config)
        assert type(kernel.helper_warps) is PreprocessHelperWarps
        dense = dataclasses.replace(spec, varlen=False)
        for other in (plan(spec, "medium"), plan(spec, "long", 4), plan(dense, "long")):
            assert not other.fuse_preprocess


@pytest.mark.parametrize("change, words", [
    ({"helper_warps": False}, "needs helper_warps"),
    ({"ds_stages": 4}, "bytes of shared memory at"),
    ({"persistent": False}, "helper_warps needs persistent"),
])
def test_what_cannot_run_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(FUSED[128], **change).check(128)
    with pytest.raises(ValueError, match="two dK/dV warpgroups"):
        dataclasses.replace(backward_plan.SINGLE[256], persistent=True, store_from_registers=True, helper_warps=True,
                            registers=(32, 64, 208, 208), fuse_preprocess=True).check(256)
    assert FUSED[128].check(128)
    assert BackwardPreprocess(BackwardSpec(), _HELPER_WARPS[128]).lanes == 16

"""The scan's kernels on a CPU: their own code against the reference in float64."""
import itertools

import pytest
import torch

from tests.helpers.convolution import DTYPES
from tests.helpers.emulation.recurrence import ColumnScanOnCpu, LineScanOnCpu, function
from tkq.recurrence.config import ScanConfig
from tkq.recurrence.spec import ScanSpec
from tkq.reference import recurrence as reference


def nan(*shape):
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize("layout, ways, groups", [("channels", (1, -1), 1), ("time", (1,), 1), ("time", (1,), 3)])
def test_forward_and_gradients(monkeypatch, layout, ways, groups):
    """A backward goes the other way. Shapes: of one run, short ones, several."""
    torch.manual_seed(0)
    time, kernel = layout == "time", LineScanOnCpu if layout == "time" else ColumnScanOnCpu
    forward, backward = (
        function(kernel(ScanSpec("fp32", 2, layout, "fp32", True, reverse=time and reverse, **more),
                        ScanConfig(4, 1, lanes=1, line_groups=groups)),
                 monkeypatch)
        for more, reverse in (({}, ways[0] < 0), (dict(gradients="both", of_state=True), ways[0] > 0)))
    for T, way in itertools.product((2, 4, 6, 18) if time else (1, 3, 4, 5, 17), ways):
        judge(forward, backward, T, time, way)


def judge(forward, backward, T, time, way):
    B, C = 2, 6
    lying = (lambda: torch.randn(B, C, T).mT) if time else lambda: torch.randn(B, T, C)
    a, b, dh = (lying() for _ in range(3))
    state, dfinal = torch.randn(B, C), torch.randn(B, C)
    h, da, db = (torch.full_like(a, torch.nan) for _ in range(3))
    final, dstate = nan(B, C), nan(B, C)
    forward(a, (b, h, None, None, state, final, None, None), way)
    want = reference.scan(a.double(), b.double(), state.double(), way < 0)
    backward(a, (dh, h, da, db, state, dfinal, dstate, None), -way)
    gradients = reference.scan_backward(dh, dfinal, a.double(), want[0], state, way < 0)
    for found, right in zip((h, final, da, db, dstate), (*want, *gradients), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ends_of_segments(monkeypatch, dtype):
    """Along time: what comes out of the last token, forward and backward, and the product of all factors."""
    torch.manual_seed(0)
    B, T, C = 2, 18, 3
    a, b = (torch.randn(B, C, T).to(DTYPES[dtype]).mT for _ in range(2))
    forward, backward = (
        function(LineScanOnCpu(ScanSpec(dtype, 2, "time", ends=True, **more), ScanConfig(4, 1, lanes=1)), monkeypatch)
        for more in (dict(final=True), dict(gradients="b", of_state=True, reverse=True)))
    nothing = (None,) * 4
    wanted = reference.scan(a.double(), b.double(), None, False)[1], reference.scan_backward(
        b.double(), None, a.double(), b.double(), torch.zeros(B, C), False)[2]
    for run, where, want in ((forward, 1, wanted[0]), (backward, 2, wanted[1])):
        end, product = nan(B, C), nan(B, C)
        states = [None, None, None]
        states[where] = end
        run(a, (b, *nothing[:3], *states, product), 1)
        torch.testing.assert_close(end.double(), want.double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(product.double(), a.double().prod(1), rtol=1e-4, atol=0.0)

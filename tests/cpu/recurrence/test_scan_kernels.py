"""The scan's kernels on a CPU: their own code against the reference in float64."""
import pytest
import torch

from tests.helpers.emulation.recurrence import ColumnScanOnCpu, LineScanOnCpu, function
from tkq.recurrence.config import ScanConfig
from tkq.recurrence.spec import ScanSpec
from tkq.reference import recurrence as reference


def nan(*shape):
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize("layout, way", [("channels", 1), ("channels", -1), ("time", 1), ("time", -1)])
def test_forward_and_gradients(monkeypatch, layout, way):
    """A backward goes the other way. Shapes: of one run, short ones, several."""
    torch.manual_seed(0)
    B, C, time = 2, 6, layout == "time"
    of, kernel = dict(dtype="fp32", vector=2, state="fp32", final=True, layout=layout), ColumnScanOnCpu
    more = {}, dict(gradients="both", of_state=True)
    if time:
        kernel, falling = LineScanOnCpu, (way < 0, way > 0)
        more = [{**m, "falling": f} for m, f in zip(more, falling)]
    forward, backward = (function(kernel(ScanSpec(**of, **m), ScanConfig(4, 1)), monkeypatch) for m in more)
    lying = (lambda *s: torch.randn(s[0], s[2], s[1]).mT) if time else lambda *s: torch.randn(s)
    for T in (2, 4, 6, 18) if time else (1, 3, 4, 5, 17):
        a, b, dh = (lying(B, T, C) for _ in range(3))
        state, dfinal = torch.randn(B, C), torch.randn(B, C)
        h, da, db = (torch.full_like(a, torch.nan) for _ in range(3))
        final, dstate = nan(B, C), nan(B, C)
        flat = lambda *states: tuple(t.view(-1) for t in states)
        forward(a, (b, h, None, None, *flat(state, final), None), way)
        want = reference.scan(a.double(), b.double(), state.double(), way < 0)
        backward(a, (dh, h, da, db, *flat(state, dfinal, dstate)), -way)
        gradients = reference.scan_backward(dh, dfinal, a.double(), want[0], state, way < 0)
        for found, right in zip((h, final, da, db, dstate), (*want, *gradients), strict=True):
            torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)

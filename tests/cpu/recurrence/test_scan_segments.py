"""Scans in segments: what the launches are given, each done by the reference."""
import pytest
import torch

from tkq.recurrence import launch, segments
from tkq.recurrence.plan import SEGMENT, SHORTEST, segments_of
from tkq.recurrence.spec import ScanSpec
from tkq.reference import recurrence as reference


def run(spec, read, others, states, reverse, product=None):
    """One launch, by the reference."""
    a, b = read
    h, da, db = others
    state, final, dstate = (None if t is None else t.view(a.shape[0], a.shape[2]) for t in states)
    if product is not None:
        product.copy_(a.double().prod(1))
    if spec.backward:
        found = reference.scan_backward(b, final, a, b if h is None else h, state, not reverse)
        results = zip((da if spec.of_a else None, db if spec.of_b else None, dstate if spec.of_state else None), found)
    else:
        results = zip((h, final if spec.final else None), reference.scan(a, b, state, reverse))
    for to, values in results:
        if to is not None:
            to.copy_(values)


@pytest.mark.parametrize("time", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_they_are_one_scan(monkeypatch, time, reverse, has_state):
    torch.manual_seed(0)
    monkeypatch.setattr(launch, "_run", run)
    monkeypatch.setattr(segments, "segments_of", lambda spec, columns, tokens, num_sms: 4)
    monkeypatch.setattr(launch.arch, "num_sms", lambda device: 132)
    lying = (lambda: torch.randn(2, 3, 20).mT) if time else lambda: torch.randn(2, 20, 3)
    a, b, dh = (lying() for _ in range(3))
    state, dfinal = (torch.randn(2, 3) if has_state else None for _ in range(2))
    h, final, _ = launch.forward(a, b, state, reverse, True)
    want = reference.scan(a, b, state, reverse)
    gradients = reference.scan_backward(dh, dfinal, a, want[0], state, reverse)
    found = launch.backward(dh, dfinal, a, want[0], state, reverse, launch.Wanted(True, True, True))
    for x, y in zip((h, final, *found), (*want, *gradients), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    only = launch.backward(dh, dfinal, a, want[0], state, reverse, launch.Wanted(False, False, True))
    torch.testing.assert_close(only[2], gradients[2], rtol=1e-4, atol=1e-5)
    assert only[0] is None and only[1] is None


def test_how_many():
    """They divide the tokens; only of few columns and many tokens."""
    for tokens in (SHORTEST, 10000, 12288, 65536, 65537):
        for columns in (1, 64, 300, 512):
            n = segments_of(ScanSpec("fp32"), columns, tokens, 132)
            assert tokens % n == 0 and tokens // n >= SEGMENT
    assert segments_of(ScanSpec("fp32"), 64, 65536, 132) == 128 and segments_of(ScanSpec("bf16"), 2048, 65536, 132) == 1
    assert segments_of(ScanSpec("fp32"), 64, SHORTEST - 8, 132) == 1 == segments_of(ScanSpec("fp32"), 64, 65537, 132)
    assert [segments_of(ScanSpec("fp32"), n, 65536, 132) for n in (512, 513)] == [16, 1]
    lines = ScanSpec("fp32", layout="time")
    assert [segments_of(lines, n, 65536, 132) for n in (8, 65, 66)] == [16, 2, 1]
    assert segments_of(lines, 8, 32768, 132) == 1


def test_lines_of_sequences_at_other_distances_are_not_merged():
    a, b = torch.zeros(2, 8, 64).mT, torch.zeros(2, 9, 64)[:, :8].mT
    (one, other), *_ = launch._merged((a, a), (None,) * 3, [None] * 3)
    assert one.shape == other.shape == (1, 64, 16)
    for read in ((a, b), (b, a)):
        assert launch._merged(read, (None,) * 3, [None] * 3)[0] is read

"""The numbers that the window kernel's host function works out from tensors' shapes: the DSL does not divide all of its
integers as Python does, and a kernel whose roles count differently waits for ever."""
import pytest

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from tkq.attention.launch import Numbers  # noqa: E402
from tkq.attention.ranges import Extent  # noqa: E402
from tkq.attention.spec import AttentionSpec  # noqa: E402
from tkq.attention.window import WindowForward  # noqa: E402
from tkq.attention.window_config import WindowConfig  # noqa: E402
from tkq.attention.window_ranges import ROWS, TILE, bands_of, segments_of, span_of  # noqa: E402

SPEC = AttentionSpec("bf16", 128, False, False, left=True, right=True, far=True)
KERNEL = WindowForward(SPEC, WindowConfig())


@cute.jit
def tasks(out: cute.Tensor, q: cute.Tensor, k: cute.Tensor, left: Int32, right: Int32):
    q, k = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in (q, k)]
    strips, number = KERNEL.tasks(q, k, None, Numbers(Float32(1.0), Float32(0.0), left, right, Int32(132)))
    out[0], out[1], out[2] = Int32(strips.span), Int32(strips.segments), Int32(number)


def test_the_host_counts_as_python_does():
    out = torch.zeros(3, dtype=torch.int32)
    operand = lambda rows: from_dlpack(torch.zeros(2, rows, 3, 128, dtype=torch.bfloat16)).mark_layout_dynamic()
    to, compiled = from_dlpack(out), None
    for rows, keys, left, right in ((2048, 2048, 1023, 1), (640, 640, 512, 511), (1300, 1353, 575, 64),
                                    (1000, 3000, 777, 5)):
        arguments = to, operand(rows), operand(keys), Int32(left), Int32(right)
        compiled = compiled or cute.compile(tasks, *arguments)
        compiled(*arguments)
        span = span_of(Extent(rows, keys, ROWS, TILE, left, right))
        segments = segments_of(rows, span)
        assert out.tolist() == [span, segments, bands_of(segments) * span * 6]

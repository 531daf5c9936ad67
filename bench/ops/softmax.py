"""softmax against its baselines and copies that move as many bytes: forward, backward, CPU time per call.

    python -m bench.ops.softmax [--sections calls,forward,backward] [--quick] [--shapes 32768x4096] [--match backward]

bf16. Bytes: forward one read and one write of M x N, its roof a copy; backward two reads and one write, its roof
torch.add. Results go to OUT/softmax.json after every case, a table is printed last.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.core.shapes import FORWARD_SHAPES
from bench.ops.rows_common import AUTOGRAD_CALL_US, BACKWARD_SHAPES, BF16, CALL_US, QUICK, ends, randn
from bench.peers import common, liger_cute
from tkq.reference import losses as reference
from tkq.softmax.ops import _launch_backward
from tkq.testing.timing import relative_error

FORWARD, BACKWARD = 0.99, 1.00
OF_COPY = 0.95
LIGER_MOST_COLUMNS = 65536


def forward_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        def error(name, inputs, output, m=m):
            if name == "copy":
                return None
            x, = inputs
            return max(relative_error(output[rows], reference.softmax(x[rows].float())) for rows in ends(m))

        against = ("QuACK", "torch.compile", *(("Liger",) if n <= LIGER_MOST_COLUMNS else ()))
        question = harness.Question(
            "forward", "softmax", f"M{m} N{n}", "GB/s", 2 * m * n * 2, Bound(against, FORWARD),
            roof=Bound(("copy",), OF_COPY)
        )
        yield Job(question, lambda x: tkq.softmax(x), "softmax", (*against, *liger_cute.names(n), "copy"),
                  lambda i, m=m, n=n: (randn(i, m, n),), error)


def backward_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        def inputs(i, m=m, n=n):
            return torch.softmax(randn(i, m, n), -1), randn(i + 1000, m, n)

        def error(name, inputs, output, m=m):
            if name == "add":
                return None
            y, dy = inputs
            wanted = [reference.softmax_backward(y[rows].float(), dy[rows].float()) for rows in ends(m)]
            return max(relative_error(output[rows], right) for rows, right in zip(ends(m), wanted))

        against = ("QuACK", "torch.compile", *(("Liger",) if n <= LIGER_MOST_COLUMNS else ()))
        question = harness.Question(
            "backward", "softmax_backward", f"M{m} N{n}", "GB/s", 3 * m * n * 2, Bound(against, BACKWARD),
            roof=Bound(("add",), OF_COPY)
        )
        yield Job(question, lambda y, dy: _launch_backward(y, dy, 1.0, False), "softmax_backward",
                  (*against, *liger_cute.names(n), "add"), inputs, error)


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    x = torch.randn(8, 256, device="cuda", dtype=BF16)
    r = x.clone().requires_grad_()
    found = {
        "x + x": Call(lambda: x + x),
        "softmax tkq": Call(lambda: tkq.softmax(x), at_most=CALL_US),
        "log_softmax tkq": Call(lambda: tkq.log_softmax(x), at_most=CALL_US),
        "softmax tkq, recorded": Call(lambda: tkq.softmax(r), True, AUTOGRAD_CALL_US),
    }
    for name, call in common.find("softmax", ("torch", "QuACK"))[0].items():
        found[f"softmax {name}"] = Call(lambda call=call: call(x))
    return found


BENCH = Bench(
    "softmax", __doc__,
    {"forward": forward_jobs, "backward": backward_jobs},
    shapes={"forward": FORWARD_SHAPES, "backward": BACKWARD_SHAPES},
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))

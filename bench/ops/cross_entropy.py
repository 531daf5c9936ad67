"""cross_entropy against its baselines: forward, mean, backward, both in one pass; CPU time per call.

    python -m bench.ops.cross_entropy [--sections calls,forward,mean,backward,both] [--quick] [--shapes 32768x4096]

bf16 logits, int64 targets. Bytes: forward one read of M x N; backward, and both, one read and one write, their roof a
copy. forward: losses of rows, for everyone. backward: from the logits and what each one's forward keeps. both: the sum
of the losses and its gradient; "tkq apart" is tkq's forward and backward one after the other.
Results go to OUT/cross_entropy.json after every case, a table is printed last.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.core.shapes import FORWARD_SHAPES
from bench.ops.rows_common import AUTOGRAD_CALL_US, BACKWARD_SHAPES, BF16, CALL_US, QUICK, ends, randn, targets
from bench.peers import common, liger_cute
from tkq.losses import launch
from tkq.losses.ops import cross_entropy_and_gradient
from tkq.reference import losses as reference
from tkq.reference.losses import Terms
from tkq.testing.timing import relative_error

AT_LEAST = 1.00
OF_COPY, OF_COPY_SHORT = 0.95, 0.86  # the second of loss and gradient in one pass, of rows below 4096 columns
EACH, SUM = Terms(reduction="none"), Terms(reduction="sum")
PEERS = ("QuACK", "torch.compile")
CHUNK = 1 << 28  # logits whose losses are computed together, in float32


def _question(section, op, m, n, streams, peers_=PEERS, roof=None):
    return harness.Question(section, op, f"M{m} N{n}", "GB/s", streams * m * n * 2, Bound(peers_, AT_LEAST), roof=roof)


def _logits(m, n):
    return lambda i: (randn(i, m, n), targets(i, m, n))


def forward_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        def error(name, inputs, output, m=m):
            x, t = inputs
            return max(relative_error(output[rows], F.cross_entropy(x[rows].float(), t[rows], reduction="none"))
                       for rows in ends(m))

        yield Job(_question("forward", "cross_entropy", m, n, 1),
                  lambda x, t: tkq.cross_entropy(x, t, reduction="none"), "cross_entropy",
                  (*PEERS, liger_cute.NAME), _logits(m, n), error)


def mean_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        def error(name, inputs, output, m=m, n=n):
            x, t = inputs
            rows = max(1, CHUNK // n)
            wanted = sum(F.cross_entropy(x[i:i + rows].float(), t[i:i + rows], reduction="sum").double()
                         for i in range(0, m, rows))
            return relative_error(output, (wanted / m).float())

        yield Job(_question("mean", "cross_entropy_mean", m, n, 1), lambda x, t: tkq.cross_entropy(x, t),
                  "cross_entropy_mean", PEERS, _logits(m, n), error)


def backward_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        def inputs(i, m=m, n=n):
            x, t = _logits(m, n)(i)
            _, saved = launch.forward(x, t, EACH)
            lse = saved[:2 * m].view(m, 2).sum(1)
            return x, t, randn(i + 1000, m).float(), saved, lse

        def error(name, inputs, output, m=m):
            if name == "copy":
                return None
            x, t, dloss, *_ = inputs
            return max(relative_error(output[rows], reference.cross_entropy_backward(
                x[rows].float(), t[rows], dloss[rows], EACH)) for rows in ends(m))

        yield Job(_question("backward", "cross_entropy_backward", m, n, 2, roof=Bound(("copy",), OF_COPY)),
                  lambda x, t, dloss, saved, lse: launch.backward(x, t, dloss, saved, EACH), "cross_entropy_backward",
                  (*PEERS, "copy"), inputs, error)


def both_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        def error(name, inputs, output, m=m):
            if name in ("copy", "Liger"):  # Liger has written over the logits
                return None
            x, t = inputs
            one = torch.ones((), device="cuda")
            return max(relative_error(output[1][rows], reference.cross_entropy_backward(
                x[rows].float(), t[rows], one, SUM)) for rows in ends(m))

        yield Job(_question("both", "both", m, n, 2, (*PEERS, "Liger"),
                            Bound(("copy",), OF_COPY if n >= 4096 else OF_COPY_SHORT)),
                  lambda x, t: cross_entropy_and_gradient(x, t, reduction="sum"), "both",
                  (*PEERS, "tkq apart", "copy", liger_cute.NAME, "Liger"), _logits(m, n), error)


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    x, t = torch.randn(8, 256, device="cuda", dtype=BF16), torch.randint(256, (8,), device="cuda")
    r = x.clone().requires_grad_()
    found = {"x + x": Call(lambda: x + x)}
    for reduction in ("none", "mean"):
        for name, given, recorded in (("", x, False), (", recorded", r, True)):
            found[f"cross_entropy tkq, {reduction}{name}"] = Call(
                lambda given=given, reduction=reduction: tkq.cross_entropy(given, t, reduction=reduction), recorded,
                AUTOGRAD_CALL_US if recorded else CALL_US)
    for name, call in common.find("cross_entropy_mean", ("torch", "QuACK"))[0].items():
        found[f"cross_entropy {name}, mean"] = Call(lambda call=call: call(x, t))
    return found


BENCH = Bench(
    "cross_entropy", __doc__,
    {"forward": forward_jobs, "mean": mean_jobs, "backward": backward_jobs, "both": both_jobs},
    shapes={"forward": FORWARD_SHAPES, "mean": FORWARD_SHAPES, "backward": BACKWARD_SHAPES, "both": BACKWARD_SHAPES},
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))

"""A user-defined forward reduction on RowKernel, as planned, against the same on ReductionBase.

    python -m bench.ops.row_forward [--shapes 32768x1024] [--out DIR]

bench.ops.row_forward_kernels has both kernels, written without tuning: the softmax-weighted mean of each row. Bytes:
one read of M x N. Results go to OUT/row_forward.json after every case; a table is printed last.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.results import Bound
from bench.ops.rows_common import ends, randn
from bench.peers import common
from tkq.testing.timing import relative_error

SHAPES = ((32768, 1024), (16384, 4096), (4096, 16384), (1024, 65536))
AT_LEAST = 0.95


def _reduction_base():
    from bench.ops.row_forward_kernels import SoftmaxMeanInOnePass

    def call(x):
        mean = torch.empty(x.shape[0], device="cuda")
        SoftmaxMeanInOnePass.launch(x, mean)
        return mean

    return call


def row_kernel(x):
    from bench.ops.row_forward_kernels import SoftmaxMean

    mean = torch.empty(x.shape[0], device="cuda")
    SoftmaxMean.launch(x=x, mean=mean)
    return mean


common.PEERS["softmax_mean"] = {"ReductionBase": _reduction_base}


def jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        def error(_, inputs, output, m=m):
            wide = [inputs[0][rows].double() for rows in ends(m)]
            return max(relative_error(output[rows], (torch.softmax(x, -1) * x).sum(-1))
                       for rows, x in zip(ends(m), wide))

        question = harness.Question("forward", "softmax_mean", f"M{m} N{n}", "GB/s", 2 * m * n,
                                    Bound(("ReductionBase",), AT_LEAST))
        inputs = lambda i, m=m, n=n: (randn(i, m, n),)
        yield Job(question, row_kernel, "softmax_mean", ("ReductionBase",), inputs, error)


BENCH = Bench("row_forward", __doc__, {"forward": jobs}, shapes={"forward": SHAPES}, quick=SHAPES)

if __name__ == "__main__":
    sys.exit(main(BENCH))

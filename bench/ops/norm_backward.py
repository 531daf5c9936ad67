"""The norms' backward against its baselines and against torch.add, which moves as many bytes and computes nothing.

    python -m bench.ops.norm_backward [--quick] [--shapes 1024x4096] [--match rmsnorm] [--without torch.compile]

rmsnorm: dx and dweight, all in bf16. layernorm: dx, dweight and dbias, the vectors in float32, as QuACK has them.
Bytes: two reads and one write of M x N. Results go to OUT/norm_backward.json. Exit status 0 if every bound that could
be decided holds and every result is accurate, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from bench.core import harness
from bench.core.command import Bench, Job, main, mean_misses
from bench.core.results import Bound, Case
from bench.peers import liger_cute
from tkq.norms.backward.ops import norm_backward
from tkq.reference import norms_backward
from tkq.testing.timing import relative_error

BF16 = torch.bfloat16
KINDS = ("rmsnorm", "layernorm")
SHAPES = ((32768, 1024), (32768, 4096), (32768, 8192), (16384, 16384), (16384, 32768), (8192, 65536), (4096, 131072))
MODERATE = {(8192, 4096): 0.88, (4096, 4096): 0.84, (1024, 4096): 0.65}  # the least ratio to torch.add: launches count
QUICK = ((32768, 1024), (32768, 4096), (16384, 16384), (1024, 4096))
PEERS = ("QuACK", "torch.compile", "Liger", "add")  # and Liger's in the CuTe DSL of rows that it takes
LIGER_MOST_COLUMNS = 65536
AGAINST_PEERS, AGAINST_QUACK_MODERATE, AGAINST_PEERS_MEAN = 1.02, 1.15, 1.10
EPS = 1e-5
SAMPLE_ROWS, CHUNK_ROWS = 256, 2048


def against_add(n: int) -> float:
    """The least ratio to torch.add."""
    return 0.95 if 4096 <= n <= 65536 else 0.92


def jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        for kind in KINDS:
            yield _job(kind, m, n)


def _job(kind: str, m: int, n: int) -> Job:
    layer = kind == "layernorm"

    def inputs(i):
        g = torch.Generator("cuda").manual_seed(i)
        dy, x = (torch.randn(m, n, device="cuda", dtype=BF16, generator=g) for _ in range(2))
        weight = torch.randn(n, device="cuda", dtype=torch.float32 if layer else BF16, generator=g)
        return dy, x, weight, *_statistics(kind, x)

    def ours(dy, x, weight, rstd, mean):
        return norm_backward(kind, dy, x, weight, rstd, mean, needs=(True, True, layer))

    if (m, n) in MODERATE:
        bound, roof = Bound(("QuACK",), AGAINST_QUACK_MODERATE), Bound(("add",), MODERATE[m, n])
    else:
        peers = tuple(name for name in PEERS if name != "add" and (name != "Liger" or n <= LIGER_MOST_COLUMNS))
        bound, roof = Bound(peers, AGAINST_PEERS), Bound(("add",), against_add(n))
    question = harness.Question("backward", f"{kind}_backward", f"M{m} N{n}", "GB/s", 3 * m * n * 2, bound, roof=roof)
    names = (*PEERS[:-1], *liger_cute.names(n), PEERS[-1])
    return Job(question, ours, f"{kind}_backward", names, inputs, _error(kind))


def _statistics(kind, x):
    """(rstd, mean or None), some rows at a time: the inputs must not need three times their memory."""
    rstd, mean = [], []
    for part in x.split(CHUNK_ROWS):
        wide = part.float()
        mean.append(wide.mean(-1))
        centred = wide - mean[-1][:, None] if kind == "layernorm" else wide
        rstd.append(torch.rsqrt(centred.square().mean(-1) + EPS))
    return torch.cat(rstd), torch.cat(mean) if kind == "layernorm" else None


def _error(kind):
    def error(name, inputs, output):
        """The worst of dx (first and last rows), dweight and dbias."""
        if name == "add":
            return None
        dy, x, weight, rstd, mean = inputs

        def wanted(rows):
            return norms_backward.norm_backward(
                kind, dy[rows], x[rows], weight, rstd[rows], None if mean is None else mean[rows]
            )

        M = x.shape[0]
        ends = (slice(0, SAMPLE_ROWS), slice(M - SAMPLE_ROWS, M))
        errors = [relative_error(output[0][rows], wanted(rows)[0]) for rows in ends]
        sums = [wanted(slice(i, i + CHUNK_ROWS))[1:] for i in range(0, M, CHUNK_ROWS)]
        for i, column in enumerate(output[1:]):
            if column is not None and i < (2 if kind == "layernorm" else 1):
                errors.append(relative_error(column, sum(s[i].double() for s in sums).float()))
        return max(errors)

    return error


def mean_of(cases: list[Case]) -> list[str]:
    """What is wrong with the mean against the best peer, over all shapes but the moderate ones."""
    return mean_misses("backward", [c for c in cases if c.bound.at_least == AGAINST_PEERS], AGAINST_PEERS_MEAN,
                       len(SHAPES) * len(KINDS))


BENCH = Bench("norm_backward", __doc__, {"backward": jobs}, shapes={"backward": SHAPES + tuple(MODERATE)}, quick=QUICK,
              judge=mean_of)

if __name__ == "__main__":
    sys.exit(main(BENCH))

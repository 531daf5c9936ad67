"""gemm with operands and outputs at any address and row pitch, against cuBLAS.

    python -m bench.ops.gemm_pitches [--quick] [--out DIR]

bench.core.pitches has the cases: the gradient of a head whose vocabulary is not padded, products of 4096 x 4096 x 4096
and batches. Copies that a call makes are in its time. Results go to OUT/gemm_pitches.json after every case; a table is
printed last.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import tkq
from bench.core import harness, pitches
from bench.core.command import PRODUCTS, Bench, Job, main, rest
from bench.core.results import Bound
from bench.peers import common

common.PEERS["gemm_out"] = {"cuBLAS": lambda: lambda a, b, out: torch.matmul(a, b, out=out)}


def ours(p: pitches.Product):
    if p.k % 8 == 0:
        return lambda a, b, out: tkq.gemm(a, b, out=out)
    from tkq.gemm.dense.launch import run  # a product of a backward, for which there is no function of its own

    def call(a, b, out):
        run(a, b, out, loose=True)
        return out

    return call


def jobs(products) -> Iterator[Job]:
    for p in products:
        question = harness.Question("pitches", "gemm", p.name, "TFLOP/s", p.flops, Bound(("cuBLAS",), p.at_least))

        def error(name, inputs, output, p=p):
            return p.error(inputs, output)

        yield Job(question, ours(p), "gemm_out", ("cuBLAS",), p.inputs, error, idle_seconds=rest(p.m, p.n, p.k))


BENCH = Bench("gemm_pitches", __doc__, {
    "head": lambda _: jobs(pitches.CASES[:1]),
    "cubes": lambda _: jobs(pitches.CUBES),
    "batches": lambda _: jobs(pitches.BATCHES),
    "vocabulary": lambda _: jobs(pitches.VOCABULARY),
}, effort=PRODUCTS)

if __name__ == "__main__":
    sys.exit(main(BENCH))

"""Forward and backward of linear attention and state spaces: the backward's launches concurrent, or one after the
other (see `tkq.linear_attention.split.concurrent`).

    python -m bench.studies.concurrent_launches [--shapes ssd:2x8192x80x128,linear:1x1536x32]

bf16. ssd: mamba2_ssd with heads of 64, sequences, their length, heads and N; linear: linear_attn with a decay for each
token, K = V = 128, sequences, their length and heads. A line for each: milliseconds. Exit status 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from unittest import mock

import torch

import tkq
from bench.ops import linear_attention, mamba2_ssd
from bench.ops.rows_common import randn
from bench.peers import linear_attention as linear_peers
from bench.peers import ssd as ssd_peers
from tkq.linear_attention.split import concurrent
from tkq.testing import timing

SHAPES = ("ssd:8x2048x80x128,ssd:2x8192x80x128,ssd:1x32768x80x128,ssd:2x8192x80x64,linear:2x2048x32,linear:1x1536x32,"
          "linear:4x4096x32")


def candidates(kind: str) -> dict:
    """By name, what is timed."""
    step = ssd_peers.training(mamba2_ssd.ours) if kind == "ssd" else linear_peers.training(tkq.linear_attn)

    def one_after_the_other(*given):
        with mock.patch.object(concurrent, "_worth", return_value=None):
            return step(*given)

    return {"concurrent": step, "one after the other": one_after_the_other}


def inputs(kind: str, i: int, sizes: tuple) -> tuple:
    """Of a step, with the gradient of what comes out."""
    if kind == "ssd":
        return *mamba2_ssd.inputs(i, *sizes), randn(9000 + i, *sizes[:3], mamba2_ssd.P)
    return *linear_attention.inputs(i, *sizes, "token"), randn(9000 + i, *sizes, linear_attention.DIM)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("needs a GPU", file=sys.stderr)
        return 2
    for text in options.shapes.split(","):
        kind, _, shape = text.partition(":")
        sizes = tuple(int(n) for n in shape.split("x"))
        for one in timing.compare(candidates(kind), lambda i: inputs(kind, i, sizes)).timings:  # noqa: B023
            print(f"{text} {one.name}: {f'{one.median_ms:.4f}' if one.ok else one.note}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

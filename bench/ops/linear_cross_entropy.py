"""linear_cross_entropy, forward and backward, against its baselines: time and memory.

    python -m bench.ops.linear_cross_entropy [--shapes 8192x4096x128256] [--without torch] [--seconds 280]

bf16; M rows of K numbers, V classes. Time: 6 M K V operations, three products; all are called eagerly, as Liger's host
waits for the GPU. Memory: the most in use above the inputs and their gradients. Results go to
OUT/linear_cross_entropy.json and OUT/linear_cross_entropy_memory.json. Exit status 0 if the bound on memory holds and
every result is accurate, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.results import run_here
from bench.ops.rows_common import BF16, targets
from bench.peers import common, liger_cute
from bench.peers.losses import with_gradients
from tkq.reference import losses as reference
from tkq.testing.timing import Effort, relative_error

SHAPES = ((4096, 4096, 128256), (8192, 4096, 128256), (8192, 4096, 32000), (16384, 2048, 50304))
PEERS = ("QuACK", "Liger", liger_cute.NAME, "torch")
OF_UNFUSED = 0.15
SAMPLE_ROWS = 64


def jobs(shapes) -> Iterator[Job]:
    for m, k, v in shapes:
        def inputs(i, m=m, k=k, v=v):
            g = torch.Generator("cuda").manual_seed(i)
            x = torch.randn(m, k, device="cuda", dtype=BF16, generator=g)
            weight = torch.randn(v, k, device="cuda", dtype=BF16, generator=g) / k**0.5
            return x, weight, targets(i, m, v)

        def error(name, inputs, output, m=m):
            x, weight, target = inputs
            rows = slice(0, SAMPLE_ROWS)
            one = torch.full((), SAMPLE_ROWS / m, device="cuda")  # the mean of all rows, as far as these go
            wanted, _ = reference.linear_cross_entropy_backward(x[rows], weight, target[rows], one)
            return relative_error(output[1][rows], wanted.float())

        question = harness.Question("linear", "linear_cross_entropy", f"M{m} K{k} V{v}", "TFLOP/s", 6 * m * k * v)
        yield Job(question, with_gradients(tkq.linear_cross_entropy), "linear_cross_entropy", PEERS, inputs, error)


def memory(shapes, names) -> dict:
    """Bytes at most above inputs and gradients, by shape and candidate."""
    found = {}
    for job, (m, k, v) in zip(jobs(shapes), shapes, strict=True):
        inputs = job.make_inputs(0)
        gradients = (m * k + v * k) * 2
        calls = {"tkq": job.ours, **common.find(job.peer_op, names)[0]}
        for name, call in calls.items():
            for _ in range(2):  # the first one compiles
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call(*inputs)
                torch.cuda.synchronize()
            found.setdefault(job.question.shape, {})[name] = torch.cuda.max_memory_allocated() - before - gradients
        del inputs
    return found


def weigh(options) -> list[str]:
    """Measure memory too; what is wrong with it."""
    found = memory(options.shapes or SHAPES, tuple(name for name in PEERS if name not in options.without))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "linear_cross_entropy_memory.json").write_text(
        json.dumps({"run": run_here(), **found}, indent=1) + "\n")
    problems = []
    for shape, taken in found.items():
        print(shape, *(f"{name} {taken[name] / 2**20:.0f} MB" for name in taken), sep="  ")
        if "torch" in taken and shape == "M8192 K4096 V128256":
            share = taken["tkq"] / taken["torch"]
            print(f"  {share:.3f}x torch, bound {OF_UNFUSED}")
            problems += [f"{shape}: {share:.3f} of torch's memory"] if share > OF_UNFUSED else []
    return problems


BENCH = Bench("linear_cross_entropy", __doc__, {"linear": jobs}, shapes={"linear": SHAPES},
              effort=Effort(7, 0.3, graphs=False), after=weigh)

if __name__ == "__main__":
    sys.exit(main(BENCH))

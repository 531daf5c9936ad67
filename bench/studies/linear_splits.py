"""What `tkq.linear_attention.split.plan` chooses among, timed: columns of V a block, segments of a sequence, and the
launches that segments are made of.

    python -m bench.studies.linear_splits [--kinds lightning,gdn] [--shapes 1x32768x32,2x8192x32] [--segments 2,4,8]

bf16, K = V = 128; lightning: a decay for each head; gdn: the gated delta rule. Shapes: sequences, their length, heads
of v. A line for each: milliseconds, and "planned" where the plan says so. Exit status 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys

import torch

from bench.ops.gated_delta_rule import inputs as of_delta
from bench.ops.linear_attention import DIM
from bench.ops.linear_attention import inputs as of_decays
from tkq.linear_attention import launch as engine
from tkq.linear_attention.launch import Given
from tkq.linear_attention.split.launch import in_segments, overlapping, split_of, states_of
from tkq.linear_attention.split.plan import Split
from tkq.testing import timing

SCALE = DIM**-0.5


def given(kind: str, *tensors: torch.Tensor) -> Given:
    """A launch of the engine."""
    return Given(*tensors[:4], tensors[4] if kind == "gdn" else None)


def candidates(kind: str, segments: tuple[int, ...]) -> dict:
    """By name, what is timed."""
    found = {f"{64 * groups} columns, whole": lambda *x, groups=groups: engine.launch(
        given(kind, *x)._replace(groups=groups), SCALE) for groups in (2, 1)}
    for groups in (2, 1):
        for count in segments:
            how = Split(groups, count)
            found[f"{64 * groups} columns, {count} segments"] = lambda *x, how=how: in_segments(
                given(kind, *x), SCALE, how)
    for count in segments:
        found[f"states of {count} segments alone"] = lambda *x, count=count: engine.launch(
            states_of(given(kind, *x)._replace(segments=count)), SCALE)
    return found


def name_of(how: Split) -> str:
    """As `candidates` has it."""
    return f"{64 * how.groups} columns, " + ("whole" if how.segments == 1 else f"{how.segments} segments")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="lightning,gdn")
    parser.add_argument("--shapes", default="1x32768x32,2x8192x32")
    parser.add_argument("--segments", default="2,4,8")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("needs a GPU", file=sys.stderr)
        return 2
    segments = tuple(int(n) for n in options.segments.split(","))
    for kind in options.kinds.split(","):
        make = of_delta if kind == "gdn" else of_decays
        for shape in options.shapes.split(","):
            batch, length, heads = (int(n) for n in shape.split("x"))
            sizes = (batch, length, heads) if kind == "gdn" else (batch, length, heads, "head")
            of = given(kind, *make(0, *sizes))
            how = split_of(of)
            planned = name_of(how) if overlapping(of, how) == 1 else "overlapping segments, which are not timed here"
            for one in timing.compare(candidates(kind, segments), lambda i: make(i, *sizes)).timings:  # noqa: B023
                ms = f"{one.median_ms:.4f}" if one.ok else one.note
                print(f"{kind} {shape} {one.name}: {ms}{' planned' * (one.name == planned)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

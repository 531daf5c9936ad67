"""Time the candidate configs of softmax and cross entropy, against QuACK and a roofline, in the same run.

    python -m bench.tune.one_pass_rows --precompile                        compile only; needs no GPU
    python -m bench.tune.one_pass_rows --kind forward --shapes 32768x1024  compile, time, print a table
    kinds: softmax, softmax_backward, forward, fused, backward (the last three are cross entropy's)

First all variants in short turns; then the quickest few beside the peer. The tables of tkq/softmax/plan.py and
tkq/losses/plan.py are what this script finds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.core.shapes import NORM_SHAPES
from bench.tune import common
from tkq.losses import plan as losses
from tkq.losses.plan import StreamingConfig
from tkq.losses.spec import CrossEntropySpec
from tkq.rows.one_pass.plan import RowConfig
from tkq.softmax import plan as softmax
from tkq.softmax.spec import SoftmaxSpec

KINDS = ("softmax", "softmax_backward", "forward", "fused", "backward")
STREAMS = {"softmax": 2, "softmax_backward": 3, "forward": 1, "fused": 2, "backward": 2}
PEERS = {"softmax": ("QuACK", "copy"), "softmax_backward": ("QuACK", "add"), "forward": ("QuACK",),
         "fused": ("QuACK", "copy"), "backward": ("QuACK", "copy")}


def spec_of(kind: str, N: int):
    if kind.startswith("softmax"):
        return SoftmaxSpec(N, "bf16", 8, backward=kind == "softmax_backward")
    return CrossEntropySpec(kind, N, "bf16", vector=8)


def variants(kind: str, N: int, match: str = "") -> list:
    """The planned one, and those whose label contains one of the texts, or is "=text"."""
    found = (softmax if kind.startswith("softmax") else losses).variants(spec_of(kind, N))
    return found[:1] + [c for c in found[1:] if any(t in f"={label(c)}=" for t in match.split(","))]


def recipe(kind: str, N: int, config: RowConfig):
    from tkq.losses.launch import recipe as of_losses
    from tkq.softmax.ops import recipe as of_softmax

    return (of_softmax if kind.startswith("softmax") else of_losses)(spec_of(kind, N), config)


def label(c) -> str:
    walk = ""
    if isinstance(c, StreamingConfig):
        walk = f" walk{c.vectors}" + (f"x{c.stages}" if c.load == "shared" else "")
    min_blocks_per_sm = f" r{c.min_blocks_per_sm}" * (c.min_blocks_per_sm > 0)
    return f"{c.threads_per_row}/{c.threads} c{c.cluster} {c.load[:3]}{walk}{min_blocks_per_sm}"


# ---- timing ----------------------------------------------------------------------------------------------------------


def _candidate(kind: str, N: int, config: RowConfig):
    """The kernel as the peers of its kind are called."""
    import torch

    from tkq import runtime

    run = runtime.function(recipe(kind, N, config))

    def floats(x, n):
        return torch.empty(n, dtype=torch.float32, device=x.device)

    def cross_entropy(x, t, gradient):
        M = x.shape[0]
        loss = floats(x, M)
        run(x, t, None, loss, floats(x, 2 * M + 2), None, gradient, -100, 0.0, 0.0, 0.0)
        return loss

    def softmax_(*given):
        out = torch.empty_like(given[0])
        run(*given, out, 1.0)
        return out

    def fused(x, t):
        gradient = torch.empty_like(x)
        return cross_entropy(x, t, gradient), gradient

    def backward(x, t, dloss, saved, lse):
        gradient = torch.empty_like(x)
        run(x, t, None, dloss, saved, None, gradient, -100, 0.0, 0.0, 0.0)
        return gradient

    calls = {"forward": lambda x, t: cross_entropy(x, t, None), "fused": fused, "backward": backward}
    return calls.get(kind, softmax_)


def _job(kind: str, M: int, N: int):
    """The benchmark's: what says how its peers are called, and with what."""
    from bench.ops import cross_entropy
    from bench.ops import softmax as softmax_bench

    jobs = {"softmax": softmax_bench.forward_jobs, "softmax_backward": softmax_bench.backward_jobs,
            "forward": cross_entropy.forward_jobs, "fused": cross_entropy.both_jobs,
            "backward": cross_entropy.backward_jobs}
    return next(jobs[kind]([(M, N)]))


def tune(kind: str, M: int, N: int, match: str = "") -> dict:
    """Milliseconds of the finalists and the peers for one shape, and every candidate's of the first round."""
    from bench.peers import common as peers
    from tkq.testing.timing import Effort

    ours = {label(c): _candidate(kind, N, c) for c in variants(kind, N, match)}
    planned, job = next(iter(ours)), _job(kind, M, N)
    found, missing = peers.find(job.peer_op, PEERS[kind])
    efforts = Effort(7, 0.002, 0.02), Effort(9, 0.02, 0.1)
    done = common.final(ours, planned, found, job.make_inputs, efforts, error=job.error)
    print(f"\n{kind} M {M} N {N}   (planned: {planned})")
    common.show(done, STREAMS[kind] * M * N * 2 * 1e-9, missing)
    return dict(kind=kind, M=M, N=N, planned=planned, **done.as_dict())


def _cases(options) -> list:
    kinds = options.kind or KINDS
    if options.shapes:
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
        return [(kind, *shape) for kind in kinds for shape in shapes]
    found = []
    for kind in kinds:
        for M, N in NORM_SHAPES:
            if kind in ("softmax", "forward"):
                found.append((kind, M, N))
            elif N <= 131072:  # half the rows where more would not fit beside the peers'
                found.append((kind, min(M, (1 << 29) // N), N))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_compiling(parser)
    parser.add_argument("--out", type=Path, help="folder for row_passes.json")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--shapes", help="such as 32768x1024,16384x16384")
    parser.add_argument("--match", default="", help="by parts of labels: 'walk,c8 sha'; '=label=' is a whole one")
    options = parser.parse_args()
    cases = _cases(options)
    common.precompile((recipe(kind, N, c) for kind, _, N in cases for c in variants(kind, N, options.match)),
                      options.processes)
    if options.precompile:
        return
    results = []
    for case in cases:
        results.append(tune(*case, options.match))
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "row_passes.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

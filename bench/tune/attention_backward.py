"""Time configurations of the attention backward against FA4 and cuDNN.

    python -m bench.tune.attention_backward --precompile                       fill the cache first: no GPU is needed
    python -m bench.tune.attention_backward [--variants all] [--cases 128:1024,4096:full,causal] [--out FILE]

Runs of three: a variant, FA4 and cuDNN take turns, on the same inputs, everything that a call launches included; what
counts is the ratio to the better of the two in the same round. --together: all variants and FA4 in one run, to see
variants apart that are close. A length may be the name of a batch of sequences one behind the other, "mixed": then FA4
is the peer. "gqa1024": of 1024, 32 query heads on 8 heads of K and V, and no peer; "mha1024": on 32.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.tune.common import precompile
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.plan import SINGLE, packed_class, plan, recipe
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.forward.plan import length_class

CASES = "128:1024,4096,16384:full,causal;64:1024,8192:full,causal;256:8192:full,causal"

# What differs from ``SINGLE``, blocks that have one task, and for which head_dims and masks it makes sense.
_PERSISTENT = {"store_from_registers": True, "persistent": True}
_HELPER_WARPS = {**_PERSISTENT, "helper_warps": True, "registers": (32, 64, 208), "l2_section_mb": 8}
_GQA = {**_HELPER_WARPS, "ping_pong": True, "by_query_head": True}
_FUSE_PREPROCESS = {**_HELPER_WARPS, "ping_pong": True, "fuse_preprocess": True}
_DQ_SERIAL = {**_PERSISTENT, "ping_pong": True, "dq_reduce": "serial", "l2_section_mb": 4}
_BULK = {"dq_reduce": "bulk", "dq_cols": 64, "ds_stages": 1, "p_stages": 1, "registers": (24, 72, 208, 208)}
_WIDE_BEHIND = {**_HELPER_WARPS, "dq_cols": 64, "registers": (32, 64, 208, 208)}
VARIANTS = {
    "single": {},
    "atomic": {"dq_reduce": "atomic"},
    "ping_pong": {"ping_pong": True},
    "no ping_pong": {"ping_pong": False},
    "persistent": _PERSISTENT,
    "persistent ping_pong": {**_PERSISTENT, "ping_pong": True},
    "helper_warps": {**_HELPER_WARPS, "ping_pong": True},
    "helper_warps no ping_pong": {**_HELPER_WARPS, "ping_pong": False},
    "helper_warps in 1 part": {**_HELPER_WARPS, "ping_pong": True, "dkv_parts": 1},
    "helper_warps in 4 parts": {**_HELPER_WARPS, "ping_pong": True, "dkv_parts": 4},
    "helper_warps sections of 4 MB": {**_HELPER_WARPS, "ping_pong": True, "l2_section_mb": 4},
    "helper_warps sections of 24 MB": {**_HELPER_WARPS, "ping_pong": True, "l2_section_mb": 24},
    "fuse_preprocess": _FUSE_PREPROCESS,
    "fuse_preprocess sections of 24 MB": {**_FUSE_PREPROCESS, "l2_section_mb": 24},
    "fuse_preprocess red": {**_FUSE_PREPROCESS, "dq_reduce": "atomic", "ds_stages": 3},
    "fuse_preprocess red 4 stages of dS": {**_FUSE_PREPROCESS, "dq_reduce": "atomic", "ds_stages": 4},
    "dq_serial": _DQ_SERIAL,
    "dq_serial, sections of 1 MB": {**_DQ_SERIAL, "l2_section_mb": 1},
    "dq_serial of 2 stages": {**_DQ_SERIAL, "stages": 2},
    "by query heads": {**_GQA, "l2_section_mb": 8},
    "by query heads of 24 MB": {**_GQA, "l2_section_mb": 24},
    "by query heads split": {**_GQA, "heads_per_task": 1},
    "by query heads split in 2s": {**_GQA, "heads_per_task": 2},
    "by query heads split in 2s with 2 rounds": {**_GQA, "heads_per_task": 2, "tail_waves": 2},
    "wide helper_warps": _WIDE_BEHIND,
    "wide bulk helper_warps": {**_BULK, **_WIDE_BEHIND},
    "2 stages": {"stages": 2},
    "3 dS stages": {"ds_stages": 3},
    "tile 64": {"tile": 64},
    "sections of 8 MB": {"l2_section_mb": 8},
    "sections of 64 MB": {"l2_section_mb": 64},
    "head by head": {"longest_first": False},
    "bulk": _BULK,
    "bulk persistent": {**_BULK, **_PERSISTENT},
    "1 stage of dS": {"ds_stages": 1},
    "wide dQ": {"dq_cols": 128, "registers": (24, 96, 192, 200)},
}


def longest(length: int | str) -> int:
    return dense_length(length) or max(packed(length)[1])


def dense_length(length: int | str) -> int:
    """0: a batch of any lengths."""
    return length if isinstance(length, int) else int(length[3:]) if length[:3] in ("gqa", "mha") else 0


def packed(name: str) -> tuple:
    """(name, lengths) of a batch of ``attention_backward_varlen``'s."""
    from bench.ops.attention_forward import BATCHES

    return next(batch for batch in BATCHES if batch[0].startswith(name.removeprefix("gqa ")))


def spec_of(dim: int, causal: bool, length: int | str) -> BackwardSpec:
    return BackwardSpec(width=dim, right=causal, varlen=not dense_length(length))


def variants(dim: int, causal: bool, length: int | str = 4096) -> dict[str, BackwardConfig]:
    """The plan, and the variants that can run, and that differ from it."""
    spec = spec_of(dim, causal, length)
    kind = (packed_class if spec.varlen else length_class)(longest(length))
    found = {"plan": plan(spec, kind, 4 if str(length).startswith("gqa") else 1)}
    for name, change in VARIANTS.items():
        if name.startswith(("sections", "head by")) and not causal:
            continue
        config = dataclasses.replace(SINGLE[dim], **change)
        try:
            if config.by_query_head and spec.varlen:
                continue
            config.check(dim)
        except ValueError:
            continue
        if config not in found.values():
            found[name] = config
    return found


def model(dim: int, c: BackwardConfig) -> tuple[float, float]:
    """(shared memory's time / the tensor cores' time, bytes of dQ added / clock of the tensor cores) of a step, from
    128 bytes and 2048 products a clock: what limits, if nothing else does."""
    halves, clocks = c.block // 64, 5 * c.tile * c.block * dim / 2048
    rows, cols = c.dq_parts(dim)
    products = halves * (2 * (64 + c.tile) + 2 * c.tile) * dim * 2  # S and dP from shared memory, dV and dK half so
    dq = rows * cols * (64 + c.dq_cols) * c.block * 2
    moved = 2 * c.tile * dim * 2 + c.block * c.tile * 2  # Q and dO in, dS
    moved += 2 * c.tile * dim * 4 if c.dq_reduce != "atomic" else 0
    moved += 2 * c.block * c.tile * 2 if dim > 128 else 0  # P from one warpgroup to the other
    return (products + dq + moved) / 128 / clocks, c.tile * dim * 4 / clocks


def main() -> None:
    args = arguments()
    chosen = {}
    for cases, names in zip(args.cases or [CASES], args.variants or ["all"], strict=True):
        wanted = None if names == "all" else [n.strip() for n in names.split(",")]
        for dim, lengths, masks in map(parsed, cases.split(";")):
            for case in ((dim, length, causal) for causal in masks for length in lengths):
                chosen[case] = {n: c for n, c in variants(dim, case[2], case[1]).items()
                                if wanted is None or n in wanted}
    if args.precompile:
        precompile([recipe(spec_of(dim, causal, length), c) for (dim, length, causal), found in chosen.items()
                    for c in found.values()])
        return
    run(chosen, args)


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--variants", action="append", help="comma-separated names: plan, " + ", ".join(VARIANTS))
    p.add_argument("--cases", action="append", help="head_dim:lengths:masks;.. as " + CASES + "; each with --variants")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--round-seconds", type=float, default=0.02, help="one candidate's turn")
    p.add_argument("--without", default="", help="peers to leave out")
    p.add_argument("--together", action="store_true")
    p.add_argument("--precompile", action="store_true", help="compile the variants, and no more")
    p.add_argument("--seconds", type=float, default=280, help="start no run after so long")
    p.add_argument("--out", type=Path)
    return p.parse_args()


def parsed(text: str):
    """(head_dim, lengths, masks) of "128:1024,mixed:full,causal"."""
    dim, lengths, masks = text.split(":")
    lengths = tuple(int(n) if n.isdigit() else n for n in lengths.split(","))
    return int(dim), lengths, tuple(m == "causal" for m in masks.split(","))


class Problem(NamedTuple):
    """What is timed. make and error: as of ``bench.core.command.Job``; options: of the peers."""

    name: str
    flops: float
    ours: Callable
    op: str
    peers: tuple
    options: dict
    make: Callable
    error: Callable


def problem_of(dim: int, length: int | str, causal: bool) -> Problem:
    from bench.ops import attention_backward as dense
    from bench.ops import attention_backward_varlen as varlen
    from bench.peers.attention import pairs

    if dense_length(length):
        heads = (0, 0) if isinstance(length, int) else (8, 32) if length.startswith("gqa") else (32, 32)
        shape = dense.Shape(dense_length(length), dim, causal, *heads)
        return Problem(str(shape), shape.flops, lambda c: dense.ours(shape, c), "attention_backward",
                       () if heads[0] else tuple(dense.PEERS), {"shape": shape}, dense.inputs(shape),
                       dense.error(shape))
    name, lengths = packed(length)
    options, heads = {"longest": max(lengths), "causal": causal}, varlen.WIDTH // dim
    return Problem(f"{name} H{heads} D{dim} {'causal' if causal else 'full'}",
                   10 * varlen.WIDTH * sum(pairs(n, causal) for n in lengths),
                   lambda c: varlen.ours(max(lengths), causal, c), "attention_backward_varlen", ("FA4",), options,
                   varlen.inputs(lengths, heads, dim, causal), varlen.error(causal))


def run(chosen, args) -> None:
    import torch

    from bench.core import harness
    from bench.peers.common import find
    from tkq.testing import timing
    from tkq.testing.timing import Effort

    gpu, monitor = timing.Gpu(), harness.Monitor()
    effort = Effort(args.rounds, args.round_seconds, warmup_seconds=4 * args.round_seconds)
    results, deadline = [], None
    print(f"{torch.cuda.get_device_name()}, driver {monitor.driver}, torch {torch.__version__}; "
          "ratio: the peer's time / ours")
    for case in chosen:
        problem = problem_of(*case)
        names = [n for n in problem.peers if n not in args.without.split(",")]
        peers, missing = find(problem.op, names, **problem.options)
        deadline = deadline or time.monotonic() + args.seconds  # the peers' import took its time
        mine = {name: problem.ours(config) for name, config in chosen[case].items()}
        for name, c in chosen[case].items():
            print("  model: {:20s} shared memory {:.2f} of the tensor cores, {:.1f} bytes added a clock".format(
                name, *model(case[0], c)))
        print(f"\n{problem.name}" + "".join(f"; no {n}: {why}" for n, why in missing.items()), flush=True)
        for group in [mine] if args.together else [{name: call} for name, call in mine.items()]:
            if time.monotonic() > deadline:
                print("  the time is up", flush=True)
                break
            found = timing.compare({**group, **peers}, problem.make, effort, error=problem.error, gpu=gpu)
            results.append({"shape": problem.name, "monitor": dataclasses.asdict(monitor.read()),
                            "timings": [dataclasses.asdict(t) for t in found.timings]})
            show(problem, found, group, peers)
            if args.out:  # what is measured stays, whatever comes
                args.out.write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()


def show(problem, found, group, peers) -> None:
    from tkq.testing.timing import ratio

    for t in found.timings:
        if not t.ok:
            print(f"  {t.name:20s} {t.note}", flush=True)
    rate = lambda name: problem.flops / found[name].median_ms / 1e9
    for name in group:
        if found[name].ok:
            against = {p: ratio(found[name], found[p]) for p in peers if found[p].ok}
            error = found[name].error
            print(f"  {name:20s} {rate(name):6.1f} TFLOP/s  {found[name].median_ms:8.4f} ms  "
                  + "  ".join(f"{p} {r:.3f}x ({rate(p):.0f})" for p, r in against.items())
                  + ("" if error is None else f"  error {error:.1e}"), flush=True)
    if len(group) > 1:
        best = min((n for n in group if found[n].ok), key=lambda n: statistics.median(found[n].times_ms))
        print(f"  fastest: {best}", flush=True)


if __name__ == "__main__":
    main()

"""What `tkq.attention.decode.cascade.sharing.pays` decides, timed: a shared prefix read once and by each sequence.

    python -m bench.studies.cascade [--heads 32x8] [--page 16] [--batches 1,4,16,64,256] [--prefixes 128,1024,8192]

bf16, D 128, one query, 256 keys of each sequence behind the prefix; pages lie in any order. Plans are made before, as
once for all layers. A line for each: microseconds, and "planned" where the plan says so. Exit status 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys

import torch

import tkq
from bench.ops.rows_common import randn
from bench.peers.decode import once
from tkq.testing import timing

D, BEHIND = 128, 256
WAYS = {"read once": True, "by each": False}


def inputs(i: int, batch: int, prefix: int, heads: tuple[int, int], page: int) -> tuple:
    """q, k_cache, v_cache, lengths, table."""
    shared, own = prefix // page, -(-(prefix % page + BEHIND) // page)
    order = torch.randperm(shared + batch * own, generator=torch.Generator().manual_seed(i)).int()
    table = torch.cat((order[:shared].expand(batch, -1), order[shared:].view(batch, own)), 1)
    q = randn(4 * i, batch, 1, heads[0], D)
    k, v = (randn(4 * i + j, len(order), page, heads[1], D) for j in (1, 2))
    return q, k, v, torch.full((batch,), prefix + BEHIND, dtype=torch.int32, device=q.device), table.to(q.device)


def plan_of(given: tuple, prefix: int, cascade: bool | None):
    """The plan of a call with such inputs."""
    q, k, _, lengths, _ = given
    return tkq.plan_cascade(lengths, q.shape[2], k.shape[2], D, prefix_len=prefix, page_size=k.shape[1],
                            cascade=cascade)


def candidates(prefix: int) -> dict:
    """By name, what is timed."""
    found = {}
    for name, cascade in WAYS.items():
        plan = once(lambda *given, cascade=cascade: plan_of(given, prefix, cascade))
        found[name] = lambda q, k, v, lengths, table, plan=plan: tkq.cascade_attention(
            q, k, v, block_table=table, plan=plan(q, k, v, lengths, table))
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="32x8")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--batches", default="1,4,16,64,256")
    parser.add_argument("--prefixes", default="128,1024,8192")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("needs a GPU", file=sys.stderr)
        return 2
    heads = tuple(int(n) for n in options.heads.split("x"))
    for batch in map(int, options.batches.split(",")):
        for prefix in map(int, options.prefixes.split(",")):
            sizes = batch, prefix, heads, options.page
            planned = "read once" if plan_of(inputs(0, *sizes), prefix, None).shared else "by each"
            for one in timing.compare(candidates(prefix), lambda i: inputs(i, *sizes)).timings:  # noqa: B023
                us = f"{1000 * one.median_ms:.1f}" if one.ok else one.note
                print(f"B{batch} prefix {prefix} {one.name}: {us}{' planned' * (one.name == planned)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

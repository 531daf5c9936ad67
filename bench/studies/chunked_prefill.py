"""Chunked prefill by page size, timed beside `flash_attn` of the same problem without pages.

    python -m bench.studies.chunked_prefill [--queries 2048] [--keys 18432] [--heads 32x8] [--pages 16,64,256] [--peers]

bf16, D 128, one sequence, causal, pages in any order, plans made ahead. "unpaged": a plain cache; "ragged": the queries
by cu_seqlens_q. --peers: FA3 over the same caches, where it is installed. A line for each: milliseconds, and the times
of flash_attn and of the plain cache over it; "apart": the relative difference of its result from flash_attn's. Exit
status 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

import tkq
from bench.ops.rows_common import randn
from bench.peers import decode
from tkq.testing import timing

D = 128
PLAIN, DENSE = "unpaged", "flash_attn"


def inputs(i: int, queries: int, keys: int, heads: tuple[int, int], pages: tuple[int, ...]) -> tuple:
    """q, k, v, lengths, starts, and of each size of pages both caches and the table."""
    q = randn(4 * i, 1, queries, heads[0], D)
    k, v = (randn(4 * i + j, 1, keys, heads[1], D) for j in (1, 2))
    ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device=q.device)
    found = [q, k, v, ints(keys), ints(0, queries)]
    for page in pages:
        count = keys // page
        order = torch.randperm(count, generator=torch.Generator().manual_seed(i)).to(q.device)
        for x in (k, v):
            cache = x.new_empty(count, page, heads[1], D)
            cache[order] = x[0].view(count, page, heads[1], D)
            found.append(cache)
        found.append(order.int()[None])
    return tuple(found)


def planned(ragged: bool) -> Callable:
    """The plan of a set of inputs, made once."""
    known: dict = {}

    def of(k, given):
        q, lengths, starts = given[0], given[3], given[4]
        if k.data_ptr() not in known:
            more = dict(cu_seqlens_q=starts, total_q=q.shape[1]) if ragged else dict(max_seqlen_q=q.shape[1])
            known[k.data_ptr()] = tkq.plan_decode(lengths, q.shape[2], k.shape[2], D, **more)
        return known[k.data_ptr()]

    return of


def candidates(pages: tuple[int, ...], peers: bool) -> dict[str, Callable]:
    """By name, what is timed."""
    def over(which: int | None, ragged: bool = False) -> Callable:
        plan = planned(ragged)

        def run(*given):
            q, lengths, starts = given[0], given[3], given[4]
            k, v, table = (*given[1:3], None) if which is None else given[5 + 3 * which:8 + 3 * which]
            options = dict(cache_seqlens=lengths, block_table=table, plan=plan(k, given))
            if ragged:
                return tkq.flash_attn_with_kvcache(q[0], k, v, cu_seqlens_q=starts, **options)[None]
            return tkq.flash_attn_with_kvcache(q, k, v, **options)

        return run

    def theirs(which: int) -> Callable:
        call: list = []

        def run(*given):
            if not call:
                call.append(decode.flash_attention_3(False))
            return call[0](given[0], *given[5 + 3 * which:7 + 3 * which], given[3], given[7 + 3 * which])

        return run

    found = {DENSE: lambda q, k, v, *_: tkq.flash_attn(q, k, v, causal=True), PLAIN: over(None)}
    for which, page in enumerate(pages):
        found[f"page {page}"] = over(which)
        found[f"page {page}, ragged"] = over(which, ragged=True)
        if peers:
            found[f"page {page}, FA3"] = theirs(which)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=2048)
    parser.add_argument("--keys", type=int, default=18432)
    parser.add_argument("--heads", default="32x8", help="of q and of K/V")
    parser.add_argument("--pages", default="16,64,256", help="sizes that divide the keys")
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("needs a GPU", file=sys.stderr)
        return 2
    pages, heads = (tuple(int(n) for n in text.split(by)) for text, by in ((options.pages, ","), (options.heads, "x")))
    sizes = options.queries, options.keys, heads, pages
    wanted = {}

    def apart(name, given, found):
        if name == DENSE:
            wanted["of"] = found.double()
        return (found.double() - wanted["of"]).norm().item() / wanted["of"].norm().item()

    timings = timing.compare(candidates(pages, options.peers), lambda i: inputs(i, *sizes), error=apart).timings
    ms = {one.name: one.median_ms for one in timings if one.ok}
    for one in timings:
        if not one.ok:
            print(f"{one.name}: {one.note}", flush=True)
            continue
        against = ", ".join(f"{of} {ms[of] / ms[one.name]:.3f}" for of in (DENSE, PLAIN) if of in ms)
        print(f"{one.name}: {ms[one.name]:.4f} ms; {against}; apart {one.error:.1e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

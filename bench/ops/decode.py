"""tkq.flash_attn_with_kvcache against FA3, FlashInfer and torch SDPA's plain cache: decoding over paged caches, bf16.

    python -m bench.ops.decode [--sections calls,paged,mixed,several,short,chunk] [--quick]
        [--shapes 64x4096x32x8x64]

Shapes: sequences, keys of each, query heads, K/V heads, keys of a page; D is 128. paged: one query. mixed: lengths from
1/16 of the keys on, on a logarithmic scale. several: four queries. short: what a few SMs could do. chunk: 2048 queries.
Pages lie in any order, and all that the caches have is in use. The work is the bytes of the keys and values; of chunk
floating-point operations. "read" is what reading the bytes takes by torch.sum. Plans are made before, as once for all
layers. A result is judged by float64, on the first and the last sequence, and there on up to 64 queries. Results go to
OUT/decode.json after every case.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import torch

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops.rows_common import randn
from bench.peers import decode
from tkq.reference.decode import flash_attn_with_kvcache as exactly
from tkq.testing.timing import relative_error

D = 128
SECTIONS = {
    "paged": tuple((*size, page) for page in (64, 16, 256) for size in (
        (1, 65536, 32, 8), (1, 16384, 64, 8), (16, 8192, 32, 8), (64, 4096, 32, 8), (128, 2048, 32, 8))),
    "mixed": ((64, 32768, 32, 8, 64), (16, 32768, 32, 8, 64)),
    "several": ((1, 65536, 32, 8, 64), (16, 8192, 32, 8, 64), (64, 4096, 32, 8, 64)),
    "short": ((1, 1024, 32, 8, 64), (8, 1024, 32, 8, 64), (1, 8192, 32, 8, 64)),
    "chunk": tuple((1, 18432, 32, 8, page) for page in (16, 64, 256)),
}
QUERIES = {"several": 4, "chunk": 2048}  # else one
AT_LEAST = {"paged": 1.03, "mixed": 1.05, "several": 1.05, "short": 1.0, "chunk": 1.08}  # times the best
JUDGED = 64  # queries, the last ones
ROOF = 0.97  # of the rate of reading
PAGED_PEERS = "FA3", "FlashInfer"


def ours() -> object:
    """The call, with a plan for each set of inputs."""
    plan = decode.once(lambda q, k, v, lengths, table: tkq.plan_decode(
        lengths, q.shape[2], k.shape[2], q.shape[3], max_seqlen_q=q.shape[1]))
    return lambda *given: tkq.flash_attn_with_kvcache(*given[:3], cache_seqlens=given[3], block_table=given[4],
                                                      plan=plan(*given))


def lengths_of(section, B, S):
    """Of each sequence."""
    if section != "mixed" or B == 1:
        return [S] * B
    return [round(S / 16 * 16 ** (i / (B - 1))) for i in range(B)]


def pairs(queries, keys):
    """Of a query and a key that it sees."""
    return sum(max(0, keys - queries + i + 1) for i in range(queries))


def inputs(i, lengths, queries, heads, kv_heads, page):
    """q, k_cache, v_cache, lengths, table."""
    pages = [math.ceil(n / page) for n in lengths]
    q = randn(4 * i, len(lengths), queries, heads, D)
    k, v = (randn(4 * i + j, sum(pages), page, kv_heads, D) for j in (1, 2))
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(i)).int()
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for row, mine in zip(table, order.split(pages)):
        row[:len(mine)] = mine
    return q, k, v, torch.tensor(lengths, dtype=torch.int32, device=q.device), table.to(q.device)


def error(name, given, found):
    """On two sequences."""
    if name == "read":
        return None
    q, k, v, lengths, table = given
    worst = 0.0
    for s in {0, len(q) - 1}:
        one = slice(s, s + 1)
        mine = table[s, :math.ceil(int(lengths[s]) / k.shape[1])].long()
        local = torch.arange(len(mine), device=q.device, dtype=torch.int32)[None]
        last = q[one, -JUDGED:].double()
        exact = exactly(last, k[mine].double(), v[mine].double(), lengths[one], local)[0]
        worst = max(worst, relative_error(found[one, -JUDGED:], exact))
    return worst


def jobs(section, shapes) -> Iterator[Job]:
    for B, S, heads, kv_heads, page in shapes:
        lengths, queries = lengths_of(section, B, S), QUERIES.get(section, 1)
        title = f"B{B} S{S} H{heads}/{kv_heads} page {page}" + " mixed" * (section == "mixed") + (
            f" Sq{queries}" if queries > 1 else "")
        work, roof = ("GB/s", 4 * sum(lengths) * kv_heads * D), Bound(("read",), ROOF)
        if section == "chunk":
            work, roof = ("TFLOP/s", 4 * heads * D * sum(pairs(queries, n) for n in lengths)), None
        question = harness.Question(section, "flash_attn_with_kvcache", title, *work,
                                    Bound(PAGED_PEERS, AT_LEAST[section]), roof=roof)
        yield Job(question, ours(), "decode", (*PAGED_PEERS, "torch", "read"),
                  lambda i, given=(lengths, queries, heads, kv_heads, page): inputs(i, *given), error,
                  dict(alike=queries == 1 and section != "mixed"))


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    given = inputs(0, [64], 1, 8, 2, 64)
    run = ours()
    return {"x + x": Call(lambda: given[0] + given[0]),
            "flash_attn_with_kvcache tkq": Call(lambda: run(*given), at_most=14.0)}


BENCH = Bench(
    "decode", __doc__,
    {section: lambda shapes, section=section: jobs(section, shapes) for section in SECTIONS},
    shapes=SECTIONS,
    quick=((64, 4096, 32, 8, 64), (1, 65536, 32, 8, 64), (1, 1024, 32, 8, 64)),
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))

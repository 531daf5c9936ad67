"""tkq.mla_decode against FlashMLA: multi-head latent attention, absorbed, over a paged cache in bf16.

    python -m bench.ops.mla [--sections calls,few,many,several,sparse,float8] [--quick] [--shapes 128x4096x128x1]

Shapes: sequences, keys of each, heads, queries. few: 16 heads, bound by reading the cache; many: 128, bound by
products; several: more than one query. sparse: of 2048 keys that each query has chosen from its sequence, in any order.
Pages have 64 rows, lie in any order, and are full. "read" is what reading the bytes takes by torch.sum. Plans are made
before, as once for all layers. A result is judged by float64, on the first and the last sequence. FlashMLA's sparse
decoding takes float8 caches alone: "FlashMLA, float8" reads 656 bytes of each key where tkq reads 1152, and its error
is that of float8; in the section "float8" both read the same cache. Results go to OUT/mla.json after every case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops.rows_common import randn
from bench.peers import decode, mla
from tkq.reference.mla import mla_decode as exactly
from tkq.testing.timing import relative_error

D, DV, PAGE, TOPK = 576, 512, 64, 2048
LENGTHS = (1, 4096), (1, 32768), (16, 4096), (16, 32768), (64, 4096), (64, 32768), (128, 4096), (128, 32768)
SECTIONS = {
    "few": tuple((*size, 16, 1) for size in LENGTHS),
    "many": tuple((*size, 128, 1) for size in LENGTHS),
    "several": ((64, 4096, 128, 2), (16, 32768, 16, 4)),
    "sparse": ((1, 4096, 128, 1), (16, 32768, 128, 1), (64, 32768, 128, 1), (64, 32768, 128, 2), (128, 32768, 128, 2)),
    "float8": ((1, 4096, 128, 1), (64, 32768, 128, 1), (64, 32768, 128, 2)),
}
AT_LEAST = {"few": 1.04, "many": 1.06, "several": 1.04, "sparse": 1.0, "float8": 1.0}  # times the best
ROOF = 0.97  # of the rate of reading


def ours() -> object:
    """The call, with a plan for each set of inputs."""
    plan = decode.once(lambda q, cache, lengths, table: tkq.plan_decode(
        lengths, q.shape[2], 1, D, head_dim_v=DV, max_seqlen_q=q.shape[1]))
    return lambda *given: tkq.mla_decode(given[0], given[1], given[3], given[2], softmax_scale=mla.SCALE,
                                         plan=plan(*given))


def inputs(i, B, S, heads, queries):
    """q, cache, lengths, table."""
    pages = -(-S // PAGE)
    q, cache = randn(2 * i, B, queries, heads, D), randn(2 * i + 1, B * pages, PAGE, D)
    order = torch.randperm(B * pages, generator=torch.Generator().manual_seed(i)).int()
    return q, cache, torch.full((B,), S, dtype=torch.int32, device=q.device), order.view(B, pages).to(q.device)


def error(name, given, found):
    """On two sequences."""
    if name == "read":
        return None
    q, cache, lengths, table = given
    worst = 0.0
    for s in {0, len(q) - 1}:
        one = slice(s, s + 1)
        local = torch.arange(table.shape[1], device=q.device, dtype=torch.int32)[None]
        exact = exactly(q[one].double(), cache[table[s].long()].double(), local, lengths[one], mla.SCALE)[0]
        worst = max(worst, relative_error(found[one], exact))
    return worst


def ours_sparse(float8=False) -> object:
    """As `ours`, of lists. float8: of float8 rows, packed with a set's first call."""
    made = decode.once(lambda q, cache, indices: (
        mla.packed(cache).view(torch.uint8) if float8 else cache,
        tkq.plan_decode(indices.new_full((q.shape[0] * q.shape[1],), indices.shape[2]), q.shape[2], 1, D,
                        head_dim_v=DV)))

    def run(q, cache, indices):
        rows, plan = made(q, cache, indices)
        return tkq.mla_decode(q, rows, softmax_scale=mla.SCALE, plan=plan, indices=indices)

    return run


def sparse_inputs(i, B, S, heads, queries):
    """q, cache, indices: of other keys for each query."""
    q, cache, _, table = inputs(i, B, S, heads, queries)
    g = torch.Generator().manual_seed(i)
    chosen = torch.stack([torch.randperm(S, generator=g)[:TOPK] for _ in range(B * queries)]).to(q.device)
    chosen = chosen.view(B, -1)
    indices = table.long().gather(1, chosen // PAGE) * PAGE + chosen % PAGE
    return q, cache, indices.int().view(B, queries, -1)


def sparse_error(name, given, found):
    """On two sequences."""
    q, cache, indices = given
    worst = 0.0
    for s in {0, len(q) - 1}:
        rows, one = cache.flatten(0, 1)[indices[s].flatten().long()].double()[:, None], indices[s:s + 1]
        local = torch.arange(one.numel(), device=q.device).view(one.shape)
        exact = exactly(q[s:s + 1].double(), rows, None, None, mla.SCALE, indices=local)[0]
        worst = max(worst, relative_error(found[s:s + 1], exact))
    return worst


def sparse_jobs(section, shapes) -> Iterator[Job]:
    for B, S, heads, queries in shapes:
        title, flops = f"B{B} S{S} H{heads} Sq{queries} top {TOPK}", 2 * B * queries * heads * min(S, TOPK) * (D + DV)
        question = harness.Question(section, "mla_decode", title, "TFLOP/s", flops,
                                    Bound(("FlashMLA, float8",), AT_LEAST[section]))
        yield Job(question, ours_sparse(section == "float8"), "mla_sparse", ("FlashMLA, float8",),
                  lambda i, given=(B, S, heads, queries): sparse_inputs(i, *given), sparse_error)


def jobs(section, shapes) -> Iterator[Job]:
    for B, S, heads, queries in shapes:
        title = f"B{B} S{S} H{heads}" + (f" Sq{queries}" if queries > 1 else "")
        if heads * queries > 64:
            seen = sum(S - queries + i + 1 for i in range(queries))
            work, roof = ("TFLOP/s", 2 * B * heads * seen * (D + DV)), None
        else:
            work, roof = ("GB/s", 2 * B * S * D), Bound(("read",), ROOF)
        question = harness.Question(section, "mla_decode", title, *work, Bound(("FlashMLA",), AT_LEAST[section]),
                                    roof=roof)
        yield Job(question, ours(), "mla", ("FlashMLA", "read"),
                  lambda i, given=(B, S, heads, queries): inputs(i, *given), error)


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    given = inputs(0, 1, 64, 16, 1)
    run = ours()
    return {"x + x": Call(lambda: given[0] + given[0]), "mla_decode tkq": Call(lambda: run(*given), at_most=14.0)}


BENCH = Bench(
    "mla", __doc__,
    {section: lambda shapes, section=section: (
        sparse_jobs if section in ("sparse", "float8") else jobs)(section, shapes) for section in SECTIONS},
    shapes=SECTIONS,
    quick=((128, 4096, 128, 1), (64, 4096, 16, 1), (1, 4096, 16, 1)),
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))

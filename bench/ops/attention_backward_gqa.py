"""The backward of flash_attn with GQA, 32 query heads on 8 K/V heads, against MHA with 32 heads: equal FLOPs.

    python -m bench.ops.attention_backward_gqa [--quick | --shapes 1024x128,4096x128]

Shapes: a sequence's length and the head dimension; B * S = 16384, full and causal. FLOPs: 2.5 times the forward's. The
results of the first and the last head of K and V are judged against the formula in float32. Results go to
OUT/attention_backward_gqa.json after every case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.results import Bound
from bench.ops import attention_backward
from bench.ops.attention_forward import GQA_BOUND, LENGTHS, TOKENS
from bench.peers import attention, common

HEADS, KV_HEADS, SAME = 32, 8, "32/32"


def inputs(length: int, dim: int, causal: bool) -> Callable[[int], tuple]:
    """i -> (do, q, k, v, o, lse) with 8 heads of K and V, and then k, v, o, lse with 32."""
    import tkq

    def make(i):
        qkv = attention.inputs(TOKENS // length, length, HEADS, HEADS, dim, dim)
        (q, *every), do = qkv(i), qkv(1000 + i)[0]
        few = [x[:, :, :KV_HEADS].contiguous() for x in every]
        forward = lambda kv: (*kv, *tkq.flash_attn(q, *kv, causal=causal, return_lse=True))
        return do, q, *forward(few), *forward(every)

    return make


def ours(causal: bool) -> Callable:
    call = attention_backward.ours(attention_backward.Shape(0, 0, causal))
    return lambda do, q, k, v, o, lse, *_: call(do, q, k, v, o, lse)


def as_many(causal: bool) -> Callable:
    """Ours, of as many heads of K and V as of Q."""
    call = attention_backward.ours(attention_backward.Shape(0, 0, causal))
    return lambda do, q, *of: call(do, q, *of[4:])


common.PEERS["attention_backward_gqa"] = {SAME: as_many}


def error(length: int, dim: int, causal: bool) -> Callable:
    of = attention_backward.error(attention_backward.Shape(length, dim, causal))
    return lambda name, given, found: of(name, (*given[:2], *given[6:]) if name == SAME else given[:6], found)


def gqa(shapes) -> Iterator[Job]:
    for length, dim in shapes:
        for causal in (False, True):
            b = TOKENS // length
            shape = f"B{b} S{length} H{HEADS}/{KV_HEADS} D{dim} {'causal' if causal else 'full'}"
            question = harness.Question(
                "gqa", "attention_backward", shape,
                "TFLOP/s", 10 * b * HEADS * dim * attention.pairs(length, causal), Bound((SAME,), GQA_BOUND))
            yield Job(question, ours(causal), "attention_backward_gqa", (SAME,), inputs(length, dim, causal),
                      error(length, dim, causal), dict(causal=causal))


BENCH = Bench("attention_backward_gqa", __doc__, {"gqa": gqa}, shapes={"gqa": tuple((n, 128) for n in LENGTHS)},
              quick=((1024, 128), (4096, 128), (16384, 128)))

if __name__ == "__main__":
    sys.exit(main(BENCH))

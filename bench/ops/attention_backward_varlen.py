"""The backward of flash_attn_varlen against FA4, including everything that a call launches.

    python -m bench.ops.attention_backward_varlen [--shapes 16384x64] [--match causal]

16384 tokens, H * D = 2048. FLOPs: 2.5 times the forward's, of pairs of a query and a key that it sees (causal: half of
all). A result is judged against the formula in float32 on the first head. Results go to
OUT/attention_backward_varlen.json after every case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from bench.core import harness
from bench.core.accuracy import EQUAL
from bench.core.command import Bench, Job, main
from bench.ops.attention_forward import BATCHES, TOKENS, WIDTH, varlen_bound
from bench.peers import attention, common
from tkq.reference import attention_backward as reference_attention
from tkq.testing.timing import Effort, relative_error


def inputs(lengths, heads, dim, causal):
    """i -> (do, q, k, v, o, lse, cu_seqlens), o and lse by our own forward."""
    import tkq

    packed, n = attention.varlen_inputs(lengths, heads, heads, dim), max(lengths)

    def make(i):
        q, k, v, cu = packed(i)
        o, lse = tkq.flash_attn_varlen(q, k, v, cu, cu, n, n, causal=causal, return_lse=True)
        g = torch.Generator("cuda").manual_seed(i)  # the default one is out of use where a peer's capture has failed
        do = torch.randn(o.shape, device="cuda", dtype=o.dtype, generator=g)
        return do, q, k, v, o, lse, cu

    return make


def ours(longest, causal, config=None):
    from tkq.attention.arguments import Lengths, Options
    from tkq.attention.backward import varlen_ops

    options = Options(causal)

    def call(do, q, k, v, o, lse, cu):
        lengths = Lengths(cu, cu, None, None, longest, longest)
        if config is None:
            return varlen_ops.attention_varlen_backward((do, q, k, v, o, lse, None), None, lengths, options)
        found = [torch.empty_like(x) for x in (q, k, v)]
        varlen_ops.run((do, q, k, v, o, lse, None), found, lengths, options, config=config)
        return found

    return call


def flash_attention_4(longest, causal):
    from flash_attn.cute.interface import _flash_attn_bwd

    return lambda do, q, k, v, o, lse, cu: _flash_attn_bwd(
        q, k, v, o, do, lse, causal=causal, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest,
        max_seqlen_k=longest)[:3]


def error(causal):
    """The largest relative error of dq, dk and dv of the first head."""

    def of(_, given, found):
        do, q, k, v, o = (x[:, :1].float() for x in given[:5])
        cu = given[6]
        want = reference_attention.flash_attn_varlen_backward(
            do, q, k, v, o, given[5][:1], None, (cu, cu, None, None), (causal, None, -1, -1, 0.0), None)
        return max(relative_error(a[:, :1], b) for a, b in zip(found[:3], want))

    return of


common.PEERS["attention_backward_varlen"] = {"FA4": flash_attention_4}


def jobs(shapes) -> Iterator[Job]:
    for dim in dict.fromkeys(dim for tokens, dim in shapes if tokens == TOKENS):
        for name, lengths in BATCHES:
            for causal in (False, True):
                longest, heads = max(lengths), WIDTH // dim
                shape = f"{name} H{heads} D{dim} {'causal' if causal else 'full'}"
                flops = 10 * WIDTH * sum(attention.pairs(n, causal) for n in lengths)
                question = harness.Question("backward", "attention_backward_varlen", shape, "TFLOP/s", flops,
                                            varlen_bound(lengths), equal_error=EQUAL)
                yield Job(question, ours(longest, causal), "attention_backward_varlen", ("FA4",),
                          inputs(lengths, heads, dim, causal), error(causal), dict(longest=longest, causal=causal))


BENCH = Bench("attention_backward_varlen", __doc__, {"backward": jobs},
              shapes={"backward": ((TOKENS, 128), (TOKENS, 64))}, effort=Effort(9, 0.03))

if __name__ == "__main__":
    sys.exit(main(BENCH))

"""The forward of flash_attn and flash_attn_varlen against FA4 and cuDNN.

    python -m bench.ops.attention_forward [--sections calls,dense,varlen,..] [--quick | --shapes 4096x128]

Shapes: a sequence's length, or, of varlen, all tokens, and the head dimension. dense: B * S = 16384, H * D = 2048, full
and causal. varlen: lengths from 1 to 8192 in 16384 tokens. window: 1024 keys, beside the time that its share of the
FLOPs predicts. gqa: 32 heads of Q and 8 of K and V; mha: these beside 32 of both, without peers. wide: heads
of 512 columns, H * D = 4096, beside twice as many of 256. calls: what an eager call costs the host. A result is judged
against the formula in float32 on two heads. Results go to OUT/attention_forward.json after every case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from bench.core import harness
from bench.core.command import Bench, Job, main, mean_misses
from bench.core.results import Bound
from bench.peers import attention
from bench.peers.attention import OTHER_PROBLEMS, Call
from tkq import reference
from tkq.testing.timing import relative_error

TOKENS, WIDTH = 16384, 2048  # B * S and H * D
LENGTHS, DIMS = (1024, 2048, 4096, 8192, 16384), (64, 128, 256)
SHAPES = tuple((length, dim) for dim in DIMS for length in LENGTHS)
QUICK = tuple((length, dim) for dim in DIMS for length in (1024, 4096, 16384))
DENSE_BOUND, MEAN_BOUND, WINDOW_SLACK, GQA_BOUND, WIDE_BOUND = 1.00, 1.06, 1.15, 1.00, 0.60
MIXED_BOUND, EQUAL_BOUND = 1.05, 1.00  # the aim is for "mixed lengths"; equal ones are as dense sequences are
CALL_US, AUTOGRAD_CALL_US = 14.0, 35.0
MIXED = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1)
MANY = tuple(32 + 97 * i % 449 for i in range(64))  # 64 sequences of 32 to 480 tokens
BATCHES = (("mixed 1..8192", MIXED), ("64 of 32..480", MANY), ("16 of 1024", (1024,) * 16))


def dense_error(call: Call):
    """The relative error of the first sequence's first and last head."""
    left, right = (-1 if n is None else n for n in call.window)

    def of(name, given, found):
        if name in OTHER_PROBLEMS:
            return None
        q, k, v = given[:3]
        group, worst = q.shape[2] // k.shape[2], 0.0
        for h in (0, q.shape[2] - 1):
            one = q[:1, :, [h]].float(), *(x[:1, :, [h // group]].float() for x in (k, v))
            worst = max(worst, relative_error(found[:1, :, [h]], reference.flash_attn(*one, call.causal, None, left,
                                                                                      right)[0]))
        return worst

    return of


def varlen_error(call: Call, lengths):
    """The relative error of the first and last head."""

    def of(_, given, found):
        q, k, v, cu = given
        heads = [0, q.shape[1] - 1]
        group = q.shape[1] // k.shape[1]
        one = q[:, heads].float(), *(x[:, [h // group for h in heads]].float() for x in (k, v))
        return relative_error(found[:, heads], reference.flash_attn_varlen(*one, cu, cu, causal=call.causal)[0])

    return of


# ---- the cases -----------------------------------------------------------------------------------


def _job(section, shape, call: Call, make_inputs, flops, bound, error, beside=tuple(attention.PEERS)) -> Job:
    question = harness.Question(section, "attention_forward", shape, "TFLOP/s", flops, bound)
    return Job(question, attention.ours(call), "attention_forward", beside, make_inputs, error, dict(call=call))


def dense(shapes) -> Iterator[Job]:
    for s, dim in shapes:
        for causal in (False, True):
            b, h, call = TOKENS // s, WIDTH // dim, Call(causal)
            yield _job("dense", f"B{b} S{s} H{h} D{dim} {'causal' if causal else 'full'}", call,
                       attention.inputs(b, s, h, h, dim, dim),
                       4 * b * h * dim * attention.pairs(s, causal), Bound(("FA4", "cuDNN"), DENSE_BOUND),
                       dense_error(call))


def varlen_bound(lengths) -> Bound:
    """Of packed sequences, forward and backward."""
    return Bound(("FA4",), MIXED_BOUND if len(set(lengths)) > 1 else EQUAL_BOUND)


def varlen(shapes) -> Iterator[Job]:
    for dim in dict.fromkeys(dim for tokens, dim in shapes if tokens == TOKENS):
        for name, lengths in BATCHES:
            for causal in (False, True):
                h, call = WIDTH // dim, Call(causal, max_seqlen=max(lengths))
                flops = 4 * h * dim * sum(attention.pairs(n, causal) for n in lengths)
                yield _job("varlen", f"{name} H{h} D{dim} {'causal' if causal else 'full'}", call,
                           attention.varlen_inputs(lengths, h, h, dim), flops, varlen_bound(lengths),
                           varlen_error(call, lengths))


def window(shapes) -> Iterator[Job]:
    for s, dim in shapes:
        for left, right in ((1023, 0), (512, 511)):
            h, call = WIDTH // dim, Call(window=(left, right))
            pairs = attention.pairs(s, False, left, right)
            beside = ("all keys", "all keys, causal") if right == 0 else ("all keys",)  # the second is not judged
            yield _job("window", f"S{s} H{h} D{dim} window ({left}, {right})", call,
                       attention.inputs(1, s, h, h, dim, dim), 4 * h * dim * pairs,
                       Bound(("all keys",), s * s / pairs / WINDOW_SLACK), dense_error(call),
                       (*attention.PEERS, *beside))


def gqa(shapes) -> Iterator[Job]:
    """32 heads of Q on 8 of K and V."""
    for s, dim in shapes:
        for causal in (False, True):
            yield _job("gqa", *_shared(s, dim, causal), Bound(("FA4", "cuDNN"), DENSE_BOUND), dense_error(Call(causal)))


def mha(shapes) -> Iterator[Job]:
    """The same beside 32 of both, and no other: behind turns of peers, which draw more or less power, ratios of one
    case were 0.82 to 1.16 from round to round."""
    for s, dim in shapes:
        for causal in (False, True):
            yield _job("mha", *_shared(s, dim, causal), Bound(("32/32",), GQA_BOUND), dense_error(Call(causal)),
                       ("32/32",))


def wide(shapes) -> Iterator[Job]:
    for s, dim in shapes:
        for causal in (False, True):
            b, h, call = TOKENS // s, 2 * WIDTH // dim, Call(causal)
            yield _job("wide", f"B{b} S{s} H{h} D{dim} {'causal' if causal else 'full'}", call,
                       attention.inputs(b, s, h, h, dim, dim), 4 * b * h * dim * attention.pairs(s, causal),
                       Bound(("half of the head dim",), WIDE_BOUND), dense_error(call),
                       ("half of the head dim", "torch SDPA"))


def _shared(s, dim, causal) -> tuple:
    """(shape, call, inputs, FLOPs): 32 heads of Q, K and V of 8, and then K and V of 32."""
    b = TOKENS // s
    both = attention.inputs(b, s, 32, 32, dim, dim)

    def make(i):
        q, k, v = both(i)
        return q, k[:, :, :8].contiguous(), v[:, :, :8].contiguous(), k, v

    return (f"B{b} S{s} H32/8 D{dim} {'causal' if causal else 'full'}", Call(causal), make,
            4 * b * 32 * dim * attention.pairs(s, causal))


def calls() -> dict[str, harness.Call]:
    """Eager calls on tiny tensors."""
    import tkq

    q, k, v = (torch.randn(1, 128, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 100, 128], device="cuda", dtype=torch.int32)
    flat = [x[0] for x in (q, k, v)]
    recorded = [x.clone().requires_grad_() for x in (q, k, v)]
    flat_recorded = [x.clone().requires_grad_() for x in flat]
    return {
        "x + x": harness.Call(lambda: q + q),
        "flash_attn": harness.Call(lambda: tkq.flash_attn(q, k, v, causal=True), at_most=CALL_US),
        "flash_attn, window and lse": harness.Call(
            lambda: tkq.flash_attn(q, k, v, window_size=(64, 0), return_lse=True), at_most=CALL_US),
        "flash_attn_varlen": harness.Call(
            lambda: tkq.flash_attn_varlen(*flat, cu, cu, 128, 128, causal=True), at_most=CALL_US),
        "flash_attn, recorded": harness.Call(
            lambda: tkq.flash_attn(*recorded, causal=True), True, AUTOGRAD_CALL_US),
        "flash_attn_varlen, recorded": harness.Call(
            lambda: tkq.flash_attn_varlen(*flat_recorded, cu, cu, 128, 128, causal=True), True, AUTOGRAD_CALL_US),
    }


def judge(cases) -> list[str]:
    return mean_misses("dense", [case for case in cases if case.section == "dense"], MEAN_BOUND,
                       2 * len(SHAPES))


BENCH = Bench(
    "attention_forward", __doc__,
    {"dense": dense, "varlen": varlen, "window": window, "gqa": gqa, "mha": mha, "wide": wide},
    shapes={"dense": SHAPES, "varlen": ((TOKENS, 128),), "window": ((16384, 128),),
            "wide": ((8192, 512),),
            **dict.fromkeys(("gqa", "mha"), tuple((length, 128) for length in LENGTHS))},
    quick=QUICK,
    calls=calls,
    judge=judge,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))

"""tkq.flash_attn_fp8 and flash_attn_fp8_varlen against FA3 in float8, whose sums are fast ones, and beside tkq's
attention in bf16.

    python -m bench.ops.attention_fp8 [--sections calls,two_level,fast,varlen,varlen_fast] [--quick | --shapes 4096x128]

Shapes: a sequence's length, or, of varlen, all tokens, and the head dimension; B * S = 16384, H * D = 2048, full and
causal. varlen: two levels, and varlen_fast, of the lengths of bench.ops.attention_forward. What is timed has the launch
that transposes V in it. A result is judged against the formula in float32, of what the numbers mean, on two heads.
Results go to OUT/attention_fp8.json after every case.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from bench.core import harness
from bench.core.accuracy import EQUAL
from bench.core.command import Bench, Job, main
from bench.core.results import Bound
from bench.ops.attention_forward import BATCHES
from bench.peers import attention, attention_fp8
from tkq import reference
from tkq.testing.timing import relative_error

TOKENS, WIDTH = 16384, 2048  # B * S and H * D
LENGTHS, DIMS = (1024, 4096, 16384), (64, 128, 256)
SHAPES = tuple((length, dim) for dim in DIMS for length in LENGTHS)
QUICK = tuple((16384, dim) for dim in DIMS)
BOUNDS = {"two_level": {128: 0.97}, "fast": {64: 1.10, 128: 1.05, 256: 1.02}}  # times FA3, by the head dimension
PACKED = {"varlen": "two_level", "varlen_fast": "fast"}  # sections of packed sequences
CALL_US = 28.0  # two launches


def inputs(batch, length, heads, dim):
    """i -> q, k, v in e4m3, descales of ones, q, k, v in bf16."""

    def make(i):
        wide = attention.inputs(batch, length, heads, heads, dim, dim)(i)
        return (*(x.to(torch.float8_e4m3fn) for x in wide), torch.ones(batch, heads, device=wide[0].device), *wide)

    return make


def packed_inputs(lengths, heads, dim):
    """i -> q, k, v in e4m3, descales of ones, cu_seqlens, q, k, v in bf16."""

    def make(i):
        *wide, cu = attention.varlen_inputs(lengths, heads, heads, dim)(i)
        scale = torch.ones(len(lengths), heads, device=cu.device)
        return (*(x.to(torch.float8_e4m3fn) for x in wide), scale, cu, *wide)

    return make


def _first_and_last(heads: int) -> slice:
    """A slice: torch 2.9 takes no lists of indices of float8 on a CPU."""
    return slice(None, None, max(1, heads - 1))


def packed_error(causal: bool):
    """The relative error of the first and last head."""

    def of(name, given, found):
        if name == "tkq, bf16":
            return None
        heads, cu = _first_and_last(given[0].shape[1]), given[4]
        one = [x[:, heads].float() for x in given[:3]]
        return relative_error(found[:, heads], reference.flash_attn_varlen(*one, cu, cu, causal=causal)[0])

    return of


def error(causal: bool):
    """The relative error of the first sequence's first and last head."""

    def of(name, given, found):
        if name == "tkq, bf16":
            return None
        heads = _first_and_last(given[0].shape[2])
        one = [x[:1, :, heads].float() for x in given[:3]]
        return relative_error(found[:1, :, heads], reference.flash_attn(*one, causal)[0])

    return of


def jobs(section, shapes) -> Iterator[Job]:
    for s, dim in shapes:
        for causal in (False, True):
            b, h = TOKENS // s, WIDTH // dim
            at_least = BOUNDS[section].get(dim)
            question = harness.Question(
                section, "flash_attn_fp8", f"B{b} S{s} H{h} D{dim} {'causal' if causal else 'full'}", "TFLOP/s",
                4 * b * h * dim * attention.pairs(s, causal), at_least and Bound(("FA3",), at_least), equal_error=EQUAL)
            yield Job(question, attention_fp8.ours(causal, section), "attention_fp8", tuple(attention_fp8.PEERS),
                      inputs(b, s, h, dim), error(causal), dict(causal=causal))


def packed_jobs(section, shapes) -> Iterator[Job]:
    for dim in dict.fromkeys(dim for tokens, dim in shapes if tokens == TOKENS):
        for name, lengths in BATCHES:
            for causal in (False, True):
                h, longest = WIDTH // dim, max(lengths)
                question = harness.Question(
                    section, "flash_attn_fp8_varlen", f"{name} H{h} D{dim} {'causal' if causal else 'full'}", "TFLOP/s",
                    4 * h * dim * sum(attention.pairs(n, causal) for n in lengths), None, equal_error=EQUAL)
                yield Job(question, attention_fp8.ours_packed(causal, longest, PACKED[section]), "attention_fp8_varlen",
                          tuple(attention_fp8.PACKED_PEERS), packed_inputs(lengths, h, dim), packed_error(causal),
                          dict(causal=causal, longest=longest))


def calls() -> dict[str, harness.Call]:
    """Eager calls on tiny tensors."""
    given = inputs(1, 128, 2, 128)(0)
    run = attention_fp8.ours(True, "two_level")
    return {"x + x": harness.Call(lambda: given[4] + given[4]),
            "flash_attn_fp8 tkq": harness.Call(lambda: run(*given), at_most=CALL_US)}


SECTIONS = dict.fromkeys(BOUNDS, jobs) | dict.fromkeys(PACKED, packed_jobs)
BENCH = Bench("attention_fp8", __doc__,
              {section: lambda shapes, section=section, of=of: of(section, shapes) for section, of in SECTIONS.items()},
              shapes=dict.fromkeys(SECTIONS, SHAPES), quick=QUICK, calls=calls)

if __name__ == "__main__":
    sys.exit(main(BENCH))

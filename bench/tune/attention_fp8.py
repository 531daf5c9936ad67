"""Time configurations of float8 attention's forward against FA3: the basis of plan.py's choices.

    python -m bench.tune.attention_fp8 --cases "128:16384:full,causal:two_level,fast; 64:16384:full:fast"
                                       [--only WORD,WORD] [--rounds 7] [--precompile]

A case is head dims, lengths, masks and ways to accumulate. B * S = 16384, H * D = 2048. Prints TFLOP/s and the ratio to
the plan's own configuration, FA3 among them.
"""
from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace

import torch

from bench.ops.attention_fp8 import TOKENS, WIDTH, inputs
from bench.peers import attention
from bench.peers.common import find
from bench.tune.common import precompile
from tkq.attention.fp8 import launch
from tkq.attention.fp8.check import Call, Options
from tkq.attention.fp8.config import HAND_OVERS, SOFTWARE_EXP2, Fp8Config
from tkq.attention.fp8.plan import plan, recipe
from tkq.attention.fp8.spec import Fp8Spec

# What each name changes of the plan; a name of several words changes all of it.
CHANGES = {
    "plan": {}, **{f"kv{n}": dict(kv=n) for n in (64, 96, 128, 160, 192, 224)},
    **{f"{n}wg": dict(consumers=n) for n in (2, 3)}, **{f"{n}stages": dict(stages=n) for n in (2, 3, 4)},
    **{f"q{n}": dict(q_stages=n) for n in (1, 2)},
    "free": dict(ping_pong=False), "static": dict(schedule="static"),
    **{point: dict(hand_over=point) for point in HAND_OVERS},
    "registers": dict(row_sum="registers", software_exp2=0), "ones": dict(row_sum="mma", software_exp2=0),
    **{f"software{n}": dict(row_sum="mma", software_exp2=n) for n in SOFTWARE_EXP2[1:]},
    "serial": dict(overlap=False, ping_pong=False),
    "2parts": dict(parts=2), "4parts": dict(parts=4),
    **{f"mb{n}": dict(l2_section_mb=n) for n in (8, 32)},
}
VARIANTS = {
    64: ("plan", *HAND_OVERS, "registers", "ones", "software2", "software3", "free", "2wg kv128 2stages",
         "2wg kv192 2stages"),
    128: ("plan", *HAND_OVERS, "registers", "ones", "software4", "free", "kv192 q1", "3stages q1", "serial", "static"),
    256: ("plan", "registers", "kv96", "kv64", "static", "2parts", "4parts"),
}


def candidates(spec: Fp8Spec, only=()) -> dict[str, Fp8Config]:
    """By name, the configurations that can run; one that is another's double is left out."""
    planned, found = plan(spec), {}
    for name in only or VARIANTS[spec.head_dim]:
        changes = {}
        for word in name.split():
            changes.update(CHANGES[word])
        config = replace(planned, **changes)
        try:
            config.check(spec.head_dim, spec.two_level)
        except ValueError as problem:
            print(f"{name}: {problem}")
            continue
        if config not in found.values():
            found[name] = config
    return found


def cases(text: str):
    """(head_dim, length, causal, accumulate) of each."""
    for one in text.split(";"):
        dims, lengths, masks, ways = (part.split(",") for part in one.strip().split(":"))
        for dim, length, mask, way in itertools.product(dims, lengths, masks, ways):
            if mask not in ("full", "causal"):
                raise ValueError(f"--cases: mask is {mask}, allowed are full and causal")
            yield int(dim), int(length), mask == "causal", way


def candidate(causal, way, config):
    """A call with this configuration."""
    options = Options(causal, accumulate=way)
    return lambda q, k, v, scale, *_: launch.attend(Call(q, k, v, scale, scale, scale), options, config)[0]


def time_one(case, chosen, args):
    """Prints a table."""
    from tkq.testing import timing

    dim, length, causal, way = case
    b, h = TOKENS // length, WIDTH // dim
    peers, missing = find("attention_fp8", ("FA3",), causal=causal)
    ours = {name: candidate(causal, way, config) for name, config in chosen.items()}
    print(f"\nD{dim} S{length} {'causal' if causal else 'full'} {way}"
          + "".join(f"\n{name}: missing, {why}" for name, why in missing.items()))
    effort = timing.Effort(args.rounds, args.round_seconds, 4 * args.round_seconds)
    done = timing.compare({**ours, **peers}, inputs(b, length, h, dim), effort)
    base, flops = next((t for t in done.timings if t.name in ours and t.ok), None), (
        4 * b * h * dim * attention.pairs(length, causal))
    for t in sorted((t for t in done.timings if t.ok), key=lambda t: t.median_ms):
        ratio = f"{timing.ratio(t, base):6.3f}x {base.name}" if base else ""
        print(f"{t.name:30s} {t.median_ms * 1e3:9.1f} us {flops / t.median_ms / 1e9:7.1f} TFLOP/s {ratio}", flush=True)
    print("\n".join(f"{t.name}: {t.note}" for t in done.timings if not t.ok), flush=True)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.tune.attention_fp8", description=__doc__.split("\n")[0])
    p.add_argument("--cases", default="64,128,256:16384:full,causal:two_level,fast")
    p.add_argument("--only", default="", help="names of variants, separated by commas; words of a name by spaces")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--round-seconds", type=float, default=0.02)
    p.add_argument("--precompile", action="store_true", help="compile what would be timed, and no more")
    args = p.parse_args(argv)
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    chosen = {}
    for case in cases(args.cases):
        spec = Fp8Spec(case[0], case[2], accumulate=case[3], descales="qkv")
        chosen[case] = spec, candidates(spec, only)
    broken = precompile([recipe(spec, config) for spec, found in chosen.values() for config in found.values()])
    if args.precompile:
        return 1 if broken else 0
    if not torch.cuda.is_available():
        print("bench.tune.attention_fp8 times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    for case, (spec, found) in chosen.items():
        time_one(case, {name: config for name, config in found.items() if recipe(spec, config) not in broken}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

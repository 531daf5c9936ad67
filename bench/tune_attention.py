"""Time configurations of the forward kernel for one problem, beside FA4 and cuDNN: what plan.py's choices come from.

    python -m bench.tune_attention --dim 256 --length 8192 [--dim-v 128] [--causal] [--window 1023,0] [--heads 32/8]
                                   [--varlen] [--only WORD,WORD] [--precompile]

Prints TFLOP/s and the ratio to the plan's own configuration. --precompile compiles what would be timed; needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace

import torch

from bench import attention_peers
from bench.attention_forward import MIXED, TOKENS, WIDTH
from bench.attention_peers import Call
from tkq import runtime
from tkq.attention.arguments import Lengths, Options
from tkq.attention.launch import Operands
from tkq.attention.plan import AttentionConfig, length_class, plan
from tkq.attention.spec import AttentionSpec

# What each name changes of the plan; a name of several words changes all of it.
CHANGES = {
    "plan": {}, "kv64": dict(kv=64), "kv80": dict(kv=80), "kv96": dict(kv=96), "kv112": dict(kv=112),
    "kv128": dict(kv=128), "kv144": dict(kv=144), "kv160": dict(kv=160), "kv176": dict(kv=176), "kv192": dict(kv=192),
    "1wg": dict(consumers=1), "2wg": dict(consumers=2), "3wg": dict(consumers=3), "1stage": dict(stages=1),
    "2stages": dict(stages=2), "3stages": dict(stages=3), "4stages": dict(stages=4), "static": dict(schedule="static"),
    "dynamic": dict(schedule="dynamic", cluster=1), "single": dict(schedule="single", bridge=False),
    "pairs": dict(schedule="static", cluster=2), "bridge": dict(bridge=True, q_stages=2), "alone": dict(bridge=False),
    "turns": dict(turns=True), "free": dict(turns=False), "q1": dict(q_stages=1, bridge=False),
    "panels2": dict(o_panels=2), "panels3": dict(o_panels=3), "panels4": dict(o_panels=4), "panels1": dict(o_panels=1),
    "over_q": dict(o_over_q=True, o_panels=1, q_stages=1, bridge=False), "own_o": dict(o_over_q=False),
    "half": dict(half=True), "mb8": dict(section_mb=8), "mb32": dict(section_mb=32), "mb64": dict(section_mb=64),
}

VARIANTS = {
    64: ("plan", "2wg alone half", "alone", "turns", "free", "2wg bridge 2stages", "2wg alone 3stages",
         "3wg alone 2stages",
         "3wg kv112 alone", "2wg kv176 alone", "2wg kv160 bridge", "static", "pairs alone", "mb32", "mb8"),
    96: ("plan", "alone", "free", "3wg kv112 alone q1", "2wg kv160 alone", "2wg kv144 bridge", "pairs alone"),
    128: ("plan", "half", "half alone", "half alone free", "alone turns", "alone free", "bridge turns", "bridge free",
          "kv176 q1 panels2 free pairs",
          "kv176 q1 panels2 turns dynamic", "kv160 q1 panels2 free dynamic", "kv144 alone q1 free", "pairs alone free",
          "mb8", "mb32", "mb64"),
    192: ("plan", "turns", "kv96 own_o panels3", "kv96 over_q", "pairs", "static", "mb32"),
    256: ("plan", "turns", "kv64 over_q half", "kv64 own_o panels4", "kv64 over_q", "kv64 own_o panels4 turns", "pairs",
          "pairs turns",
          "static", "mb32", "mb64"),
}


def config_of(name: str, planned: AttentionConfig) -> AttentionConfig:
    """The plan with the changes that the name's words say."""
    changes = {}
    for word in name.split():
        changes.update(CHANGES[word])
    return replace(planned, **changes)


def label(config: AttentionConfig, planned: AttentionConfig) -> str:
    """What differs from the plan."""
    pairs = ((f.name, getattr(config, f.name)) for f in fields(config))
    return ", ".join(f"{name}={value}" for name, value in pairs if value != getattr(planned, name)) or "the plan"


def candidates(spec: AttentionSpec, length: str, only) -> dict[str, AttentionConfig]:
    """By name, the configurations that can run; one that is another's double is left out."""
    kernel, planned, found = spec.kernel(), plan(spec, length), {}
    for name in only or VARIANTS[max(kernel.head_dim, kernel.head_dim_v)]:
        config = config_of(name, planned)
        try:
            config.check(kernel.head_dim, kernel.head_dim_v)
        except ValueError as problem:
            print(f"{name}: {problem}")
            continue
        if config not in found.values():
            found[name] = config
    return found


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.tune_attention", description=__doc__.split("\n")[0])
    p.add_argument("--dim", type=int, default=128)
    p.add_argument("--dim-v", type=int, default=0)
    p.add_argument("--length", type=int, default=4096)
    p.add_argument("--causal", action="store_true")
    p.add_argument("--window", default="", help="left,right; -1 for no limit")
    p.add_argument("--heads", default="", help="of Q, or of Q/of K and V")
    p.add_argument("--varlen", action="store_true", help="mixed lengths instead of --length")
    p.add_argument("--only", default="", help="names, separated by commas; words of a name by spaces")
    p.add_argument("--without", default="", help="peers to leave out")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--round-seconds", type=float, default=0.03)
    p.add_argument("--precompile", action="store_true")
    args = p.parse_args(argv)
    left, right = map(int, args.window.split(",")) if args.window else (-1, -1)
    causal = args.causal or right == 0
    spec = AttentionSpec("bf16", args.dim, causal, False, args.dim_v or args.dim, left >= 0, right > 0,
                         varlen=args.varlen)
    length = length_class(max(MIXED) if args.varlen else args.length)
    chosen = candidates(spec, length, [name.strip() for name in args.only.split(",") if name.strip()])
    for name, config in list(chosen.items()):
        try:
            runtime.ensure(runtime.Recipe("tkq.attention.forward:build", (spec.kernel(), config)))
        except Exception as problem:  # one that does not compile is worth a line, not the run
            print(f"{name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            del chosen[name]
            continue
        print(f"compiled {name}: {label(config, plan(spec, length))}", flush=True)
    if args.precompile:
        return 0
    if not torch.cuda.is_available():
        print("bench.tune_attention times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    time_them(args, chosen, causal, left, right)
    return 0


def time_them(args, chosen, causal, left, right):
    from tkq.testing import timing

    heads, _, kv_heads = (args.heads or str(WIDTH // args.dim)).partition("/")
    heads, kv_heads = int(heads), int(kv_heads or heads)
    lengths = MIXED if args.varlen else (args.length,) * max(TOKENS // args.length, 1)
    if args.varlen:
        make = attention_peers.varlen_inputs(lengths, heads, kv_heads, args.dim)
    else:
        make = attention_peers.inputs(len(lengths), args.length, heads, kv_heads, args.dim, args.dim_v or args.dim)
    pairs = sum(attention_peers.pairs(n, causal, left, right) for n in lengths)
    flops = 2 * heads * (args.dim + (args.dim_v or args.dim)) * pairs
    call = Call(causal, (None if left < 0 else left, None if right < 0 else right), max(MIXED) if args.varlen else 0)
    peers, missing = attention_peers.find(call, [n for n in attention_peers.PEERS if n not in args.without.split(",")])
    for name, why in missing.items():
        print(f"{name}: missing, {why}")
    ours = {name: candidate(config, args.varlen, causal, left, right) for name, config in chosen.items()}
    effort = timing.Effort(args.rounds, args.round_seconds, 4 * args.round_seconds)
    done = timing.compare({**ours, **peers}, make, effort)
    base = next((t for t in done.timings if t.name in ours and t.ok), None)
    for t in sorted((t for t in done.timings if t.ok), key=lambda t: t.median_ms):
        print(f"{t.name:34s} {t.median_ms * 1e3:9.1f} us {flops / t.median_ms / 1e9:7.1f} TFLOP/s "
              f"{timing.ratio(t, base):6.3f}x {base.name}" if base else "")
    print("\n".join(f"{t.name}: {t.note}" for t in done.timings if not t.ok))


def candidate(config, varlen, causal, left, right):
    """A call that allocates its output, and runs the kernel with this configuration."""
    from tkq.attention import ops, varlen_ops

    options = Options(causal, None, left, right)

    def dense(q, k, v):
        o = q.new_empty(*q.shape[:3], v.shape[3])
        ops.run(Operands(q, k, v, o), options, config)
        return o

    def ragged(q, k, v, cu):
        o = q.new_empty(*q.shape[:2], v.shape[2])
        varlen_ops.run(Operands(q, k, v, o), Lengths(cu, cu, None, None, max(MIXED), max(MIXED)), options, config)
        return o

    return ragged if varlen else dense


if __name__ == "__main__":
    sys.exit(main())

"""Time configurations of the attention forward against FA4 and cuDNN: the basis of plan.py's choices.

    python -m bench.tune.attention --cases "256:1024,16384:full,causal; 192/128:4096:causal; 128:mixed:full;
                                            128:16384:w1023; 128:4096:full:32/8"
                                   [--only WORD,WORD] [--rounds 7] [--seconds 90] [--precompile]

A case is head dims, lengths (mixed: varlen), masks (w1023: a causal window that far back), and heads of Q and of K and
V. Prints TFLOP/s and the ratio to the plan's own configuration. --precompile compiles what would be timed, and no more.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

from bench.ops.attention_forward import MIXED, TOKENS, WIDTH
from bench.peers import attention
from bench.peers.attention import Call
from bench.peers.common import find
from bench.tune.common import precompile
from tkq.attention.arguments import Lengths, Options
from tkq.attention.common.operands import Operands
from tkq.attention.forward.config import AttentionConfig
from tkq.attention.forward.plan import length_class, plan, recipe
from tkq.attention.forward.spec import LONG_WINDOW, AttentionSpec

# What each name changes of the plan; a name of several words changes all of it.
CHANGES = {
    "plan": {}, "kv64": dict(kv=64), "kv80": dict(kv=80), "kv96": dict(kv=96), "kv112": dict(kv=112),
    "kv128": dict(kv=128), "kv144": dict(kv=144), "kv160": dict(kv=160), "kv176": dict(kv=176), "kv192": dict(kv=192),
    "1wg": dict(consumers=1), "2wg": dict(consumers=2), "3wg": dict(consumers=3), "1stage": dict(stages=1),
    "2stages": dict(stages=2), "3stages": dict(stages=3), "4stages": dict(stages=4), "static": dict(schedule="static"),
    "dynamic": dict(schedule="dynamic", cluster=1), "single": dict(schedule="single", overlap_tasks=False),
    "pairs": dict(schedule="static", cluster=2), "fetch": dict(schedule="dynamic"),
    "overlap_tasks": dict(overlap_tasks=True, q_stages=2), "alone": dict(overlap_tasks=False),
    "ping_pong": dict(ping_pong=True),
    "free": dict(ping_pong=False), "q1": dict(q_stages=1, overlap_tasks=False),
    "store_steps2": dict(o_store_steps=2), "store_steps3": dict(o_store_steps=3), "store_steps4": dict(o_store_steps=4),
    "store_steps1": dict(o_store_steps=1),
    "reuses_q": dict(o_reuses_q_smem=True, o_from_registers=False, o_store_steps=1, q_stages=1, overlap_tasks=False),
    "own_o": dict(o_reuses_q_smem=False, o_from_registers=False),
    "direct": dict(o_reuses_q_smem=False, o_from_registers=True, o_store_steps=1),
    **{f"mb{n}": dict(l2_section_mb=n) for n in (8, 16, 20, 24, 32, 40, 48, 64)},
}

WINDOW = ("plan", "overlap_tasks", "free")
VARIANTS = {
    64: ("plan", "alone", "ping_pong", "free", "2wg overlap_tasks 2stages", "2wg alone 3stages",
         "3wg alone 2stages",
         "3wg kv112 alone", "2wg kv176 alone", "2wg kv160 overlap_tasks", "static", "pairs alone", "mb32", "mb8"),
    96: ("plan", "alone", "free", "3wg kv112 alone q1", "2wg kv160 alone", "2wg kv144 overlap_tasks", "pairs alone"),
    128: ("plan", "alone ping_pong", "alone free", "overlap_tasks ping_pong", "overlap_tasks free",
          "kv176 q1 store_steps2 free pairs", "kv176 q1 store_steps2 free pairs fetch", "pairs fetch alone free",
          "kv176 q1 store_steps2 ping_pong dynamic", "kv160 q1 store_steps2 free dynamic", "kv144 alone q1 free",
          "pairs alone free",
          "mb8", "mb32", "mb64"),
    192: ("plan", "own_o store_steps2", "ping_pong", "kv112", "kv96 own_o store_steps2", "kv96 reuses_q",
          "kv80 own_o overlap_tasks store_steps2", "pairs", "static", "mb20", "mb32", "mb40"),
    256: ("plan", "ping_pong", "own_o store_steps4", "reuses_q", "pairs",
          "kv64 own_o store_steps4", "kv64 own_o store_steps4 ping_pong", "static", "mb16", "mb24", "mb48", "mb64"),
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
    return ", ".join(f"{name}={value}" for name, value in pairs if value != getattr(planned, name, None)) or "the plan"


def candidates(spec: AttentionSpec, length: str, only=()) -> dict[str, AttentionConfig]:
    """By name, the configurations that can run; one that is another's double is left out."""
    kernel, planned, found = spec.kernel(), plan(spec, length), {}
    for name in only or (WINDOW if spec.left else VARIANTS[max(kernel.head_dim, kernel.head_dim_v)]):
        config = config_of(name, planned)
        if not kernel.longest_first:  # sections do not matter to the others
            config = replace(config, l2_section_mb=planned.l2_section_mb)
        try:
            config.check(kernel.head_dim, kernel.head_dim_v)
        except ValueError as problem:
            print(f"{name}: {problem}")
            continue
        if config not in found.values():
            found[name] = config
    return found


@dataclass(frozen=True)
class Case:
    """length: 0 for varlen's mixed ones. left: -1 without a window."""

    dim: int
    dim_v: int
    length: int
    causal: bool
    left: int
    heads: int
    kv_heads: int

    def __str__(self):
        mask = f"window {self.left}" if self.left >= 0 else "causal" if self.causal else "full"
        return (f"D{self.dim}/{self.dim_v} H{self.heads}/{self.kv_heads} "
                f"{f'S{self.length}' if self.length else 'mixed'} {mask}")

    @property
    def varlen(self):
        return self.length == 0

    @property
    def longest(self):
        return self.length or max(MIXED)

    @property
    def spec(self):
        return AttentionSpec("bf16", self.dim, self.causal, False, self.dim_v, self.left >= 0, varlen=self.varlen,
                             long_window=self.left >= LONG_WINDOW)

    @property
    def call(self):
        window = (self.left, 0) if self.left >= 0 else (None, None)
        return Call(self.causal and self.left < 0, window, self.longest if self.varlen else 0)

    def inputs(self):
        if self.varlen:
            return attention.varlen_inputs(MIXED, self.heads, self.kv_heads, self.dim)
        return attention.inputs(max(TOKENS // self.length, 1), self.length, self.heads, self.kv_heads, self.dim,
                                      self.dim_v)

    def flops(self):
        lengths = MIXED if self.varlen else (self.length,)
        of = {n: attention.pairs(n, self.causal, self.left, 0 if self.left >= 0 else -1) for n in set(lengths)}
        pairs = sum(of[n] for n in lengths) * (1 if self.varlen else max(TOKENS // self.length, 1))
        return 2 * self.heads * (self.dim + self.dim_v) * pairs


def cases(text: str) -> Iterator[Case]:
    """What ``--cases`` says."""
    for part in text.split(";"):
        dims, lengths, masks, *heads = (x.strip() for x in part.split(":"))
        dim, _, dim_v = dims.partition("/")
        q, _, kv = (heads[0] if heads else str(WIDTH // int(dim))).partition("/")
        for mask, length in itertools.product(masks.split(","), lengths.split(",")):
            if mask not in ("full", "causal") and not mask.startswith("w"):
                raise ValueError(f"--cases: mask {mask!r}, allowed are full, causal and w with a number")
            yield Case(int(dim), int(dim_v or dim), 0 if length == "mixed" else int(length), mask != "full",
                       int(mask[1:]) if mask[0] == "w" else -1, int(q), int(kv or q))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.tune.attention", description=__doc__.split("\n")[0])
    p.add_argument("--cases", default="128:4096:full")
    p.add_argument("--only", default="", help="names of variants, separated by commas; words of a name by spaces")
    p.add_argument("--without", default="", help="peers to leave out")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--round-seconds", type=float, default=0.02)
    p.add_argument("--seconds", type=float, default=280, help="start no case after so long")
    p.add_argument("--precompile", action="store_true")
    args = p.parse_args(argv)
    deadline = time.monotonic() + args.seconds
    selected = list(cases(args.cases))
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    chosen = {case: candidates(case.spec, length_class(case.longest), only) for case in selected}
    broken = precompile([recipe(case.spec, config) for case, found in chosen.items() for config in found.values()])
    if args.precompile:
        return 1 if broken else 0
    if not torch.cuda.is_available():
        print("bench.tune.attention times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    for case, found in chosen.items():
        if time.monotonic() > deadline:
            print(f"{case}: not run, the time is up")
            continue
        runs = {name: config for name, config in found.items() if recipe(case.spec, config) not in broken}
        time_one(case, runs, args)
    return 0


def time_one(case: Case, chosen, args):
    from tkq.testing import timing

    names = [name for name in attention.PEERS if name not in args.without.split(",")]
    peers, missing = find("attention_forward", names, call=case.call)
    ours = {name: candidate(case, config) for name, config in chosen.items()}
    effort = timing.Effort(args.rounds, args.round_seconds, 4 * args.round_seconds)
    print(f"\n{case}" + "".join(f"\n{name}: missing, {why}" for name, why in missing.items()))
    try:
        done = timing.compare({**ours, **peers}, case.inputs(), effort)
    except Exception as problem:  # out of memory, say
        print(f"{type(problem).__name__}: {str(problem)[:300]}", flush=True)
        return
    base, flops = next((t for t in done.timings if t.name in ours and t.ok), None), case.flops()
    planned = plan(case.spec, length_class(case.longest))
    for t in sorted((t for t in done.timings if t.ok), key=lambda t: t.median_ms):
        what = f"  {label(chosen[t.name], planned)}" if t.name in chosen else ""
        ratio = f"{timing.ratio(t, base):6.3f}x {base.name}" if base else ""
        print(f"{t.name:30s} {t.median_ms * 1e3:9.1f} us {flops / t.median_ms / 1e9:7.1f} TFLOP/s {ratio}{what}")
    print("\n".join(f"{t.name}: {t.note}" for t in done.timings if not t.ok), flush=True)


def candidate(case: Case, config):
    """A call that allocates its output, and runs the kernel with this configuration."""
    from tkq.attention import ops, varlen_ops

    options = Options(case.causal, None, case.left, 0 if case.left >= 0 else -1)

    def dense(q, k, v):
        o = q.new_empty(*q.shape[:3], v.shape[3])
        ops.run(Operands(q, k, v, o), options, config)
        return o

    def ragged(q, k, v, cu):
        o = q.new_empty(*q.shape[:2], v.shape[2])
        varlen_ops.run(Operands(q, k, v, o), Lengths(cu, cu, None, None, max(MIXED), max(MIXED)), options, config)
        return o

    return ragged if case.varlen else dense


if __name__ == "__main__":
    sys.exit(main())

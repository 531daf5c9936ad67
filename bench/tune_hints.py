"""Do hints to the caches help rows? Kernels whose loads went past L1 and whose stores left L2 first, with both, with
neither and with either, beside their roofs and their peers, in the same rounds.

    python -m bench.tune_hints --precompile --processes 14       compile only; needs no GPU
    python -m bench.tune_hints --warm 3/14                       the same of the peers, a process's share; needs one
    python -m bench.tune_hints --out DIRECTORY --seconds 90      time; cases that would come later are left out
    python -m bench.tune_hints --kind residual --shapes 4096x262144
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench import tuning
from tkq.losses import plan as losses_plan
from tkq.losses.spec import CrossEntropySpec
from tkq.norms import kept_plan, long_plan
from tkq.norms.plan import Config
from tkq.norms.spec import NormSpec
from tkq.pointwise.plan import GatedConfig, plan_gated, plan_rope
from tkq.pointwise.spec import GatedSpec, RopeSpec
from tkq.row_plan import RowConfig
from tkq.rows import plan as rows_plan
from tkq.rows.launch import recipe_of
from tkq.rows.plan import RowPlan
from tkq.rows.spec import RowSpec, Stream
from tkq.runtime import Recipe
from tkq.softmax import plan as softmax_plan
from tkq.softmax.spec import SoftmaxSpec

HINTS = {"hints": (True, True), "none": (False, False), "stores": (False, True), "loads": (True, False)}
ROWS = {1024: 32768, 2048: 32768, 4096: 32768, 8192: 32768, 16384: 16384, 32768: 16384, 65536: 16384, 131072: 8192,
        262144: 4096}
OFTEN = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
WHOLE = (4096, 16384, 65536)  # columns at which loads alone are hinted too
GATED = ((16384, 14336), (8192, 8192))
ROPE = ((4, 4096, 32, 128), (4, 4096, 32, 64))
EPS = 1e-6
BUILDERS = {"softmax": "tkq.softmax.build:build", "losses": "tkq.losses.build:build", "norms": "tkq.norms.build:build",
            "gated": "tkq.pointwise.build:gated", "rope": "tkq.pointwise.build:rope"}


# other plans, without hints, where a row missed its bound in the results of 22 November: (threads to a row, which are
# those of a block; blocks of a cluster; what follows in a config)
OTHERS = {
    ("softmax_backward", 8192): ((256, 1), (256, 2)), ("softmax_backward", 32768): ((512, 4),),
    ("softmax_backward", 65536): ((256, 16),), ("softmax_backward", 131072): ((256, 16),),
    ("softmax", 131072): ((256, 16, "shared"), (512, 8, "shared")),
    ("fused", 8192): ((256, 1),), ("fused", 16384): ((256, 2),),
    ("rmsnorm", 65536): ((128, 16, "shared"), (256, 8, "shared")),
    ("rmsnorm", 131072): ((256, 16, "shared"), (256, 8, "shared")),
    ("residual", 65536): ((256, 16, "shared", False), (256, 16, "shared"), (128, 16, "shared", False)),
    ("residual", 131072): ((256, 16, "shared", False),),
}
OF_GATED = {None: ((128, 2), (256, 2)), "both": ((128, 1), (256, 1))}  # threads, vectors


class Case(NamedTuple):
    """kind: which job of the benchmarks; shape: its M and N (or B, S, H, D). variants: recipes by name."""

    kind: str
    shape: tuple
    variants: dict
    peers: tuple
    roof: str


# ---- which kernels -------------------------------------------------------------------------------------------------


def _hinted(builder: str, spec, config, N=WHOLE[0]) -> dict:
    names = tuple(HINTS) if N in WHOLE else ("hints", "none", "stores")
    return {name: _recipe(BUILDERS[builder], spec, config, HINTS[name]) for name in names}


def _others(builder: str, kind, spec, make) -> dict:
    return {"-".join(map(str, (threads, *rest))): _recipe(BUILDERS[builder], spec, make(threads, threads, *rest),
                                                          HINTS["none"])
            for threads, *rest in OTHERS.get((kind, spec.N), ())}


def _recipe(builder, spec, config, hints) -> Recipe:
    return Recipe("bench.hint_variants:build", (builder, spec, config, *hints), sources=(builder.partition(":")[0],))


def cases() -> list[Case]:
    """Those that matter most first."""
    found = [_residual(262144)]
    found += [_softmax(N, backward) for backward in (True, False) for N in OFTEN]
    found += [_loss("backward", N) for N in OFTEN] + [_loss("fused", N) for N in OFTEN]
    found += [_residual(N) for N in OFTEN]
    for kind in ("swiglu", "geglu", "geglu_tanh"):
        shapes = GATED if kind == "swiglu" else GATED[1:]
        found += [_gated(kind, shape, gradients) for gradients in (None, "both") for shape in shapes]
    found += [_norm("rmsnorm", N) for N in OFTEN] + [_norm("layernorm", N) for N in OFTEN]
    found += [_heads(), _quantised(4096, "row"), _quantised(8192, "row"), _quantised(8192, "block")]
    found += [_rope(shape) for shape in ROPE] + [_loss("forward", N) for N in (1024, 4096, 16384)]
    return [case for case in found if case is not None]


def _rows_of(N, most=1 << 30):
    return min(ROWS[N], most // N)


def _softmax(N, backward):
    spec = SoftmaxSpec(N, "bf16", 8, backward=backward)
    config = softmax_plan.plan(spec)
    if config.load != "registers":
        return None
    liger = ("Liger",) if N in WHOLE else ()
    kind, most, roof = ("softmax_backward", 1 << 29, "add") if backward else ("softmax", 1 << 30, "copy")
    variants = _hinted("softmax", spec, config, N) | _others("softmax", kind, spec, RowConfig)
    return Case(kind, (_rows_of(N, most), N), variants, ("QuACK", *liger), roof)


def _loss(kind, N):
    spec = CrossEntropySpec(kind, N, "bf16", vector=8)
    config = losses_plan.plan(spec)
    if config.load != "registers":
        return None
    compiled = ("torch.compile",) if kind == "backward" and N != 4096 and N != 16384 else ()
    variants = _hinted("losses", spec, config, N) | _others("losses", kind, spec, RowConfig)
    return Case(kind, (_rows_of(N, 1 << 29), N), variants, ("QuACK", *compiled),
                "copy" if kind != "forward" else "")


def _as_planned(found: list[Case]) -> list[Recipe]:
    """What the benchmarks' own inputs need."""
    from tkq.losses.launch import recipe

    return [recipe(CrossEntropySpec("forward", c.shape[1], "bf16", vector=8)) for c in found if c.kind == "backward"]


def _norm(kind, N):
    spec = NormSpec(kind, N, "bf16", "fp32" if kind == "layernorm" else "bf16", None, 8)
    config = long_plan.plan(spec)
    if config.load != "registers" or kept_plan.planned(spec):
        return None
    variants = _hinted("norms", spec, config, 0) | _others("norms", kind, spec, Config)
    return Case(kind, (ROWS[N], N), variants, ("QuACK",), "copy")


def _heads():
    spec = NormSpec("rmsnorm", ROPE[0][-1], "bf16", "bf16", None, 8, heads="weight")
    return Case("heads", ROPE[0], _hinted("norms", spec, long_plan.plan(spec)), ("QuACK",), "copy")


def _quantised(N, scale):
    spec = NormSpec("rmsnorm", N, "bf16", "bf16", None, 8, out="e4m3", scale=scale)
    return Case(f"quant {scale}", (ROWS[N], N), _hinted("norms", spec, long_plan.plan(spec)), (), "")


def _gated(kind, shape, gradients):
    spec = GatedSpec(kind, "bf16", "apart", 8, gradients)
    op, roof = (f"{kind} backward", "copy + add") if gradients else (kind, "add")
    variants = _hinted("gated", spec, plan_gated(spec))
    for config in OF_GATED[gradients] if shape == GATED[1] else ():
        variants["x".join(map(str, config))] = _recipe(BUILDERS["gated"], spec, GatedConfig(*config), HINTS["none"])
    return Case(op, shape, variants, ("Liger",) if kind != "geglu" else (), roof)


def _rope(shape):
    spec = RopeSpec("bf16", "fp32", shape[-1], 0, False, 8)
    return Case("rope", shape, _hinted("rope", spec, plan_rope(spec, shape[2])), ("QuACK",), "copy")


def _residual(N):
    spec = NormSpec("rmsnorm", N, "bf16", "bf16", None, 8, "bf16", "bf16")
    planned, variants = long_plan.plan(spec), {}
    if N == 262144:
        variants = _longest(spec)
    elif planned.load == "registers":
        variants = _hinted("norms", spec, planned, N)
    else:
        variants = {"none": _recipe(BUILDERS["norms"], spec, planned, (False, False)),
                    "shared, stores": _recipe(BUILDERS["norms"], spec, planned, (False, True))}
    return Case("residual", (ROWS[N], N), variants | _others("norms", "residual", spec, Config), ("QuACK",), "copy")


LONGEST = {  # (config, with a limit on registers, loads, stores)
    "registers": (Config(512, 512, 16), False), "registers late": (Config(512, 512, 16, early=False), False),
    "registers r2": (Config(512, 512, 16), True),
    "shared": (Config(512, 512, 16, "shared"), False), "shared late": (Config(512, 512, 16, "shared", False), False),
    "256 shared late": (Config(256, 256, 16, "shared", False), False),
}


def _longest(spec) -> dict:
    found = {}
    for name, (config, limited) in LONGEST.items():
        builder = "bench.hint_variants:resident" if limited else BUILDERS["norms"]
        every = ("hints", "none", "stores", "loads") if name == "registers" else ("none", "stores")
        for hints in every:
            found[f"{name} {hints}" if name != "registers" else hints] = _recipe(builder, spec, config, HINTS[hints])
    kept = _kept_spec(spec.N)
    for name, choices in KEPT.items():
        found[name] = recipe_of(kept, rows_plan.plan(kept.shape, cluster=16, stages=3, **choices))
    return found


KEPT = {"kept 16x8": dict(per_thread=64, warps=8), "kept 16x16": dict(per_thread=32, warps=16),
        "kept 16x8 once": dict(per_thread=64, warps=8, evict_first=True, streaming=True)}


def _kept_spec(N) -> RowSpec:
    def streams(*names):
        return tuple(Stream(name, "bf16") for name in names)

    return RowSpec("bench.hint_variants", "KeptSum", N, streams("x", "residual"), streams("y", "total"),
                   streams("weight"))


# ---- calling them --------------------------------------------------------------------------------------------------


def _call(case: Case, recipe: Recipe) -> Callable:
    """The kernel as the peers of its kind are called."""
    import torch

    from tkq import runtime

    run = runtime.function(recipe)
    if isinstance(recipe.args[1], RowPlan):
        return _kept_call(run, recipe.args[1])

    def empty(x, n):
        return torch.empty(n, dtype=torch.float32, device=x.device)

    def loss(x, t, gradient):
        M = x.shape[0]
        losses = empty(x, M)
        run(x, t, None, losses, empty(x, 2 * M + 2), None, gradient, -100, 0.0, 0.0, 0.0)
        return losses

    def fused(x, t):
        gradient = torch.empty_like(x)
        return loss(x, t, gradient).sum(), gradient  # as QuACK's

    def backward(x, t, dloss, saved, lse):
        gradient = torch.empty_like(x)
        run(x, t, None, dloss, saved, None, gradient, -100, 0.0, 0.0, 0.0)
        return gradient

    def softmax(*given):
        out = torch.empty_like(given[0])
        run(*given, out, 1.0)
        return out

    def norm(x, weight, bias):
        out = torch.empty_like(x)
        run(x, weight, bias, out, 1e-5 if case.kind == "layernorm" else EPS)
        return out

    def residual(x, r, weight):
        out, total = torch.empty_like(x), torch.empty_like(x)
        run(x, weight, None, out, r, total, None, None, None, EPS, None)
        return out, total

    def heads(x, weight):
        from tkq.norms.launch import _rows

        (rows, _), _ = _rows(x, None, weight)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        run(rows, weight, None, out.view(-1, x.shape[-1]), None, None, None, None, None, EPS, None)
        return out

    def quantised(x, weight):
        from tkq.norms.launch import Call, allocate

        results = allocate(Call("rmsnorm", EPS, 0.0, torch.float8_e4m3fn, None, False, case.kind.split()[1]), x)
        run(x, weight, None, results[0], None, None, None, None, results[4], EPS, None)
        return results[0], results[4]

    def gated(gate, up):
        out = torch.empty_like(gate)
        run(gate, up, None, out, None)
        return out

    def gated_backward(dy, gate, up):
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        run(gate, up, dy, dgate, dup)
        return dgate, dup

    def rope(x, cos, sin):
        out = torch.empty_like(x)
        run(x, out, None, None, cos, sin, None, None, 0, 1.0)
        return out

    calls = {"softmax": softmax, "softmax_backward": softmax, "forward": lambda x, t: loss(x, t, None), "fused": fused,
             "backward": backward, "rmsnorm": norm, "layernorm": norm, "residual": residual, "rope": rope,
             "heads": heads, "quant row": quantised, "quant block": quantised}
    return calls.get(case.kind, gated_backward if case.kind.endswith("backward") else gated)


def _kept_call(run, plan):
    import torch

    from tkq.runtime import clusters

    units = plan.resident * clusters.resident(torch.device("cuda", 0), plan.cluster, plan.block)

    def call(x, r, weight):
        out, total = torch.empty_like(x), torch.empty_like(x)
        run((x, r), (out, total), (weight,), None, None, None, None, None, (EPS,), units)
        return out, total

    return call


def _job(kind: str, shape: tuple):
    """The benchmark's: what says how its peers are called, with what, and how wrong a result is."""
    from bench import cross_entropy, foundation, norms, pointwise
    from bench import softmax as softmax_bench

    if kind == "heads":
        return norms._heads_job(*shape)
    if kind.startswith("quant"):
        return norms._quant_job(*shape, "rmsnorm", kind.split()[1], False)
    if kind == "rope":
        import tkq
        return pointwise._rope_job("rope", tkq.rope, shape)
    of_shapes = {"softmax": softmax_bench.forward_jobs, "softmax_backward": softmax_bench.backward_jobs,
                 "forward": cross_entropy.forward_jobs, "fused": cross_entropy.both_jobs,
                 "backward": cross_entropy.backward_jobs, "residual": norms.residual_jobs}
    if kind in of_shapes:
        return next(of_shapes[kind]([shape]))
    if kind in ("rmsnorm", "layernorm"):
        return foundation.norm_job(kind, *shape)
    gated, _, backward = kind.partition(" ")
    return (pointwise._gated_backward_job if backward else pointwise._gated_job)(gated, *shape)


# ---- timing --------------------------------------------------------------------------------------------------------


def warm(case: Case) -> None:
    """Let the peers compile. Only torch.compile's kernels are of one M; others have fewer rows here."""
    import torch

    from bench import peers

    for name in case.peers:
        few = case.shape if len(case.shape) > 2 or name == "torch.compile" else (min(512, case.shape[0]), case.shape[1])
        job = _job(case.kind, few)
        found, missing = peers.find(job.peer_op, (name,))
        try:
            with torch.no_grad():
                inputs = job.make_inputs(0)
                for call in found.values():
                    call(*inputs)
            torch.cuda.synchronize()
        except Exception as problem:
            missing = {name: f"{type(problem).__name__}: {str(problem)[:200]}"}
        for peer, why in missing.items():
            print(f"{case.kind} {case.shape}: {peer}: {why}", flush=True)
        torch.cuda.empty_cache()


def tune(case: Case, broken: set, turn: float) -> dict:
    from bench import peers
    from tkq.testing import timing

    begin, job = time.perf_counter(), _job(case.kind, case.shape)
    names = (case.roof, *case.peers) if case.roof else case.peers
    found, missing = peers.find(job.peer_op, names)
    ours = {name: _call(case, recipe) for name, recipe in case.variants.items() if recipe not in broken}
    beside = dict(sorted(found.items(), key=lambda item: item[0] == "Liger"))  # it may write over its inputs: last
    effort = timing.Effort(7, turn, 0.0)
    done = timing.compare({**ours, **beside}, job.make_inputs, effort, error=job.error)
    result = dict(kind=case.kind, shape=case.shape, roof=case.roof, missing=missing,
                  seconds=round(time.perf_counter() - begin, 2),
                  ms={t.name: t.times_ms for t in done.timings}, errors={t.name: t.error for t in done.timings},
                  notes={t.name: t.note for t in done.timings if t.note})
    print(_line(result, case), flush=True)
    return result


def _line(result, case) -> str:
    ms = {name: times for name, times in result["ms"].items() if times}
    beside = [name for name in ("hints", case.roof, *case.peers) if name in ms]
    lines = [f"{case.kind} {'x'.join(map(str, case.shape))}   ({result['seconds']} s)"]
    for name in case.variants:
        if name not in ms:
            continue
        ratios = [(other, statistics.median(b / a for a, b in zip(ms[name], ms[other], strict=True)))
                  for other in beside]
        peers = [r for other, r in ratios if other in case.peers]
        of = "  ".join(f"{other} {r:.3f}" for other, r in ratios)
        least = f"  best peer {min(peers):.3f}" if peers else ""
        wrong = result["errors"].get(name)
        lines.append(f"  {name:24s} {statistics.median(ms[name]) * 1e3:8.1f} us ({min(ms[name]) * 1e3:.1f}.."
                     f"{max(ms[name]) * 1e3:.1f})  {of}{least}  error {'-' if wrong is None else f'{wrong:.1e}'}")
    lines += [f"  {name}: FAILED {note}" for name, note in result["notes"].items() if name not in ms]
    lines += [f"  {name}: missing {why}" for name, why in result["missing"].items()]
    return "\n".join(lines)


def check(found: list[Case]) -> int:
    """Every variant once, on the first of the inputs, beside the benchmark's reference. How many are wrong."""
    import torch

    wrong = 0
    for case in found:
        job = _job(case.kind, case.shape if len(case.shape) > 2 else (min(1024, case.shape[0]), case.shape[1]))
        inputs = job.make_inputs(0)
        for name, recipe in case.variants.items():
            try:
                with torch.no_grad():
                    error = job.error(name, inputs, _call(case, recipe)(*inputs))
                torch.cuda.synchronize()
            except Exception as problem:
                error = float("inf")
                print(f"{type(problem).__name__}: {str(problem)[:300]}")
            if not error < (0.05 if case.kind.startswith("quant") else 0.01):
                wrong += 1
                print(f"WRONG {case.kind} {case.shape} {name}: {error}", flush=True)
        del inputs
        torch.cuda.empty_cache()
    print(f"{sum(len(c.variants) for c in found)} variants checked, {wrong} wrong", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tuning.add_compiling(parser)
    parser.add_argument("--warm", help="I/N: compile the peers of every N-th case")
    parser.add_argument("--check", action="store_true", help="is every variant right? nothing is timed")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--kind", action="append")
    parser.add_argument("--shapes", help="such as 32768x1024,16384x16384")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--turn", type=float, default=0.01, help="seconds of a turn, after a lead-in as long")
    parser.add_argument("--out", type=Path, help="folder for hints.json")
    options = parser.parse_args()
    shapes = options.shapes and [tuple(map(int, s.split("x"))) for s in options.shapes.split(",")]
    found = [c for c in cases() if (not options.kind or c.kind in options.kind) and (not shapes or c.shape in shapes)]
    if options.list:
        for c in found:
            print(f"{c.kind} {c.shape}: {', '.join(c.variants)} | {', '.join(c.peers)} | {c.roof}")
        print(f"{len(found)} cases, {len({r for c in found for r in c.variants.values()})} kernels")
        return 0
    if options.warm:
        i, n = map(int, options.warm.split("/"))
        for case in found[i::n]:
            warm(case)
        return 0
    broken = tuning.precompile(_as_planned(found), options.processes)  # by processes that hint at nothing
    broken |= tuning.precompile((r for c in found for r in c.variants.values()), options.processes)
    if options.precompile:
        return len(broken)
    if options.check:
        return check(found)
    deadline, results = time.perf_counter() + options.seconds, []
    for case in found:
        if time.perf_counter() > deadline:
            print(f"not run, the time is up: {case.kind} {case.shape}", flush=True)
            continue
        try:
            results.append(tune(case, broken, options.turn))
        except Exception as problem:
            print(f"{case.kind} {case.shape}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "hints.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

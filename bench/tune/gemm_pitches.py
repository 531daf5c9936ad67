"""Time alternatives for operands and outputs that TMA does not support, against torch, in the same run.

    python -m bench.tune.gemm_pitches --precompile                  compile only; needs no GPU
    python -m bench.tune.gemm_pitches [--cases 0:12] [--sections copies,cases,small] --out FILE

"elements": nothing is copied; "copy": operands are; "out by elements": results do not go through shared memory. copies:
the copy alone, by threads of a block and units of each, beside torch's `copy_` and a copy of whole rows.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from bench.core import pitches
from bench.core.pitches import Lies, Product
from bench.tune import common
from tkq.gemm.dense import launch, plan, realigned
from tkq.gemm.dense.realign_config import RealignSpec
from tkq.gemm.dense.realign_plan import Around
from tkq.runtime import Recipe, function

COPIES = ((2048, 50256, Lies(1)), (4096, 4096, Lies(1, 1)), (1024, 1024, Lies(1, 1)), (50256, 1024, Lies(3, 5)))
SPECS = tuple(RealignSpec("bf16", False, threads, units)
              for threads, units in ((256, 1), (256, 2), (256, 4), (128, 2), (512, 1)))
PROCESSORS = 132  # of an H100: what the plan is asked for ahead


def ways(p: Product, a, b, out) -> dict:
    """By name: (copies or None, what to compile, blocks)."""
    loose = p.k % 8 > 0
    x, y, kind = launch.kind_of(a, b, out, False, False, launch.PLAIN, loose)
    majors, (dtype, out_dtype, (_, _, load, _, _), *rest) = kind[2][:2], kind
    fits = realigned.fits(x, y, out, majors, False, loose)
    kinds = {"as it is": (None, kind)}
    if not load:
        elements = dtype, out_dtype, (*majors, False, False, False), *rest
        copied = launch.copied(x, y, out, majors, Around(not fits.a, not fits.b), launch.PLAIN)
        kinds = {"direct": (None, elements), "copy": copied}
    found = {}
    for name, (copies, kind) in kinds.items():
        spec, sizes, batches = launch.spec_of(*kind[:-1])
        for store in dict.fromkeys((spec.store, "direct")):
            recipe, blocks = plan.planned_kernel(replace(spec, store=store), *sizes, PROCESSORS, None, batches)
            if all(recipe != other for _, other, _ in found.values()) or copies is not None:
                found[name if store == spec.store else f"{name}, out by elements"] = copies, recipe, blocks
    return found


def recipes(cases) -> list:
    """Of everything that is timed. On a machine without a GPU too: memory is asked for, and not touched."""
    found = [Recipe("tkq.gemm.dense.realign:Realign", (s,)) for s in (*SPECS, RealignSpec(both=True))]
    for p in cases:
        tensors = [_empty(lies, *shape, p.batches) for lies, shape in (
            (p.a, (p.m, p.k)), (p.b, (p.k, p.n)), (p.out, (p.m, p.n)))]
        found += [recipe for _, recipe, _ in ways(p, *tensors).values()]
    return found


def _empty(lies, rows, cols, batches):
    import torch

    lines, length = (cols, rows) if lies.turned else (rows, cols)
    each = lines * (length + lies.more)
    x = torch.empty(lies.first + max(1, batches) * each + 16, dtype=torch.bfloat16).as_strided(
        (max(1, batches), lines, length), (each, length + lies.more, 1), lies.first)
    x = x.mT if lies.turned else x
    return x if batches else x[0]


def _candidates(p: Product, a, b, out) -> dict:
    found = {}
    for name, (copies, recipe, blocks) in ways(p, a, b, out).items():
        kernel = function(recipe)
        kernel = launch.WaveSyncLaunch(kernel) if plan.takes_counter(recipe) else kernel
        if copies is not None:
            kernel = realigned.Realigned(kernel, copies)

        def run(a, b, out, kernel=kernel, blocks=blocks):
            kernel(a, b, out, None, None, 1.0, 0.0, blocks)
            return out

        found[name] = run
    return found


def _torch(a, b, out):
    import torch

    return torch.matmul(a, b, out=out)


def tune(p: Product, effort) -> dict:
    from tkq.testing import timing

    first = p.inputs(0)
    candidates = {**_candidates(p, *first), "torch": _torch}
    planned = launch.run(*first, loose=p.k % 8 > 0)
    planned = type(planned[0]).__name__ if planned else "shared"
    del first

    def error(name, inputs, output):
        inputs[2].fill_(float("nan"))  # what another left there is right
        return p.error(inputs, candidates[name](*inputs))

    done = timing.compare(candidates, p.inputs, effort, error=error)
    line = [f"{p.name:44s} planned {planned:9s}"]
    for t in sorted((t for t in done.timings if t.ok), key=lambda t: t.median_ms):
        line.append(f"{t.name} {t.median_ms * 1e3:.1f} ({done['torch'].median_ms / t.median_ms:.2f})"
                    + ("" if t.error < 0.01 else f" WRONG {t.error}"))
    line += [f"{t.name} FAILED {t.note}" for t in done.timings if not t.ok]
    print("  ".join(line), flush=True)
    return dict(case=p.name, ms={t.name: t.times_ms for t in done.timings})


def copies(rows: int, cols: int, lies: Lies, effort) -> dict:
    """The copy alone."""
    import torch

    from tkq.testing import timing

    wide = -(-cols // 8) * 8

    def inputs(i):
        x = lies.make(rows, cols)
        x.copy_(torch.randn(rows, cols, device="cuda"))
        return x, torch.full((rows, wide), float("nan"), dtype=x.dtype, device="cuda")

    def ours(spec):
        f = function(Recipe("tkq.gemm.dense.realign:Realign", (spec,)))

        def copied(src, dst):
            f(src[None], dst[None], None, None)
            return dst

        return copied

    def theirs(src, dst):
        dst[:, :cols].copy_(src)
        return dst

    def error(name, inputs, output):
        return None if name == "whole rows" else float((output[:, :cols] != inputs[0]).sum().item())

    candidates = {f"{s.threads} x {s.units}": ours(s) for s in SPECS}
    whole = torch.empty(rows, wide, dtype=torch.bfloat16, device="cuda").normal_()
    done = timing.compare({**candidates, "copy_": theirs, "whole rows": lambda src, dst: whole.clone()}, inputs, effort,
                          error=error)
    rate = lambda t: 4e-6 * rows * cols / t.median_ms
    print(f"copy {rows}x{cols} {lies.name}, GB/s: " + "  ".join(
        f"{t.name} {rate(t):.0f}{' WRONG' * bool(t.error)}" for t in done.timings if t.ok) + "".join(
        f" {t.name} FAILED {t.note}" for t in done.timings if not t.ok), flush=True)
    return dict(rows=rows, cols=cols, **asdict(lies), ms={t.name: t.times_ms for t in done.timings})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_compiling(parser)
    parser.add_argument("--sections", default="copies,cases,small")
    parser.add_argument("--cases", default=":", help="which of bench.core.pitches.CASES, as a slice")
    parser.add_argument("--seconds", type=float, default=0.006, help="of a candidate's turn")
    parser.add_argument("--rest", type=float, default=0.02, help="seconds before a turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sections = options.sections.split(",")
    chosen = slice(*(int(x) if x else None for x in options.cases.split(":")))
    cases = pitches.CASES[chosen] if "cases" in sections else ()
    cases += pitches.SMALL if "small" in sections else ()
    common.precompile(recipes(cases), options.processes)
    if options.precompile:
        return
    import torch

    from tkq.testing.timing import Effort

    effort = Effort(7, options.seconds, 0.0, idle_seconds=options.rest)
    report = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, copies=[], cases=[])
    jobs = [("copies", lambda c=c: copies(*c, Effort(7, 0.004, 0.0))) for c in COPIES if "copies" in sections]
    small = replace(effort, round_seconds=0.003, idle_seconds=0.0)
    jobs += [("cases", lambda p=p: tune(p, small if p in pitches.SMALL else effort)) for p in cases]
    with torch.no_grad():
        for kind, job in jobs:
            try:
                report[kind].append(job())
            except Exception as problem:  # the others are still worth timing
                print(f"FAILED {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

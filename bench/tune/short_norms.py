"""Time alternatives for the forward norms of short rows against the plan, a baseline and a copy, interleaved.

    python -m bench.tune.short_norms --precompile        compile only; needs no GPU
    python -m bench.tune.short_norms --out DIRECTORY     compile, time, print tables, write tune_short_norms.json
    python -m bench.tune.short_norms --case "rmsnorm 2048"

Variants differ from the plan in one thing, one of them in two: threads to a row, rows of a block, when the weight is
read, rows of a thread, where x waits, bytes of an access, or persistent. "tkq" is the op itself, which runs the planned
kernel: what lies between these two is what such a comparison cannot resolve.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from bench.tune import common
from bench.tune.norms import label, spec_of
from tkq.norms import persistent_plan
from tkq.norms.launch import recipe
from tkq.norms.plan import plan
from tkq.norms.spec import NormSpec
from tkq.rows.persistent import plan as rows
from tkq.rows.persistent.launch import recipe_of
from tkq.rows.persistent.plan import RowPlan
from tkq.rows.persistent.spec import RowSpec, Stream
from tkq.runtime import Recipe

ROWS, EPS = 32768, 1e-6
# (case of bench/tune/norms.py, columns): the peers that were the quickest in bench/results
CASES = {
    ("rmsnorm", 1024): ("torch.compile",),
    ("rmsnorm", 2048): ("Liger",),
    ("layernorm", 1024): ("torch.compile",),
    ("layernorm with bias", 1024): ("torch.compile",),
    ("rmsnorm with residual", 1024): ("QuACK",),
}
# persistent: elements of a thread, warps, stages of the ring (0: threads load their rows themselves), blocks on a
# multiprocessor
PERSISTENT = {"persistent, ring": (32, 8, 3, 2), "persistent, direct": (16, 8, 0, 4)}


class Variant(NamedTuple):
    spec: NormSpec
    config: object  # plan.Config or RowPlan

    @property
    def recipe(self) -> Recipe:
        if not isinstance(self.config, RowPlan):
            return recipe(*self)
        if self.spec.kind == "layernorm":
            return persistent_plan.recipe(*self)
        return recipe_of(_persistent_spec(self.spec), self.config)

    @property
    def words(self) -> str:
        c = self.config
        if isinstance(c, RowPlan):
            return f"{c.per_thread} a thread, {c.warps} warps, {c.stages} stages, {c.min_blocks_per_sm} blocks"
        return label(c) + f" v{self.spec.vector}" * (self.spec.vector < self.spec.widest)


def variants(case: str, N: int) -> dict[str, Variant]:
    """By name; the planned one first."""
    spec = spec_of(case, N)
    planned = plan(spec)
    threads, block = planned.threads_per_row, planned.threads
    other, swapped = "late" if planned.prefetch_weight else "early", dict(prefetch_weight=not planned.prefetch_weight)
    others = {
        "threads / 2": dict(threads_per_row=threads // 2),
        "rows x 2": dict(threads=block * 2),
        other: swapped,
        "two rows a thread": dict(rows_per_thread=2),
        "shared": dict(load="shared"),
    }
    if threads * 2 * spec.vector <= N:  # all of them have elements
        twice = dict(threads_per_row=threads * 2, threads=max(block, threads * 2))
        others |= {"threads x 2": twice, f"threads x 2, {other}": {**twice, **swapped}}
    found = {"planned": Variant(spec, planned)}
    found |= {name: Variant(spec, dataclasses.replace(planned, **choice)) for name, choice in others.items()}
    found["8 bytes"] = Variant(dataclasses.replace(spec, vector=4), planned)
    return found | {name: Variant(spec, _persistent_plan(spec, *geometry)) for name, geometry in PERSISTENT.items()}


def _persistent_spec(spec: NormSpec) -> RowSpec:
    def streams(**dtypes):
        return tuple(Stream(name, dtype) for name, dtype in dtypes.items() if dtype)

    return RowSpec("bench.tune.persistent_norms", "PersistentRMSNorm", spec.N,
                   streams(x=spec.x, residual=spec.residual), streams(y=spec.x, total=spec.total),
                   streams(weight=spec.weight))


def _persistent_plan(spec: NormSpec, per_thread: int, warps: int, stages: int, min_blocks_per_sm: int) -> RowPlan:
    shape = persistent_plan.shape(spec) if spec.kind == "layernorm" else _persistent_spec(spec).shape
    return rows.plan(shape, cluster=1, per_thread=per_thread, warps=warps, stages=stages,
                     min_blocks_per_sm=min_blocks_per_sm)


# ---- timing ----------------------------------------------------------------------------------------------------------


def _job(case: str, N: int):
    """The benchmark's: how the peers are called, with what, and how wrong a result is."""
    from bench.ops import norms

    jobs = norms.residual_jobs if "residual" in case else norms.forward_jobs
    op, with_bias = case.split()[0], "bias" in case
    return next(job for job in jobs([(ROWS, N)])
                if job.peer_op.startswith(op) and ("bias" in job.question.shape) == with_bias)


def _call(variant: Variant):
    """As the benchmark calls its peers: (x, weight, bias), or (x, residual, weight)."""
    import torch

    from tkq import runtime
    from tkq.runtime.device import clusters

    run, persistent = runtime.function(variant.recipe), isinstance(variant.config, RowPlan)
    residual, of_rows = variant.spec.residual is not None, persistent and variant.spec.kind == "rmsnorm"
    units = ()
    if persistent:
        device = torch.device("cuda", torch.cuda.current_device())
        config = variant.config
        units = (config.min_blocks_per_sm * clusters.resident(device, config.cluster, config.block),)

    def norm(x, weight, bias):
        out = torch.empty_like(x)
        if of_rows:
            run((x,), (out,), (weight,), None, None, None, None, None, (EPS,), *units)
        else:
            run(x, weight, bias, out, EPS, *units)
        return out

    def added(x, r, weight):
        out, total = torch.empty_like(x), torch.empty_like(x)
        if of_rows:
            run((x, r), (out, total), (weight,), None, None, None, None, None, (EPS,), *units)
        else:
            run(x, weight, None, out, r, total, None, None, None, EPS, None)
        return out, total

    return added if residual else norm


def tune(case: str, N: int, seconds: float) -> dict:
    """Milliseconds of each round, by candidate."""
    from bench.peers import common as peers
    from tkq.testing import timing

    job, chosen = _job(case, N), variants(case, N)
    found, missing = peers.find(job.peer_op, (*CASES[case, N], "copy"))
    ours = {name: _call(variant) for name, variant in chosen.items()}
    done = timing.compare({**ours, "tkq": job.ours, **found}, job.make_inputs, timing.Effort(9, seconds, 0.1),
                          error=job.error)
    _show(f"{case} {ROWS} x {N}", done, chosen, next(iter(found)))
    return dict(case=case, M=ROWS, N=N, peers=[name for name in found if name != "copy"], missing=missing,
                ways={name: variant.words for name, variant in chosen.items()},
                ms={t.name: t.times_ms for t in done.timings},
                errors={t.name: t.error for t in done.timings},
                notes={t.name: t.note for t in done.timings if t.note})


def _show(title: str, done, chosen: dict, peer: str) -> None:
    from tkq.testing import timing

    print(f"\n{title}: us, speedup over {peer} and copy, error")
    for t in sorted((t for t in done.timings if t.ok), key=lambda t: t.median_ms):
        ratios = " ".join(f"{timing.ratio(t, done[name]):.4f}" if done[name].ok else "-" for name in (peer, "copy"))
        words = chosen[t.name].words if t.name in chosen else ""
        error = "" if t.error is None else f"{t.error:.1e}"
        print(f"  {t.name:18s} {1e3 * t.median_ms:8.2f}  {ratios}  {error:8s} {words}")
    print("".join(f"  {t.name}: FAILED {t.note}\n" for t in done.timings if not t.ok), end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_compiling(parser)
    parser.add_argument("--out", type=Path, help="folder for tune_short_norms.json")
    parser.add_argument("--case", choices=[f"{case} {N}" for case, N in CASES], action="append")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a turn")
    options = parser.parse_args()
    cases = [(case, N) for case, N in CASES if f"{case} {N}" in (options.case or (f"{case} {N}",))]
    common.precompile((variant.recipe for case in cases for variant in variants(*case).values()), options.processes)
    if not options.precompile:
        _time(cases, options)


def _time(cases: list, options) -> None:
    import torch

    from bench.core.harness import Monitor

    report = dict(device=torch.cuda.get_device_name(), driver=Monitor().driver, torch=torch.__version__, cases=[])
    for case in cases:
        report["cases"].append(tune(*case, options.seconds))
        if options.out:  # what is measured stays, whatever comes
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "tune_short_norms.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

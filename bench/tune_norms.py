"""Time every config that plan.variants offers for the norms, beside QuACK, torch.compile and copy, in the same run.

    python -m bench.tune_norms --precompile            compile only; needs no GPU
    python -m bench.tune_norms --out DIRECTORY         compile, time, print a table, write norms.json

First all variants in short turns; then the quickest few among the peers. plan.py's table is what this script finds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from bench.shapes import NORM_SHAPES
from tkq.norms.plan import Config, plan, variants
from tkq.norms.spec import NormSpec

FINALISTS = 3


# As the benchmark calls them: QuACK's layernorm takes float32 vectors, so ours gets them too.
VECTORS = {"rmsnorm": ("bf16", None), "layernorm": ("fp32", None), "layernorm with bias": ("fp32", "fp32")}


def spec_of(case: str, N: int) -> NormSpec:
    return NormSpec(case.split()[0], N, "bf16", *VECTORS[case], vector=8)


def label(c: Config) -> str:
    words = [f"{c.threads_per_row}/{c.threads}", f"c{c.cluster}", c.load[:3]]
    words += ["late"] if not c.early else []
    words += [f"x{c.rows_each}"] if c.rows_each > 1 else []
    return " ".join(words)


# ---- compiling -------------------------------------------------------------------------------------------------------


def _compile(job):
    from tkq import runtime
    from tkq.norms.ops import recipe

    spec, config = job
    try:
        runtime.ensure(recipe(spec, config))
    except Exception as problem:  # one that does not compile is worth a line, not the run
        return f"{spec} {config}: {type(problem).__name__}: {str(problem)[:200]}"
    return None


def precompile(jobs, processes: int) -> None:
    begin = time.perf_counter()
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for i, problem in enumerate(pool.map(_compile, jobs, chunksize=4), 1):
            if problem:
                print(problem, flush=True)
            if i % 100 == 0:
                print(f"compiled {i} of {len(jobs)}, {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"compiled {len(jobs)} in {time.perf_counter() - begin:.0f} s", flush=True)


# ---- timing ----------------------------------------------------------------------------------------------------------


def _candidate(spec: NormSpec, config: Config):
    import torch

    from tkq import runtime
    from tkq.norms.ops import recipe

    run = runtime.function(recipe(spec, config))

    def call(x, weight, bias):
        out = torch.empty_like(x)
        run(x, weight, bias, out, 1e-5)
        return out

    return call


def _inputs(spec: NormSpec, M: int):
    import torch

    def make(i):
        g = torch.Generator("cuda").manual_seed(i)
        x = torch.randn(M, spec.N, device="cuda", dtype=torch.bfloat16, generator=g)
        vectors = [
            None if d is None else torch.randn(spec.N, device="cuda", dtype=torch.float32, generator=g)
            for d in (spec.weight, spec.bias)
        ]
        return x, *(v.bfloat16() if v is not None and spec.weight == "bf16" else v for v in vectors)

    return make


def tune(case: str, M: int, N: int, peer_names: tuple) -> dict:
    """Milliseconds of the finalists and the peers for one shape, and every candidate's of the first round."""
    from bench import peers
    from tkq.testing import timing

    spec = spec_of(case, N)
    make = _inputs(spec, M)
    ours = {label(c): c for c in variants(spec)}
    first = timing.compare({name: _candidate(spec, c) for name, c in ours.items()}, make, timing.Effort(7, 0.002, 0.02))
    ranked = sorted((t for t in first.timings if t.ok), key=lambda t: t.median_ms)
    best = [ours[t.name] for t in ranked[:FINALISTS]]
    final = dict.fromkeys([plan(spec), *best])
    found, missing = peers.find(spec.kind, peer_names)
    second = timing.compare(
        {**found, **{label(c): _candidate(spec, c) for c in final}}, make, timing.Effort(9, 0.02, 0.1)
    )
    gigabytes = 2 * M * N * 2 * 1e-9
    rows = sorted((t for t in second.timings if t.ok), key=lambda t: t.median_ms)
    print(f"\n{case} M {M} N {N}   (planned: {label(plan(spec))})")
    for t in rows:
        against = (
            f"  {timing.ratio(t, second['QuACK']):.3f} of QuACK" if "QuACK" in found and second["QuACK"].ok else ""
        )
        print(f"  {t.name:36s} {t.median_ms:.4f} ms {gigabytes / t.median_ms * 1e3:6.0f} GB/s{against}", flush=True)
    for t in ranked[FINALISTS:]:
        print(f"    not among the best: {t.name:36s} {t.median_ms:.4f} ms")
    for t in (*first.timings, *second.timings):
        if not t.ok:
            print(f"  {t.name}: {t.note}")
    for name, why in missing.items():
        print(f"  {name} is not there: {why}")
    return dict(
        case=case,
        M=M,
        N=N,
        planned=label(plan(spec)),
        configs={name: dataclasses.asdict(c) for name, c in ours.items()},
        first={t.name: t.times_ms for t in first.timings},
        second={t.name: t.times_ms for t in second.timings},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precompile", action="store_true", help="compile only")
    parser.add_argument("--out", type=Path, help="folder for norms.json")
    parser.add_argument("--case", choices=tuple(VECTORS), action="append")
    parser.add_argument("--n", type=int, action="append", help="only these N")
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--compiled", action="store_true", help="torch.compile too: a minute more")
    options = parser.parse_args()
    peer_names = ("copy", "QuACK", "torch.compile")[: 3 if options.compiled else 2]
    chosen = options.case or tuple(VECTORS)
    cases = [(case, M, N) for M, N in NORM_SHAPES for case in chosen if not options.n or N in options.n]
    precompile([(spec_of(case, N), c) for case, _, N in cases for c in variants(spec_of(case, N))], options.processes)
    if options.precompile:
        return
    results = []
    for case in cases:
        results.append(tune(*case, peer_names))
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "norms.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

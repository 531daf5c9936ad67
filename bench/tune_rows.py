"""Time the plans that `tkq.rows.variants` offers for the norms' backward, beside torch.add, in the same run.

    python -m bench.tune_rows --precompile                  compile only; needs no GPU
    python -m bench.tune_rows --shapes 1024x4096,32768x1024 --only planned,early=False,pdl=True

All in short turns; then the quickest few and the planned one in longer ones.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench.norm_backward import KINDS, MODERATE, SHAPES
from tkq import runtime
from tkq.norms.backward_shipped import spec
from tkq.rows.launch import recipe_of
from tkq.rows.variants import variants

FINALISTS = 4


def spec_of(kind: str, n: int):
    """As the benchmark calls them."""
    return spec(kind, n, weight="bf16" if kind == "rmsnorm" else "fp32")


def chosen(kind: str, n: int, only: tuple) -> dict:
    found = variants(spec_of(kind, n).shape)
    return {name: p for name, p in found.items() if not only or name in only}


def _compile(recipe):
    try:
        runtime.ensure(recipe)
    except Exception as problem:  # one that does not compile is worth a line, not the run
        return f"{recipe.args}: {type(problem).__name__}: {str(problem)[:200]}"
    return None


def precompile(recipes, processes: int) -> None:
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for problem in filter(None, pool.map(_compile, recipes, chunksize=4)):
            print(problem, flush=True)
    print(f"compiled {len(recipes)}", flush=True)


def _candidate(kind, n, p):
    import torch

    from tkq.rows.launch import launcher

    run = launcher(spec_of(kind, n), torch.device("cuda", torch.cuda.current_device()), p)
    layer = kind == "layernorm"

    def call(dy, x, weight, rstd, mean):
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        columns = (dweight, torch.empty_like(weight)) if layer else (dweight,)
        run((dy, x), (dx,), (weight,), (rstd, mean) if layer else (rstd,), None, columns)
        return dx, *columns

    return call


def tune(kind: str, m: int, n: int, only: tuple, final_seconds: float, with_quack: bool = False) -> None:
    """Print a table for one shape."""
    import torch

    from bench import peers
    from bench.norm_backward import _error, _job
    from tkq.testing import timing

    inputs, error = _job(kind, m, n).make_inputs, _error(kind)
    plans = chosen(kind, n, only)
    ours = {name: _candidate(kind, n, p) for name, p in plans.items()}
    first = timing.compare(ours, inputs, timing.Effort(7, 0.004, 0.05), error=error)
    ranked = sorted((t for t in first.timings if t.ok), key=lambda t: t.median_ms)
    final = dict.fromkeys(["planned", *(t.name for t in ranked[:FINALISTS])])
    peers_, missing = peers.find(f"{kind}_backward", ("QuACK",) if with_quack else ())
    beside = {"torch.add": lambda dy, x, weight, rstd, mean: torch.add(dy, x), **peers_}
    second = timing.compare({**beside, **{name: ours[name] for name in final if name in ours}}, inputs,
                            timing.Effort(11, final_seconds, 0.2))
    gigabytes = 6e-6 * m * n
    print(f"\n{kind} M {m} N {n}   planned: {plans.get('planned')}")
    for t in sorted((t for t in second.timings if t.ok), key=lambda t: t.median_ms):
        against = [f"{timing.ratio(t, second[name]):.3f}x {name}" for name in beside if second[name].ok]
        print(f"  {t.name:28s} {t.median_ms * 1e3:9.2f} us {gigabytes / t.median_ms:6.0f} GB/s  {', '.join(against)}  "
              f"{t.launches} launches [{t.mode}]", flush=True)
    for t in ranked:
        print(f"    first round: {t.name:28s} {t.median_ms * 1e3:9.2f} us  error {t.error:.1e}")
    for t in (*first.timings, *second.timings):
        if not t.ok:
            print(f"  {t.name}: FAILED {t.note}")
    for name, why in missing.items():
        print(f"  {name} is not there: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precompile", action="store_true", help="compile only")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--shapes", help="such as 1024x4096,32768x1024")
    parser.add_argument("--only", default="", help="variants by name, separated by commas")
    parser.add_argument("--final-seconds", type=float, default=0.03, help="one candidate's turn in the second part")
    parser.add_argument("--quack", action="store_true", help="QuACK beside the finalists, too")
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    options = parser.parse_args()
    shapes = SHAPES + MODERATE
    if options.shapes:
        shapes = tuple(tuple(map(int, shape.split("x"))) for shape in options.shapes.split(","))
    only = tuple(filter(None, options.only.split(",")))
    cases = [(kind, m, n) for m, n in shapes for kind in options.kind or KINDS]
    pairs = {(kind, n) for kind, _, n in cases}
    recipes = [recipe_of(spec_of(kind, n), p) for kind, n in sorted(pairs) for p in chosen(kind, n, only).values()]
    precompile(list(dict.fromkeys(recipes)), options.processes)
    if not options.precompile:
        for kind, m, n in cases:
            tune(kind, m, n, only, options.final_seconds, options.quack)


if __name__ == "__main__":
    main()

"""Time the plans of `tkq.rows.persistent.variants` for the norms' backward, against torch.add, in the same run.

    python -m bench.tune.persistent_rows --precompile                  compile only; needs no GPU
    python -m bench.tune.persistent_rows --shapes 1024x4096,32768x1024 --only planned,early=False,pdl=True

"planned" is for many rows; "to 65536 elements" is the plan where a processor has no more of one load (see
tkq.norms.backward.plan). All in short turns; then the quickest few and the planned one in longer ones.
"""

from __future__ import annotations

import argparse

from bench.ops.norm_backward import KINDS, MODERATE, SHAPES
from bench.tune import common
from tkq.norms.backward.catalog import spec
from tkq.norms.backward.plan import steps
from tkq.rows.persistent.launch import recipe_of
from tkq.rows.persistent.variants import variants

FINALISTS = 4


def spec_of(kind: str, n: int):
    """As the benchmark calls them."""
    return spec(kind, n, weight="bf16" if kind == "rmsnorm" else "fp32")


def chosen(kind: str, n: int, only: tuple) -> dict:
    shape = spec_of(kind, n).shape
    *few, _ = steps(shape)
    found = {**variants(shape), **{f"to {step.elements} elements": step.plan for step in few}}
    return {name: p for name, p in found.items() if not only or name in only}


def _candidate(kind, n, p):
    import torch

    from tkq.rows.persistent.launch import launcher

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

    from bench.ops.norm_backward import _error, _job
    from bench.peers import common as peers
    from tkq.testing.timing import Effort

    plans = chosen(kind, n, only)
    found, missing = peers.find(f"{kind}_backward", ("QuACK",) if with_quack else ())
    beside = {"torch.add": lambda dy, x, weight, rstd, mean: torch.add(dy, x), **found}
    done = common.final({name: _candidate(kind, n, p) for name, p in plans.items()}, "planned", beside,
                        _job(kind, m, n).make_inputs, (Effort(7, 0.004, 0.05), Effort(11, final_seconds, 0.2)),
                        FINALISTS, _error(kind))
    print(f"\n{kind} M {m} N {n}   planned: {plans.get('planned')}")
    common.show(done, 6e-9 * m * n, missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_compiling(parser)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--shapes", help="such as 1024x4096,32768x1024")
    parser.add_argument("--only", default="", help="variants by name, separated by commas")
    parser.add_argument("--final-seconds", type=float, default=0.03, help="one candidate's turn in the second part")
    parser.add_argument("--quack", action="store_true", help="QuACK beside the finalists, too")
    options = parser.parse_args()
    shapes = SHAPES + tuple(MODERATE)
    if options.shapes:
        shapes = tuple(tuple(map(int, shape.split("x"))) for shape in options.shapes.split(","))
    only = tuple(filter(None, options.only.split(",")))
    cases = [(kind, m, n) for m, n in shapes for kind in options.kind or KINDS]
    pairs = {(kind, n) for kind, _, n in cases}
    recipes = [recipe_of(spec_of(kind, n), p) for kind, n in sorted(pairs) for p in chosen(kind, n, only).values()]
    common.precompile(recipes, options.processes)
    if not options.precompile:
        for kind, m, n in cases:
            tune(kind, m, n, only, options.final_seconds, options.quack)


if __name__ == "__main__":
    main()

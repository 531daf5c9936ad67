"""Time every config of plan.variants for the norms, against QuACK, torch.compile and copy, in the same run.

    python -m bench.tune.norms --precompile            compile only; needs no GPU
    python -m bench.tune.norms --out DIRECTORY         compile, time, print a table, write norms.json
    python -m bench.tune.norms --case "layernorm with bias" --n 262144 --match persistent

First all variants in short turns; then the quickest few among the peers. plan.py's table is what this script finds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from bench.core.shapes import NORM_SHAPES
from bench.tune import common
from tkq.norms import fp8_persistent_plan, persistent_plan
from tkq.norms.launch import recipe
from tkq.norms.plan import plan, variants
from tkq.norms.spec import OUT_WIDTH, NormSpec
from tkq.rows.persistent.plan import RowPlan

EPS = 1e-5


# As the benchmark calls them: QuACK's layernorm takes float32 vectors, so ours gets them too.
CASES = {
    "rmsnorm": dict(weight="bf16"),
    "layernorm": dict(weight="fp32"),
    "layernorm with bias": dict(weight="fp32", bias="fp32"),
    "rmsnorm with residual": dict(weight="bf16", residual="bf16", total="bf16"),
    "rmsnorm with float32 residual": dict(weight="bf16", residual="fp32", total="fp32", vector=4),
    "rmsnorm trained": dict(weight="bf16", stats=True),
    "rmsnorm quant row": dict(weight="bf16", out="e4m3", scale="row"),
    "rmsnorm quant block": dict(weight="bf16", out="e4m3", scale="1x128"),
    "rmsnorm quant row with bias": dict(weight="fp32", bias="fp32", out="e4m3", scale="row"),
    "rmsnorm quant block with bias": dict(weight="fp32", bias="fp32", out="e4m3", scale="1x128"),
    "layernorm quant row": dict(weight="bf16", out="e4m3", scale="row"),
    "layernorm quant row with bias": dict(weight="fp32", bias="fp32", out="e4m3", scale="row"),
    "layernorm quant block": dict(weight="bf16", out="e4m3", scale="1x128"),
    "layernorm quant block with bias": dict(weight="fp32", bias="fp32", out="e4m3", scale="1x128"),
    "rmsnorm quant row with residual": dict(weight="bf16", out="e4m3", scale="row", residual="bf16", total="bf16"),
    "layernorm quant row with bias and residual": dict(weight="fp32", bias="fp32", out="e4m3", scale="row",
                                                       residual="bf16", total="bf16"),
}
PLAIN = ("rmsnorm", "layernorm", "layernorm with bias")


def spec_of(case: str, N: int) -> NormSpec:
    return NormSpec(case.split()[0], N, "bf16", **{"vector": 8, **CASES[case]})


def gigabytes(spec: NormSpec, M: int) -> float:
    """What a call moves: x and the residual in, the result and the sum out."""
    return M * spec.N * sum(OUT_WIDTH[d] for d in (spec.x, spec.residual, spec.total, spec.result) if d) / 8 * 1e-9


def chosen(spec: NormSpec, match: str = "") -> dict:
    """The planned config, and those whose label contains one of the texts, by label."""
    persistent = _persistent(spec)
    every = list(dict.fromkeys([persistent.planned(spec) or plan(spec), *variants(spec), *persistent.variants(spec)]))
    return {label(c): c for c in [every[0], *(c for c in every if any(t in label(c) for t in match.split(",")))]}


def _persistent(spec: NormSpec):
    """The module with the plans of persistent kernels."""
    return fp8_persistent_plan if spec.scale else persistent_plan


def _recipe(spec: NormSpec, c):
    return (_persistent(spec).recipe if isinstance(c, RowPlan) else recipe)(spec, c)


def label(c) -> str:
    if isinstance(c, RowPlan):
        return f"persistent {c.cluster}x{c.warps} warps {c.stages} stages r{c.min_blocks_per_sm}"
    words = [f"{c.threads_per_row}/{c.threads}", f"c{c.cluster}", c.load[:3]]
    words += ["late"] if not c.prefetch_weight else []
    words += [f"x{c.rows_per_thread}"] if c.rows_per_thread > 1 else []
    words += [f"r{c.min_blocks_per_sm}"] if c.min_blocks_per_sm else []
    return " ".join(words)


# ---- timing ----------------------------------------------------------------------------------------------------------


def _candidate(spec: NormSpec, config):
    import torch

    from tkq import runtime
    from tkq.norms import launch
    from tkq.runtime.call.dtypes import torch_type
    from tkq.runtime.device import clusters

    run, units = runtime.function(_recipe(spec, config)), ()
    if isinstance(config, RowPlan):
        device = torch.device("cuda", torch.cuda.current_device())
        units = (config.min_blocks_per_sm * clusters.resident(device, config.cluster, config.block),)
    if spec.plain:
        def call(x, weight, bias, residual):
            out = torch.empty_like(x)
            run(x, weight, bias, out, EPS, *units)
            return out
        return call
    types = [None if d is None else torch_type(d) for d in (spec.out, spec.total)]
    options = launch.Call(spec.kind, EPS, 0.0, *types, spec.stats, spec.scale)

    def call_with_options(x, weight, bias, residual):
        results = launch.allocate(options, x)
        run(*launch._arguments(options, (x, residual), weight, bias, results), *units)
        return results[0]

    return call_with_options


def _inputs(spec: NormSpec, M: int):
    import torch

    from tkq.runtime.call.dtypes import torch_type

    shapes = ((spec.x, (M, spec.N)), (spec.weight, (spec.N,)), (spec.bias, (spec.N,)), (spec.residual, (M, spec.N)))

    def make(i):
        g = torch.Generator("cuda").manual_seed(i)
        return tuple(None if d is None else torch.randn(shape, device="cuda", dtype=torch_type(d), generator=g)
                     for d, shape in shapes)

    return make


def _peers(case: str, names: tuple):
    """Those of a plain norm, which take no residual; none of the others: bench/ops/norms.py has them."""
    from bench.peers import common as peers

    if case not in PLAIN:
        return {}, {}
    found, missing = peers.find(case.split()[0], names)
    return {name: lambda x, w, b, _, call=call: call(x, w, b) for name, call in found.items()}, missing


def _error(spec: NormSpec):
    """Of a norm without options, at its first and last rows; None for a peer's."""
    from tkq.reference import norms
    from tkq.testing.timing import relative_error

    def error(name, inputs, output):
        x, weight, bias, _ = inputs
        ends = (slice(0, 64), slice(max(0, x.shape[0] - 64), x.shape[0]))
        return max(relative_error(output[r], norms.norm(spec.kind, x[r], weight, bias, eps=EPS)[0])
                   for r in ends)

    return error if spec.plain else None


def tune(case: str, M: int, N: int, peer_names: tuple, match: str = "") -> dict:
    """Milliseconds of the finalists and the peers for one shape, and every candidate's of the first round."""
    from tkq.testing.timing import Effort

    spec = spec_of(case, N)
    ours = chosen(spec, match)
    planned = next(iter(ours))
    found, missing = _peers(case, peer_names)
    done = common.final({name: _candidate(spec, c) for name, c in ours.items()}, planned, found, _inputs(spec, M),
                        (Effort(7, 0.002, 0.02), Effort(9, 0.02, 0.1)), error=_error(spec))
    print(f"\n{case} M {M} N {N}   (planned: {planned})")
    common.show(done, gigabytes(spec, M), missing)
    return dict(case=case, M=M, N=N, planned=planned,
                configs={name: dataclasses.asdict(c) for name, c in ours.items()}, **done.as_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_compiling(parser)
    parser.add_argument("--out", type=Path, help="folder for norms.json")
    parser.add_argument("--case", choices=tuple(CASES), action="append", help="all where not given")
    parser.add_argument("--n", type=int, action="append", help="only these N")
    parser.add_argument("--match", default="", help="by parts of labels: 'persistent,c16 sha'")
    parser.add_argument("--compiled", action="store_true", help="torch.compile too: a minute more")
    options = parser.parse_args()
    peer_names = ("copy", "QuACK", "torch.compile")[: 3 if options.compiled else 2]
    wanted = options.case or tuple(CASES)
    cases = [(case, M, N) for M, N in NORM_SHAPES for case in wanted if not options.n or N in options.n]
    common.precompile((_recipe(spec_of(case, N), c) for case, _, N in cases
                       for c in chosen(spec_of(case, N), options.match).values()), options.processes)
    if options.precompile:
        return
    results = []
    for case in cases:
        results.append(tune(*case, peer_names, options.match))
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "norms.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

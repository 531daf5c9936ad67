"""Time plans of RowKernel for forward reductions, against the planned one and ReductionBase, in the same run.

    python -m bench.tune.row_forward --precompile                  compile only; needs no GPU
    python -m bench.tune.row_forward --out FILE

bench.ops.row_forward_kernels has the kernels: "mean" writes one number a row, "scaled" a row as well. A plan's name
says blocks of a cluster, warps, elements of a thread, stages (0: no ring, threads read global memory), blocks on a
multiprocessor; "held": a block for each tile, which its threads hold in registers. The quickest are timed with another
kernel before each call as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

from bench.tune import common
from tkq.rows.persistent import plan as rows
from tkq.rows.persistent.launch import recipe_of
from tkq.rows.persistent.spec import RowSpec, Stream

SHAPES = ((32768, 1024), (16384, 4096), (4096, 16384), (1024, 65536))
MOST_STAGES = {"mean": (3,), "scaled": (8,)}  # each of them is tried
FINALISTS = 7
# (warps, blocks on a multiprocessor)
BLOCKS = ((4, 3), (8, 2), (8, 3), (16, 2))
HELD = tuple(itertools.product((4, 8, 16), (32, 64, 128)))  # warps, elements of a thread


def spec_of(kind: str, n: int) -> RowSpec:
    """As `SoftmaxMean.launch` makes it of aligned bf16 tensors."""
    name, stores = {"mean": ("SoftmaxMean", ()), "scaled": ("SoftmaxScaled", (Stream("y", "bf16"),))}[kind]
    return RowSpec("bench.ops.row_forward_kernels", name, n, (Stream("x", "bf16"),), stores, results=("mean",),
                   sums=(1, 2))


def name_of(p: rows.RowPlan) -> str:
    flags = (" evict" * p.evict_first + " streaming" * p.streaming + " no pdl" * (not p.pdl)
             + " held" * p.held + " past L1" * p.past_l1)
    return f"c{p.cluster} w{p.warps} e{p.per_thread} s{p.stages} r{p.min_blocks_per_sm}{flags}"


def _stages(shape, p, most: int) -> int:
    """As many as fit beside ``p.resident`` blocks."""
    return next((s for s in range(most, 0, -1)
                 if rows.smem_bytes(shape, dataclasses.replace(p, stages=s)) <= rows.smem_limit(p)), 0)


def candidates(kind: str, n: int) -> dict:
    """By name: the planned one first."""
    shape = spec_of(kind, n).shape
    planned = rows.plan(shape)
    found = {"planned": planned}

    def add(**choices):
        try:
            p = rows.plan(shape, **choices)
        except ValueError:
            return None
        if p not in found.values():
            found[name_of(p)] = p
        return p

    for (warps, min_blocks_per_sm), per_thread in itertools.product(BLOCKS, (16, 32, 64) if kind == "scaled"
                                                                    else (32, 64)):
        cluster = 1
        while cluster < 16 and cluster * warps * 32 * per_thread < n:
            cluster *= 2
        if cluster > 1 and n // cluster < 2048:
            continue
        try:
            base = rows.plan(shape, cluster=cluster, per_thread=per_thread, warps=warps)
        except ValueError:
            continue
        base = dataclasses.replace(base, min_blocks_per_sm=min_blocks_per_sm)
        for most in MOST_STAGES[kind]:
            stages = _stages(shape, base, most)
            if stages > len(shape.sums):
                add(cluster=cluster, per_thread=per_thread, warps=warps, stages=stages,
                    min_blocks_per_sm=min_blocks_per_sm)
    for warps, per_thread in HELD:
        cluster = max(1, 1 << (-(-n // (warps * 32 * per_thread)) - 1).bit_length())
        if cluster > 8 or n < 32 * per_thread:
            continue
        min_blocks_per_sm = 65536 // (warps * 32) // (per_thread * 3 // 4 + 24)  # as `rows.plan` counts registers
        add(held=True, past_l1=True, cluster=cluster, warps=warps, per_thread=per_thread,
            min_blocks_per_sm=min_blocks_per_sm)
    for choices in dict(past_l1=not planned.past_l1), dict(pdl=False), dict(evict_first=True):
        if planned.held == ("evict_first" not in choices):
            found.setdefault(f"planned, but {choices}", dataclasses.replace(planned, **choices))
    return found


def _call(kind, n, p):
    import torch

    from tkq.rows.persistent.launch import launcher

    run = launcher(spec_of(kind, n), torch.device("cuda", torch.cuda.current_device()), p)

    def call(x):
        mean = torch.empty(x.shape[0], device="cuda")
        y = (torch.empty_like(x),) if kind == "scaled" else None
        run((x,), y, None, None, (mean,), None)
        return mean

    return call


def _one_pass(x):
    import torch

    from bench.ops.row_forward_kernels import SoftmaxMeanInOnePass

    mean = torch.empty(x.shape[0], device="cuda")
    SoftmaxMeanInOnePass.launch(x, mean)
    return mean


def tune(kind: str, m: int, n: int, final_seconds: float) -> dict:
    import torch

    from bench.ops.rows_common import randn
    from tkq.testing.timing import Effort, relative_error

    found = candidates(kind, n)
    beside = {"ReductionBase": _one_pass, "read": lambda x: x.view(torch.int32).amax(-1)} if kind == "mean" else {
        "copy": lambda x: x.clone()}

    def error(name, inputs, output):
        x = inputs[0].double()
        return relative_error(output, (torch.softmax(x, -1) * x).sum(-1))

    make = lambda i: (randn(i, m, n),)
    calls = {name: _call(kind, n, p) for name, p in found.items()}
    efforts = Effort(7, 0.003, 0.0), Effort(9, final_seconds, 0.0, idle_seconds=0.01, short_us=1e6)
    done = common.final(calls, "planned", beside, make, efforts,
                        FINALISTS, error)
    print(f"\n{kind} M {m} N {n}   planned: {name_of(found['planned'])}")
    common.show(done, (4e-9 if kind == "scaled" else 2e-9) * m * n, {})
    wrong = {t.name: t.error for t in done.first.timings if t.ok and not t.error < 1e-5}
    print(f"  WRONG: {wrong}" if wrong else "  all right")
    return dict(kind=kind, M=m, N=n, **done.as_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_compiling(parser)
    parser.add_argument("--kind", choices=("mean", "scaled"), action="append")
    parser.add_argument("--shapes", help="such as 1024x4096,32768x1024")
    parser.add_argument("--final-seconds", type=float, default=0.01, help="one candidate's turn in the second part")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shapes = SHAPES
    if options.shapes:
        shapes = tuple(tuple(map(int, shape.split("x"))) for shape in options.shapes.split(","))
    cases = [(kind, m, n) for kind in options.kind or ("mean", "scaled") for m, n in shapes]
    recipes = [recipe_of(spec_of(kind, n), p) for kind, _, n in cases for p in candidates(kind, n).values()]
    common.precompile(recipes, options.processes)
    if not options.precompile:
        import torch

        report = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, cases=[])
        for kind, m, n in cases:
            report["cases"].append(tune(kind, m, n, options.final_seconds))
            if options.out:
                options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

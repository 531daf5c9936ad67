"""Time configurations of the grouped GEMM against torch:
`python -m bench.tune.grouped_gemm [--kinds bf16] [--out FILE]`.

As bench/tune/fp8.py. 16 groups, equal or skewed as in bench/ops/grouped_gemm.py.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from bench.tune.common import Turns, add_turns, blocks_of, has_gpu, precompile, size
from tkq.gemm.fp8.config import Fp8Config
from tkq.gemm.grouped.spec import GroupedSpec, fitted, recipe

WIDE, TALL = Fp8Config(group=16, panel_bytes=64), Fp8Config(m=256, n=128, across=True, lag=0, group=16, panel_bytes=64)
VARIANTS = {
    "across 3 stages": Fp8Config(across=True, group=16),
    "across": replace(WIDE, across=True),
    "across lag 0": replace(WIDE, across=True, lag=0),
    "cluster": WIDE,
    "cluster lag 0": replace(WIDE, lag=0),
    "cluster lead 1": replace(WIDE, lead=1),
    "alone": replace(WIDE, cluster=1),
    "tall": TALL,
    "cluster spread": replace(WIDE, lag=0, spread=1),
    "cluster spread pdl": replace(WIDE, lag=0, spread=1, pdl=True),
    "cluster spread lead 1 pdl": replace(WIDE, lag=0, spread=1, lead=1, pdl=True),
    "tall spread pdl": replace(TALL, spread=1, pdl=True),
    "cluster spread lead 0": replace(WIDE, lag=0, spread=1, lead=0),
    "tall spread": replace(TALL, spread=1),
    "across spread": replace(WIDE, across=True, lag=0, spread=1),
    "tall alone": replace(TALL, cluster=1),
    "across group 4": replace(WIDE, across=True, group=4),
}
SPECS = {"bf16": GroupedSpec(), "row": GroupedSpec("m", "e4m3", "e4m3", "bf16", "row")}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kinds", default="bf16")
    p.add_argument("--sizes", default="8192x4096x4096", help="M of all groups x N x K")
    p.add_argument("--variants", default=",".join(VARIANTS))
    p.add_argument("--precompile", action="store_true", help="compile only; needs no GPU")
    add_turns(p)
    args = p.parse_args()
    names = [n.strip() for n in args.variants.split(",")]
    if unknown := {blocks_of(n)[0] for n in names} - set(VARIANTS):
        raise SystemExit(f"--variants: unknown {sorted(unknown)}; allowed {list(VARIANTS)}")
    precompile([made(kind, name) for kind in args.kinds.split(",") for name in names])
    if args.precompile or not has_gpu():
        return
    turns = Turns(args)
    for kind in args.kinds.split(","):
        for shape in args.sizes.split(","):
            for skewed in (False, True):
                measure(turns, kind, size(shape), skewed, names)


def made(kind, name):
    return recipe(SPECS[kind], fitted(VARIANTS[blocks_of(name)[0]], SPECS[kind]))


def measure(turns, kind, shape, skewed, names) -> None:
    """One problem."""
    import torch

    from bench.ops import grouped_gemm as bench
    from tkq.testing import timing

    m, n, k = shape
    offsets = torch.tensor(bench.sizes(m, skewed), device="cuda").cumsum(0).int()
    bytes = (2 if kind == "bf16" else 1) * (m * k + bench.GROUPS * n * k)
    count = timing.input_sets(bytes, turns.gpu.l2_bytes(), turns.gpu.free_bytes())
    with torch.no_grad():
        sets = [bench.make_inputs(kind, m, n, k, offsets, i) for i in range(min(count, 3))]
        theirs = (bench._grouped if kind == "bf16" else bench._scaled_grouped)(kind)
        calls = {name: (f, sets) for name, f in {"torch": theirs, **{x: call(kind, x) for x in names}}.items()}
        want = theirs(*sets[0]).float()

        def error(_, got):
            return (got.float() - want).abs().max().item() / want.abs().max().item()

        about = {"kind": kind, "shape": shape, "groups": "skewed" if skewed else "equal"}
        turns.case(about, calls, error, lambda ms: f"{2e-9 * m * n * k / ms:6.0f} TFLOP/s")


def call(kind, name):
    import torch

    from tkq.gemm.grouped import ops
    from tkq.runtime import function
    from tkq.runtime.device import arch

    kernel, processors = function(made(kind, name)), arch.processors("cuda")
    plain, blocks = blocks_of(name)
    blocks = (blocks or processors) // VARIANTS[plain].cluster * VARIANTS[plain].cluster

    def f(a, b, offsets, sa=None, sb=None):
        c = torch.empty(a.shape[0], b.shape[2], dtype=torch.bfloat16, device=a.device)
        scales = [ops._NO_SCALES] * 2
        if sa is not None:
            scales = [(sa.data_ptr(), 0, *sa.stride()), ops._of_groups(sb)]
        kernel(a, b, c, offsets, *scales, blocks)
        return c

    return f


if __name__ == "__main__":
    main()

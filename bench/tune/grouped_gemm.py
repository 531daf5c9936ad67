"""Time configurations of the grouped GEMM against torch:
`python -m bench.tune.grouped_gemm [--kinds bf16] [--out FILE]`.

As bench/tune/fp8.py. 16 groups, equal or skewed as in bench/ops/grouped_gemm.py.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from bench.tune.common import Turns, add_turns, blocks_of, has_gpu, precompile, size
from tkq.gemm.fp8.config import Fp8Config
from tkq.gemm.grouped.plan import fit_to_spec, recipe
from tkq.gemm.grouped.spec import GroupedSpec

WIDE, TALL = Fp8Config(raster_group=16, store_row_bytes=64), Fp8Config(m=256, n=128, cluster_along_n=True,
                                                                       wgmma_in_flight=0, raster_group=16,
                                                                       store_row_bytes=64)
VARIANTS = {
    "along n 3 stages": Fp8Config(cluster_along_n=True, raster_group=16),
    "along n": replace(WIDE, cluster_along_n=True),
    "along n in flight 0": replace(WIDE, cluster_along_n=True, wgmma_in_flight=0),
    "cluster": WIDE,
    "cluster in flight 0": replace(WIDE, wgmma_in_flight=0),
    "cluster stagger 1": replace(WIDE, stagger_stages=1),
    "alone": replace(WIDE, cluster=1),
    "tall": TALL,
    "cluster overlap": replace(WIDE, wgmma_in_flight=0, overlap_epilogue=1),
    "cluster overlap pdl": replace(WIDE, wgmma_in_flight=0, overlap_epilogue=1, pdl=True),
    "cluster overlap stagger 1 pdl": replace(WIDE, wgmma_in_flight=0, overlap_epilogue=1, stagger_stages=1, pdl=True),
    "tall overlap pdl": replace(TALL, overlap_epilogue=1, pdl=True),
    "cluster overlap stagger 0": replace(WIDE, wgmma_in_flight=0, overlap_epilogue=1, stagger_stages=0),
    "tall overlap": replace(TALL, overlap_epilogue=1),
    "along n overlap": replace(WIDE, cluster_along_n=True, wgmma_in_flight=0, overlap_epilogue=1),
    "tall alone": replace(TALL, cluster=1),
    "along n group 4": replace(WIDE, cluster_along_n=True, raster_group=4),
}
SPECS = {"bf16": GroupedSpec(), "row": GroupedSpec("m", "e4m3", "e4m3", "bf16", "row", "row")}


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
    return recipe(SPECS[kind], fit_to_spec(VARIANTS[blocks_of(name)[0]], SPECS[kind]))


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

    kernel, num_sms = function(made(kind, name)), arch.num_sms("cuda")
    plain, blocks = blocks_of(name)
    blocks = (blocks or num_sms) // VARIANTS[plain].cluster * VARIANTS[plain].cluster

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

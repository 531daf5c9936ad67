"""Time configurations of the float8 GEMM against torch: `python -m bench.tune.fp8 [--kinds row] [--out FILE]`.

As bench/tune/gemm.py: every round lets each variant work once, in an order that changes; what counts is the median over
the rounds of torch's time / the variant's time in the same round. "NAME + ACTIVATION" has a bias and that activation,
"NAME + bias" a bias alone, and torch's time is the plain product's.
"""

from __future__ import annotations

import argparse
import itertools
from contextlib import suppress
from dataclasses import replace

from bench.tune.common import Turns, add_turns, blocks_of, has_gpu, precompile, size
from tkq.gemm.dense import small_m_plan
from tkq.gemm.dense.small_m_config import SLOT_BYTES, WIDTHS
from tkq.gemm.fp8.config import Fp8Config
from tkq.gemm.fp8.plan import best_tile, fit_to_spec, planned_kernel
from tkq.gemm.fp8.small_m_config import SmallMFp8Config
from tkq.gemm.fp8.spec import Fp8Spec
from tkq.granularity import scales_of

TALL = Fp8Config(m=256, n=128, cluster_along_n=True, wgmma_in_flight=0)
PIPELINED = Fp8Config(n=192, stages=4, split=2, store_row_bytes=64, pdl=True, promotion_unroll=8)
FIVE = replace(PIPELINED, stages=5)
FEW = Fp8Config(m=64, n=64, stages=11, consumers=1, cluster=1, stagger_stages=0, pdl=True)
QUARTERS = Fp8Config(split=4, stages=4, store_row_bytes=64, pdl=True, promotion_unroll=4)
FAST = {  # "NAME on 132": as many blocks, instead of the even number that the plan takes
    "128x256": Fp8Config(),
    "in flight 0": Fp8Config(wgmma_in_flight=0),
    "stagger 1": Fp8Config(stagger_stages=1),
    "stagger 1 in flight 0": Fp8Config(stagger_stages=1, wgmma_in_flight=0),
    "stagger 3": Fp8Config(stagger_stages=3),
    "stagger 0": Fp8Config(stagger_stages=0),
    "group 4": Fp8Config(raster_group=4),
    "group 16": Fp8Config(raster_group=16),
    "along n": Fp8Config(cluster_along_n=True),
    "alone": Fp8Config(cluster=1),
    "256x128 along n": Fp8Config(m=256, n=128, cluster_along_n=True),
    "256x128 along n in flight 0": Fp8Config(m=256, n=128, cluster_along_n=True, wgmma_in_flight=0),
    "256x128": Fp8Config(m=256, n=128),
    "256x192 along n": Fp8Config(m=256, n=192, cluster_along_n=True, stages=3, stagger_stages=1),
    "128x192": Fp8Config(n=192, stages=4),
    "128x128": Fp8Config(n=128, stages=6),
    "tall": TALL,
    "tall pdl": replace(TALL, pdl=True),
    "tall overlap": replace(TALL, overlap_epilogue=1),
    "tall overlap 2": replace(TALL, overlap_epilogue=2),
    "tall overlap 2 pdl": replace(TALL, overlap_epilogue=2, pdl=True),
    "tall overlap pdl": replace(TALL, overlap_epilogue=1, pdl=True),
    "tall overlap 4 pdl": replace(TALL, overlap_epilogue=4, pdl=True),
    "tall overlap stagger 1 pdl": replace(TALL, overlap_epilogue=1, stagger_stages=1, pdl=True),
    "tall overlap stagger 0 pdl": replace(TALL, overlap_epilogue=1, stagger_stages=0, pdl=True),
    "128x256 overlap pdl": Fp8Config(wgmma_in_flight=0, overlap_epilogue=1, pdl=True),
    "128x256 overlap": Fp8Config(wgmma_in_flight=0, overlap_epilogue=1),
    "128x256 overlap 2 pdl": Fp8Config(wgmma_in_flight=0, overlap_epilogue=2, pdl=True),
    "128x256 overlap 4 stagger 1 pdl": Fp8Config(wgmma_in_flight=0, overlap_epilogue=4, stagger_stages=1, pdl=True),
    "128x256 overlap 4 stagger 3 pdl": Fp8Config(wgmma_in_flight=0, overlap_epilogue=4, stagger_stages=3, pdl=True),
    "128x256 overlap 4 pdl": Fp8Config(wgmma_in_flight=0, overlap_epilogue=4, pdl=True),
    "128x256 overlap group 16 pdl": Fp8Config(wgmma_in_flight=0, overlap_epilogue=1, raster_group=16, pdl=True),
    "128x256 overlap stagger 1 pdl": Fp8Config(wgmma_in_flight=0, overlap_epilogue=1, stagger_stages=1, pdl=True),
    "tall stagger 1 pdl": replace(TALL, stagger_stages=1, pdl=True),
    "tall stagger 3 pdl": replace(TALL, stagger_stages=3, pdl=True),
    "tall group 4 pdl": replace(TALL, raster_group=4, pdl=True),
    "tall group 16 pdl": replace(TALL, raster_group=16, pdl=True),
    "tall alone pdl": replace(TALL, cluster=1, pdl=True),
    "tall half panels pdl": replace(TALL, store_row_bytes=64, store_buffers=4, pdl=True),
    "128x256 in flight 0 pdl": Fp8Config(wgmma_in_flight=0, pdl=True),
    "128x128 along n": Fp8Config(n=128, stages=6, cluster_along_n=True),
    "128x128 alone": Fp8Config(n=128, stages=6, cluster=1),
    "128x128 pdl": Fp8Config(n=128, stages=6, pdl=True),
    "128x128 along n pdl": Fp8Config(n=128, stages=6, cluster_along_n=True, pdl=True),
    "128x64": Fp8Config(n=64, stages=7),
    "128x64 along n": Fp8Config(n=64, stages=7, cluster_along_n=True),
    "128x64 alone": Fp8Config(n=64, stages=7, cluster=1),
}
PROMOTED = {
    "256x128 along n": Fp8Config(m=256, n=128, stages=3, cluster_along_n=True),
    "256x128 along n stagger 1": Fp8Config(m=256, n=128, stages=3, cluster_along_n=True, stagger_stages=1),
    "256x128 along n panels 1": Fp8Config(m=256, n=128, stages=4, cluster_along_n=True, store_buffers=1),
    "256x128 along n group 4": Fp8Config(m=256, n=128, stages=3, cluster_along_n=True, raster_group=4),
    "256x128 alone": Fp8Config(m=256, n=128, stages=3, cluster=1),
    "128x192 panels 1": Fp8Config(n=192, stages=5, store_buffers=1),
    "128x192 panels 1 stagger 1": Fp8Config(n=192, stages=5, store_buffers=1, stagger_stages=1),
    "128x192 panels 1 stagger 3": Fp8Config(n=192, stages=5, store_buffers=1, stagger_stages=3),
    "128x192 along n": Fp8Config(n=192, stages=5, store_buffers=1, cluster_along_n=True),
    "128x192 4 stages": Fp8Config(n=192, stages=4),
    "128x256 split 2": Fp8Config(split=2, stages=4, store_buffers=1),
    "128x160": Fp8Config(n=160, stages=5),
    "128x128": Fp8Config(n=128, stages=5),
    "tall": Fp8Config(m=256, n=128, stages=4, cluster_along_n=True, store_row_bytes=64),
    "tall pdl": Fp8Config(m=256, n=128, stages=4, cluster_along_n=True, store_row_bytes=64, pdl=True),
    "tall alone pdl": Fp8Config(m=256, n=128, stages=4, cluster=1, store_row_bytes=64, pdl=True),
    "tall alone stagger 1 pdl": Fp8Config(m=256, n=128, stages=4, cluster=1, store_row_bytes=64, stagger_stages=1,
                                          pdl=True),
    "tall cluster pdl": Fp8Config(m=256, n=128, stages=4, store_row_bytes=64, pdl=True),
    "split 2": Fp8Config(split=2, stages=4, store_row_bytes=64),
    "split 2 pdl": Fp8Config(split=2, stages=4, store_row_bytes=64, pdl=True),
    "split 2 stagger 1 pdl": Fp8Config(split=2, stages=4, store_row_bytes=64, stagger_stages=1, pdl=True),
    "split 2 alone pdl": Fp8Config(split=2, stages=4, cluster=1, store_row_bytes=64, pdl=True),
    "split 2 along n pdl": Fp8Config(split=2, stages=4, cluster_along_n=True, store_row_bytes=64, pdl=True),
    "192 pdl": Fp8Config(n=192, stages=4, pdl=True),
    "192 pipelined 2 pdl": replace(PIPELINED, promotion_unroll=2),
    "192 pipelined 4 pdl": replace(PIPELINED, promotion_unroll=4),
    "192 pipelined 8 pdl": PIPELINED,
    "192 pipelined 16 pdl": replace(PIPELINED, promotion_unroll=16),
    "192 pipelined 8 five pdl": FIVE,
    "192 pipelined 8 five stagger 3 pdl": replace(FIVE, stagger_stages=3),
    "192 pipelined 16 five pdl": replace(FIVE, promotion_unroll=16),
    "192 pipelined 8 five stagger 1 pdl": replace(FIVE, stagger_stages=1),
    "192 pipelined 8 group 4 pdl": replace(PIPELINED, raster_group=4),
    "192 pipelined 8 group 6 pdl": replace(PIPELINED, raster_group=6),
    "192 pipelined 8 group 12 pdl": replace(PIPELINED, raster_group=12),
    "192 pipelined 8 group 16 pdl": replace(PIPELINED, raster_group=16),
    "256 pipelined 4 pdl": QUARTERS,
    "256 pipelined 8 pdl": replace(QUARTERS, promotion_unroll=8),
    "256 pipelined 4 alone pdl": replace(QUARTERS, cluster=1),
    "256 pipelined 8 stagger 0 pdl": replace(QUARTERS, promotion_unroll=8, stagger_stages=0),
    "256 pipelined 4 stagger 0 pdl": replace(QUARTERS, stagger_stages=0),
    "256 pipelined 4 wide panels pdl": replace(QUARTERS, store_row_bytes=128),
    "256 pipelined 4 one wide panel pdl": replace(QUARTERS, store_row_bytes=128, store_buffers=1),
    "256 pipelined 4 stagger 3 pdl": replace(QUARTERS, stagger_stages=3),
    "256 pipelined 2 pdl": replace(QUARTERS, promotion_unroll=2),
    "256 pipelined 4 stagger 1 pdl": replace(QUARTERS, stagger_stages=1),
    "192 pipelined 8 stagger 1 pdl": replace(PIPELINED, stagger_stages=1),
    "192 pipelined 8 stagger 3 pdl": replace(PIPELINED, stagger_stages=3),
    "192 pipelined 4 stagger 0 pdl": replace(PIPELINED, promotion_unroll=4, stagger_stages=0),
    "192 5 stages pdl": Fp8Config(n=192, stages=5, store_row_bytes=64, pdl=True),
    "192 alone pdl": Fp8Config(n=192, stages=4, cluster=1, pdl=True),
    "192 stagger 1 pdl": Fp8Config(n=192, stages=4, stagger_stages=1, pdl=True),
    "192 stagger 0 pdl": Fp8Config(n=192, stages=4, stagger_stages=0, pdl=True),
}
FAST |= {f"128x256 wave sync {wave_sync}": Fp8Config(wgmma_in_flight=0, overlap_epilogue=1, pdl=True,
                                                       wave_sync=wave_sync)
         for wave_sync in (4, 8, 16, 32)}
PROMOTED |= {f"256 pipelined 4 overlap {n} pdl": replace(QUARTERS, overlap_epilogue=n) for n in (2, 4, 5, 6, 7, 8)}
PROMOTED |= {f"192 pipelined 8 overlap {n} pdl": replace(PIPELINED, overlap_epilogue=n) for n in (2, 4, 5, 6)}
PROMOTED |= {"256 pipelined 4 3 stages overlap 6 pdl": replace(QUARTERS, stages=3, overlap_epilogue=6),
             "256 pipelined 4 panels 3 overlap 6 pdl": replace(QUARTERS, store_buffers=3, overlap_epilogue=6),
             **{f"256 pipelined 4 stagger {n} overlap 6 pdl": replace(QUARTERS, stagger_stages=n, overlap_epilogue=6)
                for n in (0, 1, 3)}}
PROMOTED |= {name.replace(" pdl", " per warp pdl"): replace(config, store_per_warp=True) for name,
             config in PROMOTED.items()
             if "pipelined" in name and "pdl" in name}
FAST |= {name.replace(" pdl", " per warp pdl"): replace(config, store_per_warp=True) for name, config in FAST.items()
         if "overlap" in name and "pdl" in name}
PROMOTED |= {f"{name} wave sync {wave_sync}": replace(config, wave_sync=wave_sync) for wave_sync in (4, 8, 16, 32)
             for name, config in (
    ("192", PIPELINED), ("192 group 10", replace(PIPELINED, raster_group=10)), ("192 five", FIVE), ("256", QUARTERS))}
SMALL = {
    "64x64 along n": Fp8Config(m=64, n=64, stages=11, consumers=1, cluster=2, cluster_along_n=True, stagger_stages=0),
    "64x64 alone": Fp8Config(m=64, n=64, stages=11, consumers=1, cluster=1, stagger_stages=0),
    "64x64 along n 4": Fp8Config(m=64, n=64, stages=11, consumers=1, cluster=4, cluster_along_n=True, stagger_stages=0),
    "64x64 in flight 0": Fp8Config(m=64, n=64, stages=11, consumers=1, cluster=1, stagger_stages=0, wgmma_in_flight=0),
    "64x32 alone": Fp8Config(m=64, n=32, stages=14, consumers=1, cluster=1, stagger_stages=0),
    "64x128 alone": Fp8Config(m=64, n=128, stages=8, consumers=1, cluster=1, stagger_stages=0),
    "64x64 alone pdl": Fp8Config(m=64, n=64, stages=11, consumers=1, cluster=1, stagger_stages=0, pdl=True),
    "64x64 along n pdl": Fp8Config(m=64, n=64, stages=11, consumers=1, cluster=2, cluster_along_n=True,
                                   stagger_stages=0, pdl=True),
    "64x64 pipelined 4 pdl": replace(FEW, split=2, promotion_unroll=4),
}
SIZES = "4096,8192,16384,8192x28672x8192,8192x8192x28672"
EMPTY = "1x8192x8192,16x8192x8192,64x8192x8192"


def variants(kind: str, few=None) -> dict[str, Fp8Config]:
    """few: the sizes of a product of few tiles."""
    if not few:
        return PROMOTED if "128" in kind else FAST
    tile = best_tile(spec(kind), *few, 132)
    best = {"tile": tile, "tile without pdl": replace(tile, pdl=False)}
    return best | (SMALL if few[0] <= 64 else {}) | sharing(kind, few)


def sharing(kind: str, few) -> dict[str, SmallMFp8Config]:
    """Of blocks that share K: "their number x columns of a block", which has its processor alone or for two of them."""
    config, found = SmallMFp8Config(next((m for m in WIDTHS if m >= few[0]), WIDTHS[-1]), pdl=True), {}
    for rows, split, places in itertools.product((64, 128), (1, 2, 4, 8), (1, 2)):
        with suppress(ValueError):
            name, one = f"{split} x {rows}" + " two" * (places == 2), replace(config, rows=rows, split=split)
            found[name] = small_m_plan.fit_to_spec(one, spec(kind), places)
            if found[name].shared_bytes(spec(kind)) > 2 // places * SLOT_BYTES:
                del found[name]
    return found


def parts(name: str) -> tuple[str, str]:
    """("NAME", "ACTIVATION" or "") of a variant "NAME + ACTIVATION", which has a bias and that activation."""
    name, _, activation = name.partition(" + ")
    return blocks_of(name)[0], activation


def spec(kind: str, name: str = "") -> Fp8Spec:
    epilogue = parts(name)[1]
    return Fp8Spec(**scales_of(kind), promote="128" in kind, bias="bf16" if epilogue else None,
                   activation=activation(name))


def activation(name: str) -> str | None:
    epilogue = parts(name)[1]
    return epilogue if epilogue not in ("", "bias") else None


def config(kind: str, few, name: str) -> Fp8Config:
    return fit_to_spec(variants(kind, few)[parts(name)[0]], spec(kind, name))


def arguments(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kinds", default="tensor,row,1x128_128x128")
    p.add_argument("--sizes", help=f"MxNxK, or one number for all three; {SIZES} or, with --small, {EMPTY}")
    p.add_argument("--small", action="store_true", help="the variants for products of few tiles")
    p.add_argument("--zeros", action="store_true", help="operands of zeros, which cost the tensor cores little power: "
                   "what takes time then is not energy")
    p.add_argument("--variants", default="every", help='comma-separated names, or "every"; "NAME on 132": so '
                   "many blocks")
    add_turns(p)
    p.add_argument("--precompile", action="store_true", help="compile only; needs no GPU")
    p.add_argument("--list", action="store_true", help="check and print what would be compiled, no more")
    return p.parse_args(argv)


def chosen(args, kind, shape) -> list[str]:
    names = list(variants(kind, shape if args.small else None))
    if args.variants == "every":
        return names
    wanted = [n.strip() for n in args.variants.split(",")]
    return [n for n in wanted if parts(n)[0] in names]


def main(argv=None) -> None:
    args = arguments(argv)
    kinds, sizes = args.kinds.split(","), [size(s) for s in (args.sizes or (EMPTY if args.small else SIZES)).split(",")]
    recipes = dict.fromkeys(
        planned_kernel(spec(k, n), *shape, 132, config(k, shape if args.small else None, n))[0]
        for k, shape in itertools.product(kinds, sizes) for n in chosen(args, k, shape))
    if args.list:
        print(*(r.args for r in recipes), sep="\n")
        return
    precompile(recipes)
    if args.precompile or not has_gpu():
        return
    run(kinds, sizes, args)


def run(kinds, sizes, args) -> None:
    turns = Turns(args)
    for kind in kinds:
        for shape in sizes:
            measure(turns, kind, shape, args)


def measure(turns, kind, shape, args) -> None:
    """One problem."""
    import torch

    from bench.peers import fp8
    from tkq.reference.dense import activate
    from tkq.testing import timing

    m, n, k = shape
    with torch.no_grad():
        count = timing.input_sets(k * (m + n), turns.gpu.l2_bytes(), turns.gpu.free_bytes())
        sets = [fp8.operands(m, n, k, kind, i) for i in range(min(count, 8))]
        if args.zeros:
            for a, b, *_ in sets:
                a.view(torch.uint8).zero_(), b.t().view(torch.uint8).zero_()
        mixed = [fp8.both_orders(kind, given) for given in sets]
        calls = {"torch": (fp8.torch_mm(kind), [(x[0], x[1], *x[4:]) for x in mixed])}
        few = shape if args.small else None
        calls |= {name: (call(kind, few, name), sets) for name in chosen(args, kind, shape)}
        wanted = []

        def error(name, got):
            if not wanted:  # the first that works is right
                wanted.append(got.float())
            want = activate(wanted[0] + (some_bias(got) if parts(name)[1] else 0), activation(name))
            return (got.float() - want).abs().max().item() / max(want.abs().max().item(), 1e-30)

        turns.case({"kind": kind, "shape": shape}, calls, error, lambda ms: (
            f"{2e-9 * m * n * k / ms:6.0f} TFLOP/s {1e-6 * (k * (m + n) + 2 * m * n) / ms:5.0f} GB/s"))


def some_bias(c):
    """Of the columns of a result: each another, and as large as products are."""
    import torch

    return torch.linspace(-64, 64, c.shape[1], device=c.device).to(torch.bfloat16)


def call(kind, few, name):
    import torch

    from tkq.gemm.fp8 import ops

    wanted, gemm_spec, bias = config(kind, few, name), spec(kind, name), []
    blocks = blocks_of(name.partition(" + ")[0])[1]

    def f(a, b, sa, sb):
        c = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
        if gemm_spec.bias and not bias:
            bias.append(some_bias(c))
        ops.run(gemm_spec, a, b, sa, sb, c, wanted, blocks, bias=bias[0] if bias else None)
        return c

    return f


if __name__ == "__main__":
    main()

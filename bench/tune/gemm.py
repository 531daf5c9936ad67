"""Time GEMM configurations against torch.matmul: `python -m bench.tune.gemm [--precompile] [--out FILE]`.

What `tkq.gemm.dense.plan` and `tkq.gemm.dense.small_m_plan` choose among. "NAME + ACTIVATION" has a bias and that
activation too, and "NAME + bias" a bias: beside the plain NAME it shows what the epilogue costs; torch's time is the
plain product's. ACTIVATION may be a function of bench/tune/gemm_activations.py.
Every round lets each variant work once, in an order that changes, after a pause in which the card cools; what counts is
the median over the rounds of torch's time / the variant's time in the same round. --precompile compiles all variants
first, in as many processes as there are cores; without a GPU that is all.
"""

from __future__ import annotations

import argparse

from bench.tune.common import Turns, add_turns, blocks_of, has_gpu, precompile, size
from tkq.gemm.dense import small_m_plan
from tkq.gemm.dense.config import Config
from tkq.gemm.dense.plan import recipe
from tkq.gemm.dense.small_m_config import WIDTHS, SmallMConfig
from tkq.gemm.dense.spec import GemmSpec
from tkq.gemm.epilogue.spec import ACTIVATIONS, GATED, Epilogue

VARIANTS = {  # "NAME on 132": as many blocks, instead of the even number that the plan takes
    "cluster": Config(),
    "cluster no hold": Config(hold_in_registers=False),
    "cluster overlap": Config(overlap_epilogue=1),
    "cluster overlap pdl": Config(overlap_epilogue=1, pdl=True),
    "cluster pdl": Config(pdl=True),
    "cluster overlap group 4 pdl": Config(overlap_epilogue=1, raster_group=4, pdl=True),
    "cluster overlap group 6 pdl": Config(overlap_epilogue=1, raster_group=6, pdl=True),
    "cluster overlap group 12 pdl": Config(overlap_epilogue=1, raster_group=12, pdl=True),
    "cluster overlap group 16 pdl": Config(overlap_epilogue=1, raster_group=16, pdl=True),
    "cluster defer 4 pdl": Config(overlap_epilogue=4, defer_activation=True, pdl=True),
    "cluster defer 2 pdl": Config(overlap_epilogue=2, defer_activation=True, pdl=True),
    "cluster defer": Config(overlap_epilogue=1, defer_activation=True),
    "cluster defer 2": Config(overlap_epilogue=2, defer_activation=True),
    "cluster defer 4": Config(overlap_epilogue=4, defer_activation=True),
    "cluster overlap group 16": Config(overlap_epilogue=1, raster_group=16),
    "cluster overlap group 32": Config(overlap_epilogue=1, raster_group=32),
    "cluster overlap group 4": Config(overlap_epilogue=1, raster_group=4),
    "cluster group 4": Config(raster_group=4),
    "cluster group 16": Config(raster_group=16),
    "alone": Config(cluster=1),
    "alone no hold": Config(cluster=1, hold_in_registers=False),
    "alone group 16": Config(cluster=1, raster_group=16),
    "128x128 cluster": Config(n=128, stages=6),
    "128x128 cluster no hold": Config(n=128, stages=6, hold_in_registers=False),
    "128x128 alone": Config(n=128, stages=6, cluster=1),
    "64x128 cluster": Config(m=64, n=128, stages=8),
    "64x128 alone": Config(m=64, n=128, stages=8, cluster=1),
}
VARIANTS |= {f"wave sync {wave_sync}": Config(overlap_epilogue=1, pdl=True, wave_sync=wave_sync)
             for wave_sync in (4, 8, 16, 32, 64)}
# few rows: "narrow ROWS xSPLIT" with as many stages as leave room for two blocks, "deep" with as many as fit in one
VARIANTS |= {f"small M {rows} x{split}{deep}": (rows, split, deep)
             for rows in (64, 128) for split in (1, 2, 4, 8) for deep in ("", " deep")}
DEFAULT = "cluster,cluster on 132,cluster no hold,cluster group 4,cluster group 16,alone,alone on 132,alone no hold"
SIZES = ("4096", "8192", "16384x4096x4096", "2048")
LAYOUTS = {"rows": "n", "cols": "k"}  # b as it is, and as the transpose of a row-major matrix


def main() -> None:
    args = arguments()
    names = list(VARIANTS) if args.variants == "all" else [n.strip() for n in args.variants.split(",")]
    if unknown := [n for n in names if parts(n)[0] not in VARIANTS]:
        raise SystemExit(f"--variants: unknown {unknown}; allowed {list(VARIANTS)}")
    sizes = [size(s) for s in args.sizes.split(",")]
    layouts = args.layouts.split(",")
    if args.precompile:
        precompile([recipe(spec(n, x), *s, 132, config(n, s)) for s in sizes for x in layouts for n in names
                    if suits(n, s)])
        if not has_gpu():
            return
    run(names, sizes, layouts, args)


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--variants", default=DEFAULT, help='comma-separated names, or "all": ' + ", ".join(VARIANTS)
                   + '; "NAME on 132": with 132 blocks')
    p.add_argument("--sizes", default=",".join(SIZES), help="MxNxK, or one number for all three")
    p.add_argument("--layouts", default=",".join(LAYOUTS))
    add_turns(p)
    p.add_argument("--precompile", action="store_true")
    return p.parse_args()


def run(names, sizes, layouts, args) -> None:
    turns = Turns(args)
    for shape in sizes:
        for layout in layouts:
            measure(turns, names, shape, layout)


def measure(turns, names, shape, layout) -> None:
    """One problem."""
    import torch

    from bench.tune import gemm_activations
    from tkq.reference import dense as reference

    m, n, k = shape
    with torch.no_grad():
        sets = inputs(shape, layout, turns.gpu)
        product = torch.matmul(*sets[0]).float()

        def error(name, got):
            activation = parts(name)[1]
            activation = gemm_activations.MEANS.get(activation, activation)
            want = reference.activate(product, "" if activation == "bias" else activation)
            return (got.float() - want).abs().max().item() / want.abs().max().item()

        calls = {"torch": torch.matmul} | {name: call(name, shape) for name in names if suits(name, shape)}
        turns.case({"shape": shape, "layout": layout}, {name: (f, sets) for name, f in calls.items()}, error,
                   lambda ms: f"{2e-9 * m * n * k / ms:6.1f} TFLOP/s {2e-6 * (m * k + k * n + m * n) / ms:5.0f} GB/s")


def inputs(shape, layout, gpu) -> list:
    """Sets of (a, b) that together exceed the L2 cache."""
    import torch

    from tkq.testing import timing

    m, n, k = shape

    def one():
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        if LAYOUTS[layout] == "k":
            return a, torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
        return a, torch.randn(k, n, device="cuda", dtype=torch.bfloat16)

    return [one() for _ in range(timing.input_sets(2 * (m * k + k * n), gpu.l2_bytes(), gpu.free_bytes()))]


def parts(name: str) -> tuple[str, str]:
    """("NAME", "ACTIVATION" or "bias" or "") of a variant."""
    name, _, epilogue = name.partition(" + ")
    return blocks_of(name)[0], epilogue


def config(name: str, shape) -> Config | SmallMConfig:
    found = VARIANTS[parts(name)[0]]
    if not isinstance(found, tuple):
        return found
    rows, split, deep = found
    few = SmallMConfig(next(m for m in WIDTHS if m >= shape[0]), rows, split)
    return small_m_plan.fit_to_spec(few, GemmSpec(), **({"places": 1} if deep else {}))


def suits(name: str, shape) -> bool:
    """Narrow variants are for few rows, where of the others only the smallest tile is of interest."""
    found, few = VARIANTS[parts(name)[0]], shape[0] <= small_m_plan.MOST_M
    return few if isinstance(found, tuple) else not few or found.m == 64


def spec(name: str, layout: str) -> GemmSpec:
    return GemmSpec(b_major=LAYOUTS[layout], epilogue=Epilogue(activation(name), "bf16" if parts(name)[1] else ""))


def activation(name: str) -> str:
    """As a spec has it."""
    epilogue = parts(name)[1]
    if epilogue in ("", "bias", *ACTIVATIONS, *GATED):
        return "" if epilogue == "bias" else epilogue
    return f"bench.tune.gemm_activations:{epilogue}"


def call(name: str, shape):
    import torch

    from tkq.gemm.dense.launch import PLAIN, Extra, run

    chosen, blocks = config(name, shape), blocks_of(name.partition(" + ")[0])[1]
    epilogue, extra = parts(name)[1], PLAIN
    if epilogue:  # a bias of zeros, so that torch's product shows a wrong one
        bias = torch.zeros(shape[1], dtype=torch.bfloat16, device="cuda")
        extra = Extra(bias, activation(name))

    def f(a, b):
        c = torch.empty(a.shape[0], b.shape[1] // (2 if epilogue in GATED else 1), dtype=a.dtype, device=a.device)
        run(a, b, c, chosen, blocks, extra=extra)
        return c

    return f


if __name__ == "__main__":
    main()

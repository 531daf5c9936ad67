"""Every float8 kernel of tiles that the tests of machine code cover, and what its machine code must show. Pure
Python."""
from dataclasses import replace

from ...granularity import pair_name, scales_of
from ...runtime.compile.expectation import REGISTER_FILE, Expectation
from ...runtime.compile.recipe import Shipped
from ..dense.plan import PARTED
from .config import Fp8Config
from .plan import BLOCKS, FAST, PROMOTED, SMALL, configure, recipe_of, table, with_wave_sync
from .spec import ACTIVATIONS, BYTES, Fp8Spec


def expectation(spec: Fp8Spec, config: Fp8Config) -> Expectation:
    """What the machine code must show: no product waited for one by one, TMA in and out."""
    parts = config.m_subtiles * config.split
    steps = 1 + config.promotion_unroll if spec.promote else 2  # the first step of a tile is its own
    if config.overlap_epilogue:
        steps += steps if config.promotion_unroll else config.n_stores(spec.out) * (config.overlap_epilogue
                                                                                    if spec.activation else 1)
    products = 4 * parts * steps
    wanted = ["UTMALDG", "USETMAXREG", "STG" if spec.store == "direct" else "UTMASTG"]
    wanted += ["UTMALDG.2D.MULTICAST"] * (config.cluster > 1) + ["LDGSTS"] * spec.per_step
    wanted += ["REDG.E.INC", "LDG.E.STRONG.GPU"] * (config.wave_sync > 0)
    return Expectation(tensor=products, waits_per_mma=0.5, instructions=tuple(wanted), absent=PARTED,
                       registers=min(255, REGISTER_FILE // (128 * (1 + config.consumers)) // 8 * 8),
                       smem=config.shared_bytes(spec) + 2048)


def traits(spec: Fp8Spec, config: Fp8Config) -> frozenset:
    """What decides on a kernel's code, in pairs: its tile (whether sums are promoted, and with wave sync) with its
    scales, with its way out, and with what its epilogue computes. A shipped kernel has each pair that a plan may reach;
    types that are as wide share code."""
    tile = (spec.promote, config.m, config.n, config.consumers, config.cluster, config.cluster_along_n, config.split,
            config.promotion_unroll, config.overlap_epilogue > 0, config.store_per_warp,
            config.wave_sync > 0)
    out = spec.out if BYTES[spec.out] != 2 else "16 bits"
    curved = "curved" if spec.activation not in (None, "relu") else "bias" if spec.bias or spec.activation else "plain"
    return frozenset({(tile, "scales", spec.scale_b), (tile, "out", out, spec.store), (tile, "epilogue", curved)})


WAYS = (  # out, store, bias, activation
    ("bf16", "direct", "bf16", None), ("fp32", "tma", "bf16", "gelu"), ("fp32", "direct", None, None),
    ("e4m3", "tma", "bf16", None), ("e4m3", "direct", None, None))


def shipped() -> list[Shipped]:
    """What the tests of machine code cover: every tile with every granularity, with every way out: all ``traits``."""
    row = Fp8Spec(**scales_of("row"))
    blocks, narrow = (Fp8Spec(**scales_of(pair), promote=True) for pair in ("1x128_128x128", "1x128_1x128"))
    every = [(Fp8Spec(**scales_of(s), promote=p), tile) for s in ("tensor", "row") for p in (False, True)
             for tile in ((PROMOTED if p else FAST) + SMALL)]
    every += [(spec, tile) for spec in (blocks, narrow) for tile in table(spec) + SMALL]
    cases = every + [
        (replace(spec, out=out, store=store, bias=bias, activation=activation), tile) for spec, tile in every
        if spec.scale_b in ("row", "128x128") and (spec.promote == (spec.scale_b == "128x128"))
        for out, store, bias, activation in WAYS]
    cases += [  # a tile with a pipelined promotion has another form with other scales
        (replace(narrow, out=out, store=store, bias=bias, activation=activation), PROMOTED[1])
        for out, store, bias, activation in WAYS]
    cases += [(replace(row, out=out, store=store), FAST[0])
              for out in ("bf16", "fp16", "fp32", "e4m3") for store in ("tma", "direct")]
    cases += [(Fp8Spec(**scales_of(s)), replace(FAST[0], overlap_epilogue=0)) for s in ("tensor", "row")]
    cases += [(Fp8Spec(a=a, b=b), FAST[0]) for a, b in (("e5m2", "e4m3"), ("e4m3", "e5m2"))]
    cases += [(replace(row, bias="bf16", activation=x), FAST[0]) for x in ACTIVATIONS]
    cases += [(replace(row, bias="bf16", activation=x), FAST[1]) for x in ("relu", "gelu")]
    cases += [(Fp8Spec(bias="bf16", activation="gelu"), tile) for tile in FAST[:2]]
    cases += [(replace(blocks, bias="bf16", activation=activation, store=store), tile)
              for tile in (BLOCKS[0], PROMOTED[1])
              for activation, store in (("gelu", "tma"), ("gelu", "direct"), (None, "tma"), ("silu", "tma"))]
    cases += [(replace(blocks, out="fp16", bias="bf16", activation="silu"), BLOCKS[0])]
    cases += [(replace(blocks, out="fp32"), tile) for tile in (BLOCKS[0], PROMOTED[1])]
    cases += [(replace(row, out="e4m3", bias="bf16", activation="gelu"), FAST[0])]
    cases += [(spec, with_wave_sync(tile, spec)) for spec, tile in every
              if tile.cluster > 1 and tile not in SMALL and spec.scale_b != "1x128"]
    cases += [(spec, with_wave_sync(tile, spec)) for spec, tile in cases if tile == PROMOTED[1]
              and spec.scale_b == "128x128"]
    cases += [(x, with_wave_sync(FAST[0], x)) for x in (replace(row, bias="bf16", activation=activation)
                                                        for activation in (None, "gelu"))]
    found = {}
    for spec, tile in cases:
        config = configure(tile, spec)
        words = ["fp8_gemm", spec.a, spec.b, pair_name(spec) + ("_promoted" if spec.promote else ""), spec.out]
        words += [f"bias_{spec.activation}"] * (spec.bias is not None) + [spec.store, config.name]
        name = "_".join(words)
        quick = (spec, tile) in QUICK
        found.setdefault(name, Shipped(name, recipe_of(spec, config), expectation(spec, config),
                                       quick))
    return list(found.values())


QUICK = ((Fp8Spec(**scales_of("row")), FAST[0]), (Fp8Spec(out="e4m3", **scales_of("row")), FAST[0]),
         (Fp8Spec(**scales_of("1x128_128x128"), promote=True), BLOCKS[0]))

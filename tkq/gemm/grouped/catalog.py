"""Every grouped GEMM that the tests of machine code cover, and what its machine code must show. Pure Python."""
from ...granularity import pair_name
from ...runtime.compile.expectation import REGISTER_FILE, Expectation
from ...runtime.compile.recipe import Shipped
from ..fp8.config import Fp8Config
from .plan import FAST, PROMOTED, fit_to_spec, recipe, shared_bytes
from .spec import GroupedSpec


def expectation(spec: GroupedSpec, config: Fp8Config) -> Expectation:
    """As the dense kernel's."""
    parts = config.m_subtiles * config.split
    wanted = ["UTMALDG", "USETMAXREG", "UTMASTG"] + ["LDGSTS"] * spec.per_step
    steps = (1 if spec.promote
             else 2 + config.overlap_epilogue * config.m_subtiles * config.n // config.store_n(spec.out))
    return Expectation(tensor=4 * parts * steps, waits_per_mma=0.5, instructions=tuple(wanted),
                       registers=min(255, REGISTER_FILE // (128 * (1 + config.consumers)) // 8 * 8),
                       smem=shared_bytes(config, spec) + 2048)


def shipped() -> list[Shipped]:
    """Every tile with every kind of operands."""
    specs = [GroupedSpec(), GroupedSpec(b_major="n"), GroupedSpec("k", b_major="n"), GroupedSpec(out="fp32"),
             GroupedSpec("k", out="fp32", b_major="n"), GroupedSpec("m", "fp16", "fp16", "fp16"),
             GroupedSpec("m", "e4m3", "e4m3", "bf16", "row", "row"),
             GroupedSpec("m", "e4m3", "e4m3", "bf16", "1x128", "128x128"),
             GroupedSpec("k", "e4m3", "e4m3", "fp32", "row", "row"),
             GroupedSpec("k", "e4m3", "e4m3", "bf16", "1x128", "1x128"),
             GroupedSpec("k", "e5m2", "e4m3", "bf16", "row", "row"),
             GroupedSpec("k", "e4m3", "e4m3", "fp32", "1x128", "1x128")]
    found = []
    for spec in specs:
        for i, tile in enumerate(PROMOTED if spec.promote else FAST):
            config = fit_to_spec(tile, spec)
            types = spec.a if spec.a == spec.b else f"{spec.a}_{spec.b}"
            name = f"grouped_gemm_{spec.along}_{types}_{spec.out}_{pair_name(spec)}_{spec.b_major}_{config.name}"
            # the largest tile, but along K of bf16 a small one: the large one is written as along M
            quick = spec in (specs[0], specs[7], specs[9]) if i == 0 else spec == specs[2] and tile is FAST[2]
            found.append(Shipped(name, recipe(spec, config), expectation(spec, config), quick))
    return found

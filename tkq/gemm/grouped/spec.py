"""What a caller of the grouped GEMM asked for, and the shape of its kernel. Pure Python, no torch, no DSL."""
from dataclasses import dataclass, replace
from typing import Optional

from ...granularity import PRODUCTS, pair_name
from ...runtime.compile.expectation import REGISTER_FILE, Expectation
from ...runtime.compile.recipe import Recipe, Shipped
from ..dense.config import SHARED_BYTES
from ..fp8.config import Fp8Config, can_overlap_epilogue
from ..fp8.spec import BYTES, FP8

HALF = ("bf16", "fp16")
OUT = ("bf16", "fp16", "fp32")
MOST_GROUPS = 1024


@dataclass(frozen=True)
class GroupedSpec:
    """along "m": c[i] = a[i] @ b[g], g being row i's group: a (M, K), b (G, K, N), c (M, N). along "k":
    c[g] = a[:, g] @ b[g], the columns of a and rows of b that are g's: a (M, K), b (K, N), c (G, M, N).

    a, b: their types, both 16-bit and the same, or float8. out: c's. scale_a, scale_b: "none" for 16 bits; for float8,
    see Fp8Spec, "row" with "row", or "1x128" with "128x128" (along "m") or "1x128" (along "k"). b_major: b's contiguous
    dimension, "k" or, for 16 bits, "n". along "k" a is M- and b N-contiguous, of float8 both are K-contiguous.

    Raises:
        NotImplementedError: a value that no kernel takes, by name.
    """

    along: str = "m"
    a: str = "bf16"
    b: str = "bf16"
    out: str = "bf16"
    scale_a: str = "none"
    scale_b: str = "none"
    b_major: str = "k"

    # what Fp8Gemm asks a spec, and is always so here
    bias = None
    activation = None
    store = "tma"
    pipelines_promotion = False

    def __post_init__(self):
        is_fp8 = self.a in FP8
        allowed = {"along": ("m", "k"), "a": (*HALF, *FP8), "b": FP8 if is_fp8 else (self.a,), "out": OUT,
                   "b_major": ("k",) if is_fp8 else ("k", "n") if self.along == "m" else ("n",)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise NotImplementedError(f"grouped_gemm: {name} is {getattr(self, name)!r}, supported with a in "
                                          f"{self.a} along {self.along} are {', '.join(values)}")
        pairs = ((PRODUCTS["row"], ("1x128", "1x128" if self.along == "k" else "128x128")) if is_fp8
                 else (("none", "none"),))
        if (self.scale_a, self.scale_b) not in pairs:
            raise NotImplementedError(f"grouped_gemm: scale_a is {self.scale_a!r} and scale_b {self.scale_b!r}, "
                                      f"supported with a in {self.a} along {self.along} are "
                                      f"{', '.join(' with '.join(pair) for pair in pairs)}")

    @property
    def per_step(self) -> bool:
        return self.scale_a == "1x128"

    @property
    def m_major(self) -> bool:
        """Is a (M, K) contiguous in M?"""
        return self.along == "k" and self.b_major == "n"

    @property
    def masked(self) -> bool:
        """Do groups begin and end inside of steps?"""
        return self.along == "k" and self.a in FP8

    @property
    def promote(self) -> bool:
        return self.per_step

    @property
    def step(self) -> int:
        """Of K in a stage: a swizzle of 128 bytes."""
        return 128 // BYTES.get(self.a, 2)


# Beside the table of groups, a fourth stage has room only where panels are half as wide.
FAST = (
    Fp8Config(raster_group=16, store_row_bytes=64, wgmma_in_flight=0, overlap_epilogue=1, pdl=True),
    Fp8Config(cluster=1, raster_group=16, store_row_bytes=64, wgmma_in_flight=0, overlap_epilogue=1, pdl=True),
    Fp8Config(n=128, stages=6, cluster=1),
    Fp8Config(m=64, n=128, stages=7, consumers=1, cluster=1, stagger_stages=0),
)
PROMOTED = (
    Fp8Config(n=192, stages=4, store_buffers=1, raster_group=16, pdl=True),
    Fp8Config(n=192, stages=4, store_buffers=1, cluster=1, raster_group=16, pdl=True),
    Fp8Config(n=128, stages=5, cluster=1),
    Fp8Config(m=64, n=128, stages=7, consumers=1, cluster=1, stagger_stages=0),
)


def plan(spec: GroupedSpec, M: int, N: int, G: int, num_sms: int) -> Fp8Config:
    """The configuration for groups of M / G rows in the mean: what they will be is known on the device alone.

    Tiles of 128 rows waste 64 of a group in the mean, and a cluster of two on top of each other more. Small ones where
    few tiles would leave processors idle."""
    table = PROMOTED if spec.promote else FAST
    if spec.along == "m" and M <= 64 * G:
        return fit_to_spec(table[-1], spec)
    group, tiles = (M // G, -(-M // 128) + G // 2) if spec.along == "m" else (M, -(-M // 128) * G)
    for config in table[:-2]:
        down, right = (1, config.cluster) if config.cluster_along_n else (config.cluster, 1)
        if 128 * (down - 1) < group and config.n * (right - 1) < N and tiles * -(-N // config.n) >= num_sms:
            return fit_to_spec(config, spec)
    return fit_to_spec(table[-2], spec)


def shared_bytes(config: Fp8Config, spec: GroupedSpec) -> int:
    """The dense kernel's, and the table of groups."""
    return config.shared_bytes(spec) + 4 * (2 * MOST_GROUPS + 4)


def fit_to_spec(config: Fp8Config, spec: GroupedSpec) -> Fp8Config:
    """With as many stages as there is room for; as the dense kernel's rules have it."""
    while config.stages > 2 and shared_bytes(config, spec) > SHARED_BYTES:
        config = replace(config, stages=config.stages - 1, stagger_stages=min(config.stagger_stages, config.stages - 2))
    overlap_epilogue = config.overlap_epilogue if can_overlap_epilogue(spec, config) and not spec.masked else 0
    return replace(config, overlap_epilogue=overlap_epilogue, store_per_warp=False, wave_sync=0,
                   pdl=config.pdl and not spec.masked).check(spec)


def recipe(spec: GroupedSpec, config: Fp8Config) -> Recipe:
    return Recipe("tkq.gemm.grouped.kernel:GroupedGemm", (spec, config))


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


def granularity(along: str, sizes: tuple, scale_a: tuple, scale_b: tuple) -> Optional[tuple[str, str]]:
    """Which pair of Fp8Spec's scales two shapes mean; None for others. sizes: M, N, K, groups."""
    m, n, k, groups = sizes
    found = (tuple(scale_a), tuple(scale_b))
    return next((pair for pair, *shapes in _scale_shapes(along, m, n, -(-k // 128), groups) if found == tuple(shapes)),
                None)


def shapes_allowed(along: str, sizes: tuple) -> str:
    """For an error's text: what the scales of a product may be."""
    m, n, k, groups = sizes
    return ", ".join(f"{a} with {b}" for _, a, b in _scale_shapes(along, m, n, -(-k // 128), groups))


def _scale_shapes(along, m, n, steps, groups):
    """(granularities, shape of scale_a, of scale_b)"""
    row = PRODUCTS["row"]
    if along == "m":
        return ((row, (m, 1), (groups, 1, n)),
                (("1x128", "128x128"), (m, steps), (groups, steps, -(-n // 128))))
    return ((row, (m, 1), (1, n)), (row, (groups, m, 1), (groups, 1, n)),
            (("1x128", "1x128"), (m, steps), (steps, n)))

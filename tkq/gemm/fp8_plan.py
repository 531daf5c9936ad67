"""Which tile of a float8 GEMM, how many stages, in which order: pure Python, no torch, no DSL."""
from dataclasses import dataclass, replace
from math import gcd
from typing import Optional

from ..runtime.recipe import Recipe, Shipped
from ..testing.expectation import REGISTER_FILE, Expectation
from .fp8_spec import ACTIVATIONS, BYTES, GROUP, Fp8Spec
from .plan import SHARED, SHARED_BYTES, even_blocks

STEP = 128  # of K in a stage: a swizzle of 128 bytes, and what shares a scale
MACS = 4096  # a clock and processor: the tensor cores, 8-bit operands
L2 = 42  # bytes a clock and processor: what all of them together get from L2, shared out
TILE_CLOCKS = 3000  # a tile's beginning and end, as far as nothing hides them
SLOWER = {False: 1.3, True: 1.5}  # than the tensor cores could: plain sums and promoted, measured
ROLLING = 0.96  # of that
CLUSTER = 0.98  # of a step's time where two blocks share tiles: 0.92 to 0.99, the larger the operands the less


@dataclass(frozen=True)
class Fp8Config:
    """One kernel's shape; bench/fp8_gemm.py times the alternatives.

    m, n: a block's tile of C; each of ``consumers`` warpgroups has m / consumers rows of it, in waves of 64.
    stages: of a and b in shared memory. cluster: so many blocks lie one above the other and share B's tiles or, with
    ``across``, side by side and share A's. group: columns of tiles to a band of the tile order. panels: buffers of a
    consumer's output, each at most panel_bytes of 64 rows. pdl: the launch lies under the end of the kernel before.
    lead: stages by which the first consumer starts before the second, so that one's epilogue
    runs under the other's products. lag: products left in flight when a stage is released; not where sums are promoted.
    spread: a tile's result waits in registers and is written under the next tile's first steps, a panel to a step or,
    if it is 2 or 4 and there is an activation, a half or a quarter of one.
    Where they are promoted: split: a wave's columns are multiplied and promoted in so many parts; rolling: of a step's
    two halves one is multiplied while the other is promoted, so many steps long, for scales by blocks.
    """

    m: int = 128
    n: int = 256
    stages: int = 4
    consumers: int = 2
    cluster: int = 2
    across: bool = False
    group: int = 8
    panels: int = 2
    panel_bytes: int = 128
    pdl: bool = False
    lead: int = 2
    lag: int = 1
    spread: int = 0
    split: int = 1
    rolling: int = 0

    @property
    def name(self) -> str:
        words = [f"{self.m}x{self.n}"]
        words += [f"{'across' if self.across else 'cluster'}{self.cluster}"] * (self.cluster > 1)
        words += [f"spread{self.spread}"] * (self.spread > 0) + ["pdl"] * self.pdl
        words += [f"split{self.split}"] * (self.split > 1)
        words += [f"rolling{self.rolling}"] * (self.rolling > 0)
        return "_".join(words)

    @property
    def waves(self) -> int:
        """64-row register tiles of a consumer."""
        return self.m // (64 * self.consumers)

    @property
    def part(self) -> int:
        """Columns that are multiplied, and promoted, together."""
        return self.n // self.split

    @property
    def chunk(self) -> int:
        """Columns of a part that surely share a block scale."""
        return gcd(self.part, GROUP)

    def panel(self, out: str) -> int:
        """Columns of C in one buffer: they divide a part, in 32, 64 or 128 bytes."""
        widths = [b // BYTES[out] for b in (128, 64, 32) if b <= self.panel_bytes]
        fits = [width for width in widths if self.part % width == 0]
        return fits[0] if fits else 0

    def scales(self, spec: Fp8Spec) -> int:
        """Scales in a stage."""
        return {"block": self.m + 32, "line": self.m + self.n}.get(spec.scales, 0)

    def shared_bytes(self, spec: Fp8Spec) -> int:
        """Shared memory of a block: stages, panels of C, semaphores, and what alignment may cost."""
        stage = (self.m + self.n) * STEP + 4 * self.scales(spec) + 16
        panels = self.consumers * self.panels * 64 * self.panel(spec.out) * BYTES[spec.out]
        return self.stages * stage + panels * (spec.store == "tma") + 256

    def check(self, spec: Fp8Spec) -> "Fp8Config":
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming the field that does not fit.
        """
        rules = {
            "consumers": self.consumers in (1, 2),
            "m": self.m % (64 * self.consumers) == 0 and 0 < self.waves <= 2,
            "n": self.n % (16 * self.split) == 0 and 0 < self.part <= 256,
            "stages": self.stages > 1,
            "cluster": self.cluster in (1, 2, 4) and (self.n if not self.across else self.m) % (8 * self.cluster) == 0,
            "group": self.group > 0,
            "panel_bytes": self.panel_bytes in (32, 64, 128),
            "panels": self.panels > 0 and (spec.store == "elements" or self.panel(spec.out) > 0),
            "lead": 0 <= self.lead < self.stages and (self.lead == 0 or self.consumers == 2),
            "lag": self.lag in (0, 1),
            "spread": self.spread in (0, 1, 2, 4) and (not self.spread or (self.lag == 0 and can_spread(spec)
                                                                           and self.n % 64 == 0)),
            "split": self.split == 1 or spec.promote,
            "rolling": not self.rolling or (spec.scales == "block" and self.waves * self.split == 2),
        }
        for name, kept in rules.items():
            if not kept:
                raise ValueError(f"fp8_gemm: {name} does not fit in {self} for {spec}")
        if self.shared_bytes(spec) > SHARED_BYTES:
            raise ValueError(f"fp8_gemm: {self} takes {self.shared_bytes(spec)} bytes of shared memory for {spec}, "
                             f"allowed are {SHARED_BYTES}")
        return self


# The larger first. What each is worth on an H100 is in docs/attempts.md.
FAST = (
    Fp8Config(lag=0, spread=1, pdl=True),
    Fp8Config(m=256, n=128, across=True, lag=0, spread=1, pdl=True),
    Fp8Config(n=128, stages=6, cluster=1),
    Fp8Config(n=64, stages=7, cluster=1),
)
PROMOTED = (
    Fp8Config(split=2, cluster=1, panel_bytes=64, pdl=True),
    Fp8Config(n=192, split=2, panel_bytes=64, pdl=True, rolling=8),
    Fp8Config(m=256, n=128, stages=3, cluster=1),
    Fp8Config(n=128, stages=5, cluster=1),
    Fp8Config(n=64, stages=7, cluster=1),
)
SMALL = (  # M up to 64: B comes once, and is all that counts
    Fp8Config(m=64, n=64, stages=11, consumers=1, cluster=1, lead=0, pdl=True),
    Fp8Config(m=64, n=32, stages=14, consumers=1, cluster=2, across=True, lead=0),
    Fp8Config(m=64, n=32, stages=14, consumers=1, cluster=1, lead=0),
)


def can_spread(spec: Fp8Spec) -> bool:
    """May results wait in registers: beside sums that are not promoted, in 16 bits?"""
    return not spec.promote and spec.store == "tma" and BYTES[spec.out] == 2


def tiles(config: Fp8Config, M: int, N: int):
    """(rows, columns) of the clusters' tiles that cover C."""
    down, right = (1, config.cluster) if config.across else (config.cluster, 1)
    return -(-M // (config.m * down)), -(-N // (config.n * right))


def cycles(config: Fp8Config, M: int, N: int, K: int, processors: int, promote: bool) -> float:
    """Clocks that a GEMM should take: rounds of tiles, each so many steps of what is slowest in a processor.

    SLOWER and TILE_CLOCKS fit what 8192^3 and 4096^3 took on an H100 (see FAST) to within 3 %."""
    rows, cols = tiles(config, M, N)
    rounds = -(-rows * cols // max(1, processors // config.cluster))
    m, n, waves = config.m, config.n, config.waves * config.consumers
    read = m * STEP + waves * n * STEP  # each 64 rows of A meet all of B
    from_l2 = (m / (config.cluster if config.across else 1) + n / (1 if config.across else config.cluster)) * STEP
    slower = SLOWER[promote] * (ROLLING if config.rolling else 1) * (CLUSTER if config.cluster > 1 else 1)
    products = slower * m * n * STEP / MACS
    step = max(products, (read + (m + n) * STEP) / SHARED, from_l2 / L2)
    return rounds * (-(-K // STEP) * step + TILE_CLOCKS)


def plan(spec: Fp8Spec, M: int, N: int, K: int, processors: int) -> Fp8Config:
    """The configuration for a problem: what should be fastest, the first of the list if equal.

    A cluster only where each of its blocks has a part of C."""
    few = (c for c in SMALL if M <= 64)
    some = [c for c in (*few, *(PROMOTED if spec.promote else FAST)) if of_use(c, M, N)]
    best = min(some, key=lambda c: cycles(c, M, N, K, processors, spec.promote))
    return fitted(with_epilogue(best, spec), spec)


def with_epilogue(config: Fp8Config, spec: Fp8Spec) -> Fp8Config:
    """Of an activation that takes longer than a step, a quarter of a panel's under each."""
    return replace(config, spread=4) if config.spread and spec.activation not in (None, "relu") else config


def of_use(config: Fp8Config, M: int, N: int) -> bool:
    """Has each block of a cluster a part of C?"""
    down, right = (1, config.cluster) if config.across else (config.cluster, 1)
    return config.m * (down - 1) < M and config.n * (right - 1) < N


def fitted(config: Fp8Config, spec: Fp8Spec) -> Fp8Config:
    """The configuration with as many stages as this spec's output and scales leave room for."""
    if spec.store == "tma" and not config.panel(spec.out):
        config = replace(config, n=max(config.n, 32))
    if config.rolling and spec.scales != "block":
        config = replace(config, rolling=0, split=1, panel_bytes=128)
    if spec.out == "e4m3" and spec.bias:  # and scales, for the 128 columns of a panel, are too many registers
        config = replace(config, panel_bytes=min(config.panel_bytes, 64))
    while config.stages > 2 and config.shared_bytes(spec) > SHARED_BYTES:
        config = replace(config, stages=config.stages - 1, lead=min(config.lead, config.stages - 2))
    return replace(config, spread=config.spread if can_spread(spec) else 0).check(spec)


def launch(spec: Fp8Spec, M: int, N: int, K: int, processors: int, config: Optional[Fp8Config] = None):
    """(what to compile and call, how many blocks) for a problem; config instead of the plan's."""
    config = config.check(spec) if config else plan(spec, M, N, K, processors)
    rows, cols = tiles(config, M, N)
    return Recipe("tkq.gemm.fp8:build", (spec, config)), even_blocks(rows * cols, processors, config.cluster)


def expectation(spec: Fp8Spec, config: Fp8Config) -> Expectation:
    """What the machine code must show: no product waited for one by one, TMA in and out."""
    parts = config.waves * config.split
    steps = 1 if spec.promote else 2  # the first step of a tile is its own
    if config.spread:
        steps += config.waves * config.n // config.panel(spec.out) * (config.spread if spec.activation else 1)
    products = 4 * parts * (steps + config.rolling)
    wanted = ["UTMALDG", "USETMAXREG", "STG" if spec.store == "elements" else "UTMASTG"]
    wanted += ["UTMALDG.2D.MULTICAST"] * (config.cluster > 1) + ["LDGSTS"] * spec.per_step
    return Expectation(tensor=products, waits_per_mma=0.5, instructions=tuple(wanted),
                       registers=min(255, REGISTER_FILE // (128 * (1 + config.consumers)) // 8 * 8),
                       smem=config.shared_bytes(spec) + 2048)


def shipped() -> list[Shipped]:
    """What the tests of machine code cover: every tile with every granularity, and every way out."""
    cases = [(Fp8Spec(scales=s, promote=p), tile) for s in ("tensor", "row") for p in (False, True)
             for tile in ((PROMOTED if p else FAST) + SMALL)]
    cases += [(Fp8Spec(scales=s, promote=True), tile) for s in ("block", "line") for tile in PROMOTED + SMALL]
    cases += [(Fp8Spec(out=out, scales="row", store=store), FAST[0])
              for out in ("bf16", "fp16", "fp32", "e4m3") for store in ("tma", "elements")]
    cases += [(Fp8Spec(out=out, scales="block", promote=True, store="elements"), tile)
              for out, tile in (("bf16", PROMOTED[0]), ("bf16", PROMOTED[1]), ("e4m3", PROMOTED[1]))]
    cases += [(Fp8Spec(scales=s), replace(FAST[0], spread=0)) for s in ("tensor", "row")]
    cases += [(Fp8Spec(a=a, b=b, scales="tensor"), FAST[0]) for a, b in (("e5m2", "e4m3"), ("e4m3", "e5m2"))]
    cases += [(spec, with_epilogue(FAST[0], spec))
              for spec in (Fp8Spec(scales="row", bias="bf16", activation=x) for x in ACTIVATIONS)]
    cases += [(Fp8Spec(out="e4m3", scales="row", bias="bf16", activation="gelu"), FAST[0])]
    found = {}
    for spec, tile in cases:
        config = fitted(tile, spec)
        words = ["fp8_gemm", spec.a, spec.b, spec.scales + ("_promoted" if spec.promote else ""), spec.out]
        words += [f"bias_{spec.activation}"] * (spec.bias is not None) + [spec.store, config.name]
        name = "_".join(words)
        quick = (spec, tile) in QUICK
        found.setdefault(name, Shipped(name, Recipe("tkq.gemm.fp8:build", (spec, config)), expectation(spec, config),
                                       quick))
    return list(found.values())


QUICK = ((Fp8Spec(scales="row"), FAST[0]), (Fp8Spec(scales="row"), SMALL[0]),
         (Fp8Spec(out="e4m3", scales="row"), FAST[0]), (Fp8Spec(scales="block", promote=True), PROMOTED[0]))

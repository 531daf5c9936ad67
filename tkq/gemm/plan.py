"""Which tile, how many stages, in which order: pure Python, no torch, no DSL.

The sizes come from a model of one processor's clocks (``cycles``), which knows what ranks the tiles of a Hopper GEMM:
a wgmma reads both operands from shared memory while TMA writes the next ones there.
"""
import itertools
from dataclasses import dataclass, replace
from typing import Optional

from ..runtime.recipe import Recipe, Shipped
from ..testing.expectation import REGISTER_FILE, Expectation
from .spec import BYTES, GemmSpec

SHARED_BYTES = 231424  # of a block, as far as 227 KB less the system's 1 KB
PANEL_BYTES = 128  # of a row of C in shared memory: one swizzle
MACS = 2048  # a clock and processor: the tensor cores, 16-bit operands
SHARED = 128  # bytes a clock and processor, reads and writes together
L2 = 64  # bytes a clock and processor
TILE_CLOCKS = 1500  # a tile's beginning and end, as far as nothing hides them


@dataclass(frozen=True)
class Config:
    """One kernel's shape.

    m, n: a block's tile of C. k: of K in a stage. stages: of a and b in shared memory. consumers: warpgroups that
    multiply, each m / consumers rows. cluster, share: so many blocks lie one above the other and share B's tiles ("b"),
    or side by side and share A's ("a"). group: cluster tiles to a band of the tile order; the band's tiles go across,
    or down. buffers: panels of C in shared memory, a warpgroup. hold: a tile's result waits in registers, as 16 bits,
    and is written while the next tile's first products run. lag: wgmma groups in flight when the next is issued.
    lead: stages by which the first consumer starts before the second.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 4
    consumers: int = 2
    cluster: int = 1
    share: str = "b"
    group: int = 8
    down: bool = False
    buffers: int = 2
    hold: bool = True
    lag: int = 1
    lead: int = 0

    @property
    def waves(self) -> int:
        """Register tiles of 64 rows to a consumer."""
        return self.m // (64 * self.consumers)

    @property
    def cluster_tile(self):
        """(rows, columns) of C that a cluster works on at a time."""
        return (self.m * self.cluster, self.n) if self.share == "b" else (self.m, self.n * self.cluster)

    def shared_bytes(self, spec: GemmSpec) -> int:
        """Shared memory of a block: stages, panels of C, semaphores, and what alignment may cost."""
        stage = (self.m + self.n) * self.k * BYTES[spec.dtype]
        panels = self.consumers * self.buffers * 64 * PANEL_BYTES if spec.store == "tma" else 0
        return self.stages * stage + panels + 1024

    def check(self, spec: GemmSpec) -> "Config":
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming the field that does not fit.
        """
        panels = self.n * BYTES[spec.out] // PANEL_BYTES * self.waves
        rules = {
            "m": self.m > 0 and self.m % (64 * self.consumers) == 0,
            "n": 0 < self.n <= 256 and self.n % 64 == 0,
            "k": self.k in (64, 128),
            "stages": self.stages > self.lag,
            "cluster": self.cluster in (1, 2, 4),
            "share": self.share in ("a", "b"),
            "group": self.group > 0,
            "buffers": self.buffers > 0 and panels % self.buffers == 0,
            "hold": not self.hold or (spec.out != "fp32" and spec.store == "tma"),
            "lag": self.lag in (0, 1),
            "lead": 0 <= self.lead < self.stages,
        }
        for name, kept in rules.items():
            if not kept:
                raise ValueError(f"gemm: {name} does not fit in {self} for {spec}")
        if self.shared_bytes(spec) > SHARED_BYTES:
            raise ValueError(f"gemm: {self} takes {self.shared_bytes(spec)} bytes of shared memory for {spec}, "
                             f"allowed are {SHARED_BYTES}")
        return self


TILES = (
    Config(),
    Config(n=128, stages=6),
    Config(m=64, n=128, stages=8, consumers=1),
)


def raster(number, rows, cols, group, down, least=min):
    """(row, column) of tile ``number`` in the order of work: in bands, so that a wave shares its inputs in L2.

    A band is ``group`` columns wide and goes down, its tiles from left to right; or, with ``down``, ``group`` rows high
    and goes right. Python ints or the DSL's (with their ``least``)."""
    across, along = (rows, cols) if down else (cols, rows)
    band = number // (along * group)
    width = least(across - band * group, group)
    rest = number - band * along * group
    p, q = rest // width, band * group + rest % width
    return (q, p) if down else (p, q)


def tiles(config: Config, M: int, N: int):
    """(rows, columns) of cluster tiles that cover C."""
    height, width = config.cluster_tile
    return -(-M // height), -(-N // width)


def cycles(config: Config, M: int, N: int, K: int, processors: int) -> float:
    """Clocks that a GEMM should take: rounds of tiles, each so many steps of what is slowest in a processor."""
    rows, cols = tiles(config, M, N)
    rounds = -(-rows * cols // max(1, processors // config.cluster))
    m, n, k = config.m, config.n, config.k
    read = (m // 64) * (64 + n) * k * 2  # each 64 rows of A meet all of B
    written = (m + n) * k * 2
    height, width = config.cluster_tile
    from_l2 = (height + width) * k * 2 / config.cluster
    step = max(m * n * k / MACS, (read + written) / SHARED, from_l2 / L2)
    return rounds * (-(-K // k) * step + TILE_CLOCKS)


def plan(spec: GemmSpec, M: int, N: int, K: int, processors: int) -> Config:
    """The configuration for a problem that comes in by TMA: the tile that should be fastest, the larger if equal."""
    best = min(TILES, key=lambda config: cycles(config, M, N, K, processors))
    return fitted(best, spec)


def fitted(config: Config, spec: GemmSpec) -> Config:
    """The configuration without what this spec's output does not allow."""
    if spec.out == "fp32" or spec.store != "tma":
        config = replace(config, hold=False)
    return config.check(spec)


def recipe(spec: GemmSpec, M: int, N: int, K: int, processors: int, config: Optional[Config] = None) -> Recipe:
    """What to compile, and to call, for a problem; config instead of the plan's."""
    if spec.load == "elements":
        return Recipe("tkq.gemm.elements:build", (spec,))
    config = fitted(config, spec) if config else plan(spec, M, N, K, processors)
    return Recipe("tkq.gemm.dense:build", (spec, config))


def expectation(spec: GemmSpec, config: Config) -> Expectation:
    """What the dense kernel's machine code must show: the wgmma of a tile's first step of K and of the loop, waited for
    once each."""
    products = config.k // 16 * config.waves
    store = "STG" if spec.store == "elements" else "UTMASTG"
    return Expectation(tensor=2 * products, waits_per_mma=1 / products, instructions=("UTMALDG", "USETMAXREG", store),
                       absent=() if spec.store == "elements" else ("STG",),
                       registers=min(255, REGISTER_FILE // (128 * (1 + config.consumers)) // 8 * 8),
                       smem=config.shared_bytes(spec) + 1024)


def shipped() -> list[Shipped]:
    """What the tests of machine code cover: every tile with every order of the operands and every way out; fp16 where
    torch's usual layouts take it; the kernel for what TMA does not take."""
    majors = list(itertools.product("km", "kn"))
    ways_out = (("bf16", "tma"), ("fp32", "tma"), ("bf16", "elements"))
    specs = [GemmSpec("bf16", out, a, b, store=store) for out, store in ways_out for a, b in majors]
    specs += [GemmSpec("fp16", out, "k", b) for out in ("fp16", "fp32") for b in "kn"]
    found = []
    for spec, tile in itertools.product(specs, TILES):
        config = fitted(tile, spec)
        name = f"gemm_{spec.dtype}_{spec.a_major}{spec.b_major}_{spec.out}_{spec.store}_{config.m}x{config.n}"
        quick = spec.dtype == spec.out == "bf16" and tile is TILES[0]
        found.append(Shipped(name, Recipe("tkq.gemm.dense:build", (spec, config)), expectation(spec, config), quick))
    by_elements = Expectation(tensor=4, waits_per_mma=0.25, instructions=("LDG", "STG"), absent=("UTMALDG",))
    for a, b in majors:
        spec = GemmSpec("bf16", "bf16", a, b, "elements", "elements")
        found.append(Shipped(f"gemm_bf16_{a}{b}_bf16_elements", Recipe("tkq.gemm.elements:build", (spec,)), by_elements,
                             (a, b) == ("k", "n")))
    return found

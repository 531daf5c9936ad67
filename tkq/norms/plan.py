"""Which threads, blocks and memory path a normalisation takes. Pure: no torch, no DSL; bench/tune_norms.py times it."""
from dataclasses import dataclass, replace

from .. import reduction_plan as geometry
from .. import row_plan
from .spec import WIDTH, NormSpec

PER_THREAD = 64  # most elements of a row in one thread
PACKED_WORDS = 64  # registers for the packed x, weight and bias of a thread, when they are all loaded early


@dataclass(frozen=True)
class Config:
    """threads_per_row, threads: of a block; cluster: blocks that share a row.

    load: "registers" (which hold x over the exchange) or "shared" (by cp.async; a thread reads what it copied itself,
    once for each pass, and so needs few registers).
    early: load weight and bias before the reduction, or else where they are used.
    rows_each: rows that a thread holds at once; they share one load of weight and bias.
    """

    threads_per_row: int
    threads: int
    cluster: int = 1
    load: str = "registers"
    early: bool = True
    rows_each: int = 1

    @property
    def split(self) -> bool:
        """x in shared memory, weight and bias in registers. Then x comes through L1, and the stores come last.

        rmsnorm of (4096, 262144) in bf16 on an H100: 3022 GB/s so, 3012 if each result is stored when it is there,
        2811 past L1. Where weight and bias come late, stores at the end made layernorm up to 1.7 times as slow.
        """
        return self.load == "shared" and self.early

    def tile(self, spec: NormSpec) -> geometry.Tile:
        return geometry.tile(spec.N, spec.vector, self.threads_per_row, self.threads, self.cluster)


def smem_bytes(spec: NormSpec, config: Config) -> int:
    """Shared memory of a block: x (and residual) where they pass through it, the exchange buffers (8 bytes to a warp),
    mbarriers, and where 128 columns lie in several warps, a float for each vector of each warp."""
    t = config.tile(spec)
    x = t.rows * t.cols * spec.loaded // 8 if config.load == "shared" else 0
    met = t.threads // 32 * t.blocks * 4 if spec.scale == "block" and t.vector < 4 else 0
    return config.rows_each * (x + spec.exchanges * (t.threads // 32 * t.cluster * 8 + 16) + met)


def packed_words(spec: NormSpec, config: Config) -> int:
    """Registers that a thread needs to hold x (and residual), and weight and bias if they come early, as they lie in
    memory."""
    bits = 0 if config.load == "shared" else spec.loaded * config.rows_each
    if config.early:
        bits += sum(WIDTH[d] for d in (spec.weight, spec.bias) if d)
    per = config.tile(spec).per_thread
    return -(-per * bits // 32)


def waits_together(spec: NormSpec, config: Config) -> bool:
    """Do a thread's rows wait for their cluster together (`several.LayerNormSeveral`), or one after the other?"""
    t = config.tile(spec)
    return (spec.kind == "layernorm" and not spec.scale and config.rows_each > 1 and t.cluster > 1 and t.even(spec.N))


def check(spec: NormSpec, config: Config) -> None:
    """Raises ValueError where a config cannot serve the spec."""
    t = config.tile(spec)
    if config.load not in ("registers", "shared"):
        raise ValueError(f"load: got {config.load!r}, allowed are registers, shared")
    narrowest = min(WIDTH[d] for d in (spec.x, spec.residual) if d)
    if config.load == "shared" and spec.vector * narrowest < 32:
        raise ValueError(f"load: cp.async copies at least 4 bytes, got a vector of {spec.vector} {spec.x}")
    if config.load == "shared" and spec.scale:
        raise ValueError("load: results that wait for their scale are held in registers, got 'shared'")
    if config.rows_each < 1:
        raise ValueError(f"rows_each: got {config.rows_each}, allowed are 1 and more")
    if t.per_thread > PER_THREAD:
        raise ValueError(f"{t.per_thread} elements a thread, allowed are {PER_THREAD}")
    if t.cluster > geometry.MAX_CLUSTER or smem_bytes(spec, config) > geometry.SMEM_BYTES:
        raise ValueError(f"cluster of {t.cluster}, {smem_bytes(spec, config)} bytes of shared memory: too much")


# (largest row in bytes, the residual's among them; config), for whole 16-byte accesses. Measured on an H100 in bf16
# without a residual, at rows of 2 KB and all powers of two from 8 KB to 512 KB (bench/tune_norms.py); a row between two
# takes that of either.
# Clusters of 16 are not portable in CUDA's sense, but Hopper has them; the DSL sets the attribute that they need.
# where weight and bias are no more bytes than x (rmsnorm in one type), they come early, and many threads hold a row
_LIGHT = tuple((limit, Config(*shape)) for limit, *shape in (
    *row_plan.SHORT,
    (49152, 512, 512, 2),
    (98304, 256, 256, 4),
    (196608, 256, 256, 8),
    (262144, 256, 256, 16),
    (524288, 256, 256, 16, "shared"),
    # with a residual 2881 us at 4096 rows of 262144; 2957 in registers (71 a thread: one block on a processor), 3064
    # there with a late weight
    (1048576, 512, 512, 16, "shared"),
    (2097152, 512, 512, 16),
))
# where they are more, their way from L2 is what counts: they stay out of the registers, or several rows share one load
_LATE = (*((limit, Config(*shape, early=False)) for limit, *shape in row_plan.SHORT),
         (49152, Config(512, 512, early=False)))
_HEAVY = (
    *_LATE,
    (65536, Config(128, 128, 8, load="shared", early=False, rows_each=4)),
    (131072, Config(256, 256, 8, load="shared", early=False, rows_each=3)),
    (262144, Config(256, 256, 8, load="shared", early=False, rows_each=2)),
    (2097152, Config(512, 512, 16, early=False)),
)
# up to twice the bytes of x and residual (layernorm with a float32 weight and no bias): many small blocks share a row,
# x waits in their shared memory and the weight in registers. 65536: 3040 GB/s so, 2827 as _HEAVY; 131072: 3021 and
# 2780; 262144: 2724 and 2541.
_MEDIUM = (
    *_LATE,
    (98304, Config(256, 256, 4, load="shared")),
    (131072, Config(128, 128, 8, load="shared")),
    (262144, Config(128, 128, 16, load="shared")),
    (524288, Config(256, 256, 16, load="shared")),
    (2097152, Config(512, 512, 16, early=False)),
)
# results that wait for their scale do so in registers, 32 of a thread where that can be
_QUANTISED = tuple((limit, Config(*shape)) for limit, *shape in (
    *row_plan.SHORT,
    (65536, 512, 512, 2),
    (131072, 512, 512, 4),
    (262144, 512, 512, 8),
    (2097152, 512, 512, 16),
))


# Rows of 2 and 4 KB of x alone: 16 bytes to each thread. Where a thread had twice as many, rmsnorm of bf16 was 0.2 %
# slower at 1024 columns and 0.6 % at 2048, layernorm of 1024 with a float32 weight 1.3 %, with a bias too 2 %
# (bench/tune_short_norms.py). With a residual the tables have it so.
_SHORT = (1536, 4096)  # bytes of x: beyond the first, up to the second


def _spread(spec: NormSpec, config: Config) -> Config:
    least, most = _SHORT
    x = spec.N * WIDTH[spec.x] // 8
    if spec.scale or spec.residual or not least < x <= most:
        return config
    threads = 128 if x <= 2048 else 256
    return replace(config, threads_per_row=threads, threads=threads)


def _vectored(spec: NormSpec) -> Config:
    vectors = sum(WIDTH[dtype] for dtype in (spec.weight, spec.bias) if dtype)
    light = vectors <= spec.loaded
    table = _QUANTISED if spec.scale else _LIGHT if light else _MEDIUM if vectors <= 2 * spec.loaded else _HEAVY
    config = _spread(spec, next(config for limit, config in table if spec.N * spec.loaded // 8 <= limit))
    return replace(config, early=False) if spec.scale and not light else config


def _narrow(spec: NormSpec) -> Config:
    """Rows whose alignment allows less than 16 bytes an access: more threads of fewer elements, no shared memory."""
    most, blocks = (512, 16) if spec.scale else (1024, 8)  # results that wait in registers need many of them
    found = row_plan.narrow(spec, most, blocks)
    return Config(found.threads_per_row, found.threads, found.cluster, early=False)


def plan(spec: NormSpec) -> Config:
    """The config that a spec runs with."""
    return _vectored(spec) if spec.access == 128 else _narrow(spec)


_PATHS = (dict(early=True), dict(early=False), dict(early=True, rows_each=2),
          dict(load="shared", early=True), dict(load="shared", early=False),
          dict(load="shared", early=False, rows_each=2))


def variants(spec: NormSpec) -> list[Config]:
    """The configs worth timing for a spec with 16-byte accesses, the planned one first."""
    found = [plan(spec)]
    for cluster in (1, 2, 4, 8, 16):
        for row_threads in (32, 64, 128, 256, 512):
            for threads in (128, 256) if row_threads < 128 else (row_threads,):
                found += [c for path in _PATHS if _worth(spec, c := Config(row_threads, threads, cluster, **path))]
    return list(dict.fromkeys(found))


def _worth(spec: NormSpec, config: Config) -> bool:
    try:
        check(spec, config)
    except ValueError:
        return False
    t = config.tile(spec)
    held = t.cols * spec.loaded // 8 * t.rows * config.rows_each
    shared_well = t.cluster == 1 or (t.rows == 1 and t.cols * spec.width >= 8 * 16384)
    fits = t.cluster == config.cluster and held <= 65536 and packed_words(spec, config) <= PACKED_WORDS
    return shared_well and fits and t.per_thread >= 16

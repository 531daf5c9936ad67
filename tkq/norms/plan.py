"""Which threads, blocks and memory path a normalisation takes. Pure: no torch, no DSL; bench/tune_norms.py times it."""
from dataclasses import dataclass, replace

from .. import reduction_plan as geometry
from .spec import WIDTH, NormSpec

PER_THREAD = 64  # most elements of a row in one thread
PACKED_WORDS = 64  # registers for the packed x, weight and bias of a thread, when they are all loaded early


@dataclass(frozen=True)
class Config:
    """threads_per_row, threads: of a block; cluster: blocks that share a row.

    load: "registers" (straight from global memory) or "shared" (cp.async; a thread reads back what it copied itself).
    reload: with "shared": read x again for the second pass, instead of holding it in registers over the exchange.
    early: load weight and bias before the reduction, or else where they are used.
    stream: mark x and the output as used once, so that L1 and L2 keep weight and bias.
    rows_each: rows that a thread holds at once; they share one load of weight and bias.
    """

    threads_per_row: int
    threads: int
    cluster: int = 1
    load: str = "registers"
    reload: bool = False
    early: bool = True
    stream: bool = False
    rows_each: int = 1

    def tile(self, spec: NormSpec) -> geometry.Tile:
        return geometry.tile(spec.N, spec.vector, self.threads_per_row, self.threads, self.cluster)


def smem_bytes(spec: NormSpec, config: Config) -> int:
    """Shared memory of a block: x where it passes through it, the exchange buffers (8 bytes to a warp), mbarriers."""
    t = config.tile(spec)
    x = t.rows * t.cols * spec.width // 8 if config.load == "shared" else 0
    return config.rows_each * (x + t.threads // 32 * t.cluster * 8 + 16)


def packed_words(spec: NormSpec, config: Config) -> int:
    """Registers that a thread needs to hold x, and weight and bias if they come early, as they lie in memory."""
    bits = 0 if config.reload else spec.width * config.rows_each
    if config.early:
        bits += sum(WIDTH[d] for d in (spec.weight, spec.bias) if d)
    per = config.tile(spec).per_thread
    return -(-per * bits // 32)


def check(spec: NormSpec, config: Config) -> None:
    """Raises ValueError where a config cannot serve the spec."""
    t = config.tile(spec)
    if config.load not in ("registers", "shared"):
        raise ValueError(f"load: got {config.load!r}, allowed are registers, shared")
    if config.load == "shared" and spec.vector * spec.width < 32:
        raise ValueError(f"load: cp.async copies at least 4 bytes, got a vector of {spec.vector} {spec.x}")
    if config.reload and config.load != "shared":
        raise ValueError("reload: x can be read again only where it went through shared memory")
    if config.rows_each < 1:
        raise ValueError(f"rows_each: got {config.rows_each}, allowed are 1 and more")
    if t.per_thread > PER_THREAD:
        raise ValueError(f"{t.per_thread} elements a thread, allowed are {PER_THREAD}")
    if t.cluster > geometry.MAX_CLUSTER or smem_bytes(spec, config) > geometry.SMEM_BYTES:
        raise ValueError(f"cluster of {t.cluster}, {smem_bytes(spec, config)} bytes of shared memory: too much")


# (bytes of x to a row, config). One table serves 16- and 32-bit types. Up to 8 KB a row lives in registers; above, a
# block that reads it again from shared memory needs so few registers that three or more fit on an SM and cover each
# other's waits.
_AGAIN = dict(load="shared", reload=True, early=False)
_VECTORED = (
    (128, Config(8, 128)),
    (256, Config(16, 128)),
    (2048, Config(32, 128)),
    (4096, Config(64, 128)),
    (8192, Config(128, 128)),
    (16384, Config(256, 256, **_AGAIN)),
    (32768, Config(512, 512, **_AGAIN)),
    (65536, Config(512, 512, **_AGAIN)),
    (131072, Config(512, 512, 2, **_AGAIN)),
    (262144, Config(512, 512, 4, **_AGAIN)),
    (524288, Config(512, 512, 8, **_AGAIN)),
    (1048576, Config(1024, 1024, 8, **_AGAIN)),
)


def _vectored(spec: NormSpec) -> Config:
    row_bytes = spec.N * spec.width // 8
    return next(config for limit, config in _VECTORED if row_bytes <= limit)


def _narrow(spec: NormSpec) -> Config:
    """Rows whose alignment allows less than 16 bytes an access: more threads of fewer elements, no shared memory."""
    per = min(32, 8 * spec.vector)  # an access costs an address and a predicate, so few of them
    threads = 8
    while threads < 1024 and threads * per < spec.N:
        threads *= 2
    cluster = 1
    while cluster < 8 and threads * cluster * per < spec.N:
        cluster *= 2
    return Config(threads, max(threads, 128), cluster, early=False)


def plan(spec: NormSpec) -> Config:
    """The config that a spec runs with."""
    config = _vectored(spec) if spec.vector * spec.width == 128 else _narrow(spec)
    if config.early and packed_words(spec, config) > PACKED_WORDS:
        config = replace(config, early=False)
    return config


_PATHS = (dict(early=True), dict(early=False), dict(load="shared", reload=True, early=True),
          dict(load="shared", reload=True, early=False), dict(load="shared", reload=True, early=False, rows_each=2),
          dict(early=True, rows_each=2))


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
    held = t.cols * spec.width // 8 * t.rows * config.rows_each
    shared_well = t.cluster == 1 or (t.rows == 1 and t.cols * spec.width >= 8 * 16384)
    fits = t.cluster == config.cluster and held <= 65536 and packed_words(spec, config) <= PACKED_WORDS
    return shared_well and fits and t.per_thread >= 16

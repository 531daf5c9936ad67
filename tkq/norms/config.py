"""How a norm's kernel is laid out: the config of a plan, and what it needs."""
from dataclasses import dataclass

from ..dtypes import WIDTH
from ..reduction import geometry
from .spec import NormSpec

SMEM_BYTES, REGISTERS = 227 * 1024, 65536  # of an SM, of which a block takes 1 KB more than its own
PER_THREAD = 64  # most elements of a row in one thread
PACKED_WORDS = 64  # registers for the packed x, weight and bias of a thread, when they are all loaded early


@dataclass(frozen=True)
class Config:
    """threads_per_row, threads: of a block; cluster: blocks that share a row.

    load: "registers" (which hold x over the exchange) or "shared" (by cp.async; a thread reads what it copied itself,
    once for each pass, and so needs few registers).
    prefetch_weight: load weight and bias before the reduction, or else where they are used.
    rows_per_thread: rows that a thread holds at once; they share one load of weight and bias.
    min_blocks_per_sm: blocks for which an SM is to have registers; with 0 the compiler is free.
    """

    threads_per_row: int
    threads: int
    cluster: int = 1
    load: str = "registers"
    prefetch_weight: bool = True
    rows_per_thread: int = 1
    min_blocks_per_sm: int = 0

    @property
    def split(self) -> bool:
        """x in shared memory, weight and bias in registers. Then x comes through L1, and the stores come last.

        rmsnorm of (4096, 262144) in bf16 on an H100: 3022 GB/s so, 3012 if each result is stored when it is there,
        2811 past L1. Where weight and bias come late, stores at the end made layernorm up to 1.7 times as slow.
        """
        return self.load == "shared" and self.prefetch_weight

    def tile(self, spec: NormSpec) -> geometry.Tile:
        return geometry.tile(spec.N, spec.vector, self.threads_per_row, self.threads, self.cluster)


def smem_bytes(spec: NormSpec, config: Config) -> int:
    """Shared memory of a block: x (and residual) where they pass through it, the exchange buffers (8 bytes to a warp),
    mbarriers, and where 128 columns lie in several warps, a float for each vector of each warp."""
    t = config.tile(spec)
    x = t.rows * t.cols * spec.loaded // 8 if config.load == "shared" else 0
    met = t.threads // 32 * t.blocks * 4 if spec.scale == "1x128" and t.vector < 4 else 0
    return config.rows_per_thread * (x + spec.exchanges * (t.threads // 32 * t.cluster * 8 + 16) + met)


def packed_words(spec: NormSpec, config: Config) -> int:
    """Registers that a thread needs to hold x (and residual), and weight and bias if they come early, as they lie in
    memory."""
    bits = 0 if config.load == "shared" else spec.loaded * config.rows_per_thread
    if config.prefetch_weight:
        bits += sum(WIDTH[d] for d in (spec.weight, spec.bias) if d)
    per = config.tile(spec).per_thread
    return -(-per * bits // 32)


def waits_together(spec: NormSpec, config: Config) -> bool:
    """Do a thread's rows wait for their cluster together (`LayerNormMultiRow`), or one after the other?"""
    t = config.tile(spec)
    return (spec.kind == "layernorm" and not spec.scale and config.rows_per_thread > 1 and t.cluster > 1 and
            t.even(spec.N))


def check(spec: NormSpec, config: Config) -> None:
    """Raises ValueError where a config cannot serve the spec."""
    t = config.tile(spec)
    if config.load not in ("registers", "shared"):
        raise ValueError(f"load: got {config.load!r}, allowed are registers, shared")
    if config.load == "shared" and spec.scale:
        raise ValueError("load: got 'shared', allowed is registers for float8 results, where they wait for their scale")
    narrowest = min(WIDTH[d] for d in (spec.x, spec.residual) if d)
    if config.load == "shared" and spec.vector * narrowest < 32:
        raise ValueError(f"load: cp.async copies at least 4 bytes, got a vector of {spec.vector} {spec.x}")
    if config.rows_per_thread < 1:
        raise ValueError(f"rows_per_thread: got {config.rows_per_thread}, allowed are 1 and more")
    if t.per_thread > PER_THREAD:
        raise ValueError(f"{t.per_thread} elements a thread, allowed are {PER_THREAD}")
    if t.cluster > geometry.MAX_CLUSTER or smem_bytes(spec, config) > geometry.SMEM_BYTES:
        raise ValueError(f"cluster of {t.cluster}, {smem_bytes(spec, config)} bytes of shared memory: too much")
    if config.min_blocks_per_sm:
        _check_blocks(spec, config)


def _check_blocks(spec, config):
    """That an SM has room for the blocks that the config wants there."""
    t, blocks = config.tile(spec), config.min_blocks_per_sm
    room = blocks * (smem_bytes(spec, config) + 2048)
    if blocks < 0 or room > SMEM_BYTES or blocks * t.threads * 32 > REGISTERS:
        raise ValueError(f"min_blocks_per_sm: got {blocks} blocks of {t.threads} threads, {room} bytes of shared "
                         f"memory, allowed are 0 and what fits in {SMEM_BYTES} bytes and {REGISTERS} registers")

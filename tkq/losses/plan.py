"""Which threads, blocks and memory path a loss takes. Pure: no torch, no DSL; bench/tune/one_pass_rows.py times it."""
from dataclasses import dataclass, replace

from ..reduction import geometry
from ..rows.one_pass import plan as row_plan
from ..rows.one_pass.plan import RowConfig
from ..softmax import plan as softmax
from .spec import CrossEntropySpec, ScaleSpec

WORDS = 68  # registers of a thread for its part of a row, as it lies in memory: 64, and an access more where shifted

# (largest row in bytes, threads to a row, threads, blocks of a cluster), for 16-byte accesses.
# The forward only reads: four accesses a thread, all in flight before any is used, are 64 KB to an SM at half of
# its threads, and longer rows go over more threads, so that each warp has as much in flight.
_FORWARD = (
    (128, 8, 128, 1),
    (512, 16, 128, 1),
    (3072, 32, 128, 1),
    (6144, 64, 128, 1),
    (12288, 128, 128, 1),
    (24576, 256, 256, 1),
    (49152, 512, 512, 1),  # longer ones: _STREAMING, _LONG_STREAMING
    (98304, 512, 512, 2),
    (196608, 512, 512, 4),
    (393216, 512, 512, 8),
    (1 << 21, 512, 512, 16),
)


@dataclass(frozen=True)
class StreamingConfig(RowConfig):
    """For a forward that streams a row: its threads read it in steps of `vectors` accesses, and hold none.

    load: "shared": a ring of `stages` steps, of which one is read while the copies of the others are in flight;
    "registers": a step is loaded when it is needed.
    """

    load: str = "shared"
    vectors: int = 4
    stages: int = 3


# Longer rows, without label smoothing: three blocks on an SM, each with 48 of its 64 KB in flight; from
# 128 KB on, where one block's row lasts, one with 160 of 192 KB (3194 GB/s at N 65536, where three have 3158). The
# fewer rows are streamed at a time, the better: blocks of 256 and 128 threads are slower. A row that is held in
# several (as above, where smoothing needs two passes over it) has nothing in flight while they exchange.
_STREAMING_FROM, _LONG_STREAMING_FROM = 49152, 131072  # bytes
_STREAMING = StreamingConfig(512, 512, vectors=2, stages=4)
_LONG_STREAMING = StreamingConfig(1024, 1024, vectors=2, stages=6)

_FUSED_HELD = 262144  # bytes of a row that stay in registers at most

# The backward exchanges nothing: its "cluster" is into how many blocks a row is cut.
_BACKWARD = (
    (128, 8, 128),
    (256, 16, 128),
    (768, 32, 128),
    (1536, 64, 128),
    (3072, 128, 128),
    (6144, 256, 256),
    (12288, 512, 512),
)
# of a row in one block, where it is longer: up to _BACKWARD_SINGLE bytes 512 threads of one access, 256 of two beyond
_BACKWARD_BYTES, _BACKWARD_SINGLE = 8192, 24576


def backward(spec: CrossEntropySpec) -> RowConfig:
    """Enough blocks to a row that each thread has one access, or two of a long row; of narrow accesses four times as
    many."""
    row = spec.N * spec.width // 8
    if spec.vector * spec.width < row_plan.ACCESS_BITS:
        row = row * row_plan.ACCESS_BITS // (4 * spec.vector * spec.width)
    for limit, row_threads, threads in _BACKWARD:
        if row <= limit:
            return RowConfig(row_threads, threads)
    threads = 512 if row <= _BACKWARD_SINGLE else 256
    return RowConfig(threads, threads, -(-row // _BACKWARD_BYTES))


def check(spec: CrossEntropySpec, config: RowConfig) -> None:
    """Raises ValueError where a config cannot serve the spec."""
    if spec.kind == "backward":
        if config.load != "registers":
            raise ValueError(f"load: got {config.load!r}, the backward has its rows in registers")
        config = RowConfig(config.threads_per_row, config.threads)
        if row_plan.tile(spec, config).threads != config.threads:
            raise ValueError(f"threads: {config}")
        return
    if isinstance(config, StreamingConfig):
        _check_streaming(spec, config)
    else:
        row_plan.check(spec, config, spec.exchanges, WORDS)


def _check_streaming(spec, config):
    if spec.kind != "forward" or spec.smoothing:
        raise ValueError(f"streaming: got {spec.kind}, label smoothing {spec.smoothing}, allowed is a "
                         "forward without")
    if not 1 <= config.vectors <= 8:
        raise ValueError(f"vectors: got {config.vectors}, allowed are 1 to 8")
    if config.load == "shared":
        if config.stages < 2 or smem_bytes(spec, config) > geometry.SMEM_BYTES:
            raise ValueError(f"stages: got {config.stages}, allowed are 2 and what {geometry.SMEM_BYTES} bytes hold")
        config = replace(config, load="registers")
    row_plan.check(spec, config, spec.exchanges, spec.N)


def smem_bytes(spec: CrossEntropySpec, config: RowConfig) -> int:
    """Shared memory of a block."""
    if spec.kind == "backward":
        return 0
    if not isinstance(config, StreamingConfig) or config.load != "shared":
        return row_plan.smem_bytes(spec, config, spec.exchanges)
    ring = config.threads * config.vectors * config.stages * spec.vector * spec.width // 8
    return ring + row_plan.smem_bytes(spec, replace(config, load="registers"), spec.exchanges)


def plan(spec: CrossEntropySpec) -> RowConfig:
    """The config that a spec runs with."""
    if spec.kind == "backward":
        return backward(spec)
    if spec.vector * spec.width < row_plan.ACCESS_BITS:
        return row_plan.narrow(spec, most_cluster=16)
    if spec.kind == "fused":
        return _fused(spec)
    if spec.N * spec.width // 8 > _STREAMING_FROM and not spec.smoothing:
        return _STREAMING if spec.N * spec.width // 8 < _LONG_STREAMING_FROM else _LONG_STREAMING
    return next(RowConfig(*shape) for limit, *shape in _FORWARD if spec.N * spec.width // 8 <= limit)


def _fused(spec) -> RowConfig:
    """It reads, holds and writes rows as softmax does; those of 131072 columns were not timed in shared memory."""
    config = softmax.forward(spec)
    held = spec.N * spec.width // 8 <= _FUSED_HELD
    return replace(config, load="registers") if held else config


def variants(spec: CrossEntropySpec) -> list[RowConfig]:
    """The configs worth timing for a spec with 16-byte accesses, the planned one first."""
    found = [plan(spec)]
    clusters = (1, 2, 4, 8, 16)
    if spec.kind == "backward":
        row = spec.N * spec.width // 8
        clusters = sorted({-(-row // (threads * 16 * n)) for threads in (128, 256, 512) for n in (1, 2, 4)})
    for cluster in clusters:
        for row_threads in (32, 64, 128, 256, 512):
            for threads in (128, 256) if row_threads < 128 else (row_threads,):
                loads = ("registers",) if spec.kind == "backward" else ("registers", "shared")
                found += [c for load in loads if _worth(spec, c := RowConfig(row_threads, threads, cluster, load))]
    if spec.kind == "forward" and spec.N * spec.width // 8 > 24576:
        found += [c for c in STREAMING if _serves(spec, c)]
    return list(dict.fromkeys(found))


# Streaming configs worth timing: (threads, cluster, vectors, stages[, resident]) through shared memory, (threads,
# resident, vectors) without
_RINGS = ((512, 1, 2, 4), (512, 1, 4, 3), (512, 1, 2, 6), (512, 2, 2, 4), (512, 4, 2, 4), (512, 8, 2, 4),
          (256, 4, 2, 6), (1024, 1, 2, 6), (1024, 1, 2, 3, 2), (1024, 1, 1, 6, 2))
_LOADS = ((256, 5, 4), (512, 2, 4))
STREAMING = [StreamingConfig(threads, threads, cluster, "shared", *rest, vectors=vectors, stages=stages)
             for threads, cluster, vectors, stages, *rest in _RINGS]
STREAMING += [StreamingConfig(threads, threads, 1, "registers", min_blocks_per_sm, vectors=vectors)
              for threads, min_blocks_per_sm, vectors in _LOADS]


def _serves(spec, config):
    try:
        check(spec, config)
    except ValueError:
        return False
    return True


def _worth(spec, config):
    if not _serves(spec, config):
        return False
    t = row_plan.tile(spec, config)
    return t.cluster == config.cluster and 4 <= t.per_thread * spec.width // 32 <= 32


# So few rows, and logits in all, take their mean or sum in one launch (`once`): a call's CPU time is what counts there.
# Each of its blocks ends with a fence and a ticket, more than a microsecond that a second launch does not have.
SINGLE_LAUNCH_ROWS, ONCE_LOGITS = 1024, 1 << 23


def single_launch(rows: int, classes: int, reduction: str) -> bool:
    """Is the total made by the forward's own launch?"""
    return reduction != "none" and rows <= SINGLE_LAUNCH_ROWS and rows * classes <= ONCE_LOGITS


@dataclass(frozen=True)
class TotalConfig:
    """The sum over all rows: one cluster. pdl: it is put on the device while the kernel before it still runs, and
    waits there."""

    threads: int = 512
    cluster: int = 8
    pdl: bool = True


# ---- the linear layer's chunks ---------------------------------------------------------------------------------------

CHUNK_BYTES = 1 << 29  # of logits in memory at a time, at most
CHUNK_ROWS = 512  # at least: fewer rows would make more passes over the weight and its gradient than they save memory
CHUNK_PART = 4  # a chunk has at most one row in CHUNK_PART


def chunk_rows(M: int, V: int, size: int) -> int:
    """Rows of logits, V of `size` bytes each, that are in memory together.

    Each chunk reads the weight twice and adds to its gradient once, so chunks are large: a quarter of the rows as long
    as that is no more than 512 MB. 8192 rows of 128256 classes in bf16 go in four of 2048 rows, 525 MB.
    """
    fits = max(256, CHUNK_BYTES // (padded(V, size) * size) // 256 * 256)
    return min(fits, max(CHUNK_ROWS, -(-M // CHUNK_PART // 256) * 256))


def padded(V: int, size: int) -> int:
    """A row of logits in a chunk's memory: a whole number of 16-byte units."""
    unit = 16 // size
    return -(-V // unit) * unit


def scale(spec: ScaleSpec) -> RowConfig:
    """Eight accesses a thread: most blocks find that there is nothing to do, so there should not be many."""
    threads = 8
    while threads < 256 and threads * 8 * spec.vector < spec.N:
        threads *= 2
    return RowConfig(threads, 256, -(-spec.N // (threads * 8 * spec.vector)))

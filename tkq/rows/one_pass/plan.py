"""How a OnePassRows lies on the chip: threads, blocks, memory path, and what they cost. Pure: no torch, no DSL."""
from dataclasses import dataclass

from ...reduction import geometry

WIDTH = {"bf16": 16, "fp16": 16, "fp32": 32}  # the types of rows, in bits
ACCESS_BITS = 128
THREADS = 2048  # of an SM
# (largest row in bytes, threads to a row, threads, blocks of a cluster), for 16-byte accesses to short rows that
# threads hold: measured on an H100 for rmsnorm (bench/tune/norms.py), which reads, holds and writes them as others do.
SHORT = (
    (128, 8, 128, 1),
    (256, 16, 128, 1),
    (1536, 32, 128, 1),
    (3072, 64, 128, 1),
    (6144, 128, 128, 1),
    (12288, 256, 256, 1),
    (24576, 512, 512, 1),
)


@dataclass(frozen=True)
class RowConfig:
    """threads_per_row, threads: of a block; cluster: blocks that share a row.

    load: "registers" (which hold the row over the exchange) or "shared" (by cp.async; a thread reads what it copied
    itself, once for each pass, and so needs few registers).
    min_blocks_per_sm: blocks for which an SM is to have registers; 0: threads get what they need.
    """

    threads_per_row: int
    threads: int
    cluster: int = 1
    load: str = "registers"
    min_blocks_per_sm: int = 0


def check_vector(spec) -> None:
    """Raises ValueError where a spec's vector cannot serve its rows: with N, x, width, vector and shifted."""
    whole = ACCESS_BITS // spec.width
    widest = whole if spec.shifted else geometry.vector(spec.N, spec.width)
    if spec.vector < 1 or widest % spec.vector or (spec.shifted and spec.vector != whole):
        raise ValueError(f"vector: got {spec.vector} for N = {spec.N} in {spec.x}, shifted {spec.shifted}; "
                         f"allowed are the divisors of {widest}")


def span(N: int, vector: int, shifted: bool) -> int:
    """Columns that a row's vectors cover: its own and, where it begins anywhere in its first vector, as many more."""
    return -(-(N + vector - 1) // vector) * vector if shifted else N


def tile(spec, config: RowConfig) -> geometry.Tile:
    """spec: with N, vector and shifted."""
    columns = span(spec.N, spec.vector, spec.shifted)
    return geometry.tile(columns, spec.vector, config.threads_per_row, config.threads, config.cluster)


def smem_bytes(spec, config: RowConfig, exchanges: int, exchanged: int = 8) -> int:
    """Shared memory of a block: rows that pass through it; a buffer for each exchange, ``exchanged`` bytes a warp; its
    mbarrier."""
    t = tile(spec, config)
    rows = t.rows * t.cols * WIDTH[spec.x] // 8 if config.load == "shared" else 0
    return rows + exchanges * (t.threads // 32 * t.cluster * exchanged + 16)


def check(spec, config: RowConfig, exchanges: int, words: int) -> None:
    """Raises ValueError where a config cannot serve the spec. words: registers that a thread may fill with its row, as
    it lies in memory."""
    t = tile(spec, config)
    width = WIDTH[spec.x]
    if config.load not in ("registers", "shared"):
        raise ValueError(f"load: got {config.load!r}, allowed are registers, shared")
    if config.load == "shared" and spec.vector * width < 32:
        raise ValueError(f"load: cp.async copies at least 4 bytes, got a vector of {spec.vector} {spec.x}")
    if t.per_thread * width > 32 * words:
        raise ValueError(f"{t.per_thread} {spec.x} a thread, allowed are {words} registers of them")
    if t.cluster > geometry.MAX_CLUSTER or t.cluster & (t.cluster - 1):
        raise ValueError(f"cluster: got {t.cluster}, allowed are powers of two up to {geometry.MAX_CLUSTER}")
    if config.min_blocks_per_sm < 0 or config.min_blocks_per_sm * config.threads > THREADS:
        raise ValueError(f"min_blocks_per_sm: {config.min_blocks_per_sm} of {config.threads} threads, of {THREADS}")
    if smem_bytes(spec, config, exchanges) > geometry.SMEM_BYTES:
        raise ValueError(f"{smem_bytes(spec, config, exchanges)} bytes of shared memory, allowed are "
                         f"{geometry.SMEM_BYTES}")


def narrow(spec, most_threads: int = 1024, most_cluster: int = 8) -> RowConfig:
    """For rows whose alignment allows less than 16 bytes an access: more threads of fewer elements, no shared memory.
    An access costs an address and a predicate, so a thread has few of them."""
    per = min(32, 8 * spec.vector)
    threads = 8
    while threads < most_threads and threads * per < spec.N:
        threads *= 2
    cluster = 1
    while cluster < most_cluster and threads * cluster * per < spec.N:
        cluster *= 2
    return RowConfig(threads, max(threads, 128), cluster)


def access(N: int, size: int, rows) -> tuple:
    """(vector, shifted) for rows of N elements of `size` bytes. rows: (address, bytes from row to row) of each tensor.

    16 bytes where addresses, row strides and N allow it. Where they do not, but all tensors' rows begin at the same
    place of a 16-byte unit and elements lie at multiples of their size: whole units all the same, which reach over the
    row's ends (`shifted`). Else as many elements as all allow.
    """
    whole = ACCESS_BITS // 8
    begin, step = rows[0]
    if all(not (address | stride) % whole for address, stride in rows) and N * size % whole == 0:
        return whole // size, False
    alike = all(address % whole == begin % whole and stride % whole == step % whole for address, stride in rows)
    if alike and begin % size == 0 and N * size >= whole:
        return whole // size, True
    vector = geometry.vector(N, 8 * size)
    while any((address | stride) % (vector * size) for address, stride in rows):
        vector //= 2
    return max(vector, 1), False

"""Which threads, blocks and memory path a softmax takes. Pure: no torch, no DSL; bench/tune/one_pass_rows.py times
it."""
from ..rows.one_pass import plan as row_plan
from ..rows.one_pass.plan import RowConfig
from .spec import SoftmaxSpec

EXCHANGES = 1
WORDS = {False: 64, True: 36}  # registers of a thread for a row as it lies in memory; backward: for each of its two

# (largest row in bytes, threads to a row, threads, blocks of a cluster[, "shared"]), for 16-byte accesses.
# Forward: what bench/tune/norms.py found for rmsnorm, which reads, holds and writes rows in the same way; but for the
# longest, where rmsnorm's 16 blocks of 256 threads have 3020 GB/s and these 3027. 8192 x 131072: 1415.6 us, 1423.6 with
# rows in registers.
_FORWARD = (
    *row_plan.SHORT,
    (49152, 512, 512, 2),
    (98304, 256, 256, 4),
    (196608, 256, 256, 8),
    (262144, 256, 256, 16, "shared"),
    (524288, 512, 512, 8, "shared"),
    (1 << 21, 512, 512, 16),
)
# Backward holds two rows, so half as many elements a thread where that can be. Blocks of 512 threads with two vectors
# of each get 40 registers from the compiler and spill one; with 256 threads they get 46. 4096 x 131072: 1042.7 us,
# 1100.8 with 512 threads; 8192 x 65536: 1041.4, 1043.1 with 8 blocks of 512.
_BACKWARD = (
    *row_plan.SHORT,
    (49152, 256, 256, 4),
    (98304, 256, 256, 8),
    (262144, 256, 256, 16),
    (1 << 21, 512, 512, 16),
)


def check(spec: SoftmaxSpec, config: RowConfig) -> None:
    """Raises ValueError where a config cannot serve the spec."""
    if spec.backward and config.load != "registers":
        raise ValueError(f"load: got {config.load!r}, the backward keeps its rows in registers")
    row_plan.check(spec, config, EXCHANGES, WORDS[spec.backward])


def plan(spec: SoftmaxSpec) -> RowConfig:
    """The config that a spec runs with."""
    if spec.vector * spec.width < row_plan.ACCESS_BITS:
        return row_plan.narrow(spec)
    return _of(_BACKWARD, spec) if spec.backward else forward(spec)


def forward(spec) -> RowConfig:
    """For rows that are read, held over an exchange and written, in 16-byte accesses. spec: with N and width."""
    return _of(_FORWARD, spec)


def _of(table, spec):
    return next(RowConfig(*shape) for limit, *shape in table if spec.N * spec.width // 8 <= limit)


def variants(spec: SoftmaxSpec) -> list[RowConfig]:
    """The configs worth timing for a spec with 16-byte accesses, the planned one first."""
    found = [plan(spec)]
    for cluster in (1, 2, 4, 8, 16):
        for row_threads in (32, 64, 128, 256, 512):
            for threads in (128, 256) if row_threads < 128 else (row_threads,):
                found += [c for load in ("registers", "shared")
                          if _worth(spec, c := RowConfig(row_threads, threads, cluster, load))]
    return list(dict.fromkeys(found))


def _worth(spec, config):
    try:
        check(spec, config)
    except ValueError:
        return False
    t = row_plan.tile(spec, config)
    words = t.per_thread * spec.width // 32
    most = 24 if spec.backward else 32 if config.load == "registers" else 64
    return t.cluster == config.cluster and 4 <= words <= most

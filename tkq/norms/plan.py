"""Which threads, blocks and memory path a normalisation takes. Pure: no torch, no DSL; bench/tune/norms.py times it."""
from dataclasses import replace
from typing import Optional

from ..dtypes import WIDTH
from ..rows.one_pass import plan as row_plan
from .config import PACKED_WORDS, Config, check, packed_words
from .spec import NormSpec

# (largest row in bytes, the residual's among them; config), for whole 16-byte accesses. Measured on an H100 in bf16
# without a residual, at rows of 2 KB and all powers of two from 8 KB to 512 KB (bench/tune/norms.py); a row between two
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
    # with a residual 2881 us at 4096 rows of 262144; 2957 in registers (71 a thread: one block on an SM), 3064
    # there with a late weight
    (1048576, 512, 512, 16, "shared"),
    (2097152, 512, 512, 16),
))
# where they are more, their loads from L2 dominate: they stay out of the registers, or several rows share one load
_LATE = (*((limit, Config(*shape, prefetch_weight=False)) for limit, *shape in row_plan.SHORT),
         (49152, Config(512, 512, prefetch_weight=False)))
_HEAVY = (
    *_LATE,
    (65536, Config(128, 128, 8, load="shared", prefetch_weight=False, rows_per_thread=4)),
    (131072, Config(256, 256, 8, load="shared", prefetch_weight=False, rows_per_thread=3)),
    (262144, Config(256, 256, 8, load="shared", prefetch_weight=False, rows_per_thread=2)),
    (2097152, Config(512, 512, 16, prefetch_weight=False)),
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
    (2097152, Config(512, 512, 16, prefetch_weight=False)),
)
# results that wait for their scale do so in registers, 32 of a thread where that can be
_FP8 = tuple((limit, Config(*shape)) for limit, *shape in (
    *row_plan.SHORT,
    (65536, 512, 512, 2),
    (131072, 512, 512, 4),
    (262144, 512, 512, 8),
    (2097152, 512, 512, 16),
))


# Rows of 2 and 4 KB of x alone: 16 bytes to each thread. Where a thread had twice as many, rmsnorm of bf16 was 0.2 %
# slower at 1024 columns and 0.6 % at 2048, layernorm of 1024 with a float32 weight 1.3 %, with a bias too 2 %
# (bench/tune/short_norms.py). With a residual the tables have it so.
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
    table = _FP8 if spec.scale else _LIGHT if light else _MEDIUM if vectors <= 2 * spec.loaded else _HEAVY
    config = _spread(spec, next(config for limit, config in table if spec.N * spec.loaded // 8 <= limit))
    return replace(config, prefetch_weight=False) if spec.scale and not light else config


def _narrow(spec: NormSpec) -> Config:
    """Rows whose alignment allows less than 16 bytes an access: more threads of fewer elements, no shared memory."""
    most, blocks = (512, 16) if spec.scale else (1024, 8)  # results that wait in registers need many of them
    found = row_plan.narrow(spec, most, blocks)
    return Config(found.threads_per_row, found.threads, found.cluster, prefetch_weight=False)


# Rows of layernorm above these bytes, for which the tables above take too many registers. (largest row of x in bytes;
# config) where weight and bias are no more bytes than x, by scale ("sum": a row's, with a residual); None, and what is
# not here: the tables above. Most longer rows, those with more of weight and bias, and scales of 128 columns are
# `fp8_persistent_plan`'s, which comes first. Milliseconds on an H100 beside those of plain layernorm: N 262144 (M 4096)
# with a residual 2.505 of 3.062.
LONG_FROM_BYTES = 131072
_LONG = {
    "row": ((262144, Config(128, 128, 16, prefetch_weight=False)),),
    "sum": ((262144, None), (524288, Config(512, 512, 16, prefetch_weight=False, min_blocks_per_sm=2))),
    None: ((262144, Config(128, 128, 16, "shared")),),
}


def _is_long(spec) -> bool:
    return (spec.kind == "layernorm" and spec.vector == 8 and spec.width == 16 and not spec.heads and
            spec.N * spec.width // 8 > LONG_FROM_BYTES)


def _long(spec: NormSpec) -> Optional[Config]:
    """For rows of 16 bits an element in whole accesses, above LONG_FROM_BYTES; None for all others."""
    vectors = sum(WIDTH[dtype] for dtype in (spec.weight, spec.bias) if dtype)
    if not _is_long(spec) or vectors > spec.width:
        return None
    scale = spec.scale
    if spec.residual:
        scale = "sum" if scale == "row" else "none such"
    return next((config for limit, config in _LONG.get(scale, ()) if spec.N * spec.width // 8 <= limit), None)


def plan(spec: NormSpec) -> Config:
    """The config of the kernel that visits each row once. `launch.compiled` takes a persistent kernel instead where
    `persistent_plan.planned` or `fp8_persistent_plan.planned` has one."""
    return _long(spec) or (_vectored(spec) if spec.access == 128 else _narrow(spec))


_PATHS = (dict(prefetch_weight=True), dict(prefetch_weight=False), dict(prefetch_weight=True, rows_per_thread=2),
          dict(load="shared", prefetch_weight=True), dict(load="shared", prefetch_weight=False),
          dict(load="shared", prefetch_weight=False, rows_per_thread=2))


def variants(spec: NormSpec) -> list[Config]:
    """The configs worth timing for a spec with 16-byte accesses, the planned one first."""
    found = [plan(spec)]
    for cluster in (1, 2, 4, 8, 16):
        for row_threads in (32, 64, 128, 256, 512):
            for threads in (128, 256) if row_threads < 128 else (row_threads,):
                found += [c for path in _PATHS if _worth(spec, c := Config(row_threads, threads, cluster, **path))]
    return list(dict.fromkeys([*found, *_long_variants(spec)]))


def _long_variants(spec):
    """Of long rows of a float8 layernorm: two blocks on an SM."""
    if not (_is_long(spec) and spec.scale):
        return []
    found = [Config(512, 512, cluster, "registers", early, 1, 2) for cluster in (8, 16) for early in (True, False)]
    return [c for c in found if _serves(spec, c) and c.tile(spec).per_thread <= 32]


def _serves(spec, config) -> bool:
    try:
        check(spec, config)
    except ValueError:
        return False
    return True


def _worth(spec: NormSpec, config: Config) -> bool:
    if not _serves(spec, config):
        return False
    t = config.tile(spec)
    held = t.cols * spec.loaded // 8 * t.rows * config.rows_per_thread
    shared_well = t.cluster == 1 or (t.rows == 1 and t.cols * spec.width >= 8 * 16384)
    fits = t.cluster == config.cluster and held <= 65536 and packed_words(spec, config) <= PACKED_WORDS
    return shared_well and fits and t.per_thread >= 16

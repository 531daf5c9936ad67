"""How long rows of layernorm run where `plan.plan` has too many registers for them. No torch, no DSL.

Apart from plan.py, which is a source of every norm's kernel. bench/tune/norms.py times it.
"""
from typing import Optional

from ..dtypes import WIDTH
from . import plan as every
from .config import Config, smem_bytes
from .long_rows_config import Fp8LongRowsConfig
from .spec import NormSpec

FROM_BYTES = 131072  # of a row
SMEM_BYTES, REGISTERS = 227 * 1024, 65536  # of a multiprocessor, of which a block takes 1 KB more than its own


# (largest row of x in bytes; config) where weight and bias are no more bytes than x, by scale ("sum": a row's, with a
# residual); None, and what is not here: `plan.plan`. Most longer rows, those with more of weight and bias, and scales
# of 128 columns are `fp8_persistent_plan`'s, which comes first. Milliseconds on an H100 beside those of plain
# layernorm: N
# 131072 (M 8192) 1.120 of 1.415; 262144 (M 4096) with a residual 2.505 of 3.062.
_TABLES = {
    "row": ((262144, Fp8LongRowsConfig(128, 128, 16, rows_per_thread=2, min_blocks_per_sm=5)),),
    "sum": ((262144, None),
            (524288, Fp8LongRowsConfig(512, 512, 16, "registers", prefetch_weight=False, min_blocks_per_sm=2))),
    None: ((262144, Config(128, 128, 16, "shared")),),
}
# in place of the first, where its blocks would not have as many columns each: asking what is inside takes registers
_UNEVEN = Fp8LongRowsConfig(256, 256, 8, prefetch_weight=False, rows_per_thread=2, min_blocks_per_sm=3)


def plan(spec: NormSpec) -> Config:
    """The config that a spec runs with."""
    return planned(spec) or every.plan(spec)


def planned(spec: NormSpec) -> Optional[Config]:
    """For rows of 16 bits an element in whole accesses, above FROM_BYTES; None for all others."""
    row, scale = spec.N * spec.width // 8, spec.scale
    if spec.kind != "layernorm" or spec.vector != 8 or spec.width != 16 or row <= FROM_BYTES or spec.heads:
        return None
    if sum(WIDTH[dtype] for dtype in (spec.weight, spec.bias) if dtype) > spec.width:
        return None
    if spec.residual:
        scale = "sum" if scale == "row" else "none such"
    config = next((config for limit, config in _TABLES.get(scale, ()) if row <= limit), None)
    return _UNEVEN if scale == "row" and config and not config.tile(spec).even(spec.N) else config


def check(spec: NormSpec, config: Fp8LongRowsConfig) -> None:
    """Raises ValueError where a config cannot serve the spec."""
    t = config.tile(spec)
    if spec.kind != "layernorm" or not spec.scale or spec.heads:
        raise ValueError(f"a quantising layernorm without heads, got {spec}")
    if t.cluster < 2 or t.rows > 1:
        raise ValueError(f"a row for a cluster of blocks, got {t}")
    if config.load == "shared" and spec.scale != "row":
        raise ValueError(f"load: scales of 128 columns have their results in registers, got {config.load!r}")
    if config.load == "registers" and config.rows_per_thread > 1:
        raise ValueError(f"rows_per_thread: got {config.rows_per_thread}, in registers one is allowed")
    room = config.min_blocks_per_sm * (smem_bytes(spec, config) + 2048)
    if room > SMEM_BYTES or config.min_blocks_per_sm * t.threads * 32 > REGISTERS:
        raise ValueError(f"{config.min_blocks_per_sm} blocks of {t.threads} threads, {room} bytes of smem: too much")


# (blocks of a cluster, threads, rows at once, blocks on a multiprocessor)
_GEOMETRIES = ((16, 256, 2, 3), (16, 256, 2, 4), (16, 256, 1, 3), (16, 256, 1, 4), (16, 256, 3, 2), (16, 256, 3, 4),
               (16, 512, 2, 2), (16, 128, 2, 5), (8, 256, 2, 3))


def variants(spec: NormSpec) -> list[Config]:
    """Those worth timing, the planned one first."""
    found = [planned(spec)] if isinstance(planned(spec), Fp8LongRowsConfig) else []
    for cluster, threads, rows, min_blocks_per_sm in _GEOMETRIES:
        found += [Fp8LongRowsConfig(threads, threads, cluster, "shared", prefetch_weight, rows, min_blocks_per_sm)
                  for prefetch_weight in (True, False)]
    for cluster in (8, 16):
        found += [Fp8LongRowsConfig(512, 512, cluster, "registers", prefetch_weight, 1, 2)
                  for prefetch_weight in (True, False)]
    return list(dict.fromkeys(c for c in found if _serves(spec, c)))


def _serves(spec, config):
    try:
        check(spec, config)
    except ValueError:
        return False
    return config.tile(spec).per_thread <= (64 if config.load == "shared" else 32)

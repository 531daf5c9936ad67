"""Which tile of a grouped GEMM, how many stages. Pure Python, no torch, no DSL."""
from dataclasses import replace

from ...runtime.compile.recipe import Recipe
from ..dense.config import SHARED_BYTES
from ..fp8.config import Fp8Config, can_overlap_epilogue
from .spec import MOST_GROUPS, GroupedSpec

# Beside the table of groups, a fourth stage has room only where stores are half as wide.
FAST = (
    Fp8Config(raster_group=16, store_row_bytes=64, wgmma_in_flight=0, overlap_epilogue=1, pdl=True),
    Fp8Config(cluster=1, raster_group=16, store_row_bytes=64, wgmma_in_flight=0, overlap_epilogue=1, pdl=True),
    Fp8Config(n=128, stages=6, cluster=1),
    Fp8Config(m=64, n=128, stages=7, consumers=1, cluster=1, stagger_stages=0),
)
PROMOTED = (
    Fp8Config(n=192, stages=4, store_buffers=1, raster_group=16, pdl=True),
    Fp8Config(n=192, stages=4, store_buffers=1, cluster=1, raster_group=16, pdl=True),
    Fp8Config(n=128, stages=5, cluster=1),
    Fp8Config(m=64, n=128, stages=7, consumers=1, cluster=1, stagger_stages=0),
)


def plan(spec: GroupedSpec, M: int, N: int, G: int, num_sms: int) -> Fp8Config:
    """The configuration for groups of M / G rows in the mean: what they will be is known on the device alone.

    Tiles of 128 rows waste 64 of a group in the mean, and a cluster of two on top of each other more. Small ones where
    few tiles would leave SMs idle."""
    table = PROMOTED if spec.promote else FAST
    if spec.along == "m" and M <= 64 * G:
        return fit_to_spec(table[-1], spec)
    group, tiles = (M // G, -(-M // 128) + G // 2) if spec.along == "m" else (M, -(-M // 128) * G)
    for config in table[:-2]:
        down, right = (1, config.cluster) if config.cluster_along_n else (config.cluster, 1)
        if 128 * (down - 1) < group and config.n * (right - 1) < N and tiles * -(-N // config.n) >= num_sms:
            return fit_to_spec(config, spec)
    return fit_to_spec(table[-2], spec)


def shared_bytes(config: Fp8Config, spec: GroupedSpec) -> int:
    """The dense kernel's, and the table of groups."""
    return config.shared_bytes(spec) + 4 * (2 * MOST_GROUPS + 4)


def fit_to_spec(config: Fp8Config, spec: GroupedSpec) -> Fp8Config:
    """With as many stages as there is room for; as the dense kernel's rules have it."""
    while config.stages > 2 and shared_bytes(config, spec) > SHARED_BYTES:
        config = replace(config, stages=config.stages - 1, stagger_stages=min(config.stagger_stages, config.stages - 2))
    overlap_epilogue = config.overlap_epilogue if can_overlap_epilogue(spec, config) and not spec.masked else 0
    return replace(config, overlap_epilogue=overlap_epilogue, store_per_warp=False, wave_sync=0,
                   pdl=config.pdl and not spec.masked).check(spec)


def recipe(spec: GroupedSpec, config: Fp8Config) -> Recipe:
    return Recipe("tkq.gemm.grouped.kernel:GroupedGemm", (spec, config))

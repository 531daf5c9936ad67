"""Which configurations that were stored for ``tkq.gemm`` its kernels take. Pure Python."""
from ..stored import StoredConfigs
from . import plan
from .config import Config
from .small_m_config import SmallMConfig
from .wave_sync_config import WaveSyncConfig


def fit_to_spec(config, spec):
    """A configuration of any class, as a spec allows it."""
    return config if isinstance(config, SmallMConfig) else plan.fit_to_spec(config, spec)


def takes_rows(config, M: int) -> bool:
    """Is a configuration for M rows? One for small M without tiles along M takes at most its tile's rows."""
    return not isinstance(config, SmallMConfig) or config.tiled or config.m >= M


CONFIGS = StoredConfigs("gemm", {x.__name__: x for x in (Config, SmallMConfig, WaveSyncConfig)}, fit_to_spec,
                        takes_rows)

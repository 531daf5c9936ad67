"""Which configurations that were stored for ``tkq.gemm`` its kernels take. Pure Python."""
from ..stored import StoredConfigs
from .config import Config
from .plan import fit_to_spec
from .small_m_config import SmallMConfig


def takes_rows(config, M: int) -> bool:
    """Is a configuration for M rows? One for small M without tiles along M takes at most its tile's rows."""
    return not isinstance(config, SmallMConfig) or config.tiled or config.m >= M


CONFIGS = StoredConfigs("gemm", {x.__name__: x for x in (Config, SmallMConfig)}, fit_to_spec, takes_rows)

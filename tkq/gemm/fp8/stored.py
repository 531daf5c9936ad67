"""Which configurations that were stored for ``tkq.fp8_gemm`` its kernels take. Pure Python."""
from ..dense.stored import takes_rows
from ..stored import StoredConfigs
from .config import Fp8Config
from .plan import fit_to_spec
from .small_m_config import SmallMFp8Config

CONFIGS = StoredConfigs("fp8_gemm", {x.__name__: x for x in (Fp8Config, SmallMFp8Config)}, fit_to_spec, takes_rows)

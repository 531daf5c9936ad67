"""Which configurations that were stored for ``tkq.grouped_gemm`` its kernels take. Pure Python."""
from ..fp8.config import Fp8Config
from ..stored import StoredConfigs
from .plan import fit_to_spec

CONFIGS = StoredConfigs("grouped_gemm", {"Fp8Config": Fp8Config}, fit_to_spec)

"""A scale for each row: the norms' float8 kernel, without a norm."""
from cutlass import Float32

from .. import tile as tk
from ..norms.forward.fp8_output import Fp8Output
from ..norms.forward.kernel import NormWithOptions
from ..norms.forward.row_norm import RowNorm
from ..norms.spec import NormSpec


class NoNorm:
    """A part of RowNorm. A row passes through the chip once: its amax is exchanged between its threads, its elements
    wait in registers."""

    def exchanged(self, spec):
        return Float32

    def statistics(self, kernel, rows, eps):
        """There are none; but the first exchange is amax's then, for which the cluster's mbarriers must be ready."""
        if kernel.cluster_n > 1:
            tk.cluster_wait()
        return [[None] for _ in rows]

    def normalise(self, x, statistics):
        return x


class RowQuantizer:
    """A RowNorm without a norm; its arguments are those of a norm, of a spec without weight or bias."""

    def __init__(self, spec: NormSpec, config):
        self.norm = RowNorm(spec, config, NoNorm(), Fp8Output())

    # of a RowNorm, whatever its parts are
    fake_arguments, __call__ = NormWithOptions.fake_arguments, NormWithOptions.__call__

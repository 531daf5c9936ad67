"""The 16-bit GEMM with wave sync, for many waves of long tiles."""
from cutlass import Int32

from ..wave_sync import WaveSync
from .kernel import DenseGemm, operands
from .spec import GemmSpec
from .wave_sync_config import WaveSyncConfig


class WaveSyncGemm(WaveSync, DenseGemm):
    """As DenseGemm, and its producer waits for the other blocks' once in each wave: see ``WaveSync``. The counter is in
    the place of a bias."""

    def order_of(self, g, s):
        return self.order(g)

    def tile_of(self, g, s, order, number):
        return self.tile(g, number)

    def load_stage(self, g, s, t, k, r):
        self.load(g, s, t, k, r)

    def counter(self, g):
        return g.inputs.bias.iterator.toint()


def build(spec: GemmSpec, config: WaveSyncConfig):
    """(kernel, fake arguments): as ``dense.build``, a counter in the place of the bias."""
    from ...runtime.compile import fake

    a, b, out, _, *more = operands.fakes(spec)
    return WaveSyncGemm(spec, config), (a, b, out, fake.tensor("int32", (1,), (1,), align=4), *more, Int32(1))

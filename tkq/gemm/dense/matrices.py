"""A and B of the 16-bit GEMM: which tiles a block takes, and how a step of one comes into a stage."""
import cutlass
from cutlass import Int32

from ... import tile as tk
from ..raster import raster
from .config import Config
from .spec import GemmSpec
from .state import Tile, Tiles


class Matrices:
    """The operands of a ``Producer``; the consumers take the same tiles. Blocks of a cluster have tiles one above the
    other; each loads its own A, and its part of B for all."""

    def __init__(self, spec: GemmSpec, config: Config, tiles: Tiles):
        self.spec, self.config, self.parts = spec, config, tiles.parts

    def order(self, g, s):
        return tk.Schedule(g.rows * g.cols * g.batches, "static", self.config.cluster)

    def tile(self, g, s, order, number) -> Tile:
        """This block's tile."""
        batch = Int32(0)
        if self.spec.batch:
            batch = number // (g.rows * g.cols)
            number = number - batch * (g.rows * g.cols)
        row, col = raster(number, g.rows, g.cols, self.config.raster_group, cutlass.min)
        return Tile(batch, row * self.config.cluster + tk.cluster_rank(), col)

    def steps(self, g, t):
        return g.steps

    def load_stage(self, g, s, t, k, r):
        sem = s.pipe.acquire(r)
        a_t, b_t = self.spec.transposed
        at = [t.batch] if "a" in self.spec.batch else []
        tk.load_async(s.a[r.stage], g.a, (*at, *((k, t.row) if a_t else (t.row, k))), sem)
        at = [t.batch] if "b" in self.spec.batch else []
        place = (t.col, k) if b_t else (k, t.col)
        if self.parts == 1:
            tk.load_async(s.b[r.stage], g.b, (*at, *place), sem)
        else:
            for half in range(2):
                tk.load_async(s.b_parts[2 * r.stage + half], g.b, (*at, half, *place), sem)

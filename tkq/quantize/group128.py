"""Float8 with scales of 1 x 128, without the transpose: no tile of 128 rows is needed for it."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from .spec import EDGE, VECTOR
from .tiles import SIDE, THREADS, Operands, Tilewise


class Group128(Tilewise):
    """As Tiles, but 16 lanes take 8 rows of 128 columns, the next 16 the 128 columns beside them, and after the last
    ones the next 8 rows: a block reads up to 4 KB of a row in a stretch, where a tile's has 256 bytes.

      thread t      p = 16 * block + t // 16    rows 8 * (p // across) ..  columns 128 * (p % across) + 8 * (t % 16) ..
    """

    @cute.jit
    def __call__(self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, qt: Optional[cute.Tensor],
                 scale_t: Optional[cute.Tensor], amax: Optional[cute.Tensor], stream: cuda.CUstream):
        across = cute.ceil_div(x.shape[1], EDGE)
        pieces = across * cute.ceil_div(x.shape[0], VECTOR)
        self.kernel(Operands(x, q, scale, qt, scale_t, amax), across).launch(
            grid=[cute.ceil_div(pieces, SIDE), 1, 1], block=[THREADS, 1, 1], stream=stream)

    def tile_of(self, block, t, across):
        piece = block * SIDE + t // SIDE
        return piece // across, piece % across

    def corner(self, t, tile):
        return tile[0] * VECTOR, tile[1] * EDGE + t % SIDE * VECTOR

"""Where the kernels of attention's backward have what they hand each other."""
import cutlass.cute as cute
from cutlass import Int32, Int64

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.gqa_split import DkvPartials
from tkq.attention.backward.helper_warps import Counters
from tkq.attention.backward.preprocess import Workspace
from tkq.attention.backward.spec import BackwardSpec


def lay_out(spec: BackwardSpec, config: BackwardConfig, workspace: cute.Tensor, tiles, heads, blocks=None) -> Workspace:
    """For a number of tiles, K/V heads and blocks of keys: the statistics; the accumulator, where dQ is added up;
    counters, where blocks take one task after the other; where dK and dV are passed on (blocks; None: nowhere). In the
    host function; ``config.workspace_floats`` has its size."""
    c = config
    of_stats, of_acc = 2 * c.tile, c.tile * spec.width  # floats of a tile
    end, acc = workspace.iterator + Int64(tiles) * of_stats, None
    stats = cute.make_tensor(workspace.iterator, cute.make_layout((tiles, of_stats), stride=(of_stats, 1)))
    if c.adds_dq(spec):
        end = end.align(16)
        acc = cute.make_tensor(end, cute.make_layout((tiles, of_acc), stride=(of_acc, 1)))
        end = end + Int64(tiles) * of_acc
    if not c.persistent:
        return Workspace(stats, acc)
    counted = tiles + 1 if c.by_query_head or c.ordered else heads  # words of tiles, or query heads, which are no more
    count = Counters.count(counted) if c.helper_warps else 1 + 4 * tiles if c.serial else 1
    counters = cute.make_tensor(cute.recast_ptr(end, dtype=Int32), cute.make_layout((count,)))
    return Workspace(stats, acc, counters, None if blocks is None else DkvPartials.of(end + count, blocks, spec.width))

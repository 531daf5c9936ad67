"""Wave sync: a block starts wave i + 1 only when all have started wave i, so that A and B tiles are shared in L2. For
the 16-bit and the float8 GEMM."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from .. import tile as tk
from ..tile.assembly import ptx
from ..tile.bulk import count_up

PATIENCE = 512  # looks at the counter, of a quarter of a microsecond or so


class WaveSync:
    """A ``Producer`` that waits in each wave, after 1 / wave_sync of its own tile, until all blocks have begun theirs.

    A wave's tiles, 8 by 8 clusters, read the same rows of A and columns of B at the same time as long as they are at
    the same step of K. Without sync blocks drift apart a little more in each wave; where a wave's A and B exceed L2,
    data are evicted before the next block reads them and come from HBM again, which costs power that the tensor cores
    need.

      block 0   |wave 0       |begin|1/16|wait|..      |begin|1/16|wait|..
      block 1     |wave 0       |begin|1/16| ..          |begin|1/16| ..      the last one to begin does not wait

    counter, int32, zero before and after: how often blocks have begun a wave in which all have a tile, and at last,
    ended: that arrival of the last block resets it. A waiting block has not ended, so no block waits for a counter that
    was reset. The sync affects speed alone: a block that has waited long (others have no SM yet, as another kernel runs
    there) goes on.

    operands: as of ``Producer``; all tiles have ``g.steps`` steps of K. The counter's address is ``g.counter``.
    """

    def __init__(self, operands, wave_sync: int):
        self.operands, self.wave_sync = operands, wave_sync

    @cute.jit
    def produce(self, g, s: Constexpr):
        order, r, head = self.operands.order(g, s), s.pipe.ring(), g.steps // self.wave_sync
        number, begun, patient, waves = order.first(), Int32(0), Int32(1), order.tasks // order.workers()
        while number < order.tasks:
            t = self.operands.tile(g, s, order, number)
            if begun < waves:
                self.arrive(g, waves)
            for k in cutlass.range(g.steps, unroll=1):
                if (k == head) & (begun < waves) & (patient == 1):
                    patient = _reached(g.counter, (begun + 1) * cute.arch.grid_dim()[0])
                self.operands.load_stage(g, s, t, k, r)
                r.advance()
            number = order.following(number)
            begun += 1
        self.arrive(g, waves)

    @cute.jit
    def arrive(self, g: Constexpr, waves: Int32):
        if tk.lane_id() == 0:
            count_up(g.counter, Uint32((waves + 1) * cute.arch.grid_dim()[0] - 1))


@dsl_user_op
def _reached(counter, least, *, loc=None, ip=None):
    """1 when the counter has come so far, 0 if it does not for long. A warp, whose lanes poll together: after a poll by
    one lane the compiler would not know that the warp has reconverged, and would keep no uniform values in uniform
    registers: twice the instructions a step."""
    return Int32(ptx(
        [Int64(counter), Uint32(least)],
        "{ .reg .pred p; .reg .b32 v, n; mov.u32 n, 0; mov.u32 $0, 1; LOOK: ld.relaxed.gpu.global.u32 v, [$1]; "
        "setp.hs.u32 p, v, $2; vote.sync.any.pred p, p, 0xffffffff; @p bra.uni REACHED; add.u32 n, n, 1; "
        f"setp.lo.u32 p, n, {PATIENCE}; @p bra.uni LOOK; mov.u32 $0, 0; REACHED: }}", "=&r,l,r", loc, ip, T.i32()))

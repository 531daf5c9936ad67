"""Blocks that keep pace, round of tiles for round, so that what they share is read once: of the 16-bit GEMM and of the
float8 one."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from .. import tile as tk
from ..tile.bulk import _asm, count_up

PATIENCE = 512  # looks at the counter, of a quarter of a microsecond or so


class Pace:
    """In front of a GEMM with one producer warp: a block's producer waits in each round of tiles, after 1 / pace of its
    own, until all blocks have begun theirs.

    A round's tiles, 8 by 8 clusters of them, read the same rows of A and columns of B at the same time, if they are at
    the same step of K. Left alone they drift apart, each round a little more; where a round's A and B are more than L2
    holds, what one has read is gone when the next one comes for it, and is read from HBM again, which costs the power
    that the tensor cores are then short of.

      block 0   |round 0      |begin|1/16|wait|..      |begin|1/16|wait|..
      block 1     |round 0      |begin|1/16| ..          |begin|1/16| ..      the last one to begin waits for nobody

    counter, int32, zero before and after: how often blocks have begun a round in which all have a tile, and at last,
    ended: that arrival of the last block takes it back to zero. Whoever waits has not ended, so nobody waits for a
    counter that is back already. It is a matter of speed alone: a block that has waited long (others have no processor
    yet, as another kernel runs there) waits no more.

    A GEMM says what its producer does (``order_of``, ``tile_of``, ``load_stage``) and where the counter is
    (``counter``, its address).
    """

    @cute.jit
    def produce(self, g, s: Constexpr):
        order, r, head = self.order_of(g, s), s.pipe.ring(), g.steps // self.config.pace
        number, begun, patient, rounds = order.first(), Int32(0), Int32(1), order.tasks // order.workers()
        while number < order.tasks:
            t = self.tile_of(g, s, order, number)
            if begun < rounds:
                self.arrive(g, rounds)
            for k in cutlass.range(g.steps, unroll=1):
                if (k == head) & (begun < rounds) & (patient == 1):
                    patient = _reached(self.counter(g), (begun + 1) * cute.arch.grid_dim()[0])
                self.load_stage(g, s, t, k, r)
                r.advance()
            number = order.following(number)
            begun += 1
        self.arrive(g, rounds)

    @cute.jit
    def arrive(self, g: Constexpr, rounds: Int32):
        if tk.lane_id() == 0:
            count_up(self.counter(g), Uint32((rounds + 1) * cute.arch.grid_dim()[0] - 1))


@dsl_user_op
def _reached(counter, least, *, loc=None, ip=None):
    """1 when the counter has come so far, 0 if it does not for long. A warp, whose lanes look together and are told the
    same: of a lane by itself the compiler would not know that the warp is whole again, and would keep nothing that all
    lanes share in their common registers: twice the instructions a step."""
    return Int32(_asm(
        [Int64(counter), Uint32(least)],
        "{ .reg .pred p; .reg .b32 v, n; mov.u32 n, 0; mov.u32 $0, 1; LOOK: ld.relaxed.gpu.global.u32 v, [$1]; "
        "setp.hs.u32 p, v, $2; vote.sync.any.pred p, p, 0xffffffff; @p bra.uni REACHED; add.u32 n, n, 1; "
        f"setp.lo.u32 p, n, {PATIENCE}; @p bra.uni LOOK; mov.u32 $0, 0; REACHED: }}", "=&r,l,r", loc, ip, T.i32()))

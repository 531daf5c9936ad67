"""Which warpgroup makes which chunk's scores: the part of `LinearAttention` that knows of several."""
from cutlass import Uint32

from tkq.linear_attention.config import LinearConfig
from tkq.tile.sync import Ring

BARRIER_STRIDE = 3  # named barriers of the scores' warpgroups are so far apart: those of the state's lie between


class ScorePingPong:
    """One warpgroup makes the scores of all chunks. Or, in blocks of one head, two in ping-pong: one has the even
    chunks, the other the odd ones. What a chunk's scores wait for, gates, products and barriers, then overlaps with the
    other warpgroup's work, and the state has scores twice as often.

    Stages are even in number, so that a stage belongs to one warpgroup. If it changed hands, a warpgroup that has not
    waited for each phase of its semaphore could take an old phase for the one it waits for."""

    def __init__(self, config: LinearConfig):
        """count: of the warpgroups; from one of its chunks to the next a warpgroup goes on by as many."""
        self.count = config.scores

    def begin(self, wg, *rings: Ring):
        """A warpgroup's first chunk, where its rings are then."""
        if self.count == 1:
            return 0
        for ring in rings:
            ring.count[0] = Uint32(wg)
        return wg

    def advance(self, ring: Ring):
        """To a warpgroup's next chunk."""
        for _ in range(self.count):
            ring.advance()

    def barrier(self, number, wg):
        """A warpgroup's own named barrier; number: the first one's."""
        return number if self.count == 1 else number + BARRIER_STRIDE * wg

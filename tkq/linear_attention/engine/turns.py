"""Which warpgroup makes which scores: the part of `LinearAttention` that knows of several."""
from cutlass import Uint32

from tkq.linear_attention.config import LinearConfig
from tkq.tile.sync import Ring

BETWEEN = 3  # named barriers of the scores' warpgroups are so far apart: those of the state's lie between


class ScoreTurns:
    """One warpgroup makes the scores of all chunks. Or, of blocks of one head, two do in turn, every other chunk each:
    what a chunk's scores wait for, gates, products and barriers, is then waited for beside the other's work, and the
    state has them twice as often. Stages are even in number: a warpgroup that had not seen each turn of a stage could
    take the one before for its own."""

    def __init__(self, config: LinearConfig):
        """every: a warpgroup has every so many-th chunk."""
        self.every = config.scores

    def begin(self, wg, *rings: Ring):
        """A warpgroup's first chunk, where its rings are then."""
        if self.every == 1:
            return 0
        for ring in rings:
            ring.count[0] = Uint32(wg)
        return wg

    def advance(self, ring: Ring):
        """To a warpgroup's next chunk."""
        for _ in range(self.every):
            ring.advance()

    def barrier(self, number, wg):
        """A warpgroup's own; number: the first one's."""
        return number if self.every == 1 else number + BETWEEN * wg

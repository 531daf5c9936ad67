"""Which warpgroup makes which scores: the part of `LinearAttention` that knows of several."""
from cutlass import Uint32

from tkq.linear_attention.config import LinearConfig
from tkq.tile.sync import Ring

BETWEEN = 3  # named barriers of the scores' warpgroups are so far apart: those of the state's lie between


class Turns:
    """One warpgroup makes the scores of all chunks and heads. Or each of a block's two heads has one of its own. Or
    those of one head are made by two in turn, every other chunk by each: what a chunk's scores wait for, gates,
    products and barriers, is then waited for beside the other's work, and the state has them twice as often."""

    def __init__(self, config: LinearConfig):
        """count: of these warpgroups. of_chunk: how many of them a chunk has. every: each has every so many-th chunk.
        heads: how many of a chunk's a warpgroup makes."""
        self.count, self.of_chunk = config.scores, min(config.scores, config.heads)
        self.every, self.heads = self.count // self.of_chunk, config.heads // self.of_chunk

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

    def head(self, wg, n):
        """The n-th head of a block that is a warpgroup's."""
        return n if self.of_chunk == 1 else wg

    def barrier(self, number, wg):
        """A warpgroup's own; number: the first one's."""
        return number if self.count == 1 else number + BETWEEN * wg

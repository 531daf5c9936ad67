"""Which blocks add up what, of sums behind each token. From sizes alone."""
from __future__ import annotations

HEADS, LANES, EACH = 32, 16, 8  # of a block: heads, whose numbers are neighbours; threads of each; tokens of one
TILE = LANES * EACH
SEGMENTS = 128  # of a sequence, at most: each of its blocks reads a total of each behind its own


def segment_count(tokens: int, sequences: int | None = None) -> int:
    """Into how many segments of whole tiles a sequence is cut, so that as many blocks have a head of it. sequences:
    packed ones, which share the tokens: as many as one of the mean length has tiles."""
    tiles = -(-tokens // TILE)
    if sequences is not None:
        return max(min(tiles // max(sequences, 1), SEGMENTS), 1)
    return max(-(-tiles // max(-(-tiles // SEGMENTS), 1)), 1)

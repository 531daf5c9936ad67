"""How latent attention's key blocks are divided among parts: `balancer.Balancer` does the same. Pure Python.

A part holds ``size`` blocks. Sequences follow each other; one that begins behind another in a part leaves a gap of
``begin`` blocks, as long as its start takes. One that does not fit where it would begin goes on in the parts behind, if
``spill`` is set and `LEAST_ROOM` blocks of it fit, else it begins with the next part: no gap lies in two parts. The
pieces of a sequence that several parts have are partial results: written in fp32, and combined by the merge kernel.

Many pairs of size and spill are tried, and the cheapest one is taken: its size, and what its partial results cost. So
sequences of like lengths stay whole, or are cut into equal pieces, where equal shares of all work would cut each of
them to save a few blocks."""
from __future__ import annotations

from typing import NamedTuple

CANDIDATES = 512  # a thread of the planner each
EACH = CANDIDATES // 4  # of a kind
ROOM, MOST_SEQUENCES = 2048, 8  # sequences, at most; for each part: of more of them cutting costs little of the whole
MOST_BLOCKS = 1 << 20  # of all sequences, of which more than one candidate is tried
LEAST_ROOM = 4
# Costs, in units of one block of keys: MERGE, of the merge kernel; PARTIAL, of writing a partial result, and one more
# for each PARTIAL_ROWS of its rows.
MERGE, PARTIAL, PARTIAL_ROWS = 4, 2, 16


class Place(NamedTuple):
    """Where the next sequence may begin: block ``base + used``. base: the first one of its part. fill: blocks of the
    fullest part."""

    base: int = 0
    used: int = 0
    partials: int = 0
    fill: int = 0


def put(at: Place, blocks: int, candidate: tuple[int, bool], begin: int) -> tuple[Place, int]:
    """(the place behind a sequence of so many blocks, where its first one is)."""
    (base, used, partials, fill), (size, spill) = at, candidate
    used += begin if used else 0
    if used + blocks > size and used and not (spill and used + LEAST_ROOM <= size):
        base, used = base + size, 0
    behind = -(-max(used + blocks - size, 0) // size)  # parts
    end = used + blocks - behind * size
    partials, fill = (partials + behind + 1, size) if behind else (partials, max(fill, end))
    return Place(base + behind * size, end, partials, fill), base + used


def candidates(blocks: list[int], parts: int, begin: int) -> list[tuple[int, bool]]:
    """(size, spill): from the mean on, with cuts anywhere; up to one more sequence, where all stay whole that fit into
    a part; equal pieces of the longest one, both ways."""
    total, longest = sum(blocks), max(blocks)
    if total > MOST_BLOCKS:  # one with room for all, whatever their lengths
        return [((total + len(blocks) * begin) // parts + begin + LEAST_ROOM + 1, True)]
    mean, pieces = -(-total // parts), [-(-longest // (n + 1)) for n in range(EACH)]
    sizes = [mean + n for n in range(EACH)], [mean + longest * n // EACH for n in range(EACH)], pieces, pieces
    return [(size, kind % 2 == 0) for kind, some in enumerate(sizes) for size in some]


def partial_cost(rows: int) -> int:
    """rows: of a tile."""
    return PARTIAL + rows // PARTIAL_ROWS


def balanced(blocks: list[int], parts: int, begin: int, rows: int) -> tuple[list[int], int, int]:
    """(where each sequence begins, blocks of a part, blocks and gaps in all)."""
    best, fixed = None, MERGE * parts
    for candidate in candidates(blocks, parts, begin):
        at, (size, spill) = Place(), candidate
        for n in blocks:
            at, _ = put(at, n, candidate, begin)
        if at.base + at.used <= parts * size:
            size = size if at.partials else at.fill  # what is whole lies in the same parts then
            cost = size * parts + (fixed + at.partials * partial_cost(rows) if at.partials else 0)
            if best is None or cost < best[0]:
                best = cost, size, spill
    at, starts, candidate = Place(), [], best[1:]
    for n in blocks:
        at, start = put(at, n, candidate, begin)
        starts.append(start)
    return starts, candidate[0], at.base + at.used

"""How a kernel of linear attention is laid out."""
from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64  # tokens
ALL = 1 << 30  # chunks that reach a segment's end, where the state before it does, too


@dataclass(frozen=True)
class LinearConfig:
    """groups: warpgroups of a block that hold 64 rows of the state's V each. stages: chunks of q, k and v that are
    loaded ahead. registers: of a thread of the producer, of the scores' warpgroups and of the state's. heads: of a
    block: 1, or 2 that share one of q and k, with a warpgroup of the state each, whose V is 64 at most. scores:
    warpgroups that make scores: 1, or, with one head, 2 in ping-pong. score_stages: chunks whose scores are made ahead.
    outputs: tiles through which a warpgroup's outputs leave: 1, or 2, double-buffered.

    Raises:
        ValueError: stages or score_stages is no multiple of scores (see `engine.ping_pong.ScorePingPong`).
    """

    groups: int = 2
    stages: int = 2
    registers: tuple = (24, 104, 192)
    heads: int = 1
    scores: int = 1
    score_stages: int = 2
    outputs: int = 1

    def __post_init__(self):
        if self.stages % self.scores or self.score_stages % self.scores:
            raise ValueError(f"LinearConfig: stages and score_stages are {self.stages} and {self.score_stages}, "
                             f"allowed are multiples of scores, {self.scores}")

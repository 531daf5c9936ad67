"""What a caller of the backward with wide heads asked for: the part that decides which code is compiled."""
from dataclasses import dataclass

from tkq.attention.common import refusals
from tkq.attention.wide.spec import WIDTHS

PASSES = ("dq", "dk", "dv")


@dataclass(frozen=True)
class WideBackwardSpec:
    """dtype: of q, k, v, o, their gradients and do. width: columns of a tile. left, right: queries see at most a number
    of keys, known at run time, to the left and to the right of the key they are aligned with; causal is right, of 0.
    softcap: scores went through softcap * tanh(score / softcap). dq: q's gradient is wanted too. dlse: the log-sum-exp
    has a gradient. varlen: packed sequences, delimited by cu_seqlens; seqused_q, seqused_k: only the first rows of each
    are in use.

    Raises:
        NotImplementedError: what no kernel takes, by name.
    """

    dtype: str = "bf16"
    width: int = 512
    left: bool = False
    right: bool = False
    dq: bool = True
    dlse: bool = False
    softcap: bool = False
    varlen: bool = False
    seqused_q: bool = False
    seqused_k: bool = False

    def __post_init__(self):
        refusals.of_backward(self, WIDTHS)

    @property
    def passes(self) -> tuple:
        """The gradients that are made, in order."""
        return PASSES if self.dq else PASSES[1:]

"""What a caller of attention's backward asked for: the part that decides which code is compiled."""
from dataclasses import dataclass

from tkq.attention.common import refusals

WIDTHS = (64, 128, 256)  # of tiles: TMA fills a narrower head up with zeros


def width(head_dim: int, head_dim_v: int) -> int:
    """Of the tiles that hold ``head_dim`` columns of q and k, and ``head_dim_v`` of v.

    Raises:
        NotImplementedError: not multiples of 8 from 8 to 256.
    """
    for name, n in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if n % 8 or not 8 <= n <= WIDTHS[-1]:
            raise NotImplementedError(f"attention backward: {name} is {n}, supported are multiples of 8 from 8 to "
                                      f"{WIDTHS[-1]}")
    return next(w for w in WIDTHS if max(head_dim, head_dim_v) <= w)


@dataclass(frozen=True)
class BackwardSpec:
    """dtype: of q, k, v, o, their gradients and do. width: columns of a tile, see ``width``. left, right: queries see
    at most a number of keys, known at run time, to the left and to the right of the key they are aligned with; causal
    is right, of 0. softcap: scores went through softcap * tanh(score / softcap). dq: q's gradient is wanted too. dlse:
    the log-sum-exp has a gradient. deterministic: the same dQ in each run: made by a kernel of its own,
    or added up in a fixed order. varlen: packed sequences, delimited by cu_seqlens; seqused_q, seqused_k: only the
    first rows of each are in use.

    Raises:
        NotImplementedError: a combination that no kernel takes, by name.
    """

    dtype: str = "bf16"
    width: int = 128
    left: bool = False
    right: bool = False
    softcap: bool = False
    dq: bool = True
    dlse: bool = False
    deterministic: bool = False
    varlen: bool = False
    seqused_q: bool = False
    seqused_k: bool = False

    def __post_init__(self):
        refusals.of_backward(self, WIDTHS)

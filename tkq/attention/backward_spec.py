"""What a caller of attention's backward asked for: the part that decides which code is compiled."""
from dataclasses import dataclass

from tkq.attention.spec import DTYPES

HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class BackwardSpec:
    """dtype: of q, k, v, o, their gradients and do. head_dim: of all of them. left, right: queries see no further than
    so many keys (known at run time) to the left, to the right of the key they are aligned with; causal is right, of 0.
    dq: q's gradient is wanted too. dlse: the log-sum-exp has a gradient. deterministic: the same in each run.

    Raises:
        NotImplementedError: a combination that no kernel takes, by name.
    """

    dtype: str = "bf16"
    head_dim: int = 128
    left: bool = False
    right: bool = False
    dq: bool = True
    dlse: bool = False
    deterministic: bool = False

    @property
    def adds_dq(self) -> bool:
        """dQ is added up by the blocks that have the keys, in whatever order; else a kernel of its own makes it."""
        return self.dq and not self.deterministic

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise NotImplementedError(f"attention backward: q is {self.dtype}, supported are {', '.join(DTYPES)}")
        if self.head_dim not in HEAD_DIMS:
            supported = ", ".join(map(str, HEAD_DIMS))
            raise NotImplementedError(f"attention backward: head_dim is {self.head_dim}, supported are {supported}")

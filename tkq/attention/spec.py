"""What a caller of attention asked for: the part that decides which code is compiled."""
from dataclasses import dataclass

DTYPES = ("bf16", "fp16")
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class AttentionSpec:
    """dtype: of q, k, v and o. head_dim: of q, k and v. causal: query i sees key j if j <= i + Sk - Sq. lse: the
    log-sum-exp is written too.

    Raises:
        NotImplementedError: a combination that no kernel takes, by name.
    """

    dtype: str = "bf16"
    head_dim: int = 128
    causal: bool = False
    lse: bool = True

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise NotImplementedError(f"flash_attn: q is {self.dtype}, supported are {', '.join(DTYPES)}")
        if self.head_dim not in HEAD_DIMS:
            supported = ", ".join(map(str, HEAD_DIMS))
            raise NotImplementedError(f"flash_attn: head_dim is {self.head_dim}, supported are {supported}")

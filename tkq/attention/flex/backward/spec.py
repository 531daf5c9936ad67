"""What a caller of flex_attention's backward asked for: the part that decides which code is compiled."""
from dataclasses import dataclass
from typing import Optional

from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.flex.functions.capture_derivatives import Derivatives
from tkq.attention.flex.functions.derivative import Joint
from tkq.attention.flex.functions.graph import Graph


@dataclass(frozen=True)
class FlexBackwardSpec:
    """dtype, width, dq, dlse: as of ``BackwardSpec``. score, mask: graphs, None where there is none. joint: of a score
    function whose derivative is not 1, in the place of ``score``. blocks, full: as of ``FlexSpec``, of
    lists of query blocks. states: blocks of 64 keys, of which a task of 128 has two, and what each of them is stands in
    a table. q_per: tiles of queries in a listed block; kv_per: tasks in one."""

    dtype: str = "bf16"
    width: int = 128
    dq: bool = True
    dlse: bool = False
    score: Optional[Graph] = None
    joint: Optional[Joint] = None
    mask: Optional[Graph] = None
    blocks: bool = False
    full: bool = False
    states: bool = False
    q_per: int = 1
    kv_per: int = 1

    @property
    def graph(self) -> Optional[Graph]:
        """Of the score function, perhaps with its derivative."""
        return self.score if self.joint is None else self.joint.graph

    @property
    def attention(self) -> BackwardSpec:
        """Of the parts that it shares with ``flash_attn``. right: tasks differ in length."""
        return BackwardSpec(self.dtype, self.width, dq=self.dq, dlse=self.dlse, right=True)


@dataclass(frozen=True)
class CaptureSpec:
    """Of the kernel that makes gradients of captured tensors. of: the attention, without dq and ``joint``. derivatives:
    by which elements of which tensors. ranks: of the gradients."""

    of: FlexBackwardSpec
    derivatives: Derivatives
    ranks: tuple

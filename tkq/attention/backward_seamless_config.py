"""How attention's backward is built where it has no seams: pure Python."""
from dataclasses import dataclass

from tkq.attention.backward_config import BackwardConfig


@dataclass(frozen=True)
class SeamlessConfig(BackwardConfig):
    """With ``background``, which makes most rows' statistics too, and memory for the next task's K beside this one's
    (``tkq.attention.backward_seamless``)."""

    def shared_bytes(self, width: int) -> int:
        return super().shared_bytes(width) + 2 * self.block * width

    def check(self, width: int) -> "SeamlessConfig":
        super().check(width)
        if not self.background or self.dq_add != "bulk" or width > 128:
            raise ValueError(f"{self}: it is for background, dq_add bulk and two warpgroups with keys")
        return self

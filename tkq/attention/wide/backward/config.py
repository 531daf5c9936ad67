"""How a pass of the backward with wide heads is built: pure Python."""
from dataclasses import dataclass

from tkq.attention.forward.config import SEMAPHORE_BYTES
from tkq.attention.wide.config import ROWS, WideConfig


@dataclass(frozen=True)
class PassConfig(WideConfig):
    """A pass has 64 rows of queries, or of keys, and the others pass by as columns. ``WideConfig``'s fields with K for
    what S and dP are multiplied from, V for what the gradient is: kv are columns of a step. products: 2, S and dP, or
    S alone."""

    kv: int = 64
    products: int = 2

    def key_slots(self, head_dim: int) -> int:
        """Slots of a step's products."""
        return self.products * head_dim // self.key_cols

    def shared_bytes(self, head_dim: int) -> int:
        """Of a block: what stays, P or dS, the ring."""
        return (SEMAPHORE_BYTES + 2 * ROWS * (self.products * head_dim + self.kv)
                + self.stages * self.slot_bytes(head_dim))

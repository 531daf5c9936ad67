"""Which task next. Tasks are numbered; what a number means (which tile of which head) is the kernel's business.

    single   one task a block: the hardware deals them out
    static   persistent blocks, block b of n takes b, b + n, b + 2n ..
    dynamic  persistent blocks that fetch the next number from a counter: number the longest tasks first, and the blocks
             end together

The producer warp asks; consumers learn the number from it (``Mailbox``, or beside the first tile they wait for), or,
with single and static, go through the same numbers by themselves.
"""
from dataclasses import dataclass
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Uint32, const_expr

from .block import lane_id
from .bulk import count_up
from .sync import cluster_rank

KINDS = ("single", "static", "dynamic")


@dataclass(frozen=True)
class Schedule:
    """Numbers 0 .. tasks - 1, dealt out to the blocks (or clusters) of the grid.

    counter: dynamic's, one int32 that is 0; it is back at 0 when the last task has been fetched, without a reset. It
    belongs to one launch at a time: one counter a device and stream. Of a cluster, its first block fetches."""

    tasks: Int32
    kind: Constexpr[str] = "static"
    cluster: Constexpr[int] = 1
    counter: Optional[cute.Tensor] = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"Schedule: kind is {self.kind!r}, allowed are {', '.join(KINDS)}")
        if self.cluster < 1:
            raise ValueError(f"Schedule: cluster is {self.cluster}, allowed is 1 or more")
        if self.kind == "dynamic" and self.counter is None:
            raise ValueError("Schedule: counter is None, dynamic needs one")

    def workers(self):
        """How many blocks, or clusters of blocks, share the tasks."""
        return cute.arch.grid_dim()[0] // self.cluster

    def first(self):
        """This block's first task."""
        return Int32(cute.arch.block_idx()[0] // self.cluster)

    @cute.jit
    def fetch(self):
        """Ask for the next task, early: dynamic's atomic flies while the producer loads. The producer warp."""
        number = Int32(0)
        if const_expr(self.kind == "dynamic"):
            asks = lane_id() == 0
            if const_expr(self.cluster > 1):
                asks = lane_id() + cluster_rank() == 0
            if asks:
                # Each of n blocks starts with one task and fetches one too many: as many fetches as tasks in all.
                number = Int32(count_up(self.counter.iterator.toint(), Uint32(self.tasks - 1))) + self.workers()
        return number

    def following(self, number, fetched=None, tell=None):
        """The task after ``number``; from ``tasks`` on: none. fetched: what ``fetch`` gave. tell: of dynamic clusters,
        from the number that the first block has to the one that all have. A whole warp."""
        if self.kind == "dynamic":
            if fetched is None:
                raise ValueError("following: fetched is None, dynamic needs what fetch gave")
            if self.cluster > 1 and tell is None:
                raise ValueError(f"following: tell is None, dynamic needs it in clusters of {self.cluster}")
            number = cute.arch.shuffle_sync(fetched, 0)
            return number if self.cluster == 1 else tell(number)
        if self.kind == "static":
            return number + self.workers()
        return self.tasks + 0


def blocks_for(kind: str, tasks, num_sms, cluster=1):
    """How many blocks to launch: all of them, or as many as the SMs hold at one each. In the host function."""
    return tasks * cluster if kind == "single" else cutlass.min(tasks * cluster, num_sms // cluster * cluster)

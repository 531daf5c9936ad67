"""How the backward's kernels for query heads that share a K/V head are built: pure Python."""
from dataclasses import dataclass, fields

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.spec import BackwardSpec


@dataclass(frozen=True)
class GqaConfig(BackwardConfig):
    """Of ``tkq.attention.backward.gqa``, with helper warps. tail_waves: waves of blocks in the heads at the end, whose
    longest tasks come first. heads_per_task: query heads of a task, of those that share a K/V head, where that divides
    their number, else one; dK and dV partial sums are passed on from task to task
    (``tkq.attention.backward.gqa_split``). 0: all of them in one task."""

    helper_warps: bool = True
    tail_waves: int = 1
    heads_per_task: int = 0

    @classmethod
    def of(cls, config: BackwardConfig, **changes) -> "GqaConfig":
        """As ``config``, with changes."""
        return cls(**{**{field.name: getattr(config, field.name) for field in fields(config)}, **changes})

    def dkv_partial_floats(self, spec: BackwardSpec, keys: int) -> int:
        """dK and dV on their way, and a counter for each warp."""
        return -(-keys // self.block) * (2 * self.block * spec.width + 8) + 8 if self.heads_per_task else 0

    def check(self, width: int) -> "GqaConfig":
        """Itself; ValueError for a configuration that cannot run."""
        if not self.helper_warps or width > 128 or self.tail_waves < 1 or self.dq_reduce != "bulk":
            raise ValueError(f"{self}: query heads that share a K/V head need helper_warps, dq_reduce bulk and a wave "
                             "or more, and are for two dK/dV warpgroups")
        super().check(width)
        return self

"""How the backward's kernels for query heads that share a K/V head are built: pure Python."""
from dataclasses import dataclass, fields

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.common.integers import least, most


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


def part_in_order(number, parts, splits_per_kv_head, l2_section, tail_heads):
    """Part ``number`` in the order of work, of ``parts`` of all K/V heads, ``splits_per_kv_head`` of each: the first
    parts of a group of K/V heads before their second ones, and so on, then the next group. A group has, in whole
    sections, at most as many parts as run at once (``tail_heads`` less one or two): a part's dK and dV are ready when
    the next one needs them."""
    together = most((tail_heads - 1) // l2_section, 1) * l2_section
    group = number // (together * splits_per_kv_head)
    within = number - group * (together * splits_per_kv_head)
    width = least(together, parts // splits_per_kv_head - group * together)
    return (group * together + within % width) * splits_per_kv_head + within // width

"""How the backward's kernels for query heads that share a K/V head are built: pure Python."""
from dataclasses import dataclass, fields

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.common.integers import least, most


@dataclass(frozen=True)
class GroupedConfig(BackwardConfig):
    """Of ``tkq.attention.backward.gqa``, with background. rounds: the heads at the end whose longest tasks come
    first have so many times as many blocks as there are at once. split: query heads of a task, of those that share a
    K/V head, where that divides their number, else one; dK and dV are handed on from task to task
    (``tkq.attention.backward.gqa_split``). 0: all of them in one task."""

    background: bool = True
    rounds: int = 1
    split: int = 0

    @classmethod
    def of(cls, config: BackwardConfig, **changes) -> "GroupedConfig":
        """As ``config``, with changes."""
        return cls(**{**{field.name: getattr(config, field.name) for field in fields(config)}, **changes})

    def handed_floats(self, spec: BackwardSpec, keys: int) -> int:
        """dK and dV on their way, and a counter for each warp."""
        return -(-keys // self.block) * (2 * self.block * spec.width + 8) + 8 if self.split else 0

    def check(self, width: int) -> "GroupedConfig":
        """Itself; ValueError for a configuration that cannot run."""
        if not self.background or width > 128 or self.rounds < 1 or self.dq_add != "bulk":
            raise ValueError(f"{self}: query heads that share a K/V head need background, dq_add bulk and a round or "
                             "more, and are for two warpgroups with keys")
        super().check(width)
        return self


def part_of_turn(turn, parts, share, section, tail):
    """The part whose turn it is, of ``parts`` of all K/V heads, ``share`` of each side by side: the first parts of some
    K/V heads before their second ones, and so on, then the next heads'. So many, in whole sections, as there are at
    work at once, or fewer (``tail``: one or two more): a part's dK and dV are there when the next one has its own."""
    together = most((tail - 1) // section, 1) * section
    number = turn // (together * share)
    within = turn - number * (together * share)
    width = least(together, parts // share - number * together)
    return (number * together + within % width) * share + within // width

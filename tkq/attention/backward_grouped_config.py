"""How the backward's kernels for query heads that share a K/V head are built: pure Python."""
from dataclasses import dataclass, fields, replace

from tkq.attention.backward_config import BackwardConfig
from tkq.attention.ranges import least


@dataclass(frozen=True)
class GroupedConfig(BackwardConfig):
    """Of ``tkq.attention.backward_grouped``. split goes with background here. rounds: the heads at the end whose
    longest tasks come first have so many times as many blocks as there are at once. all_help: who has keys finishes
    dQ too, when no task is left."""

    background: bool = True
    rounds: int = 1
    all_help: bool = False

    @classmethod
    def of(cls, config: BackwardConfig, **changes) -> "GroupedConfig":
        """As ``config``, with changes."""
        return cls(**{**{field.name: getattr(config, field.name) for field in fields(config)}, **changes})

    def check(self, width: int) -> "GroupedConfig":
        """Itself; ValueError for a configuration that cannot run."""
        if not self.background or width > 128 or self.rounds < 1 or self.dq_add != "bulk":
            raise ValueError(f"{self}: query heads that share a K/V head need background, dq_add bulk and a round or "
                             "more, and are for two warpgroups with keys")
        BackwardConfig.check(replace(self, split=0), width)
        return self


def parts_together(head, heads, share, together):
    """Part ``head`` in order, of ``heads`` K/V heads, of all batch elements, in ``share`` parts each, those of one K/V
    head side by side: the first parts of ``together`` K/V heads, then their second ones, and so on, then the next."""
    number = head // (together * share)
    within = head - number * (together * share)
    width = least(together, heads - number * together)
    return (number * together + within % width) * share + within // width

"""How attention's backward is built where only zeroes are made in the background: pure Python."""
from dataclasses import dataclass

from tkq.attention.backward_grouped_config import GroupedConfig
from tkq.attention.query_ranges import chained_heads
from tkq.attention.ranges import least


@dataclass(frozen=True)
class ZeroesConfig(GroupedConfig):
    """Of ``tkq.attention.backward_zeroes``. ahead: zeroes are there when a task so many before the first that needs
    them has been given out."""

    ahead: int = 16

    def check(self, width: int) -> "ZeroesConfig":
        """Itself; ValueError for a configuration that cannot run."""
        super().check(width)
        if self.ahead < 1:
            raise ValueError(f"{self}: zeroes are made a task ahead or more")
        return self


def heads_begun(number, blocks, heads, section, tail):
    """How many of ``place``'s heads, in order, have a task among the first ``number``: whole sections."""
    sections = chained_heads(heads, section, tail) // section  # before the last one
    begun = (number + section * blocks - 1) // (section * blocks)
    return least(begun, sections) * section + (heads - sections * section) * least(begun // (sections + 1), 1)

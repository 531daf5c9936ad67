"""How attention's backward is built where nothing waits for all rows' statistics: pure Python."""
from dataclasses import dataclass, fields

from tkq.attention.backward_config import BackwardConfig


@dataclass(frozen=True)
class SeamlessConfig(BackwardConfig):
    """Of ``tkq.attention.backward_seamless``. two_keys: the next task's K has memory beside this one's
    (``backward_seamless_keys``), for which there must be one stage of dS."""

    background: bool = True
    two_keys: bool = False

    @classmethod
    def of(cls, config: BackwardConfig, **changes) -> "SeamlessConfig":
        """As ``config``, with changes."""
        return cls(**{**{field.name: getattr(config, field.name) for field in fields(config)}, **changes})

    def shared_bytes(self, width: int) -> int:
        return super().shared_bytes(width) + (2 * self.block * width if self.two_keys else 0)

    def check(self, width: int) -> "SeamlessConfig":
        """Itself; ValueError for a configuration that cannot run."""
        super().check(width)
        if not self.background or width > 128:
            raise ValueError(f"{self}: it needs background, and is for two warpgroups with keys")
        return self

"""How attention's backward is built where nothing waits for all rows' statistics: pure Python."""
from dataclasses import dataclass, fields

from tkq.attention.backward.config import BackwardConfig


@dataclass(frozen=True)
class SeamlessConfig(BackwardConfig):
    """Of ``tkq.attention.backward.fuse_preprocess``."""

    background: bool = True

    @classmethod
    def of(cls, config: BackwardConfig, **changes) -> "SeamlessConfig":
        """As ``config``, with changes."""
        return cls(**{**{field.name: getattr(config, field.name) for field in fields(config)}, **changes})

    def check(self, width: int) -> "SeamlessConfig":
        """Itself; ValueError for a configuration that cannot run."""
        super().check(width)
        if not self.background or width > 128:
            raise ValueError(f"{self}: it needs background, and is for two warpgroups with keys")
        return self

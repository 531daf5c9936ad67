"""The config of the backward with a fused preprocess: pure Python."""
from dataclasses import dataclass, fields

from tkq.attention.backward.config import BackwardConfig


@dataclass(frozen=True)
class FusePreprocessConfig(BackwardConfig):
    """Of ``tkq.attention.backward.fuse_preprocess``."""

    helper_warps: bool = True

    @classmethod
    def of(cls, config: BackwardConfig, **changes) -> "FusePreprocessConfig":
        """As ``config``, with changes."""
        return cls(**{**{field.name: getattr(config, field.name) for field in fields(config)}, **changes})

    def check(self, width: int) -> "FusePreprocessConfig":
        """Itself; ValueError for a configuration that cannot run."""
        super().check(width)
        if not self.helper_warps or width > 128:
            raise ValueError(f"{self}: it needs helper_warps, and is for two dK/dV warpgroups")
        return self

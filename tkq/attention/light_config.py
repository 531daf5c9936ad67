"""How the kernel of ``light.LightForward`` is built."""
from dataclasses import dataclass, fields

from tkq.attention.plan import AttentionConfig


@dataclass(frozen=True)
class LightForwardConfig(AttentionConfig):
    """ints: as ``LightConfig``'s."""

    ints: bool = True

    @classmethod
    def of(cls, config: AttentionConfig, **changes) -> "LightForwardConfig":
        """As ``config``, with changes."""
        return cls(**{**{field.name: getattr(config, field.name) for field in fields(config)}, **changes})

    def check(self, head_dim: int, head_dim_v: int) -> "LightForwardConfig":
        """As ``AttentionConfig.check``."""
        if self.late:
            raise ValueError(f"{self}: allowed is not late")
        return super().check(head_dim, head_dim_v)

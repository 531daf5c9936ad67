"""The shape of the kernel whose blocks keep pace: what its code depends on. Pure Python, no torch, no DSL."""
from __future__ import annotations

from dataclasses import dataclass, fields

from .config import Config
from .spec import GemmSpec


@dataclass(frozen=True)
class PacedConfig(Config):
    """A ``Config``, and pace: of so many parts of a tile, nobody loads the second before all have begun a tile of that
    round."""

    pace: int = 16

    @classmethod
    def of(cls, config: Config) -> PacedConfig:
        return cls(**{f.name: getattr(config, f.name) for f in fields(config)})

    @property
    def name(self) -> str:
        return f"{super().name}_paced"

    def check(self, spec: GemmSpec) -> PacedConfig:
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming the field that does not fit.
        """
        super().check(spec)
        if self.pace < 1 or not takes(spec):
            raise ValueError(f"gemm: pace does not fit in {self} for {spec}")
        return self


def takes(spec: GemmSpec) -> bool:
    """Is there such a kernel? The counter takes a bias's place."""
    return spec.load == "tma" and not (spec.epilogue.bias or spec.epilogue.gate)

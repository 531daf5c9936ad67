"""The config of the kernel with wave sync: what its code depends on. Pure Python, no torch, no DSL."""
from __future__ import annotations

from dataclasses import dataclass, fields

from .config import Config
from .spec import GemmSpec


@dataclass(frozen=True)
class WaveSyncConfig(Config):
    """A ``Config`` with wave_sync: a block loads no more than 1 / wave_sync of a tile before all blocks have begun a
    tile of that wave."""

    wave_sync: int = 16

    @classmethod
    def of(cls, config: Config) -> WaveSyncConfig:
        return cls(**{f.name: getattr(config, f.name) for f in fields(config)})

    @property
    def name(self) -> str:
        return f"{super().name}_wave_sync"

    def check(self, spec: GemmSpec) -> WaveSyncConfig:
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming the field that does not fit.
        """
        super().check(spec)
        if self.wave_sync < 1 or not takes(spec):
            raise ValueError(f"gemm: wave_sync does not fit in {self} for {spec}")
        return self


def takes(spec: GemmSpec) -> bool:
    """Is there such a kernel? The counter takes a bias's place."""
    return spec.load == "tma" and not (spec.epilogue.bias or spec.epilogue.gate)

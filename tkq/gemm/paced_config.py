"""The shapes of the kernels whose blocks keep pace, of 16-bit and of float8 products: what their code depends on. Pure
Python, no torch, no DSL."""
from __future__ import annotations

from dataclasses import dataclass, fields

from .config import Config
from .fp8_config import Fp8Config
from .fp8_spec import Fp8Spec
from .spec import GemmSpec


@dataclass(frozen=True)
class PacedConfig(Config):
    """A ``Config``, and pace: of so many parts of a tile, nobody loads the second before all have begun a tile of that
    round."""

    pace: int = 16

    @classmethod
    def of(cls, config: Config) -> PacedConfig:
        return cls(**_fields(config))

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


@dataclass(frozen=True)
class PacedFp8Config(Fp8Config):
    """An ``Fp8Config``, and pace, as above. Not of scales by lines: their addresses leave the producer no registers.
    Nor of tiles that roll and whose last panels wait: pace leaves the consumers 8 registers fewer."""

    pace: int = 16

    @classmethod
    def of(cls, config: Fp8Config, pace: int = 16) -> PacedFp8Config:
        return cls(**_fields(config), pace=pace)

    @property
    def name(self) -> str:
        return f"{super().name}_paced"

    def check(self, spec: Fp8Spec) -> PacedFp8Config:
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming the field that does not fit.
        """
        super().check(spec)
        if self.pace < 1 or spec.scales == "line" or (self.spread and self.rolling):
            raise ValueError(f"fp8_gemm: pace does not fit in {self} for {spec}")
        return self


def takes(spec: GemmSpec) -> bool:
    """Is there such a kernel? The counter takes a bias's place."""
    return spec.load == "tma" and not (spec.epilogue.bias or spec.epilogue.gate)


def _fields(config) -> dict:
    return {f.name: getattr(config, f.name) for f in fields(config)}

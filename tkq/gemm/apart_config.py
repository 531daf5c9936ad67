"""The shape of the float8 kernel in which a warp of their own fetches the scales: what its code depends on. Pure
Python, no torch, no DSL."""
from __future__ import annotations

from dataclasses import dataclass, fields

from .fp8_config import Fp8Config
from .fp8_spec import Fp8Spec


@dataclass(frozen=True)
class ApartFp8Config(Fp8Config):
    """An ``Fp8Config`` of one consumer, and a warp for the scales of each step."""

    @classmethod
    def of(cls, config: Fp8Config) -> ApartFp8Config:
        return cls(**{f.name: getattr(config, f.name) for f in fields(config)})

    @property
    def name(self) -> str:
        return f"{super().name}_apart"

    def check(self, spec: Fp8Spec) -> ApartFp8Config:
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming the field that does not fit.
        """
        super().check(spec)
        if self.consumers != 1 or not spec.per_step:
            raise ValueError(f"fp8_gemm: consumers does not fit in {self} for {spec}")
        return self

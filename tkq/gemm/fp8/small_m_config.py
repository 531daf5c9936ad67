"""The config of the float8 small-M kernel: what its code depends on. Pure Python, no torch, no DSL."""
from dataclasses import dataclass
from typing import ClassVar

from ..dense.small_m_config import WIDTHS, SmallMConfig
from .config import STEP
from .spec import Fp8Spec


@dataclass(frozen=True)
class SmallMFp8Config(SmallMConfig):
    """As ``SmallMConfig``; bench/tune/fp8.py times the alternatives. pdl: the launch lies under the end of the kernel
    before."""

    op: ClassVar[str] = "fp8_gemm"
    pdl: bool = False

    @property
    def name(self) -> str:
        return f"{super().name}_stages{self.stages}" + "_pdl" * self.pdl

    @property
    def tiled(self) -> bool:
        """Only the widest: where no block has all of A's rows, each has as many of them as of B's columns."""
        return self.m == WIDTHS[-1]

    @property
    def scales_of_a(self) -> int:
        """Places for them in a stage, where they change along K: one at least for each lane that brings them."""
        return max(32, self.m)

    def scales(self, spec: Fp8Spec) -> int:
        """Places for scales in a stage."""
        of_b = {"128x128": 32, "1x128": self.rows}
        return self.scales_of_a + of_b[spec.scale_b] if spec.scale_b in of_b else 0

    def stage_bytes(self, spec: Fp8Spec) -> int:
        return (self.m + self.rows) * STEP + 4 * self.scales(spec)

    def rules(self, spec: Fp8Spec) -> dict:
        return {
            "m": self.m in WIDTHS,
            "rows": self.rows in (64, 128),
            "parts": self.parts == 1,
            "split": self.split in (1, 2, 4, 8),
            "stages": self.stages > 1,
        }

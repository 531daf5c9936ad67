"""The shape of a float8 GEMM's kernel: what its code depends on. Which one a problem gets says ``fp8.plan``: a change
there makes no kernel anew. Pure Python, no torch, no DSL."""
from __future__ import annotations

from dataclasses import dataclass, fields
from math import gcd

from ..dense.config import SHARED_BYTES
from .spec import BYTES, GROUP, Fp8Spec

STEP = 128  # of K in a stage: a swizzle of 128 bytes, and what shares a scale


@dataclass(frozen=True)
class Fp8Config:
    """One kernel's shape; bench/ops/fp8_gemm.py times the alternatives.

    m, n: a block's tile of C; each of ``consumers`` warpgroups has m / consumers rows of it, in waves of 64.
    stages: of a and b in shared memory. cluster: so many blocks lie one above the other and share B's tiles or, with
    ``across``, side by side and share A's. group: columns of tiles to a band of the tile order. panels: buffers of a
    consumer's output, each at most panel_bytes of 64 rows. pdl: the launch lies under the end of the kernel before.
    lead: stages by which the first consumer starts before the second, so that one's epilogue
    runs under the other's products. lag: products left in flight when a stage is released; not where sums are promoted.
    spread: a tile's result waits in registers and is written under the next tile's first steps, a panel to a step or,
    if it is 2 or 4 and there is an activation, a half or a quarter of one. Where tiles roll: so many panels wait, in
    the sums, and are written under the next tile's first step.
    Where they are promoted: split: a wave's columns are multiplied and promoted in so many parts; rolling: one part of
    a step is multiplied while the one before is promoted, so many steps long, for scales by blocks.
    by_warp: each warp stores its own 16 rows of a panel, and waits for no other.
    """

    m: int = 128
    n: int = 256
    stages: int = 4
    consumers: int = 2
    cluster: int = 2
    across: bool = False
    group: int = 8
    panels: int = 2
    panel_bytes: int = 128
    pdl: bool = False
    lead: int = 2
    lag: int = 1
    spread: int = 0
    split: int = 1
    rolling: int = 0
    by_warp: bool = False

    @property
    def name(self) -> str:
        words = [f"{self.m}x{self.n}"]
        words += [f"{'across' if self.across else 'cluster'}{self.cluster}"] * (self.cluster > 1)
        words += [f"spread{self.spread}"] * (self.spread > 0) + ["pdl"] * self.pdl
        words += [f"split{self.split}"] * (self.split > 1)
        words += [f"rolling{self.rolling}"] * (self.rolling > 0) + ["by_warp"] * self.by_warp
        return "_".join(words)

    @property
    def waves(self) -> int:
        """64-row register tiles of a consumer."""
        return self.m // (64 * self.consumers)

    @property
    def part(self) -> int:
        """Columns that are multiplied, and promoted, together."""
        return self.n // self.split

    @property
    def chunk(self) -> int:
        """Columns of a part that surely share a block scale."""
        return gcd(self.part, GROUP)

    def panel(self, out: str) -> int:
        """Columns of C in one buffer: they divide a part, in 32, 64 or 128 bytes."""
        widths = [b // BYTES[out] for b in (128, 64, 32) if b <= self.panel_bytes]
        fits = [width for width in widths if self.part % width == 0]
        return fits[0] if fits else 0

    def count(self, out: str) -> int:
        """Panels of a consumer's part of a tile."""
        return self.waves * self.n // self.panel(out)

    def under_way(self, i: int, out: str) -> int:
        """How many stores may be reading their buffers still when panel i of a tile is written to its own, i % panels:
        those that came after its last one. Panels are stored in their order, tile after tile."""
        count = self.count(out)
        last = max(j for j in range(count) if j % self.panels == i % self.panels)
        return self.panels - 1 if i >= self.panels else min(self.panels - 1, count - 1 - last + i)

    def panels_first(self, out: str) -> bool:
        """Where tiles roll: is a tile's second product issued behind the panels that are written under its first one,
        which have its registers until then? Of four parts with eight panels; with most panels there 0.3 % faster. Of
        halves it gains nothing, and of the sixteen panels that quarters in fp32 have it was not timed."""
        return self.waves * self.split == 4 and self.count(out) == 8

    def panels_under(self, i: int, out: str) -> list[int]:
        """Of the ``spread`` last panels, where tiles roll: those that are written under part i of the next tile's first
        step, each before its own part of the sums is begun. Evenly; or, ``panels_first``, a part before its own, but
        the last under the last."""
        parts, count = self.waves * self.split, self.count(out)
        first = count - self.spread

        def under(j):
            if not self.panels_first(out):
                return (j - first) * parts // self.spread
            return max(0, j * parts // count - 1) if j < count - 1 else parts - 1

        return [j for j in range(first, count) if under(j) == i]

    def scales(self, spec: Fp8Spec) -> int:
        """Scales in a stage."""
        return {"block": self.m + 32, "line": self.m + self.n}.get(spec.scales, 0)

    def shared_bytes(self, spec: Fp8Spec) -> int:
        """Shared memory of a block: stages, panels of C, semaphores, and what alignment may cost."""
        stage = (self.m + self.n) * STEP + 4 * self.scales(spec) + 16
        panels = self.consumers * self.panels * 64 * self.panel(spec.out) * BYTES[spec.out]
        return self.stages * stage + panels * (spec.store == "tma") + 256

    def check(self, spec: Fp8Spec) -> Fp8Config:
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming the field that does not fit.
        """
        rules = {
            "consumers": self.consumers in (1, 2),
            "m": self.m % (64 * self.consumers) == 0 and 0 < self.waves <= 2,
            "n": self.n % (16 * self.split) == 0 and 0 < self.part <= 256,
            "stages": self.stages > 1,
            "cluster": self.cluster in (1, 2, 4) and (self.n if not self.across else self.m) % (8 * self.cluster) == 0,
            "group": self.group > 0,
            "panel_bytes": self.panel_bytes in (32, 64, 128),
            "panels": self.panels > 0 and (spec.store == "elements" or self.panel(spec.out) > 0),
            "lead": 0 <= self.lead < self.stages and (self.lead == 0 or self.consumers == 2),
            "lag": self.lag in (0, 1),
            "spread": not self.spread or (can_spread(spec, self) and spread_fits(spec, self)),
            "by_warp": not self.by_warp or spec.store == "tma",
            "split": self.split == 1 or spec.promote,
            "rolling": not self.rolling or (spec.rolls and self.waves * self.split in (2, 4)),
        }
        for name, kept in rules.items():
            if not kept:
                raise ValueError(f"fp8_gemm: {name} does not fit in {self} for {spec}")
        if self.shared_bytes(spec) > SHARED_BYTES:
            raise ValueError(f"fp8_gemm: {self} takes {self.shared_bytes(spec)} bytes of shared memory for {spec}, "
                             f"allowed are {SHARED_BYTES}")
        return self


def can_spread(spec: Fp8Spec, config: Fp8Config) -> bool:
    """May panels wait: in registers of their own, in 16 bits, beside sums that are not promoted; or in the sums, until
    their places are taken in the first steps that roll?"""
    if spec.store != "tma" or spec.out == "e4m3":
        return False
    return spec.rolls and config.rolling > 0 if spec.promote else BYTES[spec.out] == 2


def spread_fits(spec: Fp8Spec, config: Fp8Config) -> bool:
    """So many of them?"""
    if spec.promote:
        return config.panel(spec.out) > 0 and 0 <= config.spread <= config.count(spec.out)
    return config.spread in (0, 1, 2, 4) and config.lag == 0 and config.n % 64 == 0


@dataclass(frozen=True)
class PacedFp8Config(Fp8Config):
    """An ``Fp8Config``, and pace, as above. Not of scales by lines: their addresses leave the producer no registers.
    Nor of tiles that roll and whose last panels wait: pace leaves the consumers 8 registers fewer."""

    pace: int = 16

    @classmethod
    def of(cls, config: Fp8Config, pace: int = 16) -> PacedFp8Config:
        return cls(**{f.name: getattr(config, f.name) for f in fields(config)}, pace=pace)

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

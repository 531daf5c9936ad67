"""The shape of a float8 GEMM's kernel: what its code depends on. Which one a problem gets says ``fp8.plan``.
Pure Python, no torch, no DSL."""
from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ..dense.config import SHARED_BYTES
from .spec import BYTES, GROUP, Fp8Spec

STEP = 128  # of K in a stage: a swizzle of 128 bytes, and what shares a scale


@dataclass(frozen=True)
class Fp8Config:
    """One kernel's shape; bench/ops/fp8_gemm.py times the alternatives.

    m, n: a block's tile of C; each of ``consumers`` warpgroups has m / consumers rows of it, in m_subtiles of 64.

    mainloop:
      stages            of a and b in shared memory
      stagger_stages    stages by which the first consumer starts before the second: one's epilogue overlaps the other's
                        mainloop
      wgmma_in_flight   products left in flight when a stage is released; not with promotion
      split             with promotion: parts of a subtile's columns that are multiplied and promoted by themselves
      promotion_unroll  with promotion, for 128x128 scales of b: steps of a loop body in which a part is multiplied
                        while the one before is promoted; 0: no overlap
    epilogue:
      overlap_epilogue  a tile's result waits in registers and is stored under the next tile's first steps, a subtile
                        to a step or, with 2 or 4 and an activation, a half or a quarter of one. With promotion_unroll:
                        subtiles that wait in the sums, and are stored under the next tile's first step
      store_buffers     of a consumer's output, each at most store_row_bytes of 64 rows
      store_per_warp    each warp stores its own 16 rows of a subtile, and waits for no other
    schedule:
      cluster           blocks one above the other, which share B's tiles or, with cluster_along_n, side by side, which
                        share A's
      raster_group      columns of tiles to a band of the tile order
      pdl               programmatic dependent launch
      wave_sync         a block loads no more than 1 / wave_sync of a tile before all blocks have begun a tile of that
                        wave; 0: it does not wait for others
    """

    m: int = 128
    n: int = 256
    stages: int = 4
    consumers: int = 2
    cluster: int = 2
    cluster_along_n: bool = False
    raster_group: int = 8
    store_buffers: int = 2
    store_row_bytes: int = 128
    pdl: bool = False
    stagger_stages: int = 2
    wgmma_in_flight: int = 1
    overlap_epilogue: int = 0
    split: int = 1
    promotion_unroll: int = 0
    store_per_warp: bool = False
    wave_sync: int = 0

    @property
    def name(self) -> str:
        words = [f"{self.m}x{self.n}"]
        words += [f"{'along_n' if self.cluster_along_n else 'cluster'}{self.cluster}"] * (self.cluster > 1)
        words += [f"overlap{self.overlap_epilogue}"] * (self.overlap_epilogue > 0) + ["pdl"] * self.pdl
        words += [f"split{self.split}"] * (self.split > 1)
        words += [f"promotion{self.promotion_unroll}"] * (self.promotion_unroll > 0)
        words += ["store_per_warp"] * self.store_per_warp + ["wave_sync"] * (self.wave_sync > 0)
        return "_".join(words)

    @property
    def m_subtiles(self) -> int:
        """64-row register tiles of a consumer."""
        return self.m // (64 * self.consumers)

    @property
    def part(self) -> int:
        """Columns that are multiplied, and promoted, together."""
        return self.n // self.split

    @property
    def chunk(self) -> int:
        """Columns of a part that surely share a 128x128 scale."""
        return gcd(self.part, GROUP)

    def store_n(self, out: str) -> int:
        """Columns of C in one store: they divide a part, in 32, 64 or 128 bytes."""
        widths = [b // BYTES[out] for b in (128, 64, 32) if b <= self.store_row_bytes]
        fits = [width for width in widths if self.part % width == 0]
        return fits[0] if fits else 0

    def n_stores(self, out: str) -> int:
        """Stores of a consumer's part of a tile."""
        return self.m_subtiles * self.n // self.store_n(out)

    def stores_in_flight(self, i: int, out: str) -> int:
        """Stores that may still read their buffers when subtile i of a tile is written to its own, i % store_buffers:
        those after the last one from that buffer. Subtiles are stored in order, tile after tile."""
        count = self.n_stores(out)
        last = max(j for j in range(count) if j % self.store_buffers == i % self.store_buffers)
        return self.store_buffers - 1 if i >= self.store_buffers else min(self.store_buffers - 1, count - 1 - last + i)

    def stores_before_product(self, out: str) -> bool:
        """With a pipelined promotion: is a tile's second product issued behind the subtiles that are stored under its
        first one, whose registers it takes? For four parts with eight subtiles."""
        return self.m_subtiles * self.split == 4 and self.n_stores(out) == 8

    def stores_under_part(self, i: int, out: str) -> list[int]:
        """Of the ``overlap_epilogue`` last subtiles, with a pipelined promotion: those that are stored under part i of
        the next tile's first step, each before its own part of the sums is begun. Evenly; or,
        ``stores_before_product``, a part before its own, but the last under the last."""
        parts, count = self.m_subtiles * self.split, self.n_stores(out)
        first = count - self.overlap_epilogue

        def under(j):
            if not self.stores_before_product(out):
                return (j - first) * parts // self.overlap_epilogue
            return max(0, j * parts // count - 1) if j < count - 1 else parts - 1

        return [j for j in range(first, count) if under(j) == i]

    def scales(self, spec: Fp8Spec) -> int:
        """Scales in a stage."""
        return {"128x128": self.m + 32, "1x128": self.m + self.n}.get(spec.scale_b, 0)

    def shared_bytes(self, spec: Fp8Spec) -> int:
        """Shared memory of a block: stages, store buffers, semaphores, and what alignment may cost."""
        stage = (self.m + self.n) * STEP + 4 * self.scales(spec) + 16
        buffers = self.consumers * self.store_buffers * 64 * self.store_n(spec.out) * BYTES[spec.out]
        return self.stages * stage + buffers * (spec.store == "tma") + 256

    def check(self, spec: Fp8Spec) -> Fp8Config:
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming the field that does not fit.
        """
        rules = {
            "consumers": self.consumers in (1, 2),
            "m": self.m % (64 * self.consumers) == 0 and 0 < self.m_subtiles <= 2,
            "n": self.n % (16 * self.split) == 0 and 0 < self.part <= 256,
            "stages": self.stages > 1,
            "cluster": self.cluster in (1, 2, 4)
            and (self.n if not self.cluster_along_n else self.m) % (8 * self.cluster) == 0,
            "raster_group": self.raster_group > 0,
            "store_row_bytes": self.store_row_bytes in (32, 64, 128),
            "store_buffers": self.store_buffers > 0 and (spec.store == "direct" or self.store_n(spec.out) > 0),
            "stagger_stages": 0 <= self.stagger_stages < self.stages
            and (self.stagger_stages == 0 or self.consumers == 2),
            "wgmma_in_flight": self.wgmma_in_flight in (0, 1),
            "overlap_epilogue": not self.overlap_epilogue
            or (can_overlap_epilogue(spec, self) and overlap_fits(spec, self)),
            "store_per_warp": not self.store_per_warp or spec.store == "tma",
            "split": self.split == 1 or spec.promote,
            "promotion_unroll": not self.promotion_unroll
            or (spec.pipelines_promotion and self.m_subtiles * self.split in (2, 4)),
            "wave_sync": not self.wave_sync or (self.wave_sync > 0 and can_wave_sync(spec, self)),
        }
        for name, holds in rules.items():
            if not holds:
                raise ValueError(f"fp8_gemm: {name} does not fit in {self} for {spec}")
        if self.shared_bytes(spec) > SHARED_BYTES:
            raise ValueError(f"fp8_gemm: {self} takes {self.shared_bytes(spec)} bytes of shared memory for {spec}, "
                             f"allowed are {SHARED_BYTES}")
        return self


def can_overlap_epilogue(spec: Fp8Spec, config: Fp8Config) -> bool:
    """May subtiles wait: in registers of their own, in 16 bits, beside sums that are not promoted; or in the sums,
    until the next tile's first step overwrites them?"""
    if spec.store != "tma" or spec.out == "e4m3":
        return False
    return spec.pipelines_promotion and config.promotion_unroll > 0 if spec.promote else BYTES[spec.out] == 2


def overlap_fits(spec: Fp8Spec, config: Fp8Config) -> bool:
    """Does overlap_epilogue fit the subtiles?"""
    if spec.promote:
        return config.store_n(spec.out) > 0 and 0 <= config.overlap_epilogue <= config.n_stores(spec.out)
    return config.overlap_epilogue in (0, 1, 2, 4) and config.wgmma_in_flight == 0 and config.n % 64 == 0


def can_wave_sync(spec: Fp8Spec, config: Fp8Config) -> bool:
    """May blocks wait for each other in each wave? Not for 1x128 scales of b: their addresses leave the producer no
    registers. Nor with both a pipelined promotion and an overlapped epilogue: wave sync leaves the consumers 8
    registers fewer."""
    return spec.scale_b != "1x128" and not (config.overlap_epilogue and config.promotion_unroll)


# ---- where registers decide what a consumer does when


def prefetches_scales(spec: Fp8Spec, config: Fp8Config) -> bool:
    """Are the scales of a tile's columns fetched under its first product? They take 64 registers, which neither
    promoted sums nor results that wait leave."""
    return spec.scale_b == "row" and not (spec.promote or config.overlap_epilogue)


def prefetches_bias(config: Fp8Config) -> bool:
    """Is a tile's bias fetched before its products? Each subtile of 32 columns waited for its own, 330 clocks. (With
    an overlapped epilogue, under the first products. With wave sync, when the tile is written: 192 columns leave no
    registers.)"""
    return not config.wave_sync


def sums_begin_with_bias(config: Fp8Config) -> bool:
    """Instead of zero: where sums begin under products, and cost nothing."""
    return config.overlap_epilogue > 0 and config.promotion_unroll > 0


def few_special_functions(spec: Fp8Spec, config: Fp8Config) -> bool:
    """Is an activation computed where special functions cost more than plain instructions?"""
    return sums_begin_with_bias(config) and config.stores_before_product(spec.out)

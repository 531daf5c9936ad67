"""What a caller of the grouped GEMM asked for. Pure Python, no torch, no DSL."""
from dataclasses import dataclass
from typing import Optional

from ...granularity import PRODUCTS
from ..fp8.spec import BYTES, FP8

HALF = ("bf16", "fp16")
OUT = ("bf16", "fp16", "fp32")
MOST_GROUPS = 1024


@dataclass(frozen=True)
class GroupedSpec:
    """along "m": c[i] = a[i] @ b[g], g being row i's group: a (M, K), b (G, K, N), c (M, N). along "k":
    c[g] = a[:, g] @ b[g], the columns of a and rows of b that are g's: a (M, K), b (K, N), c (G, M, N).

    a, b: their types, both 16-bit and the same, or float8. out: c's. scale_a, scale_b: "none" for 16 bits; for float8,
    see Fp8Spec, "row" with "row", or "1x128" with "128x128" (along "m") or "1x128" (along "k"). b_major: b's contiguous
    dimension, "k" or, for 16 bits, "n". along "k" a is M- and b N-contiguous, of float8 both are K-contiguous.

    Raises:
        NotImplementedError: a value that no kernel takes, by name.
    """

    along: str = "m"
    a: str = "bf16"
    b: str = "bf16"
    out: str = "bf16"
    scale_a: str = "none"
    scale_b: str = "none"
    b_major: str = "k"

    # what Fp8Gemm asks a spec, and is always so here
    bias = None
    activation = None
    store = "tma"
    pipelines_promotion = False

    def __post_init__(self):
        is_fp8 = self.a in FP8
        allowed = {"along": ("m", "k"), "a": (*HALF, *FP8), "b": FP8 if is_fp8 else (self.a,), "out": OUT,
                   "b_major": ("k",) if is_fp8 else ("k", "n") if self.along == "m" else ("n",)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise NotImplementedError(f"grouped_gemm: {name} is {getattr(self, name)!r}, supported with a in "
                                          f"{self.a} along {self.along} are {', '.join(values)}")
        pairs = ((PRODUCTS["row"], ("1x128", "1x128" if self.along == "k" else "128x128")) if is_fp8
                 else (("none", "none"),))
        if (self.scale_a, self.scale_b) not in pairs:
            raise NotImplementedError(f"grouped_gemm: scale_a is {self.scale_a!r} and scale_b {self.scale_b!r}, "
                                      f"supported with a in {self.a} along {self.along} are "
                                      f"{', '.join(' with '.join(pair) for pair in pairs)}")

    @property
    def per_step(self) -> bool:
        return self.scale_a == "1x128"

    @property
    def m_major(self) -> bool:
        """Is a (M, K) contiguous in M?"""
        return self.along == "k" and self.b_major == "n"

    @property
    def masked(self) -> bool:
        """Do groups begin and end inside of steps?"""
        return self.along == "k" and self.a in FP8

    @property
    def promote(self) -> bool:
        return self.per_step

    @property
    def step(self) -> int:
        """Of K in a stage: a swizzle of 128 bytes."""
        return 128 // BYTES.get(self.a, 2)


def granularity(along: str, sizes: tuple, scale_a: tuple, scale_b: tuple) -> Optional[tuple[str, str]]:
    """Which pair of Fp8Spec's scales two shapes mean; None for others. sizes: M, N, K, groups."""
    m, n, k, groups = sizes
    found = (tuple(scale_a), tuple(scale_b))
    return next((pair for pair, *shapes in _scale_shapes(along, m, n, -(-k // 128), groups) if found == tuple(shapes)),
                None)


def shapes_allowed(along: str, sizes: tuple) -> str:
    """For an error's text: what the scales of a product may be."""
    m, n, k, groups = sizes
    return ", ".join(f"{a} with {b}" for _, a, b in _scale_shapes(along, m, n, -(-k // 128), groups))


def _scale_shapes(along, m, n, steps, groups):
    """(granularities, shape of scale_a, of scale_b)"""
    row = PRODUCTS["row"]
    if along == "m":
        return ((row, (m, 1), (groups, 1, n)),
                (("1x128", "128x128"), (m, steps), (groups, steps, -(-n // 128))))
    return ((row, (m, 1), (1, n)), (row, (groups, m, 1), (groups, 1, n)),
            (("1x128", "1x128"), (m, steps), (steps, n)))

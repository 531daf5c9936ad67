"""What a caller of the float8 GEMM asked for: the part that decides which code is compiled. Pure Python."""
from dataclasses import dataclass
from typing import Optional

from ...granularity import GROUP, PRODUCTS

FP8 = ("e4m3", "e5m2")
OUT = ("bf16", "fp16", "fp32", "e4m3")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1, "e5m2": 1}
SCALES = tuple(PRODUCTS.values())  # (a's, b's)
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
BIASES = ("bf16", "fp16", "fp32")
K_UNIT = 16  # K is a multiple: TMA's 16 bytes


@dataclass(frozen=True)
class Fp8Spec:
    """c = activation((a * scale_a) @ (b * scale_b) + bias) with a (M, K) and b (K, N), both K-contiguous.

    a, b: their types. out: c's; e4m3 is c / out_scale, saturated. scale_a, scale_b: granularities, as `tkq.granularity`
    has them, of a and of b's transpose, one of the pairs in SCALES: "tensor", one scale; "row", one for each row of a,
    column of b; "1x128", one for each of them and each 128 (GROUP) of K; "128x128", of b, one for each 128 of K by 128
    of N. promote: sums of 128 of K are added up in fp32 registers, always where scales change along K. bias: its type,
    a number for each column. store: how c goes out, "tma", or "direct" where a row of c is not a multiple of 16 bytes.

    Raises:
        NotImplementedError: a value that no kernel takes, by name.
    """

    a: str = "e4m3"
    b: str = "e4m3"
    out: str = "bf16"
    scale_a: str = "tensor"
    scale_b: str = "tensor"
    promote: bool = False
    bias: Optional[str] = None
    activation: Optional[str] = None
    store: str = "tma"

    def __post_init__(self):
        allowed = {"a": FP8, "b": FP8, "out": OUT, "bias": (None, *BIASES),
                   "activation": (None, *ACTIVATIONS), "store": ("tma", "direct")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                names = ", ".join(str(v) for v in values)
                raise NotImplementedError(f"fp8_gemm: {name} is {getattr(self, name)!r}, supported are {names}")
        if (self.scale_a, self.scale_b) not in SCALES:
            raise NotImplementedError(f"fp8_gemm: scale_a is {self.scale_a!r} and scale_b {self.scale_b!r}, supported "
                                      f"are {', '.join(' with '.join(pair) for pair in SCALES)}")
        if self.per_step and not self.promote:
            raise NotImplementedError(f"fp8_gemm: promote is False, scale_b {self.scale_b!r} allows True")

    @property
    def per_step(self) -> bool:
        """Do scales change along K?"""
        return self.scale_a == "1x128"

    @property
    def pipelines_promotion(self) -> bool:
        """Is there a kernel with a pipelined promotion?"""
        return self.scale_b == "128x128"


def granularity(m: int, n: int, k: int, scale_a: tuple, scale_b: tuple) -> Optional[tuple[str, str]]:
    """Which of SCALES two shapes mean; None where they mean none of them. Where two fit, they mean the same."""
    if all(x == 1 for x in (*scale_a, *scale_b)):
        return PRODUCTS["tensor"]
    blocks, scale_a, scale_b = -(-k // GROUP), tuple(scale_a), tuple(scale_b)
    if scale_a == (m, 1) and scale_b == (1, n):
        return PRODUCTS["row"]
    if scale_a == (m, blocks):  # compared, and not looked up: a size that is hashed does not stay free in a tracer
        if scale_b == (blocks, n):
            return "1x128", "1x128"
        if scale_b == (blocks, -(-n // GROUP)):
            return "1x128", "128x128"
    return None


def shapes_allowed(m: int, n: int, k: int) -> str:
    """For an error's text: what the scales of a product may be."""
    blocks = -(-k // GROUP)
    pairs = ((f"({m}, 1)", f"(1, {n})"), (f"({m}, {blocks})", f"({blocks}, {-(-n // GROUP)})"),
             (f"({m}, {blocks})", f"({blocks}, {n})"))
    return "one element each, " + ", ".join(f"{a} with {b}" for a, b in pairs)

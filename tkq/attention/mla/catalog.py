"""The kernels of MLA decoding that tkq itself can choose, and what their machine code must show."""
import itertools

from tkq.attention.mla.config import MlaConfig
from tkq.attention.mla.launch import recipe
from tkq.attention.mla.spec import MlaSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped() -> list:
    """Of bf16: one query or several, with the log-sum-exp and without."""
    specs = [MlaSpec("bf16", *flags) for flags in itertools.product((False, True), repeat=2)]
    return [Shipped("-".join(["mla_decode", s.dtype] + ["edges"] * s.edges + ["lse"] * s.lse), recipe(s), expectation())
            for s in specs]


def expectation() -> Expectation:
    """36 steps of S = Q K', four of each quarter of P V; copies past L1, 16 bytes each. And the kernel that merges."""
    few, scores, values = MlaConfig().registers
    merge = Expectation(instructions=("LDG.E.128", "ACQBULK"), registers=72)
    return Expectation(tensor=52, instructions=("LDGSTS.E.BYPASS", "USETMAXREG"), registers=128,
                       roles=((few, 1), (scores, 1), (values, 2)), others=(("ombine", merge),))

"""The kernels of long convolutions that tkq itself can choose, and what their machine code must show."""
from tkq.convolution.fft.config import FftConfig
from tkq.convolution.fft.launch import gradient_recipe, recipe
from tkq.convolution.fft.plan import plan
from tkq.convolution.fft.spec import FftSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

MANY = 64  # sequences, which keep all warpgroups at work


def shipped() -> list:
    """Of bf16 without gates, as many tokens as a transform takes: forward, and the gradients of u and of the filter."""
    found = []
    for rows, causal, blocks in ((32, True, 1), (64, True, 1), (64, True, 2), (64, True, 4), (64, True, 8),
                                 (16, False, 1), (64, False, 1)):
        for conjugate in (False, True):
            spec = FftSpec("bf16", rows, causal, conjugate=conjugate, blocks=blocks)
            found.append(Shipped(_name(spec, "backward" if conjugate else "forward"), recipe(spec, plan(spec, MANY)),
                                 _expectation(spec)))
        if blocks <= 2:  # one kernel for any number of blocks above one
            spec = FftSpec("bf16", rows, causal, blocks=blocks)
            found.append(Shipped(_name(spec, "filter-gradient"), gradient_recipe(spec, FftConfig(2)),
                                 _expectation(spec)))
    return found


def _name(s: FftSpec, what: str) -> str:
    kind = "causal" if s.causal else "circular"
    return "-".join(["fft_conv", s.dtype, f"n{s.points}", kind] + [f"blocks{s.blocks}"] * (s.blocks > 1) + [what])


def _expectation(s: FftSpec) -> Expectation:
    """Four products from the left and from the right each, forth and back or of two inputs, of four steps of 16. No
    WARPSYNC: it stands where lanes of a warp shuffle in a branch that not all of them take, and waits for ever."""
    return Expectation(tensor=48 if s.causal else 64, instructions=("LDG.E.128", "STG.E.128"),
                       absent=("ATOM", "RED", "WARPSYNC"))

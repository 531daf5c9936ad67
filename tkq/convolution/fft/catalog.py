"""The kernels of long convolutions that tkq itself can choose, and what their machine code must show."""
from tkq.convolution.fft.config import FftConfig
from tkq.convolution.fft.launch import gradient_recipe, recipe
from tkq.convolution.fft.long.launch import column_recipe, largest_recipe, row_recipe
from tkq.convolution.fft.long.spec import RADICES, ColumnSpec, LargestSpec, RowSpec
from tkq.convolution.fft.plan import plan
from tkq.convolution.fft.spec import FftSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

MANY = 64  # sequences, which keep all warpgroups at work
ABSENT = "ATOM", "RED", "WARPSYNC"  # the last stands where not all lanes of a warp shuffle, and waits for ever


def shipped() -> list:
    """Of bf16 without gates, as many tokens as a transform takes: forward, and the gradients of u and of the filter."""
    found = []
    for rows, causal, blocks in ((32, True, 1), (64, True, 1), (64, True, 2), (64, True, 4), (64, True, 8),
                                 (16, False, 1), (64, False, 1)):
        for conjugate in (False, True):
            spec = FftSpec("bf16", rows, causal, conjugate=conjugate, blocks=blocks)
            found.append(Shipped(_name(spec, "backward" if conjugate else "forward"), recipe(spec, plan(spec, MANY)),
                                 _expectation(spec)))
        if blocks <= 2:  # of more, the gradient is one of several passes
            spec = FftSpec("bf16", rows, causal, blocks=blocks)
            found.append(Shipped(_name(spec, "filter-gradient"), gradient_recipe(spec, FftConfig(2)),
                                 _expectation(spec)))
    return found + _passes()


def _passes() -> list:
    """Of bf16 without gates, of 65536 to 1048576 tokens, and of 16384 and 32768 in the filter's gradient. A row's
    transform is 32 products; one of columns 8 for each of those that it is made of."""
    found = []
    for radix in RADICES:
        for dtype in ("bf16", "fp32"):
            for back in (False, True):
                name = f"fft_conv_columns-{dtype}-n{64 * radix}-{'back' if back else 'forth'}"
                wide = ("LDG.E.128", *(("STG.E.128",) if dtype == "bf16" else ())) if back else ("LDG.E.128", "UTMASTG")
                found.append(Shipped(name, column_recipe(ColumnSpec(dtype, radix), back),
                                     Expectation(8 * radix, instructions=wide, absent=ABSENT)))
    for rows in (4, 8, 16, 32, 64):
        for gradient in (False, True):
            if gradient or rows >= 16:
                found.append(Shipped(f"fft_conv_rows-n{64 * rows}-{'filter-gradient' if gradient else 'forward'}",
                                     row_recipe(RowSpec(rows), gradient), Expectation(
                                         96, instructions=("UTMALDG", "UTMASTG"), absent=ABSENT[:2],
                                         local_memory=4 * gradient)))  # once a tile, besides its sequences
    for dtype in ("bf16", "fp32"):
        found.append(Shipped(f"fft_conv_largest-{dtype}", largest_recipe(LargestSpec(dtype)),
                             Expectation(instructions=("LDG.E.128",), absent=ABSENT)))
    return found


def _name(s: FftSpec, what: str) -> str:
    kind = "causal" if s.causal else "circular"
    return "-".join(["fft_conv", s.dtype, f"n{s.points}", kind] + [f"blocks{s.blocks}"] * (s.blocks > 1) + [what])


def _expectation(s: FftSpec) -> Expectation:
    """Four products from the left and from the right each, forth and back or of two inputs, of four steps of 16."""
    return Expectation(tensor=48 if s.causal else 64, instructions=("LDG.E.128", "STG.E.128"), absent=ABSENT)

"""The kernels of long convolutions that tkq itself can choose, and what their machine code must show."""
import dataclasses

from tkq.convolution.fft.launch import gradient_recipe, recipe, spectra_recipe, taps_recipe
from tkq.convolution.fft.long.launch import column_recipe, largest_recipe, row_recipe
from tkq.convolution.fft.long.spec import RADICES, ColumnSpec, LargestSpec, RowSpec
from tkq.convolution.fft.plan import gradient_plan, plan
from tkq.convolution.fft.spec import BLOCKS, TRANSFORM_ROWS, FftSpec
from tkq.convolution.fft.whole.launch import TAPS, filter_recipe, kept_recipe
from tkq.convolution.fft.whole.launch import gradient_recipe as whole_gradient_recipe
from tkq.convolution.fft.whole.launch import recipe as whole_recipe
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

MANY = 64  # sequences, which keep all warpgroups at work
ABSENT = "ATOM", "RED", "WARPSYNC"  # the last stands where not all lanes of a warp shuffle, and waits for ever


def shipped() -> list:
    """Of bf16 without gates, as many tokens as a transform takes: forward, and the gradients of u and of the filter."""
    found = []
    for rows, causal, blocks in ((32, True, 1), (64, True, 1), (64, True, 2), (64, True, 4), (64, True, 8),
                                 (16, False, 1), (64, False, 1)):
        for conjugate in (False, True)[:1 if blocks == BLOCKS[-1] else 2]:  # a whole sequence's kernel is the same
            spec = FftSpec("bf16", rows, causal, conjugate=conjugate, blocks=blocks)
            found.append(Shipped(_name(spec, "backward" if conjugate else "forward"), recipe(spec, plan(spec, MANY)),
                                 _expectation(spec)))
        if blocks <= 2:  # of more, the gradient is one of several passes
            spec = FftSpec("bf16", rows, causal, blocks=blocks)
            found.append(Shipped(_name(spec, "filter-gradient"), gradient_recipe(spec, gradient_plan(spec, MANY)),
                                 _expectation(spec, gradient=True)))
    return found + _filters() + _whole() + _passes() + _millions() + _split()


def _filters() -> list:
    """Of those above, up to two blocks: the filters' spectra, and their gradients."""
    found = []
    for rows, causal, blocks in ((32, True, 1), (64, True, 1), (64, True, 2), (16, False, 1), (64, False, 1)):
        for conjugate in (False, True):
            spec = FftSpec("bf16", rows, causal, conjugate=conjugate, blocks=blocks)
            found.append(Shipped(_name(spec, "spectra-of-backward" if conjugate else "spectra"), spectra_recipe(spec),
                                 Expectation(instructions=("LDS.64", "STG.E.128"), absent=ABSENT)))
        found.append(Shipped(_name(spec, "filter-taps"), taps_recipe(spec),
                             Expectation(instructions=("LDG.E.64", "LDS.64"), absent=ABSENT)))
    return found


def _whole() -> list:
    """Of whole sequences: what is beside the forward."""
    found = []
    for mirrored in (False, True):
        name = f"fft_conv_filters-n32768-{'backward' if mirrored else 'forward'}"
        found.append(Shipped(name, filter_recipe(mirrored),
                             Expectation(instructions=("LDG.E", "STG.E.128"), absent=ABSENT)))
    found.append(Shipped("fft_conv_taps-n32768", TAPS, Expectation(instructions=("LDG.E.128", "STG.E"), absent=ABSENT,
                                                                        local_memory=8)))
    whole = FftSpec("bf16", 64, blocks=BLOCKS[-1])
    keeps = dataclasses.replace(whole, keeps=True)
    found.append(Shipped(_name(whole, "backward"), whole_recipe(keeps), _expectation(keeps)))
    found.append(Shipped(_name(whole, "kept-spectra"), kept_recipe(whole), Expectation(
        16, instructions=("LDG.E.128", "STG.E.128", "STSM"), absent=ABSENT)))
    found.append(Shipped(_name(whole, "filter-gradient"), whole_gradient_recipe(whole), Expectation(
        instructions=("LDG.E.128", "STG.E.128"), absent=ABSENT)))
    return found


def _passes() -> list:
    """Of bf16 without gates, of 65536 to 1048576 tokens, and of 16384 and 32768 in the filter's gradient. A row's
    transform is 32 products; one of columns 8 for each of those that it is made of."""
    found = []
    for radix in (radix for radix in RADICES if not ColumnSpec("bf16", radix).radix_first):
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


def _millions() -> list:
    """Columns of 2097152 and 4194304 tokens, and back of circular ones; of rows as before."""
    found = [_radix_first(ColumnSpec(dtype, radix), back) for radix in RADICES if ColumnSpec("bf16", radix).radix_first
             for dtype in ("bf16", "fp32") for back in (False, True)]
    return [*found, _radix_first(ColumnSpec("fp32", RADICES[-1], noted=True), True)]


def _radix_first(spec: ColumnSpec, back: bool) -> Shipped:
    """A complex product of 64 points is 16, and stands once; back they are real ones of 8, and stand for each of the
    radix. Split, three times as many."""
    name = "-".join([f"fft_conv_columns-{spec.dtype}-n{spec.rows}", *["split"] * spec.split,
                     *["noted"] * spec.noted, "back" if back else "forth"])
    products = (8 * spec.radix if back else 16) * (3 if spec.split else 1)
    return Shipped(name, column_recipe(spec, back), Expectation(
        products, instructions=() if back else ("UTMASTG",), absent=ABSENT))


def _split() -> list:
    """Split, of bf16 without gates: to 4096 tokens, and to 524288 in three passes."""
    found = []
    for rows, causal in ((32, True), (64, True), (64, False)):
        for conjugate in (False, True):
            spec = FftSpec("bf16", rows, causal, conjugate=conjugate, split=True)
            found.append(Shipped(_name(spec, "backward" if conjugate else "forward"), recipe(spec, plan(spec, MANY)),
                                 _expectation(spec)))
    for radix in (1, 2):
        found += [_radix_first(ColumnSpec(dtype, radix, split=True), back) for dtype in ("bf16", "fp32")
                  for back in (False, True)]
    for rows in TRANSFORM_ROWS:
        for gradient in (False, True):
            found.append(Shipped(
                f"fft_conv_rows-n{64 * rows}-split-{'filter-gradient' if gradient else 'forward'}",
                row_recipe(RowSpec(rows, True), gradient), Expectation(
                    288, instructions=("UTMALDG", "UTMASTG"), absent=ABSENT[:2],
                    local_memory=4 if gradient else 150)))  # once a sequence: beside its products little
    return found


def _name(s: FftSpec, what: str) -> str:
    kind = "causal" if s.causal else "circular"
    return "-".join(["fft_conv", s.dtype, f"n{s.points}", kind, *[f"blocks{s.blocks}"] * (s.blocks > 1),
                     *["split"] * s.split, what])


def _expectation(s: FftSpec, gradient: bool = False) -> Expectation:
    """Products of 64 x 64 x 64, of four steps of 16. In registers, two from the left for each input or output tile,
    which with up to 16 rows are none of wgmma's, and two from the right, forth and back of each block; of the filter's
    gradient forth twice. Of a whole sequence four of half a product (over n1), three in a loop, four, and one in a
    loop. Otherwise four of each; split, three times as many."""
    if s.whole and not gradient:  # addresses are kept, not made anew for each sequence
        return Expectation(40, instructions=("LDG.E.128", "STG.E.128", "STSM"), absent=ABSENT, local_memory=64)
    tensor = (48 if s.causal else 64) * (3 if s.split else 1)
    if gradient or s.in_registers:
        one = 8 * (2 if s.rows > 16 else 1)
        tensor = 2 * one * (1 if gradient else s.blocks)
    by_ring = s.in_registers and not gradient
    return Expectation(tensor, instructions=("LDG.E.128", "STG.E.128", *(("UBLKCP",) if by_ring else ())),
                       absent=ABSENT[:2] if by_ring else ABSENT, local_memory=40 if s.split else 0)

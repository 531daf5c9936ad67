"""Faults in the long convolution."""
from .mutant import family

TESTS = "tests/gpu/convolution/test_fft_conv.py::"
NUMERICS, BLOCKS, NAN, ENDS, SHORT, SIZES, PAIRS = ((f"{TESTS}{name}",) for name in (
    "test_numerics[5-3080-5000]", "test_eight_blocks[20000-50000]",
    "test_nan_and_infinities_stay_in_their_sequence[4096-False]", "test_nan_behind_the_ends", "test_short",
    "test_filters_of_any_size", "test_partners_of_any_size"))

MUTANTS = (
    *family(
        "fft", "tkq/convolution/fft/tables.py",
        ("twiddles_of_twice_the_points", "c, s = root(r * col, parts * self.spec.points)",
         "c, s = root(r * col, 2 * parts * self.spec.points)", NUMERICS),
        ("whole_frequencies_where_quarters_are", "return (4 * k1 - 1, 4) if self.spec.causal else (k1, 1)",
         "return k1, 1", NUMERICS),
        ("sequences_reach_each_other", "here = m // R == k // R", "here = m >= 0", SHORT),
        ("one_warp_says_how_large_the_filter_is", "for w in cutlass.range_constexpr(self.threads // 32):",
         "for w in cutlass.range_constexpr(1):", SIZES)),
    *family(
        "fft", "tkq/convolution/fft/sequences.py",
        ("tokens_behind_the_end", "if batch < B and token + e < L:\n    held[e] = vectors.run_at("
         "x, (batch, head, token + e), 1)[0]",
         "if batch < B:\n    held[e] = vectors.run_at(x, (batch, head, token + e), 1)[0]", ENDS),
        ("nan_reach_the_partner", "finite = most < INFINITE", "finite = most >= 0", NAN)),
    *family(
        "fft", "tkq/convolution/fft/blocks.py",
        ("first_block_in_every_place", "tk.complex_mul_table(acc, first, part(j), True)",
         "tk.complex_mul_table(acc, first, part(1), True)", BLOCKS),
        ("second_block_forgotten", "for i in cutlass.range(1, j, unroll=1):",
         "for i in cutlass.range(2, j, unroll=1):", BLOCKS),
        ("mirrored_blocks_in_order", "block = blocks - 1 - j if self.spec.conjugate else j", "block = j", BLOCKS)),
    *family(
        "fft", "tkq/convolution/fft/filter_gradient.py",
        ("other_warpgroups_left_out", "tk.complex_to_table(s.total, total, other > 0)",
         "tk.complex_to_table(s.total, total, False)", NUMERICS),
        ("pair_of_one_scale", "return sums[0] if self.spec.causal else cutlass.max(*sums)", "return sums[0]", PAIRS)),
)

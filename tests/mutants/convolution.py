"""Faults in the convolution."""
from .mutant import family

TESTS = "tests/gpu/convolution/"
NUMERICS, PACKED, TIME, STATES = ((f"{TESTS}test_causal_conv1d.py::{name}",) for name in (
    "test_numerics[203-264]", "test_packed_sequences[ragged]", "test_long_runs_along_time", "test_states[200]"))
NUMBERS, NORMED, HALF = ((f"{TESTS}test_causal_conv1d.py::{name}",) for name in (
    "test_numbers_are_the_sequences_that_they_make", "test_normed_heads[heads0-320-bf16-1]",
    "test_normed_heads[heads1-264-bf16-1]"))
STEPS = (f"{TESTS}test_causal_conv1d_step.py",)

MUTANTS = (
    *family(
        "conv", "tkq/convolution/forward.py",
        ("window_of_the_group_before", "put(window, i, rows[n + i])", "put(window, i, rows[i])", NUMERICS),
        ("rest_of_a_run_left_out", "if whole < end:", "if whole > end:", NUMERICS)),
    *family(
        "conv", "tkq/convolution/along_channels.py",
        ("states_of_the_first_sequence",
         "put(window, i, state_column(g.state, (batch, channel), V)(t + kernel.taps.ahead))",
         "put(window, i, state_column(g.state, (0, channel), V)(t + kernel.taps.ahead))", STATES)),
    *family(
        "conv", "tkq/convolution/taps.py",
        ("taps_over_the_beginning",
         "result.append([cutlass.select_(age >= back, x, s) for x, s in zip(row, state, strict=True)])",
         "result.append(row)", PACKED)),
    *family(
        "conv", "tkq/convolution/sequences.py",
        ("empty_sequences_have_tokens", "if self.cut(cu, above, tokens) > t:", "if self.cut(cu, above, tokens) >= t:",
         PACKED),
        ("tokens_of_no_sequence", "return (of.number >= 0) & (of.number < self.count(cu))", "return of.number >= 0",
         (f"{TESTS}test_causal_conv1d.py::test_packed_sequences[around]",))),
    *family(
        "conv", "tkq/convolution/sequences.py",
        ("numbers_make_one_sequence",
         "return Sequence(number, cutlass.select_(number != of.number, t, of.begin), tokens)",
         "return Sequence(number, of.begin, tokens)", NUMBERS),
        ("numbers_before_the_run_are_forgotten",
         "begin = cutlass.select_(held[i] != held[i - 1], t - self.ahead + i, begin)", "pass", NUMBERS)),
    *family(
        "conv", "tkq/convolution/heads.py",
        ("half_of_a_head", "for shift in range(self.lanes.bit_length() - 1):",
         "for shift in range(self.lanes.bit_length() - 2):", NORMED),
        ("all_heads_are_normed",
         "scale = cutlass.select_(self.channel < self.channels, rsqrt(self.sums(y) + EPS), Float32(1.0))",
         "scale = rsqrt(self.sums(y) + EPS)", HALF),
        ("gradient_along_the_head_is_left", "along = scale * scale * self.sums(y, dy)",
         "along = Float32(0.0)", NORMED)),
    *family(
        "conv", "tkq/convolution/backward.py",
        ("tokens_behind_the_run_count",
         "mine = dz if counts is None else [cutlass.select_(counts, x, Float32(0.0)) for x in dz]", "mine = dz",
         NUMERICS),
        ("no_tokens_behind_the_run", "for base in cutlass.range(whole, end + ahead, n, unroll=1):",
         "for base in cutlass.range(whole, end, n, unroll=1):", NUMERICS),
        ("gradients_over_the_beginning",
         "pending[at + e] = found if age is None else cutlass.select_(age >= d, found, pending[at + e])",
         "pending[at + e] = found", PACKED)),
    *family(
        "conv", "tkq/convolution/sums.py",
        ("runs_left_out", "total = total + cutlass.select_(base + j < runs, held[j], Float32(0.0))",
         "total = total + held[j]", NUMERICS)),
    *family(
        "conv", "tkq/convolution/along_time.py",
        ("zeros_before_the_first_token", "numbers = [cutlass.select_(at >= 0, a, Float32(0.0)) for a in numbers]",
         "pass", TIME),
        ("zeros_behind_the_last_token", "dz[e] = cutlass.select_(t < g.x.shape[1], found, Float32(0.0))",
         "dz[e] = found", TIME),
        ("step_before_forgotten", "behind[k] = found", "pass", TIME),
        ("half_of_the_lanes", "for shift in cutlass.range_constexpr(self.lanes.bit_length() - 1):",
         "for shift in cutlass.range_constexpr(self.lanes.bit_length() - 2):", TIME)),
    *family(
        "conv", "tkq/convolution/step.py",
        ("rows_that_are_not_there", "if row >= 0 and row < rows:", "if row >= 0:", STEPS),
        ("the_first_columns", "found = fma(weights[i], window[held - self.ahead + i], found)",
         "found = fma(weights[i], window[i], found)", STEPS)),
)

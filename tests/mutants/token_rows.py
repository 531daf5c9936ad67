"""Faults in Mamba-2's gradients by rows of tokens: most of them a CPU shows."""
from .mutant import family

EMULATED = ("tests/cpu/linear_attention/ssd/test_token_rows.py",)
SUMMED = ("tests/gpu/linear_attention/test_ssd_backward.py::test_lengths[300]",)
FOLDER = "tkq/linear_attention/token_rows/"

MUTANTS = (
    *family(
        "linear_ssd_rows_state", f"{FOLDER}state.py",
        ("that_does_not_decay", "tk.mul(state, state, s.gate.total[0, factors.stage])", "pass", EMULATED),
        ("of_tokens_that_do_not_decay", "tk.apply_narrow(taken, lambda x, f: x * f, own, factor)",
         "tk.apply_narrow(taken, lambda x, f: x, own, factor)", EMULATED),
        ("in_one_part", "tk.mma_AB(state, rest, wide[tokens.stage])", "pass", EMULATED),
        ("rounded_in_one_part", "tk.apply_narrow(rounded, lambda x, of_x: x - of_x, state, rounded)",
         "tk.apply_narrow(rounded, lambda x, of_x: x - x, state, rounded)", EMULATED),
        ("that_begins_with_zeros",
         "tk.load_from(tk.columns(state, CHUNK * part, CHUNK), self.view(g.initial, t), 0, self.first(t, part))",
         "pass", EMULATED),
        ("before_its_tokens", "s.tokens.wait(tokens)", "pass", EMULATED),
        ("before_its_factors", "s.factors.wait(factors)", "pass", EMULATED),
        ("over_one_that_is_read", "s.states.acquire_empty(free)", "pass", EMULATED)),
    *family(
        "linear_ssd_rows", f"{FOLDER}outputs.py",
        ("of_a_token_itself_twice", "self.seen(parts, both, x, *self.gate.weights(between, scale), apart=1)",
         "self.seen(parts, both, x, *self.gate.weights(between, scale))", EMULATED),
        ("of_the_tokens_behind", "there = row <= col - apart if self.spec.reverse else row >= col + apart",
         "there = row <= col - apart if not self.spec.reverse else row >= col + apart", EMULATED),
        ("of_a_token_itself_of_another", "there = (warp == w) & (tk.first_col() + e == row)",
         "there = (warp == w) & (tk.first_col() + e == 7 - row)", EMULATED),
        ("of_pairs_in_one_part", "tk.mma_AB(o, rest, s.v[tokens.stage])", "pass", EMULATED),
        ("of_the_state_in_one_part",
         "(tk.mma_AB if const_expr(by_keys) else tk.mma_ABt)(o, s.q[tokens.stage], tiles[1])", "pass", EMULATED),
        ("of_the_state_without_decay", "tk.mul_row(o, o, at_query)", "pass", EMULATED),
        ("without_a_token_itself", "found = found + itself.tensor[r] * element(v, i)", "pass", EMULATED),
        ("without_the_step", "found = found * step.tensor[r]", "pass", EMULATED),
        ("without_the_skip", "found = found + skip.tensor[j] * element(v, i)", "pass", EMULATED),
        ("whose_tokens_are_not_released", "s.tokens.release(tokens)", "pass", EMULATED),
        ("whose_states_are_released_before_they_are_read", "s.states.wait(states)",
         "s.states.wait(states)\ns.states.release(states)", EMULATED),
        ("sums_of_half_a_row", "return sum(chains[0][1:], chains[0][0]) + sum(chains[1][1:], chains[1][0])",
         "return sum(chains[0][1:], chains[0][0])", EMULATED),
        ("before_the_state", "s.states.wait(states)", "pass", EMULATED),
        ("before_their_factors", "s.factors.wait(factors)", "pass", EMULATED),
        ("before_their_tokens", "s.tokens.wait(tokens)", "pass", EMULATED)),
    *family(
        "linear_ssd_rows_of_heads", f"{FOLDER}sums.py",
        ("without_the_other", "x.tensor[i] = x.tensor[i] + element(found, i)", "pass", SUMMED)),
)

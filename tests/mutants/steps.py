"""Faults in steps of linear attention and state spaces."""
from .mutant import family

TESTS = "tests/gpu/linear_attention/"
DELTA, CHANNELS = ((f"{TESTS}test_steps.py::test_gates[True-{gate}]",) for gate in ("token", "channel"))
TOKENS, LENGTHS = (f"{TESTS}test_steps.py::test_tokens[128-3]",), (f"{TESTS}test_steps.py::test_lengths_of_q_and_k",)
ROWS, ACCEPTED = ((f"{TESTS}test_step_rows.py::{name}",) for name in (
    "test_rows_that_the_pool_does_not_have[1-dtype0]", "test_accepted_tokens[dtype0-state0-3]"))
GUARDED = (f"{TESTS}test_step_rows.py::test_nothing_outside_of_the_pool_is_touched[end]",)
SHARED = (f"{TESTS}test_steps.py::test_many_states[128-128-channel-True-v]",)
SPACE, TYPES, SOFTPLUS = ((f"{TESTS}test_ssd_step.py::{name}",) for name in (
    "test_expanded_arguments", "test_types_and_options[wide]", "test_softplus_of_all_sizes"))
CALLS = (f"{TESTS}test_step_calls.py::test_a_replayed_call_refuses_out_where_values_are",)

MUTANTS = (
    *family(
        "step", "tkq/linear_attention/step/kernel.py",
        ("row_behind_the_pool", "if row < 0 or row >= Int64(g.state.shape[0]):", "if row < 0:", GUARDED),
        ("row_before_the_first", """
            if row >= 0:
                self.steps(g, at, row, held, memory)
         """, """
            if row >= -1:
                self.steps(g, at, row, held, memory)
         """, GUARDED),
        ("skipped_rows_are_not_zeroed", "self.put_zeros(g, at)", "pass", ROWS),
        ("more_accepted_than_tokens", "if last >= 0 and last < g.tokens:", "if last >= 0:", ACCEPTED),
        ("first_state_of_the_token_behind", "last = Int64(vectors.run_at(g.accepted, (at.n,), 1)[0]) - 1",
         "last = Int64(vectors.run_at(g.accepted, (at.n,), 1)[0])", ACCEPTED),
        ("states_behind_tokens_are_not_stored", """
            if row >= 0:
                self.state.store(state, g.state, row, at.head, at.part)
         """, "pass", ACCEPTED),
        ("the_same_token_again", "self.read(g, at, t + 1, held)", "self.read(g, at, t, held)", TOKENS),
        ("query_does_not_see_its_own_token", "out = [scale * (x + met * u) for x, u in zip(out, writes)]",
         "out = [scale * x for x, u in zip(out, writes)]", DELTA),
        ("given_without_decay", "found = [x * decay for x in found]", "found = [x for x in found]", DELTA),
        ("state_does_not_decay", "x = (decay[i] if each else decay) * x", "x = x", CHANNELS),
        ("keys_of_their_own_length", "scale, k = scale * q_length, [x * k_length for x in k]",
         "scale = scale * q_length", LENGTHS),
        ("queries_of_their_own_length", "scale, k = scale * q_length, [x * k_length for x in k]",
         "k = [x * k_length for x in k]", LENGTHS)),
    *family(
        "step", "tkq/linear_attention/step/state.py",
        ("sums_of_half_the_lanes", "for offset in self.offsets:", "for offset in self.offsets[1:]:", DELTA),
        ("rows_of_other_lanes", "k = i // c.k_run * c.k_run * c.k_lanes + i % c.k_run",
         "k = i // c.k_run * c.k_run + i % c.k_run", DELTA)),
    *family(
        "step", "tkq/linear_attention/step/warps.py",
        ("sums_of_all_warps_but_the_last", "for w in range(self.config.k_warps):",
         "for w in range(self.config.k_warps - 1):", SHARED),
        ("runs_of_one_warp", "runs[i] = _plus(run, self.run(memory, w, part, i))",
         "runs[i] = _plus(run, self.run(memory, 0, part, i))", SHARED),
        ("dots_of_one_warp", "dots = _plus(dots, self.dots(memory, w))", "dots = _plus(dots, self.dots(memory, 0))",
         SHARED),
        ("warps_with_the_same_rows", "return cute.arch.thread_idx()[0] // LANES * config.rows",
         "return cute.arch.thread_idx()[0] // LANES * 0", SHARED)),
    *family(
        "step", "tkq/linear_attention/step/token.py",
        ("beta_of_one", "return [held[1][0] * (v - x) for v, x in zip(values, given)]",
         "return [v - x for v, x in zip(values, given)]", DELTA),
        ("nothing_is_erased", "return [held[1][0] * (v - x) for v, x in zip(values, given)]",
         "return [held[1][0] * v for v, x in zip(values, given)]", DELTA),
        ("softplus_without_its_tail", "return cutlass.max(x, Float32(0.0)) + rest",
         "return cutlass.max(x, Float32(0.0))", SOFTPLUS),
        ("no_bias_of_dt", "x = numbers[0] + numbers[2]", "x = numbers[0]", TYPES),
        ("one_d_for_a_head", "row = (at.head, at.part.v + j)", "row = (at.head, at.part.v)", SPACE)),
    *family(
        "step", "tkq/runtime/call/replay_overlap.c",
        ("replayed_wherever_tensors_lie", "if (record->overlaps != call->overlaps) return 0;", "return 1;", CALLS)),
)

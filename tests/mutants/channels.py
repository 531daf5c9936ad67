"""Faults in linear attention with gates for each column."""
from .mutant import family, pressed

NAPS, DELTA_NAPS, READS = (pressed(x) for x in ("naps-channels", "naps-channels_delta", "reads-channels"))
TESTS = "tests/gpu/linear_attention/test_channels.py::"
KEYS, FAR, DELTA, VALUES, REVERSED, PAIRS, LAST, LONG, KINDS = ((f"{TESTS}{name}",) for name in (
    "test_lengths[o]", "test_resets", "test_lengths[delta]", "test_lengths[dq]", "test_lengths[dk]",
    "test_lengths[dk_of_both]", "test_nothing_behind_the_end_counts",
    "test_gradients_of_gates_are_as_good_at_any_length[False]", "test_chunks_of_all_kinds"))
OUTPUTS = tuple(f"{TESTS}test_outputs_have_the_error_of_their_rounding[{delta}]" for delta in (False, True))
DECAYS = ("tests/gpu/linear_attention/test_delta_inputs_on_gpu.py::test_decays_of_columns[dtype0]",)
LENGTHS = ("tests/gpu/linear_attention/test_delta_inputs_on_gpu.py::test_rows_of_any_length_with_gates_of_columns",)
BOUNDED_GPU = "tests/gpu/linear_attention/test_bounded.py::"
ALIKE_BOUNDED = (f"{BOUNDED_GPU}test_an_inverse_that_rounding_would_move",)
ALIKE = ("tests/gpu/linear_attention/test_delta_forward.py::test_hard_inverses[0.0-identical-2.0]",)
BLOCKS, BLOCKS_PACKED = ("tests/gpu/linear_attention/test_delta_forward.py::test_lengths[300-token]",), (
    "tests/gpu/linear_attention/test_blocks_on_gpu.py::test_packed",)
BLOCKS_KEPT, BLOCKS_BACK, BLOCKS_BACK_ALIKE = (
    (f"tests/gpu/linear_attention/test_blocks_on_gpu.py::test_training[{name}]",)
    for name in ("usual-False", "usual-True", "alike-True"))
SEEN = "there = row + 8 * r < col + (8 * n + e + diagonal) if above else col + (8 * n + e) < row + (8 * r + diagonal)"
BOUNDED, HARD, EDGES = ((f"{BOUNDED_GPU}{name}",) for name in (
    "test_results[300-128--5.0]", "test_hard_data[0.0001-1.0]", "test_packed"))
SPLIT = "tests/gpu/linear_attention/test_bounded_split.py::"
REACHED, SEGMENTED = ((f"{SPLIT}{name}",) for name in (
    "test_chunks_that_reach_a_segment[3000-4]", "test_segments[1537]"))
EXACT = (f"{TESTS}test_gradients_by_one_product_are_as_exact_as_by_levels[False]",)
BEFORE = ("tests/gpu/linear_attention/test_packed.py::test_tokens_before_the_first_sequence",)
FINISH = "tests/gpu/linear_attention/test_finish_on_gpu.py::"
HEADS, DOTS, SUMS, SEGMENTS = ((f"{FINISH}{name}",) for name in (
    "test_sums_over_shared_heads", "test_dot_products", "test_sums_behind_each_token[False]",
    "test_one_segment_and_several_give_the_same_bits"))
PACKED = tuple(f"{FINISH}test_packed_sequences[{case}]" for case in ("cuts0-3013-40", "cuts1-1000-130"))

MUTANTS = (
    *family(
        "linear", "tkq/linear_attention/channels/columns.py",
        ("reference_a_token_late", """
                f = times(f, mine.a, i)
                rows.append((i, f))
         """, """
                rows.append((i, f))
                f = times(f, mine.a, i)
         """, KINDS),
        ("early_rows_with_their_own_decay", """
                rows.append((i, f))
                f = times(f, mine.a, i)
         """, """
                f = times(f, mine.a, i)
                rows.append((i, f))
         """, KINDS),
        ("diagonal_left_out", "there = row == col", "there = row > 8", FAR),
        ("level_of_the_earlier_half", "return (late ^ early) // half == 1 and late // half % 2 == 1",
         "return (late ^ early) // half == 1 and late // half % 2 == 0", KINDS),
        ("neighbour_is_oneself",
         "found = [products[(self.part ^ 1) * self.columns + 2 * self.pair + e] for e in range(2)]",
         "found = [products[self.part * self.columns + 2 * self.pair + e] for e in range(2)]", FAR),
        ("gates_of_tokens_behind_the_end", "left = cutlass.select_(2 * self.pair < columns, tokens - first, Int32(0))",
         "left = cutlass.select_(2 * self.pair < columns, Int32(64), Int32(0))", LAST)),
    *family(
        "linear", "tkq/linear_attention/channels/state.py",
        ("state_does_not_decay_by_columns", """
            if not self.whole.holds(s.whole.found[None, at.scores]):
                mul_columns(c.s, s.total[None, at.scores])
         """, "pass", KINDS),
        ("state_stays_in_the_middle_of_a_chunk",
         "mul_columns(c.s, self.whole.step(STEPS - 1, s.whole, at.scores))", "pass", KEYS),
        ("state_not_in_the_middle_of_a_chunk",
         "mul_columns(c.s, self.whole.step(0, s.whole, at.scores))", "pass", KEYS),
        ("what_the_state_gives_for_keys_as_they_came",
         "self.delta.of_state(c, s.started[at.scores] if self.solved else None)",
         "self.delta.of_state(c, s.k[at.tokens] if self.solved else None)", DELTA),
        ("state_does_not_decay_between_blocks", "mul_columns(c.s, self.whole.step(n, s.whole, at.scores))", "pass",
         KINDS),
        ("state_does_not_decay_behind_blocks",
         "mul_columns(c.s, self.whole.step(CHUNK // EDGE, s.whole, at.scores))", "pass", KINDS),
        ("blocks_in_the_other_order", "block = CHUNK // EDGE - 1 - n if self.spec.reverse else n",
         "block = CHUNK // EDGE - 1 - n", KINDS),
        ("block_without_what_it_takes_off", "tk.mma_AB(c.s, c.x, s.started[at.scores], k=tokens)", "pass", KINDS),
        ("columns_no_wait_for_scores", "s.scores.wait(scores)", "", DELTA_NAPS)),
    *family(
        "linear", "tkq/linear_attention/channels/kernel.py",
        ("columns_scores_written_over", "s.scores.acquire_empty(out)", "", READS)),
    *family(
        "linear", "tkq/linear_attention/channels/scores.py",
        ("keys_do_not_decay_to_the_end",
         "self.columns.to_ends(mine, products, rows((keys, keys)), rows(*late), s.total[None, stage])",
         "self.columns.to_ends(mine, products, rows(), rows(*late), s.total[None, stage])", KINDS),
        ("second_part_of_queries_left_out", "tk.mma_ABt(c.all, s.levels[0], k)", "pass", OUTPUTS),
        ("second_part_of_keys_left_out", "tk.mma_ABt(c.all, q, s.levels[1])", "pass", OUTPUTS),
        ("lower_of_a_level_left_out", "gather_lower(c.lower, c.x, part, half)",
         "gather_lower(c.lower, c.x, part, half if half != 16 else 8)", KINDS)),
    *family(
        "linear", "tkq/linear_attention/channels/ahead.py",
        ("beta_of_another_chunk", "beta[at, i & (beta.shape[1] - 1)] = found", "beta[at, i & 1] = found", DELTA)),
    *family(
        "linear", "tkq/linear_attention/channels/whole.py",
        ("whole_of_far_decays", "near = near & (size <= most)", "pass", FAR),
        ("blocks_of_far_decays", "near_blocks = near_blocks & (eight <= most_of_eight)  # not where it is NaN", "pass",
         FAR),
        ("whole_of_growth_and_decay", "eight = eight + cute.math.absf(mine.a[i, e])", "eight = eight + mine.a[i, e]",
         FAR),
        ("blocks_from_another_token", "f = [exp2(-self.of_half(mine, rows[0], e)) for e in range(2)]",
         "f = [exp2(-self.of_half(mine, rows[0] + 8, e)) for e in range(2)]", KINDS),
        ("steps_within_a_part_alone", "shared.steps[n * K + col, stage] = shared.steps[n * K + col, stage] * "
         "firsts[(c.part + 1) * K + col]", "pass", KINDS),
        ("steps_as_they_lie", "return STEPS - 1 - n if self.spec.reverse else n", "return n", KINDS),
        ("whole_from_another_token", "counts = n >= c.part if early else n < c.part",
         "counts = n > c.part if early else n < c.part", KEYS),
        ("whole_divided_by_a_token_s_own_decay", "for a in reversed(decays[1:]):", "for a in reversed(decays[:-1]):",
         KEYS),
        ("whole_sees_what_is_behind", "tk.right_fill(x, 1, 0.0, diagonal=True)", "pass", KEYS)),
    *family(
        "linear", "tkq/linear_attention/channels/l2norm.py",
        ("lengths_of_half_a_row", "for i in cutlass.range_constexpr(LANES.bit_length() - 1):",
         "for i in cutlass.range_constexpr(LANES.bit_length() - 2):", LENGTHS),
        ("lengths_of_keys_once", "of_state[i] = b * b * found[e]", "of_state[i] = b * found[e]", LENGTHS),
        ("values_without_a_key_s_length", "of_values[i] = b * found[e]", "of_values[i] = found[e]", LENGTHS),
        ("lengths_without_eps", "to[token] = scale * cute.math.rsqrt(total[0] + EPS, fastmath=True)",
         "to[token] = scale * cute.math.rsqrt(total[0], fastmath=True)", LENGTHS)),
    *family(
        "linear", "tkq/linear_attention/channels/bounded/blocks.py",
        ("gates_behind_the_end_decay", "bound = cutlass.select_(there, g.own.bound * tk.LOG2E, Float32(0.0))",
         "bound = g.own.bound * tk.LOG2E", BOUNDED),
        ("half_a_block_s_decay_is_lost", "steps[at, wg] = steps[at, wg] * firsts[at, wg]",
         "steps[at, wg] = steps[at, wg]", BOUNDED),
        ("late_rows_divided_by_a_neighbour_s_decay", """
        for a in reversed(decays[1:]):
            over.insert(0, times(over[0], a))
         """, """
        for a in reversed(decays[:-1]):
            over.insert(0, times(over[0], a))
         """, BOUNDED),
        ("early_rows_from_their_own_token", "over = inner[-2::-1]", "over = inner[:0:-1]", BOUNDED),
        ("bounded_lengths_of_keys_once", "factors = [b * b * x for b, x in zip(lengths.keys, beta)]",
         "factors = [b * x for b, x in zip(lengths.keys, beta)]", BOUNDED),
        ("bounded_lengths_without_eps",
         "over = [[cute.math.rsqrt(x + EPS, fastmath=True) for x in one] for one in found]",
         "over = [[cute.math.rsqrt(x + 1e-30, fastmath=True) for x in one] for one in found]", HARD),
        ("lengths_of_another_row", "owner, odd = 4 * row + row // 2, row % 2 == 1",
         "owner, odd = 4 * row, row % 2 == 1", BOUNDED),
        ("beta_of_tokens_behind_the_end", "if token < g.tokens:", "if token < g.tokens + 64:", EDGES)),
    *family(
        "linear", "tkq/linear_attention/channels/bounded/state.py",
        ("bounded_state_not_in_a_block_s_middle",
         "mul_columns(of, cute.make_tensor(step.iterator + first, cute.make_layout(self.piece)))", "pass", BOUNDED),
        ("bounded_state_stays_in_a_block_s_middle", "mul_columns(c.s, self.step(s, BLOCKS, ring.stage))", "pass",
         BOUNDED),
        ("bounded_inverse_in_one_part", "tk.copy(tk.columns(c.again, *rest), v)", "tk.zero(c.again)",
         ALIKE_BOUNDED),
        ("first_state_of_no_segment", "if span.first == 0:", "if span.first < 0:", SEGMENTED),
        ("last_state_of_no_segment", "if span.end == chunks(self.spec, g, t) and span.first < span.end:",
         "if span.end > chunks(self.spec, g, t) and span.first < span.end:", SEGMENTED)),
    *family(
        "linear", "tkq/linear_attention/channels/bounded/reach.py",
        ("reach_of_columns_that_give_each_other_nothing",
         "p = [cute.math.fma(m, k, y) * a for k, y, a in zip(of_key, p, decays)]",
         "p = [y * a for y, a in zip(p, decays)]", REACHED),
        ("reach_gives_up_at_once", "if found[0] == ALL and total[0] * Float32(times) <= NOTHING * Float32(i):",
         "if found[0] == ALL and total[0] * Float32(times) <= NOTHING * Float32(i + 1):", REACHED),
        ("reach_of_states_that_never_grow",
         "w = w * cute.arch.fmax(cute.math.absf(1.0 - betas[i]), Float32(1.0))", "pass", REACHED),
        ("reach_of_keys_of_any_length", "m = cute.math.absf(betas[i]) * (over[i] * (SLACK * m))",
         "m = cute.math.absf(betas[i]) * (SLACK * m)", REACHED),
        ("reach_of_chunks_behind", "behind = ((row + 1) * each - i * AT_ONCE) * CHUNK - tk.warp_id() * EDGE",
         "behind = ((row + 1) * each + 1 - i * AT_ONCE) * CHUNK - tk.warp_id() * EDGE", REACHED)),
    *family(
        "linear", "tkq/linear_attention/overlap/segments.py",
        ("segments_begin_with_nothing", "first = cutlass.select_(before < ALL, stored_from - before, end)",
         "first = cutlass.select_(before < ALL, stored_from, end)", SEGMENTED),
        ("segments_that_nobody_has", "going = reach[last] == ALL", "going = reach[last] == ALL - 1", SEGMENTED),
        ("segments_lose_their_first_chunk", "return leader & (chunk >= span.stored_from) if self.there else leader",
         "return leader & (chunk > span.stored_from) if self.there else leader", SEGMENTED)),
    *family(
        "linear", "tkq/linear_attention/blocks/pairs.py",
        ("blocks_see_what_is_behind", SEEN, SEEN.replace("8 * r + diagonal", "8 * r + 8"), BLOCKS),
        ("blocks_see_what_is_before", SEEN, SEEN.replace("8 * n + e + diagonal", "8 * n + e + 8"), BLOCKS_BACK),
        ("blocks_by_an_inverse_not_turned",
         "x[2 * r + e, 0, n] = Float32(0.0) if r > n else lower[row * PITCH + column]",
         "x[2 * r + e, 0, n] = Float32(0.0) if n > r else lower[column * PITCH + row]", BLOCKS_BACK),
        ("blocks_of_rows_of_another_warp",
         "first, column = (warp * EDGE + row) * ROW, (warp + beside) % (CHUNK // EDGE)",
         "first, column = row * ROW, (warp + beside) % (CHUNK // EDGE)", BLOCKS),
        ("inverse_in_one_part", "held = unpacked(rounded, dtype)", "held = two", ALIKE),
        ("blocks_multiplied_by_the_wrong_rows", "words_of_b[e] = of_b[4 * step + n + 2 * e]",
         "words_of_b[e] = of_b[4 * step + 2 * n + e]", BLOCKS),
        ("blocks_of_one_panel", "tk.load(x, of(panel))", "tk.load(x, of(0))", BLOCKS)),
    *family(
        "linear", "tkq/linear_attention/blocks/scores.py",
        ("blocks_leave_out_gates",
         "x = x + cutlass.select_(tk.lane_id() % EDGE >= 1 << i, other, Float32(0.0))",
         "x = x + cutlass.select_(tk.lane_id() % EDGE >= 2 << i, other, Float32(0.0))", BLOCKS),
        ("blocks_end_at_their_first_token",
         "last, i = cute.arch.shuffle_sync(total, EDGE - 1), tk.warp_id() % 4 * EDGE + tk.lane_id()",
         "last, i = cute.arch.shuffle_sync(total, 0), tk.warp_id() % 4 * EDGE + tk.lane_id()", BLOCKS),
        ("blocks_of_tokens_behind_the_end", "there = token < g.tokens", "there = token < g.tokens + 64", BLOCKS_PACKED),
        ("blocks_by_the_other_token_s_beta", "return lambda r, n, e: columns[n][e]",
         "return lambda r, n, e: columns[r][e]", BLOCKS_BACK),
        ("blocks_of_other_tokens_added", "keep(p, False, lambda r, n, e: Float32(-1.0), seen, True)",
         "keep(p, False, lambda r, n, e: Float32(1.0), seen, True)", BLOCKS_BACK),
        ("blocks_erased_without_the_scale", "erase = begun * cute.arch.rcp_approx(g.scale)", "erase = begun",
         BLOCKS_BACK)),
    *family(
        "linear", "tkq/linear_attention/blocks/gradients.py",
        ("gradients_by_blocks_do_not_decay", "tk.mul(c.s, c.s, s.factors.total[block, scores])", "pass", BLOCKS_BACK),
        ("blocks_in_the_order_of_tokens", "self.add(c, s, (BLOCKS - 1 - block, wg), (ring.stage, scores.stage))",
         "self.add(c, s, (block, wg), (ring.stage, scores.stage))", BLOCKS_BACK),
        ("blocks_erase_nothing", "tk.apply_narrow(c.taken, lambda d, e: -(e * d), c.given, c.few)",
         "tk.zero(c.taken)", BLOCKS_BACK),
        ("blocks_of_gradients_in_one_part", "tk.mma_ABt(c.given, c.u, s.inverse[scores], b_part=block, "
         "k=(rest[0], sum(rest)))", "pass", BLOCKS_BACK_ALIKE),
        ("sums_of_a_block_s_gradients_by_dv_alone",
         "by = cutlass.select_(large, cute.arch.rcp_approx(b * b), sign_of(b))", "by = cute.arch.rcp_approx(b * b)",
         BLOCKS_BACK)),
    *family(
        "linear", "tkq/linear_attention/blocks/state.py",
        ("state_by_blocks_does_not_decay", "tk.mul(c.s, c.s, of.total[block, scores])", "pass", BLOCKS),
        ("state_takes_up_values_as_they_were", "taken = c.u", "taken = c.v", BLOCKS),
        ("blocks_keep_what_values_lack", "tk.apply_narrow(kept, lambda r, b: r * kept_of(b), c.given, c.few)",
         "tk.apply_narrow(kept, lambda r, b: r, c.given, c.few)", BLOCKS_KEPT),
        ("blocks_take_up_what_values_lack", "tk.mul_col(c.given, c.given, c.few)", "pass", BLOCKS_KEPT),
        ("blocks_without_their_inverse",
         "tk.mm_ABt(c.given, c.v, s.inverse[scores], b_part=block, **inside)",
         "tk.mm_ABt(c.given, c.v, s.p[scores], b_part=block, **inside)", BLOCKS)),
    *family(
        "linear", "tkq/linear_attention/decays/kernel.py",
        ("decays_of_another_head",
         "factor = cute.math.exp2(of.A_log[column // self.spec.head_dim] * tk.LOG2E, fastmath=True)",
         "factor = cute.math.exp2(of.A_log[thread // self.spec.head_dim] * tk.LOG2E, fastmath=True)", DECAYS),
        ("decays_summed_behind_the_end", "sums[0, e] = sums[0, e] + cutlass.select_(there, dx, Float32(0.0))",
         "sums[0, e] = sums[0, e] + dx", DECAYS),
        ("slope_of_a_bound_without_its_factor", "dx = dy * (bound * factor) * slope(parts(factor * x))",
         "dx = dy * bound * slope(parts(factor * x))", DECAYS)),
    *family(
        "linear", "tkq/linear_attention/decays/function.py",
        ("sigmoid_of_the_other_sign", "return cutlass.select_(x < 0.0, of.e * of.r, of.r)",
         "return cutlass.select_(x > 0.0, of.e * of.r, of.r)", DECAYS),
        ("softplus_of_few_terms", "TERMS = 7  # of the series of atanh(s) / s, s at most 1/3: what is left out "
         "is below 2^-25 of it", "TERMS = 3", DECAYS)),
    *family(
        "linear", "tkq/linear_attention/channels/value_state.py",
        ("rows_of_the_state_do_not_decay", "tk.mul_row(c.s, c.s, c.total)", "", VALUES),
        ("state_in_one_part", "tk.mma_ABt(o, c.rest, queries)", "pass", LONG),
        ("x_with_factors_that_are_not_rounded",
         "self.add_dots(c, r, n, given, unpacked(word if f is None else scaled(word, f, self.dtype), self.dtype))",
         "self.add_dots(c, r, n, [x if f is None else x * y for x, y in zip(given, f or given)], "
         "unpacked(word, self.dtype))", LONG),
        ("values_in_one_part", "tk.mma_ABt(c.o, c.left, s.p[stage])", "pass", EXACT),
        ("pairs_in_one_part", "tk.mma_ABt(o, values, p[1])", "pass", EXACT),
        ("state_takes_up_values_in_one_part", "tk.mma_AB(c.s, c.left, s.k[ring.stage])", "pass", EXACT),
        ("columns_no_wait_for_a_step", """
                s.steps.wait(steps)
                self.add_chunk(c, g, s, ring, steps)
         """, "self.add_chunk(c, g, s, ring, steps)", NAPS),
        ("sums_of_two_tokens_of_eight", "after = after + cute.arch.shuffle_sync(total, tk.lane_id() - lane)",
         "after = after + own", REVERSED),
        ("sums_of_one_chunk", "behind[row + 8 * r, 0] = before + Float64(after)", "pass", REVERSED)),
    *family(
        "linear", "tkq/linear_attention/channels/value_pairs.py",
        ("second_pairs_left_out", "of.multiply_pairs(c.o, c.left, others)", "pass", PAIRS),
        ("second_pairs_in_one_part", "pairs, others = (s.p[stage], s.carried[stage]), (s.p2[stage], s.carried2[stage])",
         "pairs, others = (s.p[stage], s.carried[stage]), (s.p2[stage], s.p2[stage])", PAIRS),
        ("first_keys_without_the_scale", "state[r, at] = cute.math.fma(fresh[r, j], -scale, state[r, at])",
         "state[r, at] = state[r, at] - fresh[r, j]", PAIRS)),
    *family(
        "linear", "tkq/linear_attention/channels/whole_of_values.py",
        ("values_whole_of_far_decays",
         "near = near & (one[2 * half] + one[2 * half + 1] >= -MOST / tk.LOG2E)  # not where it is NaN",
         "near = near & (one[2 * half] <= 0.0)", FAR),
        ("values_whole_from_another_token", "starts = -(first + second), -second, Float32(0.0), third",
         "starts = -(first + second), -second, third, third", VALUES),
        ("values_whole_with_its_ends_as_they_lie", "self.put_ends(of, ends[::-1] if reverse else ends)",
         "self.put_ends(of, ends)", REVERSED)),
    *family(
        "linear", "tkq/linear_attention/channels/sums.py",
        ("sums_of_terms_all_added", "total[0] = total[0] + (held[i, 0] - held[i, 1])",
         "total[0] = total[0] + (held[i, 0] + held[i, 1])", SUMS),
        ("sums_of_tokens_behind_the_last", "if token < of.rows:", "if token < of.rows + 1:", SUMS),
        ("sums_of_the_first_sequence", "at = m.iterator + cute.crd2idx((batch, of.first + part * self.ahead, col), "
         "m.layout)", "at = m.iterator + cute.crd2idx((batch, part * self.ahead, col), m.layout)", PACKED),
        ("totals_of_the_first_sequence", "chunks, row0 = cute.ceil_div(of.end - of.first, CHUNK), of.first // CHUNK",
         "chunks, row0 = cute.ceil_div(of.end - of.first, CHUNK), 0", PACKED),
        ("sums_without_the_chunks_behind", "behind[0] = behind[0] + Float64(total[0])", "pass", SEGMENTS),
        ("sums_without_the_next_segment", "for i in cutlass.range(rows[1] - rows[0], unroll=8):",
         "for i in cutlass.range(rows[1] - rows[0] - 1, unroll=8):", SEGMENTS),
        ("sums_of_the_part_before", "held.store(following.load())", "pass", SUMS)),
    *family(
        "linear", "tkq/linear_attention/finish/heads.py",
        ("elements_of_the_last_head_alone", "total[e] = total[e] + x", "total[e] = x", HEADS),
        ("heads_from_the_first_part_alone",
         "for part in cutlass.range(a.shape[1] // self.spec.at_once, unroll=1):",
         "for part in cutlass.range(1, unroll=1):", HEADS),
        ("heads_of_another_row", "n = block * (THREADS // self.vectors) + thread // self.vectors",
         "n = block * (THREADS // self.vectors)", HEADS)),
    *family(
        "linear", "tkq/linear_attention/finish/rows.py",
        ("dots_of_half_a_row", "for i in cutlass.range_constexpr(lanes.bit_length() - 1):",
         "for i in cutlass.range_constexpr(lanes.bit_length() - 2):", DOTS),
        ("dots_with_the_next_row", "if n < y.shape[0] and column < self.spec.columns:", "if n < y.shape[0]:", DOTS)),
    *family(
        "linear", "tkq/linear_attention/channels/value_state.py",
        ("columns_of_no_sequence_are_left", "tokens = t.tokens if const_expr(self.spec.packed) else g.tokens",
         "tokens = g.tokens", BEFORE)),
    *family(
        "linear", "tkq/linear_attention/channels/parts.py",
        ("chunks_of_all_sequences", "return ((t.tokens if spec.packed else g.tokens) + (CHUNK - 1)) >> 6",
         "return (g.tokens + (CHUNK - 1)) >> 6", BEFORE)),
)

"""Faults in attention with functions of the user's."""
from .mutant import family

FORWARD, BACKWARD = "tests/gpu/attention/test_flex_attention.py::", "tests/gpu/attention/test_flex_backward.py::"
CAPTURED = "tests/gpu/attention/test_flex_captured_gradients.py::"


def _of(file, *names):
    return tuple(file + name for name in names)


GALLERY, LENGTHS = _of(FORWARD, "test_gallery --slow"), _of(FORWARD, "test_lengths")
ALIBI = _of(FORWARD, "test_gallery[alibi_causal]")
CAP = _of(FORWARD, "test_far_from_a_softcap")
EMPTY, FULL = _of(FORWARD, "test_empty_rows"), _of(FORWARD, "test_full_blocks_are_not_masked")
INDICES, WHOLE = _of(FORWARD, "test_captured_indices_that_lie"), _of(FORWARD, "test_operations[whole]")
SIZES, NO_BLOCK = _of(FORWARD, "test_block_sizes --slow"), _of(FORWARD, "test_rows_of_no_block")
SHARED, TABLES = _of(CAPTURED, "test_gradients[shared-128]"), _of(CAPTURED, "test_gradients[tables-128]")
MASKS, TYPES = _of(FORWARD, "test_create_block_mask"), _of(FORWARD, "test_create_block_mask[of_every_type-2500-size3]")
STEPS = _of(FORWARD, "test_create_block_mask[causal-1000-size4]")
KEYS, HALVES = _of(BACKWARD, "test_lengths"), _of(BACKWARD, "test_block_sizes --slow")
EQUAL, EQUAL_SLOPE = (_of(BACKWARD, f"test_equal_accuracy[{name}-128]") for name in ("causal", "softcap"))
WIDE, WIDE_SLOPE = (_of(BACKWARD, f"test_equal_accuracy[{name}-256]") for name in ("causal", "softcap"))
BEHIND = _of(BACKWARD, "test_scores_that_grow_behind_the_last_key --slow")

MUTANTS = (
    *family(
        "flex", "tkq/attention/flex/state.py",
        ("parts_of_a_block_left_out", "return cutlass.max(cutlass.min(block, last), 0) * self.kv_per + i % self.kv_per",
         "return cutlass.max(cutlass.min(block, last), 0) * self.kv_per",
         SIZES),
        ("tasks_of_no_block_before_the_first_key", "found = self.tile_of(block, cutlass.max(rest, 0))",
         "found = self.tile_of(block, rest)", NO_BLOCK),
        ("full_blocks_by_the_other_list", "if i >= counts.masked:", "if i > counts.masked:", FULL)),
    *family(
        "flex", "tkq/attention/flex/softmax.py",
        ("keys_behind_the_end", "if limit < self.config.kv:", "if limit < 0:", LENGTHS),
        ("empty_rows_keep_nan", "if empty:", "if empty & (r > 1):", EMPTY),
        ("keys_behind_the_end_of_full_tiles", "if g.tasks.rows_k % (self.config.kv * self.spec.kv_per) != 0:",
         "if g.tasks.rows_k < 0:", LENGTHS),
        ("nothing_is_the_least", "LOWEST = -3.4028234663852886e38  # of float32's numbers",
         "LOWEST = -float(\"inf\")", EMPTY),
        ("empty_tasks_see_keys", "if regs.task[\"n_masked_right\"] < 0:",
         "if regs.task[\"n_masked_right\"] < -1:", NO_BLOCK),
        ("rows_of_the_first_warpgroup", "row = regs.task[\"tile\"] * self.config.rows + regs.wg * 64 + tk.first_row()",
         "row = regs.task[\"tile\"] * self.config.rows + tk.first_row()", GALLERY),
        ("far_scores_are_near", "return cute.arch.vote_all_sync(top <= Float32(1.0))",
         "return cute.arch.vote_all_sync(top <= Float32(9.0))",
         _of(FORWARD, "test_far_from_a_softcap_of_biases --slow"))),
    *family(
        "flex", "tkq/attention/flex/linear_scores.py",
        ("biases_of_the_first_column", "view[r, j] = cute.math.fma(view[r, j], g.score_scale, columns[j])",
         "view[r, j] = cute.math.fma(view[r, j], g.score_scale, columns[0])", ALIBI),
        ("biases_of_the_first_row", "regs.shift.tensor[r] = exponents.bias[r] - regs.max.tensor[r]",
         "regs.shift.tensor[r] = exponents.bias[0] - regs.max.tensor[r]", ALIBI),
        ("biases_of_the_first_lane_s_columns", "first = Float32(tk.first_col())", "first = Float32(0.0)", ALIBI),
        ("biases_do_not_move_max", "return cute.math.fma(s, Float32(LOG2E), self.bias[r])",
         "return s * Float32(LOG2E)", _of(FORWARD, "test_biases_that_grow"))),
    *family(
        "flex", "tkq/attention/flex/capped.py",
        ("far_scores_under_a_cap_are_near",
         "near = (top <= numbers.limit) & (cute.math.absf(low) <= numbers.limit)",
         "near = (top <= numbers.limit * 9) & (cute.math.absf(low) <= numbers.limit * 9)", CAP),
        ("low_scores_under_a_cap_are_near",
         "near = (top <= numbers.limit) & (cute.math.absf(low) <= numbers.limit)", "near = top <= numbers.limit", CAP),
        ("caps_of_any_sign", "plain = (cap * by > 0) & (size > SMALL) & (size < LARGE) & "
         "(cute.math.absf(cap) < LARGE)", "plain = size > SMALL", CAP)),
    *family(
        "flex", "tkq/attention/flex/roles.py",
        ("first_tile_is_masked_twice", "whole = cutlass.max(masked, 1)", "whole = cutlass.max(masked, 0)", FULL),
        ("numbers_of_the_first_tile", "numbers[0, stage] = Int32(at[2])", "numbers[0, stage] = Int32(0)", GALLERY)),
    *family(
        "flex", "tkq/attention/flex/scheduler.py",
        ("the_second_tile_first", "g.keys.at(*of, Int32(0), counts))", "g.keys.at(*of, Int32(1), counts))", GALLERY),
        ("tasks_of_no_block_see_one", "masked = Int32(-1)", "masked = Int32(0)", NO_BLOCK)),
    *family(
        "flex", "tkq/attention/flex/emit.py",
        ("negative_indices_are_the_first", "index = select(index < 0, index + size, index)", "", INDICES),
        ("remainders_of_the_dividends_sign", "return select(wrong, rest + b, rest)", "return rest", WHOLE)),
    *family(
        "flex", "tkq/attention/flex/look.py",
        ("the_first_columns_alone", "column = col + 32 * part, 8 * (j // 2) + j % 2",
         "column = col + 0 * part, 8 * (j // 2) + j % 2", _of(FORWARD, "test_broadcast_masks")),
        ("values_of_the_first_lanes",
         "value = from_lane(values[j // 2 % 2 * 2 + j % 2], 8 * part + 4 * (j // 4) + tk.lane_id() % 4)",
         "value = from_lane(values[j // 2 % 2 * 2 + j % 2], 4 * (j // 4) + tk.lane_id() % 4)",
         _of(FORWARD, "test_gallery[natten] --slow")),
        ("the_first_lane_s_number_alone", "left[0] = select(here, left[0] & Int32(2 - r), left[0])",
         "left[0] = Int32(0)", GALLERY),
        ("limits_a_column_early", "past = _below(limit + type(limit)(1))", "past = _below(limit)",
         GALLERY),
        ("columns_of_half_the_lanes", "for offset in (4, 8, 16):", "for offset in (4, 8):",
         GALLERY)),
    *family(
        "flex", "tkq/attention/flex/block_masks/bounds.py",
        ("equal_where_ranges_meet", "return Bounds((a.low == b.high) & (a.high == b.low), (a.low <= b.high) & "
         "(b.low <= a.high))", "return Bounds((a.low == b.low) & (a.high == b.high), (a.low <= b.high) & "
         "(b.low <= a.high))", MASKS),
        ("nothing_where_some_may_be", "\"ge\": lambda a, b, kinds: Bounds(a.low >= b.high, a.high >= b.low),",
         "\"ge\": lambda a, b, kinds: Bounds(a.low >= b.high, a.low >= b.low),", MASKS)),
    *family(
        "flex", "tkq/attention/flex/block_masks/parts.py",
        ("the_first_of_a_block_alone", "self.each(span.more // self.LANES + 1, look_at)", "self.each(1, look_at)",
         MASKS),
        ("low_words_of_the_others", "rest = Uint32(cute.arch.warp_redux_sync(select(high == first, low, "
         "Uint32(0xffffffff)), \"umin\"))", "rest = Uint32(cute.arch.warp_redux_sync(low, \"umax\"))", TYPES),
        ("nan_is_the_greatest", "return select(nan, Int32(LEAST), place), select(nan, Int32(-LEAST - 1), place)",
         "return place, place", TYPES),
        ("zeros_are_two", "bits = select(bits == Int32(LEAST), Int32(0), bits)", "", TYPES)),
    *family(
        "flex", "tkq/attention/flex/block_masks/elements.py",
        ("keys_of_one_step", "row, column = Int32(0), column + lanes * COLUMNS",
         "row, column = Int32(0), keys.more + 1", STEPS),
        ("the_first_lane_s_row", "taken = {i: from_lane(value, r) for i, value in values.items()}",
         "taken = {i: from_lane(value, 0) for i, value in values.items()}", MASKS),
        ("left_at_the_first_seen", "on = (column <= keys.more) & (every | (some == Boolean(False)))",
         "on = (column <= keys.more) & (some == Boolean(False))", MASKS)),
    *family(
        "flex", "tkq/attention/flex/block_masks/states.py",
        ("full_blocks_behind_the_end", "full = select(inside, Int32(ALL), Int32(SOME))", "full = Int32(ALL)", MASKS),
        ("blocks_of_the_next_warp", "column = first + n * self.WARPS", "column = first + n", MASKS)),
    *family(
        "flex", "tkq/attention/flex/block_masks/order.py",
        ("lists_of_the_first_group", "some_before, full_before = some_before + cute.arch.popc(bits), full_before + "
         "cute.arch.popc(full_bits)", "some_before, full_before = cute.arch.popc(bits), full_before + "
         "cute.arch.popc(full_bits)", MASKS),
        ("rows_as_columns", "return cute.make_tensor(states.iterator, cute.select(states.layout, [0, 1, 3, 2]))",
         "return states", MASKS)),
    *family(
        "flex", "tkq/attention/flex/backward/dkv.py",
        ("ds_of_a_rounded_p", "return e, e * (dp + delta)",
         "return e, cutlass.Float32(cutlass.BFloat16(e)) * (dp + delta)", EQUAL),
        ("ds_of_the_first_queries", "tk.mma_AB(of.dk, of.ds, s.q[stage], k=self.part(i - 1))",
         "tk.mma_AB(of.dk, of.ds, s.q[stage], k=self.part(i))", EQUAL_SLOPE),
        ("dp_of_the_first_queries", "tk.mm_ABt(dp, s.v[c.wg], s.do[stage], b_part=i)",
         "tk.mm_ABt(dp, s.v[c.wg], s.do[stage], b_part=0)", EQUAL_SLOPE)),
    *family(
        "flex", "tkq/attention/flex/backward/scores.py",
        ("dead_keys_live", "if alive < 64:", "if alive < -64:", BEHIND),
        ("ds_of_a_rounded_slope", "weight = e * slopes(x, *place)",
         "weight = Float32(cutlass.BFloat16(e * slopes(x, *place)))", EQUAL_SLOPE),
        ("halves_as_the_first",
         "state = g.states[at.t.batch_k, at.head, g.row_block(at.tile), 2 * at.t.block + at.half]",
         "state = g.states[at.t.batch_k, at.head, g.row_block(at.tile), 2 * at.t.block]", HALVES)),
    *family(
        "flex", "tkq/attention/flex/backward/dkv_hdim256.py",
        ("wide_weights_rounded", "four[i % 4] = weight", "four[i % 4] = Float32(cutlass.BFloat16(weight))", WIDE_SLOPE),
        ("wide_weights_of_the_first_columns", "to = s.p[None, tk.thread_in_warpgroup(), i // 4, c.p_ring.stage]",
         "to = s.p[None, tk.thread_in_warpgroup(), i // 8, c.p_ring.stage]", WIDE_SLOPE),
        ("wide_p_without_its_factor", "tk.add(lse, lse, float(P_BITS))", "pass", WIDE),
        ("wide_masks_are_not_looked_at", "self.scores.p_fp32(g, at, c.s, p, lse, seen)",
         "self.scores.p_fp32(g, at, c.s, p, lse)", WIDE),
        ("wide_dead_keys_live", "self.scores.clear_dead_keys(t, 0, ds)", "pass", BEHIND)),
    *family(
        "flex", "tkq/attention/flex/spec.py",
        ("wide_tasks_of_128_keys", "return 128 if width <= 128 else 64", "return 128", WIDE)),
    *family(
        "flex", "tkq/attention/flex/backward/tanh.py",
        ("far_scores_are_near_in_the_backward", "return cute.arch.vote_all_sync(top <= Float32(1.0))",
         "return cute.arch.vote_all_sync(top <= Float32(9.0))", _of(BACKWARD, "test_far_from_a_softcap"))),
    *family(
        "flex", "tkq/attention/flex/backward/sums.py",
        ("columns_of_half_the_rows", "total = sum_over(total, 4, 8, 16)", "total = sum_over(total, 4, 8)", SHARED),
        ("rows_of_a_lane", "total = sum_over(sums[r], 1, 2)", "total = sum_over(sums[r], 1)", SHARED),
        ("heads_of_half_a_warp", "total = sum_over(sums[0], 1, 2, 4, 8, 16)", "total = sum_over(sums[0], 1, 2, 4, 8)",
         SHARED),
        ("all_lanes_add_what_one_does", "total = select(alone, select(lane == 0, together, Float32(0.0)), total)",
         "total = select(alone, together, total)", SHARED),
        ("diagonals_of_fewer_keys", "for row in range(ROWS):", "for row in range(ROWS - 1):", SHARED),
        ("the_last_run_is_lost", "add_if(flag(self.total != Float32(0.0)), self.place, self.total)", "pass", TABLES),
        ("runs_take_the_next_along", "value = select(other, Float32(0.0), self.total) + value",
         "value = self.total + value", TABLES)),
    *family(
        "flex", "tkq/attention/flex/backward/captures.py",
        ("sums_of_the_head_before", "for i in cutlass.range_constexpr(len(self.sums)):\n"
         "    self.sums[i].begin(c.sums[i])", "for i in cutlass.range_constexpr(len(self.sums)):\n    if h == 0:\n"
         "        self.sums[i].begin(c.sums[i])", SHARED),
        ("captured_gradients_of_dead_keys", "there = [tk.first_row() + 8 * r < alive for r in range(2)]",
         "there = [tk.first_row() + 8 * r < alive + 64 for r in range(2)]", TABLES),
        ("diagonals_from_the_lane_s_key",
         "key, query = found[\"kv\"][0] - tk.lane_id() // 4, found[\"q\"][0] - tk.first_col()",
         "key, query = found[\"kv\"][0], found[\"q\"][0] - tk.first_col()", SHARED),
        ("the_mask_is_not_looked_at", "e = chosen(seen, r, j, e, 0.0) if masked else e", "", TABLES)),
    *family(
        "flex", "tkq/attention/flex/functions/derivative.py",
        ("the_last_use_alone", "found[a] = self.add(found.get(a), one)", "found[a] = one",
         ("tests/gpu/attention/test_flex_backward.py::test_a_score_that_is_used_in_several_places[128]",))),
    *family(
        "flex", "tkq/attention/flex/backward/scheduler.py",
        ("tiles_of_the_first_head", "of = t.batch_k, self.query_head(g, t, h), t.block\n"
         "counts, starts = g.queries.counts(*of), g.queries.starts(*of)\nfirst = Int32(0)",
         "of = t.batch_k, self.query_head(g, t, 0), t.block\n"
         "counts, starts = g.queries.counts(*of), g.queries.starts(*of)\nfirst = Int32(0)",
         _of(BACKWARD, "test_groups_and_lse")),
        ("full_tiles_alone_where_none_is_masked", "rest = lambda i: self.listed(g, starts, i, counts.masked)",
         "rest = lambda i: g.queries.from_start(starts, i, counts.masked, not self.full)",
         _of(BACKWARD, "test_lists_without_a_function --slow")),
        ("the_tile_before_once_more", "tile = tile_at(cutlass.min(i + 1, end - 1))", "tile = tile_at(i)",
         _of(BACKWARD, "test_gallery"))),
    *family(
        "flex", "tkq/attention/common/sequences.py",
        ("no_tiles_for_the_rest_of_a_block", "return ceil_div(self.rows_k, size) if of_keys else "
         "ceil_div(self.rows_q, size * self.q_per) * self.q_per",
         "return ceil_div(self.rows_k, size) if of_keys else ceil_div(self.rows_q, size)", KEYS)),
)

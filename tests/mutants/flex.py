"""Faults in attention with functions of the user's."""
from .mutant import family

FORWARD, BACKWARD = "tests/gpu/attention/test_flex_attention.py::", "tests/gpu/attention/test_flex_backward.py::"
CAPTURED = "tests/gpu/attention/test_flex_captured_gradients.py::"


def _of(file, *names):
    return tuple(file + name for name in names)


GALLERY, LENGTHS = _of(FORWARD, "test_gallery"), _of(FORWARD, "test_lengths")
EMPTY, FULL = _of(FORWARD, "test_empty_rows"), _of(FORWARD, "test_full_blocks_are_not_masked")
INDICES, WHOLE = _of(FORWARD, "test_captured_indices_that_lie"), _of(FORWARD, "test_operations[whole]")
SIZES, NO_BLOCK = _of(FORWARD, "test_block_sizes --slow"), _of(FORWARD, "test_rows_of_no_block")
SHARED, TABLES = _of(CAPTURED, "test_gradients[shared]"), _of(CAPTURED, "test_gradients[tables]")
KEYS, HALVES = _of(BACKWARD, "test_lengths"), _of(BACKWARD, "test_block_sizes --slow")

MUTANTS = (
    *family(
        "flex", "tkq/attention/flex/state.py",
        ("parts_of_a_block_left_out", "return cutlass.max(cutlass.min(block, last), 0) * self.kv_per + i % self.kv_per",
         "return cutlass.max(cutlass.min(block, last), 0) * self.kv_per",
         SIZES),
        ("full_blocks_by_the_other_list", "if entry >= first:", "if entry > first:", FULL),
        ("full_blocks_from_the_list_s_first", "entry = entry - masked // self.kv_per", "entry = entry + 0", FULL)),
    *family(
        "flex", "tkq/attention/flex/softmax.py",
        ("keys_behind_the_end", "if limit < self.config.kv:", "if limit < 0:", LENGTHS),
        ("empty_rows_keep_nan", "if empty:", "if empty & (r > 1):", EMPTY),
        ("empty_tasks_see_keys", "if regs.task[\"n_masked_right\"] < 0:",
         "if regs.task[\"n_masked_right\"] < -1:", NO_BLOCK),
        ("rows_of_the_first_warpgroup", "row = regs.task[\"tile\"] * self.config.rows + regs.wg * 64 + tk.first_row()",
         "row = regs.task[\"tile\"] * self.config.rows + tk.first_row()", GALLERY)),
    *family(
        "flex", "tkq/attention/flex/roles.py",
        ("first_tile_is_masked_twice", "whole = cutlass.max(masked, 1)", "whole = cutlass.max(masked, 0)", FULL)),
    *family(
        "flex", "tkq/attention/flex/emit.py",
        ("negative_indices_are_the_first", "index = select(index < 0, index + size, index)", "", INDICES),
        ("remainders_of_the_dividends_sign", "rest = select(wrong, rest + b, rest)", "", WHOLE)),
    *family(
        "flex", "tkq/attention/flex/look.py",
        ("the_first_columns_alone", "first = col + 32 * part", "first = col + 0 * part", GALLERY)),
    *family(
        "flex", "tkq/attention/flex/backward/dkv.py",
        ("dead_keys_live", "if alive < 64:", "if alive < -64:", KEYS),
        ("halves_as_the_first",
         "state = g.states[t.batch_k, head, g.row_block(tile), 2 * t.block + c.wg]",
         "state = g.states[t.batch_k, head, g.row_block(tile), 2 * t.block]", HALVES)),
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
        "flex", "tkq/attention/flex/functions/capture_derivatives.py",
        ("the_last_use_alone", "adjoint[a] = of.add(adjoint.get(a), found)", "adjoint[a] = found", SHARED)),
    *family(
        "flex", "tkq/attention/flex/backward/scheduler.py",
        ("tiles_of_the_first_head", "of = t.batch_k, self.query_head(g, t, h), t.block\n"
         "counts = g.queries.counts(*of)\nmasked = Int32(0)",
         "of = t.batch_k, self.query_head(g, t, 0), t.block\ncounts = g.queries.counts(*of)\nmasked = Int32(0)",
         _of(BACKWARD, "test_groups_and_lse"))),
)

"""Faults in decoding of multi-head latent attention."""
from .mutant import family, pressed

TESTS = "tests/gpu/attention/test_mla.py::"
PAGES, EDGES, SHARED, FIXED, LIES = ((f"{TESTS}{name}",) for name in (
    "test_pages", "test_queries_that_see_other_keys", "test_work_that_blocks_share",
    "test_fixed_splits_do_not_depend_on_the_batch", "test_what_lies_gives_nan"))
LISTS, LISTS_THAT_LIE, VIEWS = ((f"tests/gpu/attention/test_mla_sparse.py::{name}",) for name in (
    "test_lists", "test_what_lies_gives_nan", "test_half_precision_and_views --slow"))
DIVIDED, RISING = (f"{TESTS}test_plans",), (f"{TESTS}test_scores_that_rise",)
FLOAT8, FLOAT8_LIES = ((f"tests/gpu/attention/test_mla_float8.py::{name}",) for name in (
    "test_pages", "test_lists_that_lie_give_nan"))

MUTANTS = (
    *family(
        "mla", "tkq/attention/mla/copies.py",
        ("rows_that_are_not_there", "size = cutlass.select_(at != Int64(0), Int32(16), Int32(0))", "size = Int32(16)",
         PAGES)),
    *family(
        "mla", "tkq/attention/decode/pages.py",
        ("pages_without_gaps",
         "elements = Int64(page) * Int64(page_step) + Int64(row) * Int64(row_step) + Int64(s.head) * Int64(head_step)",
         "elements = (Int64(page) * cache.shape[1] + row) * Int64(row_step) + Int64(s.head) * Int64(head_step)",
         PAGES)),
    *family(
        "mla", "tkq/attention/mla/producer.py",
        ("right_half_is_not_awaited", "smem.right_pipe.acquire_empty(right)", "", pressed("reads-mla")),
        ("pages_without_a_place", "if cute.arch.vote_any_sync(fault):", "if cute.arch.vote_all_sync(fault):", LIES)),
    *family(
        "mla", "tkq/attention/mla/float8.py",
        ("scales_of_the_other_half", "scales, by = scales + row * SCALE_BYTES + half * 8, {}",
         "scales, by = scales + row * SCALE_BYTES, {}", FLOAT8),
        ("scales_of_the_other_group",
         "by[step // 2] = load_f32(scales, rows * (TOGETHER * SCALE_BYTES) + panel // 2 * 4)",
         "by[step // 2] = load_f32(scales, rows * (TOGETHER * SCALE_BYTES))", FLOAT8),
        ("scales_of_the_other_rows",
         "by[step // 2] = load_f32(scales, rows * (TOGETHER * SCALE_BYTES) + panel // 2 * 4)",
         "by[step // 2] = load_f32(scales, panel // 2 * 4)", FLOAT8),
        ("rows_do_not_lie_where_they_are_read",
         "return row * PANEL + (chunk >> 3) * (ROWS * PANEL) + (chunk & 7 ^ (row & 1) * 4) * 16",
         "return row * PANEL + (chunk >> 3) * (ROWS * PANEL) + (chunk & 7) * 16", FLOAT8),
        ("columns_lie_one_behind_the_other",
         "store16(to ^ (i * 16), wide, step // 4 * (TOGETHER * PANEL) + step % 4 * (ROWS * PANEL))",
         "store16(to + i * 16, wide, step // 4 * (TOGETHER * PANEL) + step % 4 * (ROWS * PANEL))", FLOAT8)),
    *family(
        "mla", "tkq/attention/mla/float8_producer.py",
        ("halves_that_have_not_landed", "cute.arch.cp_async_wait_group(1)", "cute.arch.cp_async_wait_group(2)", FLOAT8),
        ("left_half_is_not_awaited", "smem.left_pipe.acquire_empty(left)", "", pressed("reads-mla_float8")),
        ("rotated_columns_of_the_other_stage", "self.rotated(smem, pair.stage, rows)",
         "self.rotated(smem, 1 - pair.stage, rows)", FLOAT8),
        ("right_half_is_in_use", "smem.right_pipe.acquire_empty(pair)", "", pressed("reads-mla_float8")),
        ("scales_of_the_block_before",
         "copy16(scales_of(smem, self.pair(smem, left).stage) + lane * SCALE_BYTES, address + SCALES,",
         "copy16(scales_of(smem, 1 - self.pair(smem, left).stage) + lane * SCALE_BYTES, address + SCALES,", FLOAT8),
        ("right_half_is_the_left_one",
         "at + Int64(chunk * 16) + (half * HALF_BYTES + part * 128), size_of(at))",
         "at + Int64(chunk * 16) + part * 128, size_of(at))", FLOAT8),
        ("warps_share_their_rows",
         "return Int32(smem.addresses.iterator.toint()) + (tk.warp_id() % 4 * WARP_ROWS + row) * 8",
         "return Int32(smem.addresses.iterator.toint()) + row * 8", FLOAT8),
        ("rows_behind_the_end",
         "there, fault = self.pages.judge(g, found, (lane < WARP_ROWS) & (key < s.length))",
         "there, fault = self.pages.judge(g, found, lane < WARP_ROWS)", FLOAT8),
        ("faults_are_not_noted", "note(smem, slot, Int32(1))", "note(smem, slot, Int32(0))", FLOAT8_LIES),
        ("rows_that_are_there_are_not_told", "told[tk.warp_id() % 4, left.stage] = rows",
         "told[tk.warp_id() % 4, left.stage] = Int32(0xFFFF)", FLOAT8)),
    *family(
        "mla", "tkq/attention/mla/scores.py",
        ("rope_part_is_forgotten", "return [(*left, (0, HALF)), (*rope, (0, 64)), (*right, (0, part)), "
         "(*last, (part, HALF - 64)),", "return [(*left, (0, HALF)), (*right, (0, part)), (*last, (part, HALF - 64)),",
         PAGES),
        ("rest_of_q_is_that_before", "copy_panels(smem.q_rope, 0, rows, (8, 9))", "", PAGES),
        ("largest_scores_never_rise", "top = cutlass.select_(top > old + Float32(self.config.rise), top, old)",
         "top = cutlass.select_(old == Float32(-Float32.inf), top, old)", RISING),
        ("largest_scores_rise_too_late", "top = cutlass.select_(top > old + Float32(self.config.rise), top, old)",
         "top = cutlass.select_(top > old + Float32(16 * self.config.rise), top, old)", RISING),
        ("old_sums_are_not_rescaled", "tk.mul(regs.norm, regs.norm, regs.correct)", "", SHARED),
        ("factors_are_always_1",
         "smem.correct[tk.first_row() + 8 * r, regs.pair.stage] = regs.correct.tensor[r]",
         "smem.correct[tk.first_row() + 8 * r, regs.pair.stage] = Float32(1.0)", RISING),
        ("factors_of_the_block_before", "tk.fill(regs.correct, 1.0)", "pass", RISING),
        ("rises_of_all_lanes_alone", "return cute.arch.vote_any_sync(found)", "return cute.arch.vote_all_sync(found)",
         RISING)),
    *family(
        "mla", "tkq/attention/mla/values.py",
        ("o_is_not_rescaled", "tk.mul_row(o, o, regs.correct)", "pass", SHARED)),
    *family(
        "mla", "tkq/attention/mla/output.py",
        ("lengths_are_believed", "lse, fault = tk.rv(), cutlass.select_(s.length == length_of(g, s), Int32(0), "
         "Int32(1))", "lse, fault = tk.rv(), Int32(0)", LIES),
        ("lse_of_the_first_query", "at = at + Int64(first) * query", "pass", LISTS)),
    *family(
        "mla", "tkq/attention/mla/indices.py",
        ("queries_share_a_list", "index = g.table[sequence, query, key]", "index = g.table[sequence, 0, key]", LISTS),
        ("rows_of_the_first_page", "page = index // size", "page = Int32(0)", VIEWS),
        ("indices_are_believed",
         "return seen & (index >= 0) & (place < rows), seen & ((index < -1) | (place >= rows))",
         "return seen & (index >= 0) & (place < rows), seen & (index < -1)", LISTS_THAT_LIE),
        ("rows_of_odd_lanes_alone", "key = self.pages.key(block)", "key = self.pages.key(block) | 1", LISTS)),
    *family(
        "mla", "tkq/attention/mla/tiles.py",
        ("results_of_the_first_query", "at = at + cutlass.Int64(first) * query", "pass", LISTS),
        ("lengths_of_the_first_list", "return g.seqlens[place[:cute.rank(g.seqlens)]]",
         "return g.seqlens[(0, 0)[:cute.rank(g.seqlens)]]", LISTS),
        ("blocks_share_a_tile", "tile = s.tile * g.together + cute.arch.block_idx()[1]",
         "tile = s.tile * g.together", PAGES),
        ("slots_of_other_tiles",
         "return cutlass.Int64(slot) * g.partial.shape[1] + cute.arch.block_idx()[1] * rows, rows",
         "return cutlass.Int64(slot) * g.partial.shape[1], rows", SHARED)),
    *family(
        "mla", "tkq/attention/decode/planner.py",
        ("longest_lengths_overflow", "return first, (cutlass.max(length, 0) - 1) // key_block + 1",
         "return first, (cutlass.max(length, 0) + key_block - 1) // key_block", DIVIDED)),
    *family(
        "mla", "tkq/attention/decode/balancer.py",
        ("short_ends_are_cut_off", "cut = one.spill & (used + LEAST_ROOM <= one.size)", "cut = one.spill", DIVIDED),
        ("sequences_begin_at_once", "used = at[USED] + cutlass.select_(at[USED] > 0, begin, Int32(0))",
         "used = at[USED]", DIVIDED),
        ("parts_behind_the_last", "return cutlass.select_((b == batch) & (at[BASE] + at[USED] <= room), cost, "
         "Int32(NEVER)), size", "return cost, size", DIVIDED),
        ("partial_results_cost_nothing",
         "merging = MERGE * sizes.parts + at[PARTIALS] * (PARTIAL + rows // PARTIAL_ROWS)",
         "merging = MERGE * sizes.parts", DIVIDED)),
    *family(
        "mla", "tkq/attention/mla/combine.py",
        ("last_part_is_forgotten",
         "splits = cutlass.select_(some, (start + weight - 1) // cutlass.max(size, 1) - head + 1, Int32(1))",
         "splits = cutlass.select_(some, (start + weight - 1) // cutlass.max(size, 1) - head, Int32(1))", SHARED),
        ("parts_behind_the_last_count",
         "parts.append((cutlass.select_(first + j < end, lse, Float32(-INF)), found))", "parts.append((lse, found))",
         SHARED),
        ("warps_are_not_rescaled", "sums[e] = cute.math.fma(weight, smem.sums[e * WARP + lane, w], sums[e])",
         "sums[e] = sums[e] + smem.sums[e * WARP + lane, w]", SHARED),
        ("last_of_few_parts_is_forgotten", "self.add(g, t, (first, t.splits), place, sums, FEW_TOGETHER)",
         "self.add(g, t, (first, t.splits - 1), place, sums, FEW_TOGETHER)", SHARED),
        ("packed_columns_lie_beside_each_other", "each, step = (2, 8) if self.config.partials_in_fragments else (4, 4)",
         "each, step = 4, 4", SHARED),
        ("columns_of_the_first_panel",
         "at = (g.partial.iterator + (slot * HEAD_DIM_V + column + panel * COLUMNS)).align(16)",
         "at = (g.partial.iterator + (slot * HEAD_DIM_V + column)).align(16)", SHARED),
        ("tasks_of_few_parts_are_left_out", "return splits > FEW, (splits > 1) & (splits <= FEW)",
         "return splits > FEW, (splits > 2) & (splits <= FEW)", SHARED),
        ("blocks_with_an_item_leave",
         "if (me[0] + me[1] == 0) | self.begins(g, found[0], 0) | self.begins(g, found[1], 1):",
         "if me[0] + me[1] == 0:", SHARED)),
)

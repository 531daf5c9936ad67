"""Faults in attention over a cache."""
from .mutant import family

TESTS = "tests/gpu/attention/test_kv_cache.py::"
PAGES, EDGES, SHARED, FIXED, LIES = ((f"{TESTS}{name}",) for name in (
    "test_pages", "test_queries_that_see_other_keys", "test_work_that_blocks_share",
    "test_fixed_splits_do_not_depend_on_the_batch", "test_what_lies_gives_nan"))

RUN = "given = q, operands, (scale, options.softcap or 1.0, options.left, right, of.split, parts, B, of.queries)"
SIZES = ("return (self.heads_kv, self.group, self.queries, self.tiles, self.keys, self.left, self.split, parts, "
         "overhead,")
FLOAT8 = "tests/gpu/attention/test_float8_cache.py::"
FLOAT8_PAGES, TOKENS, BEYOND, APPEND = ((f"{FLOAT8}{name}",) for name in (
    "test_pages_of_float8", "test_scales_of_tokens_that_differ", "test_queries_beyond_float16",
    "test_append_to_float8"))
RAGGED, RAGGED_LIES = ((f"tests/gpu/attention/test_ragged_queries.py::{name}",) for name in (
    "test_ragged_queries", "test_starts_that_lie"))

CASCADE = "tests/gpu/attention/test_cascade.py::"
PREFIXES, HEADS, SHORT = ((f"{CASCADE}{name}",) for name in (
    "test_prefixes", "test_pages_and_heads", "test_what_lies_gives_nan"))

TREES = ("tests/gpu/attention/test_tree_mask.py::test_trees",)

MUTANTS = (
    *family(
        "decode", "tkq/attention/decode/tree.py",
        ("drafts_from_the_key_before", "regs.drafts[0] = s.length - queries", "regs.drafts[0] = s.length - queries - 1",
         TREES),
        ("mask_of_another_query", "query = (s.tile * ROWS + tk.first_row() + 8 * r) // g.group",
         "query = (tk.first_row() + 8 * r) // g.group", TREES),
        ("keys_before_the_drafts", "early = Int32((mask << Int64(before)) & Int64(LOW)) | ones",
         "early = Int32((mask << Int64(before)) & Int64(LOW))", TREES),
        ("upper_half_of_a_mask",
         "seen = self.bits(regs.tree[r], begin + tk.first_col() + 32 * word)",
         "seen = self.bits(regs.tree[r], begin + tk.first_col())", TREES),
        ("no_mask_of_a_block_with_one_draft", "if begin + keys > 0:", "if begin + keys > 1:", TREES)),
    *family(
        "decode", "tkq/attention/decode/cascade/ops.py",
        ("prefix_is_causal",
         "*before, parts, _ = launch.decode(call.prefix(shared), both._replace(causal=False, in_parts=True))",
         "*before, parts, _ = launch.decode(call.prefix(shared), both._replace(in_parts=True))", PREFIXES),
        ("sinks_count_twice", "sinks=None, plan=self.prefix_plan, cu_seqlens_q=None)",
         "plan=self.prefix_plan, cu_seqlens_q=None)", HEADS),
        ("suffix_from_the_first_page",
         "return Call(*self[:10])._replace(block_table=table[:, pages:] if pages else table)",
         "return Call(*self[:10])", PREFIXES),
        ("prefix_lse_of_another_head", "return states[0].view(o.shape), states[1].view(H, B, Sq).transpose(0, 1)",
         "return states[0].view(o.shape), states[1].view(B, H, Sq)", PREFIXES)),
    *family(
        "decode", "tkq/attention/decode/cascade/plan_ops.py",
        ("sequences_without_the_prefix",
         "return (seqlens - shared).masked_fill_(seqlens < least, -1).masked_fill_(seqlens == 0, 0)",
         "return (seqlens - shared).masked_fill_(seqlens == 0, 0)", SHORT),
        ("prefix_and_keys_behind_it_twice", "return (seqlens - shared).masked_fill_(seqlens < least, -1).masked_fill_("
         "seqlens == 0, 0)", "return (seqlens - 0).masked_fill_(seqlens < least, -1).masked_fill_(seqlens == 0, 0)",
         PREFIXES)),
    *family(
        "decode", "tkq/attention/decode/pages.py",
        ("page_of_the_first_key", "page = g.table[s.source, page]", "page = g.table[s.source, 0]", PAGES),
        ("row_of_the_page_before", "row = key - page * g.page_size", "row = key - page * g.page_size // 2", PAGES),
        ("keys_behind_the_end", "seen = (lane < self.config.rows_per_warp) & (key < s.length)",
         "seen = lane < self.config.rows_per_warp", PAGES),
        ("tail_of_v_is_read", "return cutlass.select_(there, cache.iterator.toint() + bytes, Int64(0))",
         "return cache.iterator.toint() + bytes", PAGES),
        ("float8_rows_of_the_next_page", "over = row >= g.page_size", "over = row > g.page_size", FLOAT8_PAGES),
        ("pages_that_are_not_there", "bad = seen & ((page < -1) | (page >= g.k.shape[0]))",
         "bad = seen & (page < -1)", LIES)),
    *family(
        "decode", "tkq/attention/decode/widening.py",
        ("vectors_of_other_rows", "place = (2 * part ^ own_row) * 16", "place = 2 * part * 16", FLOAT8_PAGES),
        ("keys_of_the_block_before", "self.load(k_held, soon.k, self.spec.head_dim)",
         "self.load(k_held, now.k, self.spec.head_dim)", FLOAT8_PAGES),
        ("scales_of_the_block_before", "self.load_scales(g, s, scales, soon)", "pass", TOKENS),
        ("stage_is_not_waited_for", "smem.v_pipe.acquire_empty(v_ring)", "pass",
         (f"{FLOAT8}test_float8_work_that_blocks_share",))),
    *family(
        "decode", "tkq/attention/decode/scaling.py",
        ("queries_are_not_scaled",
         "factor = ((2 * FP32_BIAS + TOP - exponent) << FP32_MANTISSA).bitcast(Float32)", "factor = Float32(1.0)",
         BEYOND),
        ("k_descale_is_left_out", "both = regs.scale.tensor[r] * factor * of_k", "both = regs.scale.tensor[r] * factor",
         FLOAT8_PAGES),
        ("scales_of_no_key_count", "some = s.length > 0", "some = s.length >= 0", FLOAT8_PAGES),
        ("v_descale_of_another_head",
         "regs.of_v[0], of_k = g.v_descale[s.source, s.head], g.k_descale[s.source, s.head]",
         "regs.of_v[0], of_k = g.v_descale[s.source, 0], g.k_descale[s.source, s.head]", FLOAT8_PAGES),
        ("weights_of_1_at_most", "base = top - PEAK", "base = top",
         (f"{FLOAT8}test_values_of_0_at_the_largest_weights",)),
        ("weights_beyond_float16", "return cutlass.select_(top - base > PEAK, top, base)", "return base", BEYOND),
        ("largest_scale_of_a_warp", "for warp in range(4):", "for warp in range(1):", TOKENS),
        ("o_in_the_unit_before",
         "tk.mul(regs.correct, regs.correct, Float32(cutlass.select_(grown, before * inverse, Float32(1.0))))", "pass",
         TOKENS)),
    *family(
        "decode", "tkq/attention/decode/direct/warps.py",
        ("direct_keys_that_are_not_there", "if there != Int32(-1):", "if there == Int32(12345):", FLOAT8_PAGES),
        ("direct_sum_is_not_rescaled", "regs.norm[e] = regs.norm[e] * correct", "pass", FLOAT8_PAGES),
        ("direct_o_in_the_unit_before", "correct = regs.of_v[0] * cute.arch.rcp_approx(top)", "correct = Float32(1.0)",
         TOKENS),
        ("direct_scales_of_the_step_before", "self.rows.load_scales(g, s, regs.scales, later)", "pass", TOKENS),
        ("direct_keys_of_other_parts",
         "own = s._replace(length=cutlass.min(s.length, s.end * self.config.keys))  # keys of other parts stay out",
         "own = s", (f"{FLOAT8}test_float8_work_that_blocks_share",)),
        ("direct_largest_score_of_another_rounding", "s[j] = cute.math.exp2(s[j] - bases[j % 2], fastmath=True)",
         "s[j] = cute.math.exp2(s[j] - bases[j % 2] * Float32(1.000001), fastmath=True)", BEYOND),
        ("direct_maximum_of_a_lane", "top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=4 << step))",
         "pass", FLOAT8_PAGES),
        ("direct_end_of_another_query", "first, end = regs.first[e] - key - own, regs.end[e] - key - own",
         "first, end = regs.first[0] - key - own, regs.end[0] - key - own",
         (f"{FLOAT8}test_queries_that_see_other_float8_keys",))),
    *family(
        "decode", "tkq/attention/decode/direct/rows.py",
        ("direct_values_of_other_keys",
         "own = [(16 * i + 8 * h + j, 2 * t) for i in range(self.tiles) for h in range(2) for j in range(2)]",
         "own = [(16 * i + 8 * j + h, 2 * t) for i in range(self.tiles) for h in range(2) for j in range(2)]",
         FLOAT8_PAGES),
        ("direct_pages_of_the_step_before", "place = self.pages.after(g, place, step)", "place = place", FLOAT8_PAGES)),
    *family(
        "decode", "tkq/attention/decode/direct/output.py",
        ("direct_warps_in_their_own_units", "return found, inverse, cute.math.exp2(regs.max[e] - base, fastmath=True)",
         "return found, inverse, Float32(1.0)", FLOAT8_PAGES),
        ("direct_warps_that_are_left_out", "for w, x in enumerate(tops):", "for w, x in enumerate(tops[:1]):",
         FLOAT8_PAGES),
        ("direct_pages_that_lie", "plan[words.BAD_PAGE] = Int32(1)", "pass",
         (f"{FLOAT8}test_what_lies_of_float8_gives_nan",))),
    *family(
        "decode", "tkq/attention/decode/walk.py",
        ("row_of_the_first_tile",
         "return [cutlass.select_(fine, x, Int32(0)) for x in (source, Int32(0), row, queries)]",
         "return [cutlass.select_(fine, x, Int32(0)) for x in (source, Int32(0), Int32(0), queries)]", RAGGED)),
    *family(
        "decode", "tkq/attention/decode/lister.py",
        ("keys_of_the_tile_behind", "own = seqlens[b] - (end - row - queries)", "own = seqlens[b]", RAGGED),
        ("starts_are_believed", "fine = (first >= 0) & (first <= end) & (end <= listing.total)",
         "fine = (first >= 0) & (first <= end)", RAGGED_LIES)),
    *family(
        "decode", "tkq/attention/decode/producer.py",
        ("not_announced_by_copies", "cute.arch.cp_async_mbarrier_arrive_noinc(pipe.full[ring.stage].ptr)",
         "cute.arch.mbarrier_arrive(pipe.full[ring.stage].ptr)", PAGES)),
    *family(
        "decode", "tkq/attention/decode/consumer.py",
        ("keys_that_are_not_there", "if (there[0] & there[1] & there[2] & there[3]) != all_there:",
         "if (there[0] & there[1] & there[2] & there[3]) == 12345:", PAGES),
        ("o_is_not_rescaled", "tk.mul_row(regs.o, regs.o, regs.correct)", "pass", SHARED),
        ("old_plans_are_believed", "fine = s.inside & self.walk.planned(g, s)", "fine = s.inside", LIES),
        ("one_key_more", "end = cutlass.min(own + g.right + 1, s.length)",
         "end = cutlass.min(own + g.right + 2, s.length)", EDGES),
        ("window_of_one_key_more", "regs.first[r] = cutlass.select_(g.left < 0, Int32(0), own - g.left)",
         "regs.first[r] = cutlass.select_(g.left < 0, Int32(0), own - g.left - 1)", EDGES)),
    *family(
        "decode", "tkq/attention/decode/output.py",
        ("splits_behind_the_last_count",
         "lse = cutlass.select_(first + j < s.splits, self.lse_of(g, slot, row), Float32(-INF))",
         "lse = self.lse_of(g, slot, row)", SHARED),
        ("first_block_merges", "if self.arrive(g, smem.ticket, s) == s.splits - 1:",
         "if self.arrive(g, smem.ticket, s) == 0:", SHARED),
        ("parts_are_not_told_of", "if s.split == 0:", "if s.split < 0:", PREFIXES),
        ("sum_before_is_not_rescaled", "sums[e] = sums[e] * before", "pass", SHARED)),
    *family(
        "decode", "tkq/attention/decode/walk.py",
        ("slots_of_other_tasks",
         "begin, others = 2 * head_part + 1, 2 * (head_part + 1)", "begin, others = 2 * head_part, 2 * (head_part + 1)",
         SHARED),
        ("lengths_are_believed", "inside = (length >= 0) & (length <= g.capacity)", "inside = length >= 0", LIES)),
    *family(
        "decode", "tkq/attention/decode/planned.py",
        ("splits_depend_on_the_batch", SIZES, SIZES.replace("self.split", "self.split * min(batch, 2)"), FIXED,
         (("tkq/attention/decode/launch.py", RUN, RUN.replace("of.split", "int(plan[words.FIXED])")),))),
    *family(
        "decode", "tkq/attention/decode/merge.py",
        ("parts_of_another_task", "begin = cutlass.select_(fixed, task * most, 2 * first + 1)",
         "begin = cutlass.select_(fixed, task * most, 2 * first)", PREFIXES),
        ("parts_of_another_tile", "tiles = (queries * group + ROWS - 1) // ROWS", "tiles = Int32(1)",
         (f"{CASCADE}test_batches",)),
        ("parts_behind_the_last", "lse = cutlass.select_(first + j < splits, x.partial_lse[slot, row], -INF)",
         "lse = x.partial_lse[slot, row]", PREFIXES),
        ("parts_of_the_first_columns",
         "found.append((lse, self.columns(x.partial, (slot, row, chunk * NARROW), first + j < splits)))",
         "found.append((lse, self.columns(x.partial, (slot, row, 0), first + j < splits)))", PREFIXES),
        ("nan_of_what_saw_no_key", "a = [cutlass.select_(of_a == Float32(0.0), Float32(0.0), e * of_a) for e in a]",
         "a = [e * of_a for e in a]", (f"{TESTS}test_merged_states",))),
    *family(
        "decode", "tkq/attention/decode/append.py",
        ("slots_beyond_the_cache", "if slot >= Int64(0) and slot < rows:", "if slot < rows:",
         (f"{TESTS}test_append",)),
        ("partner_of_the_first_half", "partner = cutlass.select_(first, column + half, column - half)",
         "partner = column", (f"{TESTS}test_append",)),
        ("largest_of_a_lane", "top = nan_max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))", "pass", APPEND),
        ("scale_of_another_head", "factor = cute.arch.rcp_approx(scales[head])",
         "factor = cute.arch.rcp_approx(scales[0])", APPEND)),
)

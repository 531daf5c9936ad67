"""Faults in attention over a cache."""
from .mutant import family

TESTS = "tests/gpu/attention/test_kv_cache.py::"
PAGES, EDGES, SHARED, FIXED, LIES = ((f"{TESTS}{name}",) for name in (
    "test_pages", "test_queries_that_see_other_keys", "test_work_that_blocks_share",
    "test_fixed_splits_do_not_depend_on_the_batch", "test_what_lies_gives_nan"))

RUN = ("run, given = launcher(q, spec), "
       "(q, operands, (scale, options.softcap or 1.0, options.left, right, of.split, parts))")
SIZES = ("return (self.heads_kv, self.group, self.queries, self.tiles, self.keys, self.left, self.split, parts, "
         "overhead,")

MUTANTS = (
    *family(
        "decode", "tkq/attention/decode/producer.py",
        ("page_of_the_first_key", "page = g.table[s.batch, page]", "page = g.table[s.batch, 0]", PAGES),
        ("row_of_the_page_before", "row = key - page * g.page_size", "row = key - page * g.page_size // 2", PAGES),
        ("keys_behind_the_end", "seen = (lane < self.config.rows_per_warp) & (key < s.length)",
         "seen = lane < self.config.rows_per_warp", PAGES),
        ("tail_of_v_is_read", "return cutlass.select_(there, cache.iterator.toint() + elements * 2, Int64(0))",
         "return cache.iterator.toint() + elements * 2", PAGES),
        ("pages_that_are_not_there", "bad = seen & ((page < -1) | (page >= g.k.shape[0]))",
         "bad = seen & (page < -1)", LIES),
        ("not_announced_by_copies", "cute.arch.cp_async_mbarrier_arrive_noinc(pipe.full[ring.stage].ptr)",
         "cute.arch.mbarrier_arrive(pipe.full[ring.stage].ptr)", PAGES)),
    *family(
        "decode", "tkq/attention/decode/consumer.py",
        ("keys_that_are_not_there", "if (there[0] & there[1] & there[2] & there[3]) != all_there:",
         "if (there[0] & there[1] & there[2] & there[3]) == 12345:", PAGES),
        ("o_is_not_rescaled", "tk.mul_row(regs.o, regs.o, regs.correct)", "pass", SHARED),
        ("old_plans_are_believed", "fine = s.inside & (s.length == g.seqlens[s.batch])", "fine = s.inside", LIES),
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
        ("sum_before_is_not_rescaled", "sums[e] = sums[e] * before", "pass", SHARED)),
    *family(
        "decode", "tkq/attention/decode/walk.py",
        ("slots_of_other_tasks",
         "return cutlass.select_(split == 0, s.begin, s.others + (split - 1) * self.STEP)",
         "return cutlass.select_(split == 0, s.begin, s.others + split - 1)", SHARED),
        ("lengths_are_believed", "inside = (length >= 0) & (length <= g.capacity)", "inside = length >= 0", LIES)),
    *family(
        "decode", "tkq/attention/decode/launch.py",
        ("splits_depend_on_the_batch", SIZES, SIZES.replace("self.split", "self.split * min(batch, 2)"), FIXED,
         (("tkq/attention/decode/launch.py", RUN, RUN.replace("of.split", "int(plan[words.FIXED])")),))),
    *family(
        "decode", "tkq/attention/decode/merge.py",
        ("nan_of_what_saw_no_key", "a = [cutlass.select_(of_a == Float32(0.0), Float32(0.0), e * of_a) for e in a]",
         "a = [e * of_a for e in a]", (f"{TESTS}test_merged_states",))),
    *family(
        "decode", "tkq/attention/decode/append.py",
        ("slots_beyond_the_cache", "if slot >= Int64(0) and slot < rows:", "if slot < rows:",
         (f"{TESTS}test_append",)),
        ("partner_of_the_first_half", "partner = cutlass.select_(first, column + half, column - half)",
         "partner = column", (f"{TESTS}test_append",))),
)

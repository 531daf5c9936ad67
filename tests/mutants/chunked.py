"""Faults in chunked prefill."""
from .mutant import family

TESTS = "tests/gpu/attention/test_chunked_prefill.py::"
PAGES, SKIPPED, LIES, WINDOWS, RAGGED, RAGGED_LIES, STRIDES = ((f"{TESTS}{name}",) for name in (
    "test_pages", "test_pages_that_are_skipped", "test_what_lies_gives_nan", "test_windows_softcap_and_sinks --slow",
    "test_ragged_queries", "test_ragged_queries_that_lie", "test_strides_of_queries"))
BOXES_OF_GROUPS = (f"{TESTS}test_pages[192-pairs]",)  # several boxes of a page, each of several groups of 8 rows
WINDOW = ("left=sc.left if const_expr(spec.left) else None, "
          "right=sc.right if const_expr(spec.right) else None,")

MUTANTS = (
    *family(
        "chunked", "tkq/attention/decode/chunked/producer.py",
        ("page_of_the_first_key", "page = pages[number]", "page = pages[0]", PAGES),
        ("first_box_of_each_page", "return number, box - number * steps[0], box", "return number, Int32(0), box",
         PAGES),
        ("boxes_of_the_page_before", "under = row < 0", "under = row < -1", PAGES),
        ("keys_behind_the_end",
         "asked = Uint32(box) < Uint32(t.rows_k + self.cache.box - 1) // self.cache.box", "asked = box >= 0",
         PAGES),
        ("boxes_of_the_first_warp",
         "of = tuple(cute.arch.shuffle_sync(x, box) for x in at)",
         "of = tuple(cute.arch.shuffle_sync(x, j) for x in at)", PAGES),
        ("groups_of_a_page_as_boxes",
         "at = (page * g.tasks.sizes.groups + row * self.box_groups,) if self.cache.row_groups else (page, row)",
         "at = (page * g.tasks.sizes.groups + row,) if self.cache.row_groups else (page, row)", BOXES_OF_GROUPS),
        ("skipped_keys_count", "word = cute.arch.vote_ballot_sync(missing)", "word = Int32(0)", SKIPPED),
        ("pages_that_are_not_there", "word = word | self.fault(g, missing & (page != -1))", "pass", LIES),
        ("pages_that_other_tasks_see", "word = word | self.fault(g, bad)", "pass", LIES),
        ("words_of_one_place", "found[0, ring.stage] = word", "found[0, 0] = word", SKIPPED)),
    *family(
        "chunked", "tkq/attention/decode/chunked/softmax.py",
        ("keys_that_are_not_there", "moved = inner.out_of_range(g, regs, self.cache.paged and word != 0)",
         "moved = inner.out_of_range(g, regs)", SKIPPED),
        ("keys_of_a_max_that_moves", "if moved:\n    if const_expr(self.cache.paged):", "if moved:\n    if False:",
         SKIPPED),
        ("box_of_another_group", "if word & Int32(1 << (8 * (j // 2) // self.cache.box)) != 0:",
         "if word & Int32(1 << (8 * j // self.cache.box) % 31) != 0:", SKIPPED),
        ("tail_of_v_is_multiplied", "if begin > 0 and begin < kv and begin < end:",
         "if begin > 0 and begin < kv and begin > end:", PAGES),
        ("tail_of_the_first_group",
         "return (group * panels + panel) * (8 * ROW_BYTES) + (chunk - group * chunks) * 16",
         "return panel * (8 * ROW_BYTES) + (chunk - group * chunks) * 16", PAGES),
        ("tail_of_the_first_panel_alone", "return panel * (self.config.kv * ROW_BYTES) + chunk * 16",
         "return chunk * 16", PAGES),
        ("tail_of_one_panel", "for panel in cutlass.range_constexpr(self.spec.head_dim_v // PANEL):",
         "for panel in cutlass.range_constexpr(1):", PAGES),
        ("faults_of_the_last_block", "regs.blocks.fault[0] = regs.blocks.fault[0] | word",
         "regs.blocks.fault[0] = word", LIES),
        ("rows_of_no_key_yet", "tk.fill(regs.max, LOWEST)", "tk.neg_infty(regs.max)", SKIPPED)),
    *family(
        "chunked", "tkq/attention/decode/chunked/tasks.py",
        ("rows_of_the_sequence_before", "return Task((b + 1) * sizes.rows, b, head, tile, sizes.rows, length), fine",
         "return Task(b * sizes.rows, b, head, tile, sizes.rows, length), fine", PAGES),
        ("lengths_are_believed", "fine = (length >= 0) & (length <= sizes.capacity) & (length == planned)",
         "fine = (length >= 0) & (length == planned)", LIES),
        ("old_plans_are_believed", "fine = (length >= 0) & (length <= sizes.capacity) & (length == planned)",
         "fine = (length >= 0) & (length <= sizes.capacity)", LIES),
        ("keys_of_the_whole_sequence", "return Task(row + queries, source, head, Int32(0), queries, planned), fine",
         "return Task(row + queries, source, head, Int32(0), queries, length), fine", RAGGED),
        ("starts_are_believed", "planned == cutlass.max(length - (end - row - queries), 0))", "planned == planned)",
         RAGGED_LIES)),
    *family(
        "chunked", "tkq/attention/decode/chunked/plan.py",
        ("pages_a_row_apart", "if row <= 0 or page % (ROWS_OF_TMA * row):", "if row <= 0:", PAGES)),
    *family(
        "tile", "tkq/tile/views.py",
        ("groups_of_packed_pages", "return Int32(Int64(x.stride[3]) // (Int64(x.stride[0]) * GROUP))",
         "return Int32(x.shape[0] // GROUP)", PAGES)),
    *family(
        "chunked", "tkq/attention/decode/chunked/launch.py",
        ("sequences_that_lie_apart", "return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)", "return True",
         STRIDES)),
    *family(
        "chunked", "tkq/attention/decode/chunked/kernel.py",
        ("window_of_all_keys", WINDOW, WINDOW.replace("left=sc.left if", "left=sc.left + 1 if"), WINDOWS),
        ("plans_of_other_calls", "if g.tasks.matches():", "if g.tasks.sizes.batch > 0:", LIES)),
)

"""Faults in the scan."""
from .mutant import family

TESTS = "tests/gpu/recurrence/test_scan.py::"
NUMERICS, TIME, REVERSE, AROUND, CHAIN = ((f"{TESTS}{name}",) for name in (
    "test_numerics[700-False]", "test_contiguous_tokens[776-33-bf16-False]", "test_contiguous_tokens[776-33-bf16-True]",
    "test_lines_and_what_is_around", "test_states_chain[False]"))

SEGMENTS, GROWTH = ((f"{TESTS}{name}",) for name in ("test_segments[False-False]",
                                                     "test_growth_that_nothing_feeds[8192-12-False]"))

EDGE = "return Float32(self.at(x, of, cutlass.min((of.run + 1) * self.tokens, x.shape[1] - 1), 1)[0])"
START = "put(state, [cutlass.select_(of.run == 0, x, state[i]) for i, x in enumerate(start)])"
JOINED = "far, up = lane >= by, lambda x, by=by: cute.arch.shuffle_sync_up(x, by)"
LINES_GROWTH, LINES_SEGMENTS = ((f"{TESTS}{name}",) for name in ("test_growth_that_nothing_feeds[200-264-True]",
                                                                "test_growth_through_segments[True]"))

MUTANTS = (
    *family(
        "scan", "tkq/recurrence/carry.py",
        ("no_wait_for_the_state", "tk.sync(1 + run.warp, 2 * WARP)", "pass", NUMERICS),
        ("slot_of_this_warp", "slots[(next_ * self.vector + e) * WARP + run.lane, 0] = state[e]",
         "slots[(run.warp * self.vector + e) * WARP + run.lane, 0] = state[e]", NUMERICS)),
    *family(
        "scan", "tkq/recurrence/columns.py",
        ("tokens_behind_the_last_count",
         "return found if there is None else [cutlass.select_(there, x, y) for x, y in zip(found, h, strict=True)]",
         "return found", NUMERICS),
        ("factor_of_the_token_itself", "a = self.load(g.a, of, self.tokens(run, g, rest, -1), g)",
         "a = self.load(g.a, of, self.tokens(run, g, rest), g)", NUMERICS),
        ("state_of_the_token_itself",
         "h = self.load(g.h, of, self.tokens(run, g, rest, 1), g) if self.spec.of_a else []",
         "h = self.load(g.h, of, self.tokens(run, g, rest), g) if self.spec.of_a else []", NUMERICS),
        ("first_factor_multiplies_the_final_gradient",
         "factor = [cutlass.select_(s == 0, Float32(1.0), x) for x in factor]", "pass", NUMERICS),
        ("initial_state_forgotten", "earlier = [cutlass.select_(last, before[e], x) for e, x in enumerate(earlier)]",
         "pass", NUMERICS),
        ("all_from_the_first_token", "token = cutlass.select_(g.way > 0, Int32(0), T - 1)", "token = Int32(0)",
         (f"{TESTS}test_numerics[700-True]",)),
        ("final_state_of_the_run_before", "if run.k + 1 == run.runs and of.inside:",
         "if run.k + 2 == run.runs and of.inside:", CHAIN)),
    *family(
        "scan", "tkq/recurrence/columns.py",
        ("product_of_a_segment_is_infinite",
         "g.product[of.batch, of.channel + e] = finite(state[self.spec.vector + e])",
         "g.product[of.batch, of.channel + e] = state[self.spec.vector + e]", GROWTH),
        ("product_of_a_segment_s_gradients_is_infinite",
         "g.product[of.batch, of.channel + e] = finite(last[e] * state[self.spec.vector + e])",
         "g.product[of.batch, of.channel + e] = last[e] * state[self.spec.vector + e]", GROWTH)),
    *family(
        "scan", "tkq/recurrence/segments.py",
        ("segments_get_the_state_that_they_leave", "found[:, 1:] = behind[:, :-1]", "found[:, 1:] = behind[:, 1:]",
         SEGMENTS),
        ("first_segment_without_the_state", "first.zero_() if state is None else first.copy_(state)", "first.zero_()",
         SEGMENTS)),
    *family(
        "scan", "tkq/recurrence/launch.py",
        ("state_at_a_segment_s_other_end",
         "edge = h[:, 0 if not reverse else -1].unflatten(0, (-1, part.count)).float()",
         "edge = h[:, 0 if reverse else -1].unflatten(0, (-1, part.count)).float()", SEGMENTS)),
    *family(
        "scan", "tkq/recurrence/lines.py",
        ("in_the_order_of_memory", "return values[::-1] if self.spec.reverse else values", "return values", REVERSE),
        ("tokens_behind_the_last_are_written", "if piece.first < x.shape[1]:", "if piece.first < x.shape[1] + 64:",
         AROUND),
        ("slope_of_the_token_s_own_factor", "for x, y in zip(a, dh[1:], strict=False):",
         "for x, y in zip(a[1:], dh[1:], strict=True):", TIME),
        ("state_of_the_run_itself", EDGE, EDGE.replace("self.tokens,", "self.tokens - 1,"), TIME),
        ("lines_without_the_initial_state", "h = earlier[i][:-1] + [cutlass.select_(last, before, earlier[i][-1])]",
         "h = earlier[i]", TIME),
        ("lanes_of_half_a_warp", "for by in (1, 2, 4, 8, 16):", "for by in (1, 2, 4, 8):",
         (f"{TESTS}test_long_lines",)),
        ("lane_before_the_first", JOINED, JOINED.replace("lane >=", "lane + 1 >="), TIME),
        ("state_behind_the_lane_itself",
         "return cutlass.select_(of.lane == 0, coming, cute.arch.shuffle_sync_up(after, 1))", "return after", TIME),
        ("state_of_the_line_before", START, START.replace("of.run == 0", "run.k == 0"),
         (f"{TESTS}test_several_lines_a_block",)),
        ("end_of_a_whole_run", "if const_expr(rest or i == self.pieces - 1):", "if const_expr(rest):",
         (f"{TESTS}test_layouts_agree",)),
        ("state_of_the_first_piece",
         "found.append(Step(factor, products.grown(piece.whole.factor, value, piece.whole.value)))",
         "found.append(Step(factor, value))", TIME),
        ("product_without_the_segment_s_first_pieces",
         "factor = products.times(piece.whole.factor, factor, self.parts)", "pass", LINES_SEGMENTS)),
    *family(
        "scan", "tkq/recurrence/products.py",
        ("products_are_infinite", "high = assembly.product_toward_zero(x[0], y[0])", "high = x[0] * y[0]",
         LINES_GROWTH),
        ("products_of_one_number", "return [high, low]", "return [high, low * 0.0]", (f"{TESTS}test_long_lines",))),
)

"""Faults in Hedgehog's attention."""
from .mutant import family, pressed

NAPS, LOADS, READS = (pressed(f"{kind}-hedgehog") for kind in ("naps", "loads", "reads"))
TESTS = "tests/gpu/linear_attention/test_hedgehog.py::"
LONG, SHORT, BESIDE, GRADIENTS, OTHERS = ((f"{TESTS}{name}",) for name in (
    "test_lengths[460]", "test_lengths[65]", "test_types_and_sizes[dtype0-64-64]",
    "test_gradients[460]", "test_other_chunks_alone[False]"))
NARROW = (f"{TESTS}test_gradients_of_the_other_size",)  # whose features' gradients are by PyTorch
BESIDE_NARROW = (f"{TESTS}test_types_and_sizes[dtype1-64-32]",)

WINDOW = (f"{TESTS}test_gradients_of_the_window[460]",)
PRESSED_FEATURES, LOADED_FEATURES, READ_FEATURES, ROLES_FEATURES = (
    pressed(f"{kind}-hedgehog_features") for kind in ("naps", "loads", "reads", "roles"))
ALIKE = (f"{TESTS}test_gradients_of_scores_that_are_alike",)
LEAST_GRADIENTS = (f"{TESTS}test_gradients_where_features_are_at_their_least",)
NOT_WRITTEN = (f"{TESTS}test_the_gradient_of_keys_alone",)  # with features in memory that has NaN
KEPT = (f"{TESTS}test_features_that_are_kept[1100-128]",)
FLOAT16 = (f"{TESTS}test_gradients_of_float16",)
SEGMENTS, LOADED_SEGMENTS = (f"{TESTS}test_segments[2100]",), pressed("loads-hedgehog_segments")
PRESSED_WINDOW, READ_WINDOW = (pressed(f"{kind}-hedgehog_window") for kind in ("naps", "reads"))

ALL_LEAST = (f"{TESTS}test_features_that_are_all_at_their_least",)
KERNEL = "tkq/linear_attention/hedgehog/kernel.py"
KEYS = "tk.load_async(s.k[keys.stage], g.k, (t.batch, t.head, i, 0), s.keys.acquire(keys))"
# Keys behind queries and values, for which a fault is not to wait in their place.
KEYS_LAST = ((KERNEL, KEYS, "pass"), (KERNEL, "tokens.advance()\nkeys.advance()",
                                      f"tokens.advance()\n{KEYS}\nkeys.advance()"))
# Outputs behind their gradients, likewise.
QUERY_KERNEL = "tkq/linear_attention/hedgehog/query_kernel.py"
OUTPUTS = "tk.load_async(s.o[0], g.o, (t.batch, t.head, i, 0), s.outputs.acquire(one))"
OUTPUTS_LAST = ((QUERY_KERNEL, OUTPUTS, "pass"), (QUERY_KERNEL, "load_chunk(g.b, s.b, s.values, values, t, i)",
                                                  f"load_chunk(g.b, s.b, s.values, values, t, i)\n{OUTPUTS}"))
VALUES = """
            tk.load_T(c.v, s.v[self.config.groups * tokens.stage + wg])  # the rounded state has left its registers
            tk.mul(c.o, c.o, linear)
            tk.mma_ABt(c.o, c.v, s.p[2 * weights.stage])
            tk.mma_ABt(c.o, c.before, s.p[2 * weights.stage + 1])
            tk.mma_AB(c.of_y, c.before, of_k[0])
            tk.mma_AB(c.of_minus_y, c.before, of_k[1])
            tk.load_shared_cols(c.inverse, s.inverse[None, weights.stage])
            tk.mma_wait(2)
            tk.mul_col(c.o, c.o, c.inverse)
            put(g.o, s.o, c.o, (t.batch, t.head, i, 0), OUT_BARRIER, wg)
            tk.mma_wait(0)
            tk.copy(c.before, c.v)
            s.tokens.release(tokens)
"""
RELEASED = "            s.tokens.release(tokens)\n"
FREED_FIRST = RELEASED + VALUES.lstrip("\n").replace(RELEASED, "")

MUTANTS = (
    *family(
        "linear", "tkq/linear_attention/hedgehog/weights.py",
        ("hedgehog_a_key_too_many", "tk.right_fill(w.now, 1, -Float32.inf, diagonal=True)",
         "tk.right_fill(w.now, 2, -Float32.inf, diagonal=True)", SHORT),
        ("hedgehog_a_chunk_before_the_first", "if i == 0:", "if i < 0:", SHORT),
        ("hedgehog_most_of_the_own_chunk", "tk.row_max(w.most, w.past, w.most)", "", LONG),
        ("hedgehog_sums_of_a_chunk_before_the_first", "if there and tk.lane_id() % 4 == 0:",
         "if tk.lane_id() % 4 == 0:", LONG),
        ("hedgehog_no_sums", "sums[at, 0] = sums[at, 0] + w.sums[part].rows_view[r, 0]", "", LONG),
        ("hedgehog_no_sums_of_32_features", "add_row(sums, w.y_q, 0)", "", BESIDE_NARROW),
        ("hedgehog_kept_features_of_the_own_chunk",
         "tk.store_async(g.k_features, of_keys[part], (t.batch, t.head, i - 1, part))",
         "tk.store_async(g.k_features, of_keys[part], (t.batch, t.head, i, part))", KEPT),
        ("hedgehog_no_wait_for_tokens", """
            s.tokens.wait(tokens)
            s.keys.wait(keys)
         """, "s.keys.wait(keys)", LOADS),
        ("hedgehog_no_wait_for_keys", """
            s.tokens.wait(tokens)
            s.keys.wait(keys)
         """, "s.tokens.wait(tokens)", LOADS, KEYS_LAST)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/kernel.py",
        ("hedgehog_without_the_linear_factor", "tk.mul(c.o, c.o, linear)", "", LONG),
        ("hedgehog_values_of_the_chunk_before_left_out", "tk.mma_ABt(c.o, c.before, s.p[2 * weights.stage + 1])",
         "tk.mma_ABt(c.o, c.v, s.p[2 * weights.stage + 1])", LONG),
        ("hedgehog_state_without_minus_y", "tk.mma_AB(c.of_minus_y, c.before, of_k[1])", "", LONG),
        ("hedgehog_maps_of_the_first_head", "tk.load_async(s.maps[1], g.k_map, (t.head, 0, 0), of_maps)",
         "tk.load_async(s.maps[1], g.k_map, (0, 0, 0), of_maps)", LONG),
        ("hedgehog_no_wait_for_weights", """
            tk.copy(c.minus_y16, c.of_minus_y)
            s.weights.wait(weights)
         """, "tk.copy(c.minus_y16, c.of_minus_y)", NAPS),
        ("hedgehog_tokens_freed_before_values_are_read", VALUES, FREED_FIRST, pressed("roles-hedgehog"), KEYS_LAST)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/segments.py",
        ("hedgehog_segments_with_a_chunk_twice", "end = cutlass.min(first + g.each - 1, chunks)",
         "end = cutlass.min(first + g.each, chunks)", SEGMENTS),
        ("hedgehog_segments_without_the_values_before", "if t.first > 0:", "if t.first < 0:", SEGMENTS),
        ("hedgehog_segments_without_sums", "total[0] = total[0] + g.sums[n, t.batch, t.head, thread]",
         "total[0] = g.sums[n, t.batch, t.head, thread]", SEGMENTS),
        ("hedgehog_segments_of_the_first_state",
         "add_held((c.of_y, c.of_minus_y), g.states[n, t.batch, t.head, wg, None, None])",
         "add_held((c.of_y, c.of_minus_y), g.states[0, t.batch, t.head, wg, None, None])", SEGMENTS),
        ("hedgehog_no_wait_for_the_values_before", "s.map_pipe.wait(s.map_pipe.ring())", "", LOADED_SEGMENTS)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/features.py",
        ("hedgehog_features_below_their_least",
         "tk.apply(w.e, lambda x: cutlass.select_(x < LEAST, Float32(LEAST), x), w.e)", "", ALL_LEAST),
        ("hedgehog_softmax_of_y_twice", "tk.mul(y, y, -1.0)", "tk.mul(y, y, 1.0)", BESIDE)),
    *family(
        "linear", "tkq/reference/hedgehog.py",
        ("hedgehog_gradients_of_the_window_as_keys_before", "late, early = slice(WINDOW, None), slice(0, max(0, "
         "q.shape[1] - WINDOW))", "late, early = slice(0, None), slice(0, None)", NARROW),
        ("hedgehog_features_without_delta",
         "taken = taken.sub_(sums.mul_(delta[..., None]))", "taken = taken.sub_(sums)", NARROW)),
    *family(
        "linear", "tkq/linear_attention/spec.py",
        ("hedgehog_own_chunk_with_the_others",
         'return self.queried and not self.others and not (self.second == "pair" and self.dot)',
         "return not self.updates", OTHERS)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/gradients.py",
        ("hedgehog_keys_before_in_the_order_of_tokens",
         "return launch(Given(q, k, v, reverse=reverse, others=True), 1.0).o.to(wide)",
         "return launch(Given(q, k, v, others=True), 1.0).o.to(wide)", NARROW)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/sides.py",
        ("hedgehog_sums_of_one_warps_columns", "for warp in cutlass.range_constexpr(WARPS):",
         "for warp in cutlass.range_constexpr(1):", GRADIENTS),
        ("hedgehog_features_at_their_least_are_softmaxes",
         'LEAST_NARROW = {"bf16": 134 * 2.0**-27, "fp16": 17 * 2.0**-24}  # 1e-6, rounded: features at their least',
         'LEAST_NARROW = {"bf16": 0.5, "fp16": 0.5}',
         LEAST_GRADIENTS)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/query_side.py",
        ("hedgehog_values_of_the_own_chunk_taken_up", "tk.mma_AtB(c.sum, features_of_y(s, side), s.b[before.stage])",
         "tk.mma_AtB(c.sum, features_of_y(s, side), s.b[following(before).stage])", GRADIENTS),
        ("hedgehog_queries_without_the_chunk_before", "tk.mma_AB(c.dq, s.ds[1], s.y[before.stage], b_part=side)", "",
         GRADIENTS),
        ("hedgehog_queries_of_one_side", "tk.mma_ABt(c.dq, s.dy[1], s.x_map[0], b_part=side)", "", GRADIENTS),
        ("hedgehog_map_gradient_of_one_side", "for n in range(SIDES):", "for n in range(1):", GRADIENTS),
        ("hedgehog_no_wait_for_features_of_keys", "s.y_features.wait(tk.Ring(tokens.count, 1))", "", LOADED_FEATURES),
        ("hedgehog_no_wait_for_a_sides_delta", "s.deltas.wait(one)", "", ROLES_FEATURES),
        ("hedgehog_no_wait_for_dy", "s.dys.wait(tk.Ring(tokens.count, 1))", "", ROLES_FEATURES),
        ("hedgehog_no_wait_for_ds", "s.pairs.wait(one)", "", ROLES_FEATURES),
        ("hedgehog_dy_written_over", "s.dys.acquire_empty(one)", "", ROLES_FEATURES)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/query_window.py",
        ("hedgehog_queries_without_the_largest_scores_part", "self.lower(s.ds, c.largest, less)", "pass", ALIKE),
        ("hedgehog_one_of_the_largest_scores", "rest = bits & (bits - 1)", "rest = bits & 0", ALIKE),
        ("hedgehog_largest_scores_of_the_own_chunk_alone", "own, past = largest[0], largest[1]",
         "own, past = largest[0], Int32(0)", ALIKE),
        ("hedgehog_rows_of_one_side", "rows.less.tensor[r] = s.less[row, 0] + s.less[row, 1]",
         "rows.less.tensor[r] = s.less[row, 0]", GRADIENTS),
        ("hedgehog_no_wait_for_delta", "s.deltas.wait(one)", "", ROLES_FEATURES),
        ("hedgehog_no_wait_for_less", "s.dys.wait(one)", "", ROLES_FEATURES),
        ("hedgehog_ds_written_over", "s.pairs.acquire_empty(one)", "", ROLES_FEATURES)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/query_deltas.py",
        ("hedgehog_no_wait_for_outputs", "s.outputs.wait(one)", "", LOADED_FEATURES, OUTPUTS_LAST),
        ("hedgehog_numbers_of_the_chunk_behind", "at = cutlass.min(i * CHUNK + row, g.tokens - 1)",
         "at = cutlass.min((i + 1) * CHUNK + row, g.tokens - 1)", GRADIENTS),
        ("hedgehog_delta_of_half_of_the_rows", "first = warp * ROWS + n * BLOCK", "first = warp * ROWS", GRADIENTS)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/query_kernel.py",
        ("hedgehog_features_over_a_state", "s.states.wait(one)", "", READ_FEATURES),
        ("hedgehog_features_of_the_own_chunk_taken_up", "cutlass.select_(i > 0, i - 1, t.chunks))", "i)",
         GRADIENTS)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/window_rows.py",
        ("hedgehog_a_later_key", "edge = 2 * warp + r  # which eight columns the row's own is one of",
         "edge = 2 * warp + r + 1", GRADIENTS)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/key_side.py",
        ("hedgehog_keys_without_the_largest_scores_part",
         "taken = cutlass.select_(score == most, share, Float32(0.0))", "taken = Float32(0.0)", ALIKE),
        ("hedgehog_numbers_of_the_queries_behind", "chunk = visited(t, i) + side", "chunk = visited(t, i) + 1",
         GRADIENTS),
        ("hedgehog_weights_of_the_own_chunk_taken_up", """
            if side == 0:
                self.put_numbers(numbers, c, side)
         """, "", GRADIENTS),
        # not the wait for P's room: that for dy's, before it, has all but the store of dv, which was begun long before
        ("hedgehog_dy_of_keys_written_over", "s.dys.acquire_empty(one)", "", ROLES_FEATURES)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/key_kernel.py",
        ("hedgehog_features_over_a_state_of_keys", "s.read.wait(one)", "", READ_FEATURES),
        ("hedgehog_features_of_the_last_chunk", "cutlass.select_(i > 0, chunk, t.chunks))", "chunk)",
         NOT_WRITTEN)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/key_rows.py",
        ("hedgehog_values_without_the_chunk_behind", "tk.mma_AtB(c.d, s.p[1], s.b[behind.stage])", "", GRADIENTS),
        ("hedgehog_values_of_one_side", "tk.mma_AB(c.d, s.of_x[1], s.state[1])", "", GRADIENTS),
        ("hedgehog_no_wait_for_weights_of_keys", "s.pairs.wait(one)", "", PRESSED_FEATURES),
        ("hedgehog_gradients_without_the_power", """
            tk.mma_wait(0)
            tk.mul(c.d, c.d, power)
         """, "tk.mma_wait(0)", FLOAT16)),
    *family(
        "linear", "tkq/linear_attention/hedgehog/window_kernel.py",
        ("hedgehog_largest_score_without_its_part", "e * inverse * (d - delta) - cutlass.select_(e == 1.0, less, "
         "Float32(0.0))), x, dp, rows.inverse, rows.delta,", "e * inverse * (d - delta)), x, dp, rows.inverse, "
         "rows.delta,", WINDOW),
        ("hedgehog_keys_without_the_chunk_behind", "tk.mma_AtB(dk, s.ds[1], s.q[tokens.stage])", "", WINDOW),
        ("hedgehog_last_chunk_of_keys_left_out", "self.put_keys(g, s, t, (dk, dv), t.chunks - 1)", "", WINDOW),
        ("hedgehog_no_wait_for_pairs", """
            s.tokens.wait(tokens)
            s.pairs.wait(pairs)
         """, "s.tokens.wait(tokens)", PRESSED_WINDOW),
        ("hedgehog_pairs_written_over", "s.pairs.acquire_empty(out)", "", READ_WINDOW)),
)

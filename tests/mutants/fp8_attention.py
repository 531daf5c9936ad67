"""Faults in float8 attention."""
from .mutant import family, pressed

FOLDER, TESTS = "tkq/attention/fp8/", "tests/gpu/attention/test_fp8_attention.py::"
SIZES, MOVING, WINDOWS, DESCALES, MEAN, NEEDLE, TRANSPOSED, KEYS, DIMS, TASKS = ((TESTS + name,) for name in (
    "test_sizes --slow", "test_a_maximum_that_moves_in_every_block", "test_windows", "test_descales",
    "test_values_of_mean_one", "test_a_needle", "test_values_are_transposed", "test_values_whose_keys_are_contiguous",
    "test_head_dims", "test_each_task_has_its_own_largest_scores"))
SOFTWARE, NONE = ((f"tests/gpu/attention/test_fp8_software_exp2.py::{name}",) for name in (
    "test_without_lse", "test_numbers_that_are_none_without_lse"))
EXPONENTS = ("tests/gpu/tile/test_tile_narrow.py::test_exp2_e4m3",)
WINDOWS = tuple(f"{WINDOWS[0]}[{case}]" for case in ("two_level-128", "two_level-256", "fast-64"))
QUANTISED, OPTIONS = (TESTS + "test_quantised",), (TESTS + "test_quantised_with_options --slow",)
LOADS, READS = (pressed(f"{kind}-attention_fp8") for kind in ("loads", "reads"))
PARTS_LOADS = pressed("loads-attention_fp8_parts")
LENGTHS, STAYS, PACKED, IN_USE, PAGES, NOT_THERE = (
    ("tests/gpu/attention/test_fp8_attention_varlen.py::" + name,) for name in (
        "test_lengths", "test_a_sequence_s_nan_stays_in_it", "test_values_are_transposed",
        "test_what_is_not_in_use_is_not_looked_at", "test_pages", "test_pages_that_are_not_there"))

MUTANTS = (
    *family(
        "fp8_attention", FOLDER + "softmax.py",
        ("largest_probability_is_1", "SHIFT = 8.0", "SHIFT = 0.0", NEEDLE),
        ("largest_probability_is_beyond_e4m3", "SHIFT = 8.0", "SHIFT = 10.0", SIZES),
        ("max_stays", "found = found | (row_max < -SHIFT) | (top * self.factor(g, regs) - row_max > SHIFT)",
         "found = found | (row_max < -SHIFT)", MOVING),
        ("rows_below_zero_are_in_range",
         "found = found | (row_max < -SHIFT) | (top * self.factor(g, regs) - row_max > SHIFT)",
         "found = found | (top * self.factor(g, regs) - row_max > SHIFT)", MOVING),
        ("norm_is_not_rescaled", "tk.mul(regs.norm, regs.norm, regs.correct)", "pass", MOVING),
        ("no_descale_of_v", "tk.mul(regs.last_norm, regs.last_norm, regs.factors[1])", "pass", DESCALES)),
    *family(
        "fp8_attention", FOLDER + "consumer.py",
        ("no_wait_for_v", """
            smem.v_pipe.wait(regs.v)
            self.multiply(smem, regs, 0)
         """, "self.multiply(smem, regs, 0)", LOADS),
        ("no_wait_for_v_of_several_parts", """
            smem.v_pipe.wait(regs.v)
            self.sum_up(smem, regs)
            for part in range(self.config.parts):
         """, """
            self.sum_up(smem, regs)
            for part in range(self.config.parts):
         """, PARTS_LOADS),
        ("k_freed_before_its_product", """
            tk.mma_wait(2 if const_expr(self.by_ones) else 1)
            self.release(smem.k_pipe, regs.k)
         """, """
            self.release(smem.k_pipe, regs.k)
            tk.mma_wait(2 if const_expr(self.by_ones) else 1)
         """, READS),
        ("o_is_not_rescaled", "tk.mul_row(regs.o[part], regs.o[part], regs.correct)", "pass", MOVING),
        ("product_of_the_block_before_stays", "tk.mm_ABt(regs.product, regs.p, v, b_part=part)",
         "tk.mma_ABt(regs.product, regs.p, v, b_part=part)", SIZES),
        ("product_is_not_added", "tk.add(regs.o[part], regs.o[part], regs.product)",
         "tk.copy(regs.o[part], regs.product)", SIZES),
        ("tensor_cores_add", """
            if self.spec.two_level:
                tk.mm_ABt(regs.product, regs.p, v, b_part=part)
            else:
                tk.mma_ABt(regs.o[part], regs.p, v, b_part=part)
         """, "tk.mma_ABt(regs.o[part], regs.p, v, b_part=part)", MEAN,
         ((FOLDER + "consumer.py", """
            if self.spec.two_level:
                tk.add(regs.o[part], regs.o[part], regs.product)
          """, "pass"),)),
        ("first_part_twice", "tk.mm_ABt(regs.product, regs.p, v, b_part=part)",
         "tk.mm_ABt(regs.product, regs.p, v, b_part=0)", SIZES),
        ("columns_of_the_first_part", "(rows, cols), (row, col), first = o.shape, o.stride, part * self.cols",
         "(rows, cols), (row, col), first = o.shape, o.stride, 0", SIZES),
        ("columns_behind_the_end",
         "return cute.make_tensor(o.iterator + first, cute.make_layout((rows, cols - first), stride=(row, col)))",
         "return cute.make_tensor(o.iterator + first, cute.make_layout((rows, cols), stride=(row, col)))", DIMS),
        ("descales_of_the_first_sequence",
         'at, scale = (self.sequence(g, regs), regs.task["head"] // g.tasks.heads_per_kv), g.scale',
         'at, scale = (0, regs.task["head"] // g.tasks.heads_per_kv), g.scale', TASKS),
        ("factors_of_0",
         "regs.factors[0] = cute.arch.fmax(self.if_any_key(regs, scale), Float32(SMALLEST), nan=True)",
         "regs.factors[0] = scale",
         ("tests/gpu/attention/test_fp8_attention.py::test_zeros_as_they_are_quantised[two_level-True]",)),
        ("masks_on_the_left_left_out", 'whole = blocks - regs.task["n_masked_left"]', "whole = blocks + 0", WINDOWS),
        ("lse_of_the_first_tile", "tk.store_rows(g.lse[(*reversed(of), None)], lse, row, end)",
         "tk.store_rows(g.lse[(*reversed(of), None)], lse, regs.wg * 64, end)", SIZES),
        ("descales_of_the_first_packed_sequence",
         'return cutlass.min(regs.task["sequence"], g.tasks.count - 1)', "return Int32(0)", LENGTHS),
        ("factors_of_the_last_sequence_behind_it",
         'return cutlass.select_(regs.task["rows_k"] > 0, factor, Float32(1.0))', "return factor", STAYS),
        ("rows_of_the_next_sequence_written", 'return t["batch"] - t["rows_q"] + row, t["batch"]',
         'return t["batch"] - t["rows_q"] + row, t["batch"] + 1', IN_USE)),
    *family(
        "fp8_attention", FOLDER + "producer.py",
        ("other_block_of_v", "self.load_v(g, smem, v_ring, of_v, first_v + end - j)",
         "self.load_v(g, smem, v_ring, of_v, first_v + end - 1 - j)", SIZES),
        ("first_block_of_v", "self.load_v(g, smem, v_ring, of_v, first_v + seen.first)",
         "self.load_v(g, smem, v_ring, of_v, first_v)", WINDOWS),
        ("tile_of_v_of_the_sequence_before",
         "tile = packed.first_tile(g.tasks, t.sequence, t.batch_k - t.rows_k)",
         "tile = packed.first_tile(g.tasks, t.sequence, t.batch_k - t.rows_k - 1)", LENGTHS)),
    *family(
        "fp8_attention", FOLDER + "packed.py",
        ("keys_of_the_next_sequence", "return begin + (tile - first) * KEYS, begin + keys",
         "return begin + (tile - first) * KEYS, begin + keys + 1", PACKED),
        ("each_tile_as_the_first", "return begin + (tile - first) * KEYS, begin + keys", "return begin, begin + keys",
         PACKED),
        ("keys_behind_the_last_sequence",
         "keys = cutlass.select_(s < batch.count, keys, Int32(0))  # behind the last sequence", "keys = keys + 0",
         PACKED)),
    *family(
        "fp8_attention", FOLDER + "transpose.py",
        ("keys_behind_the_end", "if key < end:", "if key < end + 1:", TRANSPOSED),
        ("keys_in_their_own_order", "key = first + 8 * (j // 2) + lane % 4 * 2 + j % 2",
         "key = first + lane % 4 * 4 + j", TRANSPOSED),
        ("whole_groups_alone", "if first + j < S:", "if first + j < 0:", KEYS),
        ("groups_in_their_own_order",
         "found[c] = low_halves(near, far) if c % 2 == 0 else high_halves(near, far)", "found[c] = words[c]", KEYS)),
    *family(
        "fp8_attention", FOLDER + "pages.py",
        ("pages_that_are_not_there", "if (number >= 0) & (number < pages):", "if number < pages:", NOT_THERE),
        ("keys_of_the_first_sequence_s_pages", "number = block_table[s, key // page]",
         "number = block_table[0, key // page]", PAGES),
        ("keys_behind_the_last_page",
         "block_table.shape[1] * k.shape[1]), 0)", "(block_table.shape[1] + 1) * k.shape[1]), 0)", PAGES),
        ("tiles_of_no_key_stay_as_they_are", "if (i == 0) | (i * KEYS < used):", "if i * KEYS < used:", PAGES),
        ("values_of_such_pages_are_not_0", "value.fill(Uint32(0))", "value.fill(Uint32(NANS))", NOT_THERE)),
    *family(
        "fp8_attention", FOLDER + "quantize.py",
        ("scales_of_one_query_head", "each = H // heads_kv * (D // VECTOR)", "each = D // VECTOR", QUANTISED),
        ("negative_numbers_are_small",
         "bits = value.bitcast(Int32) & Int32(0x7FFFFFFF)  # NaN is larger than all", "bits = value.bitcast(Int32)",
         QUANTISED),
        ("rotation_among_a_lanes_columns_alone", "while step < width:", "while step < VECTOR:", OPTIONS),
        ("rotation_is_not_orthonormal", "return [v * width ** -0.5 for v in values]", "return values", OPTIONS),
        ("mean_of_the_first_tokens", "for part in cutlass.range(x.sums.shape[0], unroll=4):",
         "for part in cutlass.range(1, unroll=4):", OPTIONS),
        ("sums_beyond_the_last_token",
         "for token in cutlass.range(part * MEAN_ROWS, cutlass.min((part + 1) * MEAN_ROWS, S), unroll=4):",
         "for token in cutlass.range(part * MEAN_ROWS, (part + 1) * MEAN_ROWS, unroll=4):", OPTIONS),
        ("mean_of_another_head",
         "mean = vectors.wide(vectors.load(vectors.run_at(x.mean, (place[0], place[1], at[3]), VECTOR)))",
         "mean = vectors.wide(vectors.load(vectors.run_at(x.mean, (place[0], 0, at[3]), VECTOR)))", OPTIONS),
        ("positions_turned_back", "sign = cutlass.select_(first, Float32(-1.0), Float32(1.0))",
         "sign = cutlass.select_(first, Float32(1.0), Float32(-1.0))", OPTIONS),
        ("k_of_means_without_positions", "values = self.element(1, x.k, x, (batch, token, head, col))",
         "values = self.element(2, x.k, x, (batch, token, head, col))", OPTIONS)),
    *family(
        "fp8_attention", "tkq/tile/float8.py",
        ("rows_of_p_swapped",
         "first = 8 * (group // 2) + 2 * (group % 2)", "first = 8 * (group // 2) + 2 * (1 - group % 2)", SIZES),
        ("columns_of_p_in_their_own_order", "return [first + j for j in (0, 1, 4, 5)]",
         "return [first + j for j in (4, 5, 0, 1)]", SIZES)),
    *family(
        "fp8_attention_software", FOLDER + "consumer.py",
        ("sum_of_the_last_block_alone", "regs.norm.tensor[r] = regs.norm.tensor[r] + regs.sums.tensor[2 * r]",
         "regs.norm.tensor[r] = regs.sums.tensor[2 * r]", SOFTWARE),
        ("norm_is_not_rescaled", "tk.mul(regs.norm, regs.norm, regs.correct)", "pass", SOFTWARE),
        ("a_row_has_four_sums", "tk.mul(regs.last_norm, regs.last_norm, 0.25)", "pass", SOFTWARE)),
    *family(
        "fp8_attention_software", FOLDER + "softmax.py",
        ("nan_is_lost",
         "regs.max.tensor[r] = cutlass.select_(top < math.inf, regs.max.tensor[r], Float32(math.nan))", "pass", NONE),
        ("infinite_factors_are_lost",
         "top = largest_of_bits([regs.s.rows_view[r, j] for j in range(regs.s.cols // 4)]) * self.factor(g, regs)",
         "top = largest_of_bits([regs.s.rows_view[r, j] for j in range(regs.s.cols // 4)])", NONE)),
    *family(
        "tile_exp2_e4m3", "tkq/tile/exp2_float8.py",
        ("no_curve", "CURVE = 175.7", "CURVE = 0.0", EXPONENTS), ("rounded_down", "LESS = 24", "LESS = 88", EXPONENTS),
        ("one_row_s_shift", "begin = [0.5 - shift.tensor[row] * (1 / RANGE) for row in range(2)]",
         "begin = [0.5 - shift.tensor[0] * (1 / RANGE) for row in range(2)]", EXPONENTS),
        ("subnormal_as_normal", 'f"max.s16x2 {pair}, {pair}, s;")', 'f"max.s16x2 {pair}, {pair}, {pair};")',
         EXPONENTS)),
)

"""Faults in the long convolution."""
from .mutant import family, pressed

TESTS, SPLIT_TESTS = "tests/gpu/convolution/test_fft_conv.py::", "tests/gpu/convolution/test_fft_conv_split.py::"
NUMERICS, TWO, BLOCKS, NAN, NAN_SPLIT, ENDS, SHORT, PAIRS = ((f"{TESTS}{name}",) for name in (
    "test_numerics[5-3080-5000]", "test_blocks[8192]", "test_eight_blocks",
    "test_nan_and_infinities_stay_in_their_sequence[4096-False-half]",
    "test_nan_and_infinities_stay_in_their_sequence[4096-False-split]", "test_nan_behind_the_ends", "test_short",
    "test_partners_of_any_size"))
OF_WARPS, CIRCLE_OF_WARPS, IN_TURN, TWO_IN_TURN, HARD = ((f"{TESTS}{name}",) for name in (
    "test_numerics[19-1024-1000]", "test_circular[1024-1024]",
    "test_tiles_and_heads_in_turn[9-4096-True]", "test_tiles_and_heads_in_turn[7-8192-True]",
    "test_hard_signals[impulses-4096]"))
CIRCLE, SPIKE, HEADS_OF_ANY_SIZE = ((f"{TESTS}{name}",) for name in (
    "test_circular[4096-4096]", "test_filters_of_one_frequency", "test_filters_of_any_size_in_turn"))
HEADS_LOADS, HEADS_ROLES = pressed("loads-fft_heads"), pressed("roles-fft_heads")
WHOLE, WHOLE_ENDS, WHOLE_IN_TURN, WHOLE_TAP, WHOLE_IMPULSES, WHOLE_NAN = ((f"{TESTS}{name}",) for name in (
    "test_whole_sequences[32768-32768]", "test_nan_behind_the_ends_of_whole_sequences",
    "test_tiles_and_heads_in_turn[3-20000-True]", "test_one_tap_of_whole_sequences",
    "test_hard_signals[impulses-32768]", "test_nan_and_infinities_stay_in_their_sequence[20000-True-half]"))
BEYOND = (f"{TESTS}test_whole_filters_whose_spectra_no_float32_has",)
TINY = (f"{TESTS}test_a_filters_gradient_of_numbers_of_any_size[4096-True--60]",)
MANY_HEADS = (f"{TESTS}test_spectra_of_more_than_2_31_numbers[split] --slow",)
PASSES, MANY, MILLION, IMPULSES, NAN_IN_A_FILTER = ((f"{TESTS}{name}",) for name in (
    "test_several_passes[3-262144-262144]", "test_tiles_in_turn", "test_a_million_tokens",
    "test_hard_signals[impulses-262144]", "test_nan_in_a_filter_and_its_gradient[262144]"))
MILLIONS = (f"{TESTS}test_millions_of_tokens[2097152-2097152]", f"{TESTS}test_millions_of_tokens[4194304-4194304]")
CIRCLE_OF_MILLIONS = (
    "tests/gpu/convolution/test_fft_conv_circles.py::test_circular_of_millions_of_tokens[4194304-4194304-] --slow",)
SIGNALS_OF_MILLIONS = (
    "tests/gpu/convolution/test_fft_conv_circles.py::test_hard_signals_of_a_circle_of_millions_of_tokens --slow",)
SPLIT_ONE, SPLIT_CIRCLE, SPLIT_PASSES, SPLIT_GATES, SPLIT_PARTS, SPLIT_IMPULSES, SPLIT_SPIKE = ((
    f"{SPLIT_TESTS}{name}",) for name in (
    "test_one_pass[5-4096-4096-fp16]", "test_circular[4096-100-fp16]", "test_several_passes[12400-20000-fp16]",
    "test_gates_and_odd_lengths --slow", "test_columns_of_one_to_four_parts[1-1048576-1048576-fp16]",
    "test_the_gradient_of_impulses[4194304]", "test_filters_of_one_frequency"))

MUTANTS = (
    *family(
        "fft", "tkq/convolution/fft/tables.py",
        ("twiddles_of_twice_the_points", "c, s = self.root(r * col, parts * self.spec.points)",
         "c, s = self.root(r * col, 2 * parts * self.spec.points)", BLOCKS),
        ("twiddles_in_the_order_of_columns",
         "roots = [self.root(r * token_of(col + e), parts * self.spec.points) for e in range(2)]",
         "roots = [self.root(r * (col + e), parts * self.spec.points) for e in range(2)]", NUMERICS),
        ("frequencies_of_halves_in_order",
         "return col if not self.halves else cutlass.select_(col < COLS // 2, 2 * col, 2 * col - COLS + 1)",
         "return col", NUMERICS),
        ("halves_of_rows_of_one_sign",
         "found = cutlass.select_(imag == by_imag, c, cutlass.select_(imag == 0, s, -s))",
         "found = cutlass.select_(imag == by_imag, c, s)", CIRCLE_OF_WARPS),
        ("halved_rows_in_order", "return 2 * place + half", "return place + self.spec.rows // 2 * half", CIRCLE),
        ("whole_frequencies_where_quarters_are", "return (4 * k1 - 1, 4) if self.spec.causal else (k1, 1)",
         "return k1, 1", NUMERICS),
        ("sequences_reach_each_other", "here = m // R == k // R", "here = m >= 0", SHORT),
        ("one_warp_says_how_large_the_filter_is", "for w in cutlass.range_constexpr(self.threads // 32):",
         "for w in cutlass.range_constexpr(1):", SPLIT_SPIKE),
        ("offsets_of_32_bits",
         "return cute.make_tensor(spectra.iterator + cute.assume(Int64(head) * first, divby=first), layout)",
         "return cute.make_tensor(spectra.iterator + head * first, layout)", MANY_HEADS),
        ("factors_of_tiny_gradients_are_clamped",
         "return power_of(exponent >> 1) * power_of(exponent - (exponent >> 1))", "return power_of(exponent)", TINY)),
    *family(
        "fft", "tkq/convolution/fft/sequences.py",
        ("tokens_behind_the_end", "if batch < B and token + e < L:\n    held[e] = vectors.run_at("
         "x, (batch, head, token + e), 1)[0]",
         "if batch < B:\n    held[e] = vectors.run_at(x, (batch, head, token + e), 1)[0]", ENDS),
        ("nan_reach_the_partner", "finite = most < INFINITE", "finite = most >= 0", NAN_SPLIT)),
    *family(
        "fft", "tkq/convolution/fft/tokens.py",
        ("run_behind_the_end", "if batch < B and token + e < L:\n    held[e] = vectors.run_at("
         "x, (batch, place.head, token + e), 1)[0]",
         "if batch < B:\n    held[e] = vectors.run_at(x, (batch, place.head, token + e), 1)[0]", ENDS),
        ("nan_reach_others_of_a_tile", "if most[r, tile] >= INFINITE:", "if most[r, tile] < 0:", NAN),
        ("last_warps_left_out", "cutlass.max(of_warps[2, tile], of_warps[3, tile]))",
         "cutlass.max(of_warps[0, tile], of_warps[1, tile]))", HARD)),
    *family(
        "fft", "tkq/convolution/fft/halves.py",
        ("blocks_back_as_forth",
         "p, q = (warp_products.diagonal_block(f.rows[i], transposed=True) for i in range(2))",
         "p, q = (warp_products.diagonal_block(f.rows[i]) for i in range(2))", OF_WARPS),
        ("differences_by_the_factors_of_sums", "warp_products.diagonal_mm([(d.imag, q, False)], tiles[1])",
         "warp_products.diagonal_mm([(d.imag, p, False)], tiles[1])", CIRCLE_OF_WARPS)),
    *family(
        "fft", "tkq/tile/woven.py",
        ("rows_unfolded_the_other_way", "real[i], real[k] = a + b, a - b", "real[i], real[k] = a - b, a + b", CIRCLE)),
    *family(
        "fft", "tkq/convolution/fft/radix.py",
        ("powers_of_roots_stay_the_first", "by = times(by, one)", "by = one", NUMERICS),
        ("last_butterflies_with_the_roots_of_the_first",
         "c, s = self.root((me + m * self.threads) % stride, stride * radix)",
         "c, s = self.root(me % stride, stride * radix)", OF_WARPS)),
    *family(
        "fft", "tkq/convolution/fft/filter_spectra.py",
        ("second_part_without_the_first", "return x * c + before * s, x * s - before * c", "return x * c, x * s", TWO),
        ("taps_behind_the_last", "return cutlass.select_(n <= last, found, Float32(0.0))", "return found",
         (f"{TESTS}test_numerics[64-4096-777]",)),
        ("one_warp_says_how_large", "for w in cutlass.range_constexpr(warps):", "for w in cutlass.range_constexpr(1):",
         SPIKE)),
    *family(
        "fft", "tkq/convolution/fft/filter_taps.py",
        ("taps_before_the_second_block_left_out", "total[0, n], total[1, n] = total[0, n] - y, total[1, n] + x",
         "total[0, n], total[1, n] = total[0, n], total[1, n]", TWO),
        ("transforms_of_a_tile_left_out", "count = g.sums.shape[2] * spec.summed_transforms", "count = g.sums.shape[2]",
         (f"{TESTS}test_gates_and_odd_lengths",))),
    *family(
        "fft", "tkq/convolution/fft/ring.py",
        ("first_head_for_all", "there = vectors.run_at(self.spectra, (self.first + n, 0), self.words).iterator.toint()",
         "there = vectors.run_at(self.spectra, (self.first, 0), self.words).iterator.toint()", IN_TURN),
        ("table_loaded_where_one_is_read", "tk.wait(self.empty[place], (turn - 1) & 1)", "pass", HEADS_ROLES),
        ("table_read_before_it_is_there",
         "tk.wait(self.full[at[0] % self.places], (at[0] // self.places) & 1)", "", HEADS_LOADS),
        ("table_not_awaited_that_a_warpgroup_goes_past",
         "self.arrived(at)\ntk.arrive(self.empty[at[0] % self.places])", "tk.arrive(self.empty[at[0] % self.places])",
         TWO_IN_TURN),
        ("scale_of_the_first_place", "return self.memory[self.words - 4, self.at[0] % self.places].bitcast(Float32)",
         "return self.memory[self.words - 4, 0].bitcast(Float32)", HEADS_OF_ANY_SIZE)),
    *family(
        "fft", "tkq/tile/warp_products.py",
        ("first_warp_rows_for_all", "row = thread_in_warpgroup() // 32 * 16 + matrix % 2 * 8 + lane % 8",
         "row = matrix % 2 * 8 + lane % 8", OF_WARPS)),
    *family(
        "fft", "tkq/convolution/fft/in_registers.py",
        ("next_tile_in_registers_is_this_one", "self.ask(g, asked, (w.next_head, w.next_tile, w.more))",
         "self.ask(g, asked, (w.next_head, w.tile, w.more))", IN_TURN),
        ("next_head_is_this_one", "self.ask(g, asked, (w.next_head, w.next_tile, w.more))",
         "self.ask(g, asked, (w.head, w.next_tile, w.more))", IN_TURN),
        ("last_tile_of_a_block_left_out", "return block * tiles // blocks, (block + 1) * tiles // blocks",
         "return block * tiles // blocks, (block + 1) * (tiles - 1) // blocks", IN_TURN),
        ("first_block_forgotten",
         "woven.woven_mul(narrow, acc, ring.table(0), part, more=(before, ring.table(1)))",
         "woven.woven_mul(narrow, acc, ring.table(0), part)", TWO)),
    *family(
        "fft", "tkq/convolution/fft/blocks.py",
        ("first_block_in_every_place", "tk.complex_mul_table(acc, first, part(j), True)",
         "tk.complex_mul_table(acc, first, part(1), True)", BLOCKS),
        ("second_block_forgotten", "for i in cutlass.range(1, j, unroll=1):",
         "for i in cutlass.range(2, j, unroll=1):", BLOCKS),
        ("mirrored_blocks_in_order", "block = blocks - 1 - j if self.spec.conjugate else j", "block = j", BLOCKS)),
    *family(
        "fft", "tkq/convolution/fft/filter_gradient.py",
        ("other_warpgroups_left_out", "tk.complex_to_table(s.total, total, other > 0)",
         "tk.complex_to_table(s.total, total, False)", NUMERICS),
        ("other_warps_left_out", "[s.total[None, at + of, i] for of in range(0, tk.WARPGROUP, threads)])",
         "[s.total[None, at, i]])", OF_WARPS),
        ("first_block_with_the_second_left_out", "if j == 1:", "if j == 2:", TWO),
        ("next_sequence_is_this_one",
         "following = cutlass.select_(j == 0, w.head, after[0]), cutlass.select_(j == 0, tile, after[1]), j",
         "following = w.head, tile, j", TWO_IN_TURN),
        ("pair_of_one_scale", "return sums[0] if self.spec.causal else cutlass.max(*sums)", "return sums[0]", PAIRS)),
    *family(
        "fft", "tkq/convolution/fft/long/circular.py",
        ("own_tap_twice", "around[:, 0] = 0", "pass", SIGNALS_OF_MILLIONS),
        ("around_as_before", "for taps, mirrored in ((before, conjugate), (around, not conjugate)))",
         "for taps, mirrored in ((before, conjugate), (around, conjugate)))", CIRCLE_OF_MILLIONS),
        ("taps_of_the_causal_part_alone", "found[:, 1:] += around[:, 1:].flip(1)", "pass", CIRCLE_OF_MILLIONS)),
    *family(
        "fft", "tkq/convolution/fft/long/largest.py",
        ("first_warp_alone_says_how_large", "for w in cutlass.range_constexpr(THREADS // 32):",
         "for w in cutlass.range_constexpr(1):", IMPULSES)),
    *family(
        "fft", "tkq/convolution/fft/long/columns.py",
        ("whole_frequencies_between_passes",
         "x, y = self.conjugate(turn((4 * k1 - 1) * (col0 + tk.first_col()), 4 * points))",
         "x, y = self.conjugate(turn(4 * k1 * (col0 + tk.first_col()), 4 * points))", PASSES),
        ("radix_with_one_root_for_all", "roots.append(times(roots[-1], one))", "roots.append(one)", MILLION)),
    *family(
        "fft", "tkq/convolution/fft/long/rows.py",
        ("filter_not_mirrored", "acc.imag.tensor[i] = acc.imag.tensor[i] * (down * conjugate)",
         "acc.imag.tensor[i] = acc.imag.tensor[i] * down", PASSES),
        ("next_tile_is_this_one",
         "self.fetch(g, s, w, (cutlass.select_(last, i + 1, i), cutlass.select_(last, 0, which + 1), 1 - stage))",
         "self.fetch(g, s, w, (i, cutlass.select_(last, 0, which + 1), 1 - stage))", MANY),
        ("products_stay_divided",
         "by, exponent = tk.rv(), exponent_of(first) + exponent_of(second) - 2 * (127 + g.above)",
         "by, exponent = tk.rv(), exponent_of(first) - 127 - g.above", PASSES)),
    *family(
        "fft", "tkq/convolution/fft/long/back.py",
        ("rows_of_one_size", "by = power_of(g.exponents[head, tile] - most) * Float32(spec.scale)",
         "by = power_of(most - most) * Float32(spec.scale)", PASSES),
        ("nan_of_a_filter_forgotten", "finite = cutlass.max(of_x, of_filter) < INFINITE", "finite = of_x < INFINITE",
         NAN_IN_A_FILTER)),
    *family(
        "fft_split", "tkq/convolution/fft/transform.py",
        ("operands_of_one_part", "return ((0, 2), (2 * self.spec.tiles, 0), (0, 0)) if self.spec.split else ((0, 0),)",
         "return ((2 * self.spec.tiles, 0), (0, 0)) if self.spec.split else ((0, 0),)", SPLIT_ONE),
        ("factors_of_one_part", "return ((0, 2), (2 * self.spec.tiles, 0), (0, 0)) if self.spec.split else ((0, 0),)",
         "return ((0, 2), (0, 0)) if self.spec.split else ((0, 0),)", SPLIT_ONE)),
    *family(
        "fft_split", "tkq/convolution/fft/tables.py",
        ("low_factors_of_the_first_tile", "low = 2 * spec.tiles + 2 * tile", "low = 2 * spec.tiles", SPLIT_CIRCLE),
        ("quarters_of_another_sign", "odd, negative = (quarter & 1) == 1, (Int32(1) + quarter) & 2",
         "odd, negative = (quarter & 1) == 1, quarter & 2", SPLIT_ONE)),
    *family(
        "fft_split", "tkq/convolution/fft/sequences.py",
        ("products_with_gates_rounded", "put_rest(tiles[2 + tile], eight, row, col)",
         "put_run(tiles[2 + tile], [x * Float32(0.0) for x in eight], row, col)", SPLIT_GATES)),
    *family(
        "fft_split", "tkq/tile/pairs.py",
        ("low_parts_of_a_left_out",
         "return [(a.low, b.high), (a.high, b.low), (a.high, b.high)] if isinstance(a, SplitPair) else [(a, b)]",
         "return [(a.high, b.low), (a.high, b.high)] if isinstance(a, SplitPair) else [(a, b)]",
         ("tests/gpu/tile/test_tile_pairs.py::test_split_pairs[fp16]",)),
        ("low_part_is_the_high_one", "left = x - element(high, 2 * i), y - element(high, 2 * i + 1)", "left = x, y",
         ("tests/gpu/tile/test_tile_pairs.py::test_split_pairs[fp16]",))),
    *family(
        "fft", "tkq/convolution/fft/long/radix_first.py",
        ("rows_in_natural_order", "k1 = q + spec.radix * (tk.first_row() + 8 * r)",
         "k1 = ROWS * q + tk.first_row() + 8 * r", MILLIONS),
        ("whole_frequencies_within_the_radix", "angle = math.pi / 2 * a / spec.radix", "angle = 0.0", MILLIONS),
        ("quarters_of_the_first_root_left_out",
         "first, step = self.turn(row, 4 * spec.rows), self.turn(-row, spec.rows)",
         "first, step = self.turn(0 * row, 4 * spec.rows), self.turn(-row, spec.rows)", MILLIONS),
        ("low_parts_of_sums_left_out", "put_rest(tiles[spec.planes * q + 2 + of], found[q][of], row, col)",
         "put_run(tiles[spec.planes * q + 2 + of], [x * 0.0 for x in found[q][of]], row, col)", SPLIT_PARTS)),
    *family(
        "fft", "tkq/convolution/fft/long/radix_first_back.py",
        ("back_in_natural_order", "first = row % spec.radix * ROWS + row // spec.radix", "first = row", MILLIONS),
        ("low_planes_left_out",
         "return tuple(Float32(values[e, of, q]) + Float32(values[e, 2 + of, q]) for of in range(2))",
         "return tuple(Float32(values[e, of, q]) for of in range(2))", SPLIT_PASSES)),
    *family(
        "fft_split", "tkq/convolution/fft/long/rows.py",
        ("sum_of_impulses_overflows", "ABOVE = 5", "ABOVE = 9", SPLIT_IMPULSES)),
    *family(
        "fft_whole", "tkq/convolution/fft/whole/digits.py",
        ("whole_frequencies_between_products", "c, s = root((4 * k1 - 1) * DIGITS * n, 4 * POINTS)",
         "c, s = root(4 * k1 * DIGITS * n, 4 * POINTS)", WHOLE),
        ("digits_that_are_not_moved_on", "c, s = root((4 * ((across - turn) & (DIGITS - 1)) - 1) * down, 4 * DIGITS)",
         "c, s = root((4 * across - 1) * down, 4 * DIGITS)", WHOLE)),
    *family(
        "fft_whole", "tkq/convolution/fft/whole/tokens.py",
        ("first_warp_alone_says_how_large", "for i in range(1, cute.size(of_warps)):", "for i in range(1, 1):",
         WHOLE_IMPULSES),
        ("tokens_behind_the_end", "return load16(address + 2 * more, (place.batch < B) & (token + more < L))",
         "return load16(address + 2 * more, place.batch < B)", WHOLE_ENDS),
        ("nan_of_a_sequence_forgotten",
         "factor = cutlass.select_(most[0, 0] < INFINITE, power_of_two(exponent), Float32.inf - Float32.inf)",
         "factor = power_of_two(exponent)", WHOLE_NAN),
        ("factors_up_to_an_fp32s_alone", "return factor, cutlass.max(exponent - BIAS, 0)",
         "return factor, cutlass.max(exponent - exponent, 0)", BEYOND)),
    *family(
        "fft_whole", "tkq/convolution/fft/whole/kernel.py",
        ("next_sequence_is_this_one", "places = self.forth.place(g.u, item), self.forth.place(g.u, item + step)",
         "places = self.forth.place(g.u, item), self.forth.place(g.u, item)", WHOLE_IN_TURN)),
    *family(
        "fft_whole", "tkq/convolution/fft/whole/spectra.py",
        ("next_spectrum_is_this_one", "places = self.forth.place(g.u, item), self.forth.place(g.u, item + step)",
         "places = self.forth.place(g.u, item), self.forth.place(g.u, item)", WHOLE_IN_TURN)),
    *family(
        "fft_whole", "tkq/convolution/fft/whole/kept.py",
        ("spectra_of_the_first_sequence",
         "there = vectors.run_at(self.spectra, (place.head, place.batch, t, u, tk.thread_in_warpgroup(), 0), 8)",
         "there = vectors.run_at(self.spectra, (place.head, place.batch * 0, t, u, tk.thread_in_warpgroup(), 0), 8)",
         WHOLE)),
    *family(
        "fft_whole", "tkq/convolution/fft/whole/filters.py",
        ("filter_not_mirrored", "sign = -1.0 if self.mirrored else 1.0", "sign = 1.0", WHOLE),
        ("first_warp_alone_says_how_large_a_filter_is",
         "totals = [total + of_warps[w, 1 + i] for i, total in enumerate(totals)]", "pass", WHOLE_TAP),
        ("exponents_of_an_fp32_alone", "return cutlass.max((found >> 1) + up + BIAS, LEAST)",
         "return cutlass.min(cutlass.max((found >> 1) + up + BIAS, LEAST), MOST)", BEYOND),
        ("taps_of_one_size", "total = cutlass.select_(is_small, small, cutlass.select_(is_large, large, mid))",
         "total = mid", (f"{TESTS}test_filters_of_any_size[32768]",))),
    *family(
        "fft_whole", "tkq/convolution/fft/whole/taps.py",
        ("second_half_of_the_frequencies_alone", "before[n1] = vectors.run_at(g.taps, (head, token), 1)[0]",
         "before[n1] = Float32(0.0)", WHOLE)),
    *family(
        "fft_whole", "tkq/convolution/fft/whole/gradient.py",
        ("products_stay_divided", "by = power_of_two(exponent + SCALE)", "by = power_of_two(SCALE + 0 * exponent)",
         WHOLE),
        ("last_sequences_again",
         "there, nearest, found = batch < g.v.shape[1], cutlass.min(batch, g.v.shape[1] - 1), []",
         "there, nearest, found = batch >= 0, cutlass.min(batch, g.v.shape[1] - 1), []",
         WHOLE),
        ("nan_of_a_sequence_left_out",
         "return cutlass.select_(cutlass.max(of_v, of_w) < NOT_FINITE, by, Float32.inf - Float32.inf)", "return by",
         (f"{TESTS}test_nan_in_a_filter_and_its_gradient[32768]",))),
)

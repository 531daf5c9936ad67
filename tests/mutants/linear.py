"""Faults in linear attention."""
from .mutant import family, pressed

NAPS, LOADS, READS = (pressed(x) for x in ("naps-linear", "loads-linear", "reads-linear"))
TESTS = "tests/gpu/linear_attention/"
LONG, ODD = ((f"{TESTS}test_linear_op.py::test_shared_heads[{tokens}]",) for tokens in (200, 65))
STATES, RESET = ((f"{TESTS}{name}",) for name in ("test_linear_op.py::test_two_calls_are_one",
                                                  "test_linear_forward.py::test_a_reset"))

HARD = (f"{TESTS}test_delta_forward.py::test_hard_inverses[0.1-identical-2.0]",)
GRADIENTS, FIRST, LACKING = ((f"{TESTS}{name}",) for name in (
    "test_delta_backward.py::test_lengths[token-lengths1]",
    "test_delta_launches.py::test_nothing_in_front_of_gates_is_read[front]",
    "test_delta_launches.py::test_hard_inverses[0.1-identical-2.0-False]"))
NO_BETA = (f"{TESTS}test_delta_launches.py::test_hard_inverses[0.1-identical-0.0-False]",)
SECOND, SECOND_PAIR, SECOND_SCORES = ((f"{TESTS}test_delta_launches.py::test_second_operands[{name}]",) for name in (
    "query-200-token-True", "pair-200-token-True", "pair-200-none-False"))  # with sums a pair has no scores

# What is taken off is asked for where it is needed: a chunk ahead it would have come, waited for or not.
FINISH = "self.ssd.finish(c, s, skip, of_scores, lambda: self.read_values(s, c, wg, stage))"
ASKED_LATE = (("tkq/linear_attention/engine/kernel.py", "self.neighbours.ask(g, s, t, self.order(t, i), wg)", "pass"),
              ("tkq/linear_attention/engine/kernel.py", FINISH, f"{FINISH}\nself.neighbours.ask(g, s, t, chunk, wg)"))
NEIGHBOURS, TAKEN_OFF = ((f"{TESTS}test_delta_launches.py::{name}",) for name in (
    "test_outputs_of_neighbours[pair-True]", "test_what_is_taken_off[True]"))

SSD, LIMITS, GATED, SSD_GRADIENTS, SUMS, SEGMENTS, CANCEL = ((f"{TESTS}test_{name}",) for name in (
    "ssd_forward.py::test_lengths[65]", "ssd_forward.py::test_limits[limit0]",
    "ssd_forward.py::test_types_and_what_there_is[without0-dtype1-of_dt1]", "ssd_backward.py::test_lengths[300]",
    "suffix_sums.py::test_lengths[5000]", "suffix_sums.py::test_lengths[40000]",
    "suffix_sums.py::test_sums_that_cancel"))
PACKED_SUMS = (f"{TESTS}test_suffix_sums.py::test_packed_sequences[cuts0-40013-dtype0]",
               f"{TESTS}test_suffix_sums.py::test_packed_sequences[cuts1-1000-dtype1]")
PACKED_COLUMNS = tuple(f"'{TESTS}test_packed.py::test_results_and_gradients[dtype0-{op} of columns-]'"
                       for op in ("linear_attn", "gated_delta_rule"))
SPLIT, SPLIT_DELTA = ((f"{TESTS}test_split.py::{name}",) for name in (
    "test_gates_of_tokens[1000-5]", "test_the_delta_rule[130-8]"))
PACKED, PACKED_BACK, NONE, FALLS, APART, ROWS = ((f"{TESTS}{name}",) for name in (
    "test_packed.py::test_forward[64-64-cu0-token]",
    "test_packed.py::test_results_and_gradients[dtype0-gated_delta_rule-token]",
    "test_packed.py::test_tokens_before_the_first_sequence[gated_delta_rule]",
    "test_pools.py::test_cu_seqlens[dtype0-linear_attn-end]",
    "test_packed.py::test_no_sequence_reaches_another[linear_attn]",
    "test_pools.py::test_states_are_read_and_written_there[True-dtype0-linear_attn]"))
# Others of the delta rule's forward are by blocks; K above 128 takes the engine.
WIDE, WIDE_DELTA, WIDE_HARD, WIDE_SUMS = ((f"{TESTS}test_wide.py::{name}",) for name in (
    "test_forward[200-0.1]", "test_delta_rule[200-random]", "test_delta_rule[200-identical]",
    "test_gradients_of_values_and_sums[200]"))
CHECKPOINTS, CHECKPOINTS_OF_BATCH = ((f"{TESTS}test_checkpoints.py::test_of_{name}[linear_attn]",) for name in (
    "packed_sequences", "a_batch"))
PING_PONG = (f"{TESTS}test_ssd_forward.py::test_lengths[1000]",)
# Mamba-2's gradients of batches with P 64 are token rows': these go through the engine.
PACKED_SSD, SUMMED_SSD = ((f"{TESTS}test_ssd_backward.py::{name}",) for name in (
    "test_packed_sequences[1]", "test_widths[128-128-dtype2]"))

REACH, BY_BLOCKS, BY_BLOCKS_BACK = ((f"{TESTS}test_split.py::{name}",) for name in (
    "test_chunks_that_reach_a_segments_end[True-2000-3]", "test_segments_by_blocks[3]",
    "test_gradients_of_segments_by_blocks"))

BY_HALVES = (f"{TESTS}test_split.py::test_segments_by_blocks[2]",)
OVERLAPPING, NAN_STATE = ((f"{TESTS}test_overlapping_segments.py::{name}",) for name in (
    "test_segments[2000-3-128-128-bfloat16]", "test_nan_ends_where_decays_end[state]"))

MUTANTS = (
    *family(
        "linear", "tkq/linear_attention/engine/packed.py",
        ("gates_of_the_next_sequence", "return replace(g, tokens=piece.rows, **found)",
         "return replace(g, tokens=g.tokens - first, **found)", PACKED),
        ("reversed_gates_of_the_next_sequence", "return replace(g, tokens=piece.rows, **found)",
         "return replace(g, tokens=g.tokens - first, **found)", PACKED_BACK),
        ("steps_of_the_first_sequence",
         '(("ssd",), lambda x: x._replace(dt=_tokens(x.dt, first), diagonal=_tokens(x.diagonal, first)))):',
         '(("ssd",), lambda x: x._replace(diagonal=_tokens(x.diagonal, first)))):', PACKED_SSD),
        ("diagonals_of_the_first_sequence",
         '(("ssd",), lambda x: x._replace(dt=_tokens(x.dt, first), diagonal=_tokens(x.diagonal, first)))):',
         '(("ssd",), lambda x: x._replace(dt=_tokens(x.dt, first)))):', PACKED_SSD),
        ("own_tensors_of_no_piece", 'found["own"] = g.own._replace(**own)', "pass", PACKED_COLUMNS),
        ("a_token_of_the_next_sequence", "return first, end", "return first, cutlass.min(end + 1, g.tokens)", APART),
        ("gates_of_the_first_sequence", "at = x.iterator + Int64(first) * strides[batch + 1]",
         "at = x.iterator + Int64(0) * strides[batch + 1]", PACKED),
        ("tokens_of_no_sequence_are_read", "rows = Int32(0) if n >= count else end - first", "rows = end - first",
         NONE),
        ("tokens_of_no_sequence_are_left",
         "lambda x: x.part(written) if isinstance(x, tk.gl) else _tokens(x, first)),",
         "lambda x: x.part(piece.rows) if isinstance(x, tk.gl) else _tokens(x, first)),", NONE),
        ("sequences_that_overlap", 'first = cute.arch.warp_redux_sync(first, "max")', "first = self.cut(g, last)",
         FALLS),
        ("sequences_from_32_on", "for base in cutlass.range(0, last + 1, WARP, unroll=4):",
         "for base in cutlass.range(0, 1, WARP, unroll=4):",
         (f"{TESTS}test_packed.py::test_many_sequences[linear_attn]",)),
        ("states_of_the_first_sequence", "state = Int32(-1) if n >= count else n",
         "state = Int32(-1) if n >= count else Int32(0)", PACKED),
        ("rows_by_the_sequence", "state = self.row(g.state_indices[n])", "state = n", ROWS),
        ("rows_of_the_lower_32_bits", "return Int32(cutlass.max(cutlass.min(index, (1 << 31) - 1), -1))",
         "return Int32(index)", (f"{TESTS}test_pools.py::test_state_indices[linear_attn-end]",)),
        ("rows_behind_the_pool", "there = (t.state >= 0) & (t.state < rows)", "there = t.state >= 0", ROWS)),
    *family(
        "linear", "tkq/linear_attention/engine/segmented.py",
        ("segments_of_another_sequence", "return n // g.segments, first, chunks",
         "return n % g.segments, first, chunks", SPLIT),
        ("values_in_a_transfer", "return cute.ceil_div(g.tokens, CHUNK) if self.transfer else chunk", "return chunk",
         SPLIT_DELTA),
        ("a_transfer_from_zeros", "view[r, j] = one", "view[r, j] = Float32(0.0)", SPLIT_DELTA),
        ("transfers_of_what_leaves_nothing", "return g.reach[t.state, t.head] == ALL\n", "return True\n", BY_BLOCKS),
        ("halves_that_the_other_alone_decides", "return (n % 2 != int(reverse)) | (mine == ALL) | (other == ALL)",
         "return (n % 2 != int(reverse)) | (mine == ALL)", BY_HALVES),
        ("the_same_halves_twice", "return block % count * 2 + cutlass.select_(block < count, 1 - back, back)",
         "return block % count * 2 + 1 - back", BY_HALVES),
        ("the_first_chunks_of_a_segment_alone",
         "first, chunks = first + (0 if self.spec.reverse else chunks - reached), reached", "chunks = reached",
         BY_BLOCKS),
        ("the_identity_s_first_columns", "row = row0 + tk.first_row() + 8 * r", "row = tk.first_row() + 8 * r",
         SPLIT_DELTA),
        ("the_last_chunks_decay_alone", "decay[0] = decay[0] * shared.total[0, place]",
         "decay[0] = shared.total[0, place]", SPLIT)),
    *family(
        "linear", "tkq/linear_attention/split/combine.py",
        ("transfers_that_were_not_stored", "ways = range(1 + self.spec.reverse) if self.spec.reach else ()",
         "ways = (int(self.spec.reverse),) if self.spec.reach else ()",
         (f"{TESTS}test_split.py::test_what_leaves_nothing_one_way",)),
        ("states_that_do_not_decay", "s[e] = before + added[e, i]", "s[e] = s[e] + added[e, i]", SPLIT),
        ("segments_in_the_order_of_tokens", "return x.states.shape[1] - 1 - i if self.spec.reverse else i", "return i",
         (f"{TESTS}test_split.py::test_corrected_values[reversed]",)),
        ("eight_segments_alone", "for base in cutlass.range(0, count, AHEAD, unroll=1):",
         "for base in cutlass.range(0, cutlass.min(count, AHEAD), AHEAD, unroll=1):",
         (f"{TESTS}test_split.py::test_gates_of_tokens[1216-19]",)),
        ("transfers_transposed", "factors[i] = matrix[base + i, row]",
         "factors[i] = matrix[row, base + i + 0]", SPLIT_DELTA),
        ("transfers_not_transposed", "factors[i + e] = four[e]", "factors[i + e] = matrix[base + i + e, row]",
         (f"{TESTS}test_split.py::test_corrected_values[reversed]",))),
    *family(
        "linear", "tkq/linear_attention/split/launch.py",
        ("segments_that_all_begin_with_zeros", "made = _outputs(given._replace(inverse=inverse), scale, first)",
         "made = _outputs(given._replace(inverse=inverse), scale, torch.zeros_like(first))", SPLIT),
        ("segments_by_what_reaches_the_next_one",
         "return engine.launch(given._replace(reach=reach[:, :-1]), scale)",
         "return engine.launch(given._replace(reach=reach[:, 1:]), scale)", OVERLAPPING)),
    *family(
        "linear", "tkq/linear_attention/blocks/state.py",
        ("first_chunk_of_a_segment_is_not_stored", "stored = chunk >= t.stored_from", "stored = chunk > t.stored_from",
         OVERLAPPING),
        ("all_segments_from_the_first_state", "begins = t.stored_from == 0", "begins = t.stored_from >= 0", NAN_STATE),
        ("segments_without_a_last_state",
         "last = (t.chunks > 0) & (t.first + t.chunks == cute.ceil_div(g.tokens, CHUNK))",
         "last = (t.chunks > 0) & (t.first + t.chunks > cute.ceil_div(g.tokens, CHUNK))", OVERLAPPING)),
    *family(
        "linear", "tkq/linear_attention/split/reach.py",
        ("chunks_that_reach_the_other_end", "chunk = first + cutlass.select_(way == 0, chunks - 1 - mine, mine)",
         "chunk = first + mine", (f"{TESTS}test_split.py::test_chunks_that_reach_a_segments_end[False-2000-3]",)),
        ("longer_keys_that_count_for_nothing",
         "found = found + cutlass.select_(longer > 1.0, cute.math.log2(longer), Float32(0.0))", "pass", REACH),
        ("keys_of_another_head_in_a_bound", "of_key = head // (g.shape[2] // k.shape[2])",
         "of_key = head % k.shape[2]", REACH),
        ("gates_behind_the_end", "return token, (mine < chunks) & (token < tokens)", "return token, mine < chunks",
         REACH)),
    *family(
        "linear", "tkq/linear_attention/delta/gradients.py",
        ("gates_of_a_segment_alone", "ends = state_products(before.state, p.starts.mT, behind.scale)",
         "ends = state_products(before.state, p.starts.mT, 0.0)", BY_BLOCKS_BACK),
        ("sums_of_the_states_before", "ends = state_products(before.state, p.starts.mT, behind.scale)",
         "ends = state_products(saved.starts.mT, p.starts.mT, behind.scale)", BY_BLOCKS_BACK)),
    *family(
        "linear", "tkq/linear_attention/packed_sequences.py",
        ("gradients_of_gates_beyond_the_sequence",
         "x[:, :-step] += torch.where(behind[:-step] > step, x[:, step:], zero)",
         "x[:, :-step] += x[:, step:].clone()", PACKED_SUMS),
        ("gradients_of_tokens_of_no_sequence",
         "return torch.where(self.inside.view(1, -1, *(1,) * (x.dim() - 2)), x, x.new_zeros(()))", "return x",
         PACKED_SUMS),
        ("tokens_before_the_first_are_its", "of.masked_fill_(place < bounds[0], count)", "", PACKED_SUMS)),
    *family(
        "linear", "tkq/linear_attention/engine/delta.py",
        ("keys_are_not_erased", "shared.erase[i, stage] = beta * decay", "shared.erase[i, stage] = 0.0 * decay",
         WIDE_DELTA),
        ("erased_before_they_decay", "shared.erase[i, stage] = beta * decay", "shared.erase[i, stage] = beta",
         WIDE_DELTA),
        ("beta_of_one", "tk.mul_row(x, x, beta)", "", WIDE_HARD),
        ("what_values_lack_by_an_inverse_without_beta", "self.scale_columns(x, shared.beta[None, stage])", "pass",
         LACKING),
        ("what_values_lack_taken_up", """
                tk.mul_col(c.w, c.w, c.beta)
            tk.copy(c.v, c.w)
         """, "    tk.copy(c.v, c.w)", NO_BETA),
        ("what_values_lack_kept_for_each", "c.erase.tensor[i], c.beta.tensor[i] = kept_of(b), of_kept(b)",
         "c.erase.tensor[i], c.beta.tensor[i] = Float32(1.0), b", LACKING),
        ("sums_of_gradients_of_values", "c.w.tensor[i] = cutlass.select_(f > 0.0, element(c.rest, i) * f, "
         "c.o.tensor[i] * element(c.beta, i))", "pass", GRADIENTS),
        ("what_values_lack_erased_with_beta", "shared.erase[i, stage] = decay", "pass", LACKING),
        ("gradients_by_the_inverse_not_transposed", "tk.mm_AB(c.w, c.x, shared.inverse[of_inverse])",
         "tk.mm_ABt(c.w, c.x, shared.inverse[of_inverse])", GRADIENTS),
        ("gradients_of_what_values_lack_without_other_tokens", "tk.mma_AB(c.o, c.rest, shared.keys[stage])", "pass",
         GRADIENTS),
        ("gradients_of_other_tokens_added", "tk.apply_narrow(mine[2], lambda n: -n, x)",
         "tk.apply_narrow(mine[2], lambda n: n, x)", GRADIENTS),
        ("an_inverse_of_another_chunk", "tk.store_async(g.kept, shared.inverse[stage], (t.batch, t.head, chunk, 0))",
         "tk.store_async(g.kept, shared.inverse[stage], (t.batch, t.head, chunk + 1, 0))", GRADIENTS),
        ("gradients_are_not_erased", "tk.mma_AB(c.s, c.x, keys)", "", GRADIENTS),
        ("gradients_without_beta", "tk.apply_narrow(c.x, lambda o, b: o * b, c.o, c.beta)", "tk.copy(c.x, c.o)",
         GRADIENTS),
        ("erased_without_the_scale", "decay = decay * cute.arch.rcp_approx(g.scale)", "pass", GRADIENTS),
        ("beta_of_another_token", "beta = Float32(mine[1].found[e])", "beta = Float32(mine[1].found[1 - e])",
         WIDE_DELTA)),
    *family(
        "linear", "tkq/linear_attention/engine/ahead.py",
        ("numbers_of_tokens_before_the_first", "if token >= 0 and token < g.tokens:", "if token < g.tokens:", FIRST)),
    *family(
        "linear_inverse", "tkq/linear_attention/engine/inverse.py",
        ("last_row_is_not_solved", "for i in cutlass.range_constexpr(k + 1, EDGE):",
         "for i in cutlass.range_constexpr(k + 1, EDGE - 1):", HARD),
        ("block_of_8_left_out", "self.pair(lower, 2 * EDGE * warp)", "pass", WIDE_HARD),
        ("block_of_32_left_out", "self.merge(lower, Int32(0), warp // 2, warp % 2, 4 * EDGE)", "pass",
         WIDE_HARD),
        ("with_its_sign", "a[e, 0] = -left.at(e // 2 + e % 2 * 2, k)", "a[e, 0] = left.at(e // 2 + e % 2 * 2, k)",
         WIDE_HARD),
        ("of_11_bits", "for i, (x, y) in enumerate(((a_rest, b), (a, b_rest), (a, b))):",
         "for i, (x, y) in enumerate(((a, b),)):", LACKING)),
    *family(
        "linear_second", "tkq/linear_attention/engine/second.py",
        ("tokens_see_themselves", "put_scores(s.second.p[places[1]], p, 1)", "put_scores(s.second.p[places[1]], p, 0)",
         SECOND),
        ("second_scores_are_added", "self.sign = -1.0 if self.pair or spec.both_ways else 1.0", "self.sign = 1.0",
         SECOND),
        ("pairs_without_the_scale",
         "return Float32(0.0) - left * cute.arch.rcp_approx(scale)", "return Float32(0.0) - left", SECOND_PAIR)),
    *family(
        "linear_both_ways", "tkq/linear_attention/engine/both_ways.py",
        ("queries_of_a_chunk_give_keys_nothing", "tk.mma_AtB(c.w, s.x[tile], s.p[scores])", "pass", SECOND),
        ("keys_of_a_chunk_give_keys_nothing", "tk.mma_AtB(c.w, s.v[tile], s.second.p[scores])", "pass", SECOND),
        ("sums_without_what_is_taken_off", "add_dots(s.dots, c.w, c.v, wg, times=2.0)",
         "add_dots(s.dots, c.w, c.v, wg, times=1.0)", SECOND)),
    *family(
        "linear", "tkq/linear_attention/engine/gates.py",
        ("state_does_not_decay", "tk.mul(c.s, c.s, shared.total[0, stage])", "pass", LONG),
        ("values_do_not_decay", "left = cute.math.exp2(last - x, fastmath=True)", "left = cute.math.exp2(x - x)", LONG),
        ("outputs_of_the_other_order", "begun, left = left, begun", "pass", LONG),
        ("kept_taken_up_as_corrected", "left = left * logs[2 + e]", "pass", SECOND),
        ("kept_as_queries_of_a_state", "begun = begun * logs[2 + e]", "pass", SECOND_PAIR),
        ("kept_in_scores", "shared.kept[i, stage] = x - cute.math.log2(logs[2 + e], fastmath=True)",
         "shared.kept[i, stage] = x", SECOND),
        ("kept_by_the_other_side",
         "of_rows, of_cols = (shared.kept, shared.sum) if self.spec.reverse else (shared.sum, shared.kept)",
         "of_rows, of_cols = (shared.sum, shared.kept) if self.spec.reverse else (shared.kept, shared.sum)",
         SECOND_SCORES),
        ("gate_of_infinity", "found = [cutlass.select_(y < LOWEST, Float32(LOWEST), y) for y in x]", "found = x",
         RESET)),
    *family(
        "linear_checkpoints", "tkq/linear_attention/engine/checkpoints.py",
        ("of_a_chunk_that_ends_early", "if done % g.every == 0 and done * CHUNK <= g.tokens:",
         "if done % g.every == 0:", CHECKPOINTS),
        ("a_chunk_early", "if done % g.every == 0 and done * CHUNK <= g.tokens:",
         "if i % g.every == 0 and done * CHUNK <= g.tokens:", CHECKPOINTS_OF_BATCH),
        ("in_one_row", "of_head = g.checkpoints[t.batch, done // g.every - 1, t.head, None, None]",
         "of_head = g.checkpoints[t.batch, 0, t.head, None, None]", CHECKPOINTS_OF_BATCH)),
    *family(
        "linear_checkpoints", "tkq/linear_attention/engine/packed.py",
        ("of_the_first_sequence",
         '(("checkpoints",), lambda x: _tokens(x, first // (CHUNK * g.every))),',
         '(("checkpoints",), lambda x: _tokens(x, 0 * first)),', CHECKPOINTS)),
    *family(
        "linear_wide", "tkq/linear_attention/engine/products.py",
        ("last_piece_alone", "multiply = tk.mma_ABt", "multiply = tk.mm_ABt", WIDE),
        ("pieces_of_the_first_columns", "multiply(d, operand, other, k=(first, first + n))",
         "multiply(d, operand, other, k=(0, n))", WIDE),
        ("rest_left_out", "issued.append(rest)", "pass", WIDE_SUMS),
        ("values_in_the_place_of_corrected_ones", "tk.store_T(s.v[stage], c.w)", "pass", WIDE_DELTA),
        ("states_of_the_first_columns", "tk.load_from(part, x, row0, first)", "tk.load_from(part, x, row0, 0)",
         WIDE_DELTA)),
    *family(
        "linear", "tkq/linear_attention/engine/kernel.py",
        ("gates_of_the_next_chunk", "self.gate = Gate(spec, self.ssd, self.heads, "
         "self.heads.every if self.factors_alone else self.ping_pong.count)",
         "self.gate = Gate(spec, self.ssd, self.heads)", SPLIT),
        ("inverse_of_queries",
         "x, p, keys = tk.rt_fl(CHUNK), tk.rt(CHUNK, self.dtype), s.q if self.spec.reverse else s.k",
         "x, p, keys = tk.rt_fl(CHUNK), tk.rt(CHUNK, self.dtype), s.k", GRADIENTS),
        ("gradients_in_the_order_of_tokens", "return visited(t, i, self.spec.reverse)", "return visited(t, i, False)",
         LONG),
        ("last_chunk_left_out", "batch, first, chunks = self.segmented.of_block(g, batch, "
         "head, cute.ceil_div(tokens, CHUNK))",
         "batch, first, chunks = self.segmented.of_block(g, batch, head, tokens // CHUNK)", ODD),
        ("keys_of_another_head", "found = [(s.k[stage], g.k, (t.batch, t.head_k, chunk, 0))]",
         "found = [(s.k[stage], g.k, (t.batch, t.head, chunk, 0))]", ODD),
        ("first_state_left_out", "self.products.load(state, self.sequences.state(g.initial, t), row0)",
         "tk.zero(state)", STATES),
        ("no_wait_for_scores", "s.scores.wait(scores)", "", NAPS),
        ("scores_written_over", "s.scores.acquire_empty(out)", "", READS),
        ("tokens_freed_before_their_products", """
            tk.mma_wait(0)
            self.add_rest(s, c, wg, (ring.stage, scores.stage))
         """, """
            s.tokens.release(ring)
            tk.mma_wait(0)
            self.add_rest(s, c, wg, (ring.stage, scores.stage))
         """, READS)),
    *family(
        "linear", "tkq/linear_attention/engine/scores.py",
        ("strict_mask_with_the_diagonal", "tk.right_fill(p, 1 - apart, 0.0, diagonal=True)",
         "tk.right_fill(p, 1, 0.0, diagonal=True)", GRADIENTS),
        ("reversed_strict_mask_with_the_diagonal", "tk.left_fill(p, apart, 0.0, diagonal=True)",
         "tk.left_fill(p, 0, 0.0, diagonal=True)", PACKED_SSD),
        ("no_wait_for_tokens", """
            if i < t.chunks:
                s.tokens.wait(ring)
            if const_expr(self.spec.scored):
         """, "if const_expr(self.spec.scored):", LOADS),
        ("diagonal_twice", "self.spec, self.delta, self.apart = spec, delta, int(apart)",
         "self.spec, self.delta, self.apart = spec, delta, int(spec.strict)", PACKED_SSD)),
    *family(
        "linear_half", "tkq/tile/triangle.py",
        ("without_the_diagonal", "behind = lane_id() // 4 - first_col()  # how far the row is behind the pair's first "
         "column, where both are eight", "behind = lane_id() // 4 - first_col() - (1 - 2 * upper)", ODD),
        ("of_the_whole_block", "if block == row:", "if block == -1:", ODD),
        ("of_the_other_warp", "row, block = 2 * warp + i % 2, i // 2", "row, block = 6 - 2 * warp + i % 2, i // 2",
         ODD)),
    *family(
        "linear_ping_pong", "tkq/linear_attention/engine/ping_pong.py",
        ("begin_at_the_first_stage", "ring.count[0] = Uint32(wg)", "ring.count[0] = Uint32(0)", PING_PONG),
        ("all_chunks_each", "self.count = config.scores", "self.count = 1", PING_PONG)),
    *family(
        "linear_neighbours", "tkq/linear_attention/engine/neighbours.py",
        ("other_head_left_out", "x.tensor[i] = x.tensor[i] + element(spare, i)", "pass", NEIGHBOURS),
        ("nothing_is_added", "x.tensor[i] = x.tensor[i] + self.sign * element(spare, i)", "pass", TAKEN_OFF),
        ("taken_off_and_not_added", "self.sign = 1.0 if spec.dot else -1.0", "self.sign = -1.0", TAKEN_OFF),
        ("outputs_of_the_first_heads", "return t.head // 2 if self.summed else t.head", "return t.head", NEIGHBOURS),
        ("sent_before_those_before_are_taken", "shared.pipe.acquire_empty(ring)", "pass",
         pressed("reads-delta_neighbours")),
        ("taken_before_it_has_come", "tk.wait(s.neighbours.less[wg], ring.phase)", "pass", TAKEN_OFF, ASKED_LATE)),
    *family(
        "linear", "tkq/linear_attention/engine/ssd.py",
        ("steps_without_their_bias", "d = d + Float32(o.bias[t.head])", "pass", SSD),
        ("steps_below_their_limit", "d = o.low if d < o.low else d", "pass", LIMITS),
        ("outputs_without_the_skip", "o = o + skip * v", "pass", SSD),
        ("gated_by_the_sigmoid", "o = o * z * cute.arch.rcp_approx(1.0 + cute.math.exp2(-tk.LOG2E * z, fastmath=True))",
         "o = o * cute.arch.rcp_approx(1.0 + cute.math.exp2(-tk.LOG2E * z, fastmath=True))", GATED),
        ("x_gradient_without_the_step", "o = o * d", "pass", PACKED_SSD),
        ("skip_gradient_of_the_last_chunk", "mine[1].tensor[r] = mine[1].tensor[r] + sum(products[1:], products[0])",
         "mine[1].tensor[r] = sum(products[1:], products[0])", PACKED_SSD),
        ("skip_gradients_of_the_first_sequence", "g.ssd.of_skip[t.state, t.head, row] = mine[1].tensor[r]",
         "g.ssd.of_skip[0, t.head, row] = mine[1].tensor[r]", PACKED_SSD),
        ("steps_of_another_token", "found[2 + e] = d if there else Float32(0.0)",
         "found[3 - e] = d if there else Float32(0.0)", SSD),
        ("diagonal_without_its_step", "shared[row, 2 * stage] = view[r, j] * factor",
         "shared[row, 2 * stage] = view[r, j]", PACKED_SSD),
        ("sums_of_heads_without_the_step", "tk.mul_col(c.o, c.o, d)", "pass", SUMMED_SSD)),
    *family(
        "linear", "tkq/linear_attention/engine/gates.py",
        ("states_without_the_step", "left = left * logs[2 + e] if const_expr(self.adds) else left", "pass", SSD),
        ("scores_without_the_step", "shared.dt[i, stage] = logs[2 + e] * g.scale if const_expr(self.adds) else "
         "logs[2 + e]", "shared.dt[i, stage] = g.scale if const_expr(self.adds) else logs[2 + e]", SSD)),
    *family(
        "linear", "tkq/linear_attention/suffix/kernel.py",
        ("what_is_behind_the_segment_left_out", "n = t.segment + 1 + i * LANES + t.lane",
         "n = t.segment + 2 + i * LANES + t.lane", SUMS),
        ("the_next_segments_alone", "for i in range(SEGMENTS // LANES):", "for i in range(1):", SUMS),
        ("one_token_of_each_thread", "total[0] = total[0] + values[e]", "total[0] = values[e]", SUMS),
        ("one_part_of_several", "return sum(parts[1:], parts[0])", "return parts[0]",
         (f"{TESTS}test_suffix_sums.py::test_parts[2-1]",)),
        ("tiles_behind_in_the_segment_left_out", "total[0] = total[0] + self.behind(sums, t, 0)", "pass", SEGMENTS),
        ("lanes_behind_left_out",
         "self.store(x, values, total[0] + self.behind(sums, t, t.lane + 1), t, t.tile1 - 1 - i, of_steps)",
         "self.store(x, values, total[0], t, t.tile1 - 1 - i, of_steps)", SUMS),
        ("packed_sums_of_tokens_of_none", "values[e] = cutlass.select_(token < t.of.rows, value, Float64(0.0))",
         "values[e] = cutlass.select_(token < t.of.end - t.of.first, value, Float64(0.0))", PACKED_SUMS),
        ("packed_sums_of_the_first_sequence", "at = t.batch, there, t.head", "at = t.batch, there - t.of.first, t.head",
         PACKED_SUMS),
        ("packed_sums_with_the_first_end", "total[0] = total[0] + Float64(x.end[t.of.state, t.head])",
         "total[0] = total[0] + Float64(x.end[0, t.head])", PACKED_SUMS),
        ("rounded_sums", "values[e] = values[e] + values[e + 1]",
         "values[e] = Float64(Float32(values[e] + values[e + 1]))", CANCEL)),
    *family(
        "linear", "tkq/linear_attention/suffix/steps.py",
        ("steps_get_nothing_of_decays", "of_d = Float32(taken) + o.of_q[at] * o.of_x[at] + o.A[at[2]] * dg",
         "of_d = Float32(taken) + o.of_q[at] * o.of_x[at]", SSD_GRADIENTS),
        ("steps_get_nothing_of_themselves", "of_d = Float32(taken) + o.of_q[at] * o.of_x[at] + o.A[at[2]] * dg",
         "of_d = Float32(taken) + o.A[at[2]] * dg", SSD_GRADIENTS),
        ("steps_without_softplus_slope", "of_d = cutlass.select_(within, of_d, Float32(0.0)) * slope",
         "of_d = cutlass.select_(within, of_d, Float32(0.0))", SSD_GRADIENTS),
        ("steps_beyond_their_limits", "within = found >= o.low and found <= o.high", "within = found >= o.low",
         (f"{TESTS}test_ssd_backward.py::test_limits[True]",)),
        ("steps_of_no_sequence", "of_d = cutlass.select_(inside, of_d, Float32(0.0))", "pass", PACKED_SSD),
        ("decays_get_sums_without_the_step",
         "sums[0] = sums[0] + Float64(cutlass.select_(inside, d * dg, Float32(0.0)))",
         "sums[0] = sums[0] + Float64(cutlass.select_(inside, dg, Float32(0.0)))", SSD_GRADIENTS),
        ("bias_gets_the_last_token", "sums[1] = sums[1] + Float64(of_d)", "sums[1] = Float64(of_d)", SSD_GRADIENTS)),
    *family(
        "linear", "tkq/linear_attention/suffix/products.py",
        ("runs_behind_the_last_one", "there = base + i * THREADS < runs", "there = base < runs",
         (f"{TESTS}test_suffix_sums.py::test_products_of_states[80-64]",))),
)

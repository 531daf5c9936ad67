"""Faults in Based."""
from .mutant import family, pressed

NAPS, READS = (pressed(x) for x in ("naps-based", "reads-based"))
TESTS = "tests/gpu/linear_attention/"
LONG, SEGMENTS = ((f"{TESTS}test_based.py::{name}",) for name in ("test_lengths[300]", "test_segments"))
GRADIENTS, HALVES = ((f"{TESTS}test_based_backward.py::{name}",) for name in (
    "test_lengths[300]", "test_float16_and_two_parts_of_values"))

# The state lets tokens go when it has read them, and not behind its products, which come later than all others do.
FREED_BY_THE_STATE = tuple(("tkq/linear_attention/based/kernel.py", was, now) for was, now in (
    ("s.ready.wait(ready)", "s.tokens.release(ring)\ns.ready.wait(ready)"),
    ("s.tokens.release(ring)\ns.ready.release(ready)", "s.ready.release(ready)")))

MUTANTS = (
    *family(
        "based", "tkq/linear_attention/based/features.py",
        ("rows_as_they_lie_in_memory", "exchanged = 2 * (first // 4 % 2)", "exchanged = 0", LONG),
        ("opposite_columns_of_the_lower_lanes_alone",
         "ends = [cutlass.select_(x.upper, x.pair(r, m + 2), x.pair(r, m)) for m in (0, 8)]",
         "ends = [x.pair(r, m) for m in (0, 8)]", LONG),
        ("squares_in_full", 'of_kind = {"linear": linear, "one": times, "square": square * 0.5, "pair": square}',
         'of_kind = {"linear": linear, "one": times, "square": square, "pair": square}', LONG)),
    *family(
        "based", "tkq/linear_attention/based/kernel.py",
        ("mask_without_the_diagonal", "tk.right_fill(x, 1, 0.0, diagonal=True)",
         "tk.right_fill(x, 0, 0.0, diagonal=True)", LONG),
        ("reversed_mask_without_the_diagonal", "tk.left_fill(x, 0, 0.0, diagonal=True)",
         "tk.left_fill(x, 1, 0.0, diagonal=True)", GRADIENTS),
        ("outputs_at_the_states_scale", "tk.mul(c.o, c.o, back)", "pass", LONG),
        ("segments_from_zero", "for segment in cutlass.range(t.segment, unroll=1):",
         "for segment in cutlass.range(0, unroll=1):", SEGMENTS),
        ("no_wait_for_features", "s.ready.wait(ready)", "", NAPS),
        ("features_written_over", "s.ready.acquire_empty(out)", "", READS),
        ("tokens_freed_before_their_products", """
            tk.mma_wait(0)
            s.tokens.release(ring)
            if const_expr(self.outputs):
         """, """
            s.tokens.release(ring)
            tk.mma_wait(0)
            if const_expr(self.outputs):
         """, READS, FREED_BY_THE_STATE)),
    *family(
        "based", "tkq/linear_attention/based/sums.py",
        ("sums_of_the_chunk_alone", "self.of_chunks_before(sums, m, g.scale, before)", "tk.zero(sums)", LONG),
        ("moments_of_one_part", "tk.mma_AB(m.of_q, of_q, shared.low[i % 2], k=(0, 16))", "", LONG),
        ("moments_of_the_first_segment_alone", "add_held((m.sum,), g.moments[segment, t.batch, t.head, None, None])",
         "add_held((m.sum,), g.moments[0, t.batch, t.head, None, None])", SEGMENTS)),
    *family(
        "based", "tkq/linear_attention/based/chain.py",
        ("squares_once", "sums[j] = cute.math.fma(d, y[i], sums[j])", "pass", GRADIENTS),
        ("lanes_above", "source = (lane & Int32(28)) | ((lane + (4 - m)) & Int32(3))",
         "source = (lane & Int32(28)) | ((lane + m) & Int32(3))", GRADIENTS)),
    *family(
        "based", "tkq/linear_attention/based/moments.py",
        ("delta_of_every_part", "there = Float32(cutlass.select_(t.part == 0, Float32(1.0), Float32(0.0)))",
         "there = Float32(1.0)", HALVES),
        ("moments_of_the_weight_of_one", "tk.mul_row(m.wide, m.wide, m.weight)", "pass", GRADIENTS)),
    *family(
        "based", "tkq/linear_attention/based/gradient_kernel.py",
        ("mask_of_gradients_without_the_diagonal", "tk.right_fill(c.w, 1, 0.0, diagonal=True)",
         "tk.right_fill(c.w, 0, 0.0, diagonal=True)", GRADIENTS),
        ("without_the_moments", "of_chunks_before = far[r][j] - self.moments.taken(c, r, j)",
         "of_chunks_before = far[r][j]", GRADIENTS),
        ("gradients_without_a_wait_for_states", "s.states.wait(states)", "", NAPS)),
    *family(
        "based", "tkq/linear_attention/based/prepare_kernel.py",
        ("not_divided", "factor = times / x.sums[batch, token, head]", "factor = times", GRADIENTS)),
)

"""Faults in attention with wide heads."""
from .mutant import family, pressed

NAPS, LOADS, READS, ROLES = (pressed(f"{kind}-attention_wide") for kind in ("naps", "loads", "reads", "roles"))
CLUSTER = pressed("naps-attention_wide_cluster")
FOLDER, TESTS = "tkq/attention/wide/", "tests/gpu/attention/test_attention_wide.py::"
TASKS = (TESTS + "test_many_tasks",)
GRADIENTS, GROUPS = ((TESTS + test,) for test in ("test_gradients", "test_gradients_of_groups"))
PACKED = (TESTS + "test_gradients_of_packed_sequences",)
NARROWER = (TESTS + "test_narrower_heads_and_strides",)

MUTANTS = (
    *family(
        "wide", FOLDER + "products.py",
        ("no_wait_for_k", "smem.k_pipe.wait(regs.ring)", "", LOADS),
        ("k_freed_before_its_product", """
            tk.mma_wait(1)
            release_before(smem.k_pipe, regs.ring, 1)
         """, """
            release_before(smem.k_pipe, regs.ring, 1)
            tk.mma_wait(1)
         """, READS),
        ("p_before_it_is_there", "if const_expr(not first and i == slots.own - slots.in_flight):",
         "if const_expr(not first and i == 0):", NAPS),
        ("last_factors_over_those_of_the_task_before", "smem.end_pipe.acquire_empty(regs.end)", "", ROLES),
        ("o_never_corrected", "of_warps[tk.warp_id() % 4] = Int32(moved)", "of_warps[tk.warp_id() % 4] = Int32(0)",
         NAPS)),
    *family(
        "wide", FOLDER + "scores.py",
        ("factors_of_the_end", "store_factors(smem, regs.correct, 0)", "store_factors(smem, regs.correct, 1)", NAPS),
        ("lse_of_the_first_tile", "tk.store_rows(of, lse, first + t[\"tile\"] * self.config.rows, end)",
         "tk.store_rows(of, lse, first + 0 * self.config.rows, end)", TASKS),
        ("masks_left_out", "masked = regs.task[\"n_masked_right\"]", "masked = Int32(1)", NAPS)),
    *family(
        "wide", FOLDER + "output.py",
        ("no_wait_for_v", "smem.v_pipe.wait(regs.ring)", "", LOADS),
        ("v_freed_before_its_product", """
            tk.mma_wait(1)
            release_before(smem.v_pipe, regs.ring, PARTS)
         """, """
            release_before(smem.v_pipe, regs.ring, PARTS)
            tk.mma_wait(1)
         """, READS),
        ("no_wait_for_p", "smem.p_pipe.wait(regs.p_ring)", "", NAPS),
        ("no_wait_for_the_last_factors", "smem.end_pipe.wait(regs.end)", "", ROLES),
        ("columns_behind_the_end", "return cute.make_tensor(o.iterator + first, cute.make_layout((rows, cols - first), "
         "stride=(row, col)))", "return cute.make_tensor(o.iterator + first, cute.make_layout((rows, cols), "
         "stride=(row, col)))", NARROWER)),
    *family(
        "wide", FOLDER + "producer.py",
        ("no_wait_for_a_free_slot", """
            sem = smem.k_pipe.acquire(ring)
            tk.load_async(smem.k[ring.stage], k, (*at, i), sem)
         """, """
            sem = smem.k_pipe.full[ring.stage]
            tk.expect_bytes(sem, smem.k_pipe.bytes)
            tk.load_async(smem.k[ring.stage], k, (*at, i), sem)
         """, READS),
        ("other_block_of_v", "self.load_v(smem, v, ring, v_of, end - j)",
         "self.load_v(smem, v, ring, v_of, end - 1 - j)", NAPS),
        ("parts_swapped", "at = block * n + i % n, part * tiles + i // n",
         "at = block * n + i % n, (PARTS - 1 - part) * tiles + i // n", NAPS),
        ("both_blocks_the_first_tile", "tile = tile * self.config.cluster + tk.cluster_rank()",
         "tile = tile * self.config.cluster", CLUSTER)),
    *family(
        "wide", FOLDER + "backward/scores.py",
        ("no_delta", "(tk.add_row if self.by_rows else tk.add_col)(regs.dp, regs.dp, regs.delta)", "", GRADIENTS),
        ("statistics_of_the_first_head",
         "head, col = t[\"head\"] * g.heads + i // t[\"per_head\"], self.block(regs, i) * self.config.kv",
         "head, col = t[\"head\"] * g.heads, self.block(regs, i) * self.config.kv", GROUPS),
        ("gradient_masks_left_out", "if first + ROWS > 0:", "if first + ROWS < -5000:", GRADIENTS),
        ("nan_of_rows_behind_the_sequence", "tk.right_fill(regs.dp, rest, 0.0)", "pass", PACKED),
        ("no_derivative_of_the_softcap",
         "tk.apply(regs.dp, lambda w, t: w * (Float32(1.0) - t * t), regs.dp, regs.s)", "pass", PACKED),
        ("gradient_without_its_factor", "tk.fill(factor, g.factor)", "tk.fill(factor, 1.0)", GRADIENTS)),
    *family(
        "wide", FOLDER + "backward/producer.py",
        ("values_of_the_next_head",
         "self.load_values(smem, values, ring, (t.batch_k, head + before // per_head), first + before % per_head)",
         "self.load_values(smem, values, ring, (t.batch_k, head + j // per_head), first + before % per_head)", GROUPS),
        ("the_last_block_left_out", "return first, most(found.end - first, 1)",
         "return first, most(found.end - first - 1, 1)", GRADIENTS)),
    *family(
        "wide", FOLDER + "backward/stats.py",
        ("columns_behind_the_end_count", "total = total + cutlass.select_(at < vectors, part, Float32(0.0))",
         "total = total + part", (TESTS + "test_gradients[320-dtype1-False] --slow",))),
)

"""Faults in attention's forward."""
from .mutant import family, pressed

NAPS, LOADS, READS, OVERLAP_TASKS, CLUSTER_LOADS, CLUSTER_READS, WINDOW, PACKED = (
    pressed(x) for x in (
        "naps-attention", "loads-attention", "reads-attention", "naps-attention_overlap_tasks",
        "loads-attention_cluster", "reads-attention_cluster", "naps-attention_window", "naps-attention_packed"))
FOLDER = "tkq/attention/"

MUTANTS = (
    *family(
        "attention", FOLDER + "forward/consumer.py",
        # A block of its own loads Q behind K, and TMA brings both in that order: of two, each brings half of K.
        ("no_wait_for_k_of_a_task", """
            smem.k_pipe.wait(regs.k)
            regs.stagger.take()
         """, "regs.stagger.take()", CLUSTER_LOADS),
        ("no_wait_for_k", """
            smem.k_pipe.wait(regs.k)
            regs.ping_pong.take()
         """, "regs.ping_pong.take()", LOADS),
        ("no_wait_for_v", """
            smem.v_pipe.wait(regs.v)
            tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage])
            regs.ping_pong.give()
         """, """
            tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage])
            regs.ping_pong.give()
         """, LOADS),
        ("no_wait_for_the_last_v", """
            smem.v_pipe.wait(regs.v)
            tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage])
            self.save_statistics(regs)
         """, """
            tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage])
            self.save_statistics(regs)
         """, LOADS),
        ("k_freed_before_its_product", """
            tk.mma_wait(1)
            self.release(smem.k_pipe, regs.k)
         """, """
            self.release(smem.k_pipe, regs.k)
            tk.mma_wait(1)
         """, READS),
        ("v_freed_before_its_product", """
            tk.mma_wait(0)
            self.release(smem.v_pipe, regs.v)
            tk.copy(regs.p, regs.s)
            self.correct_if(regs, moved)
         """, """
            self.release(smem.v_pipe, regs.v)
            tk.mma_wait(0)
            tk.copy(regs.p, regs.s)
            self.correct_if(regs, moved)
         """, READS),
        ("no_wait_for_q", "tk.wait(smem.q_full[i], regs.q.phase)", "", LOADS),
        # One stage of Q: of two, K's and V's stages keep the producer from the next but one.
        ("q_freed_before_its_products", """
            self.steps(g, smem, regs)
            if const_expr(not config.o_reuses_q_smem):
                tk.arrive(smem.q_empty[self.q_at(regs)])
         """, """
            if const_expr(not config.o_reuses_q_smem):
                tk.arrive(smem.q_empty[self.q_at(regs)])
            self.steps(g, smem, regs)
         """, CLUSTER_READS),
        ("no_correction_of_o", "tk.mul_row(regs.o, regs.o, regs.correct)",
         "tk.mul(regs.o, regs.o, cutlass.Float32(1.0))", NAPS),
        ("o_not_divided", "tk.mul_row(regs.o, regs.o, regs.last_norm)",
         "tk.mul_row(regs.o, regs.o, regs.norm)", OVERLAP_TASKS),
        ("lse_of_other_rows", "return first, first + rows * pack", "return first, first + rows * pack - 1", NAPS)),
    *family(
        "attention", FOLDER + "forward/producer.py",
        ("no_wait_for_a_free_stage", """
            sem = pipe.acquire(ring)
            tk.load_async(dst[ring.stage], src, (*of, block, 0), sem)
         """, """
            sem = pipe.full[ring.stage]
            tk.expect_bytes(sem, pipe.bytes)
            tk.load_async(dst[ring.stage], src, (*of, block, 0), sem)
         """, READS),
        ("heads_swapped", "end, head = seen.first + seen.blocks, t.head // g.tasks.heads_per_kv",
         "end, head = seen.first + seen.blocks, t.head % (g.tasks.heads // g.tasks.heads_per_kv)", NAPS),
        ("other_block_of_v", "self.load(smem.v, v, smem.v_pipe, v_ring, v_of, end - j)",
         "self.load(smem.v, v, smem.v_pipe, v_ring, v_of, end - 1 - j)", NAPS)),
    *family(
        "attention", FOLDER + "forward/softmax.py",
        ("lse_of_the_next_task", "regs.last_max.tensor[r] + cute.math.log2(norm, fastmath=True)) * tk.LN2",
         "regs.max.tensor[r] + cute.math.log2(norm, fastmath=True)) * tk.LN2",
         ("tests/gpu/attention/test_attention.py::test_each_task_has_its_own_largest_scores[False-True]",)),
        ("norm_not_corrected", "tk.mul(regs.norm, regs.norm, regs.correct)", "tk.copy(regs.norm, regs.norm)", NAPS)),
    *family(
        "attention", FOLDER + "common/mask.py",
        ("mask_off_by_one", "return first, None if e.right is None else own + e.right + 1 - start, e.rows_k - start",
         "return first, None if e.right is None else own + e.right + 2 - start, e.rows_k - start", NAPS),
        ("keys_past_the_end", "return first, None if e.right is None else own + e.right + 1 - start, e.rows_k - start",
         "return first, None if e.right is None else own + e.right + 1 - start, e.rows_k - start + 1",
         OVERLAP_TASKS),
        ("one_mask_too_few", "n_masked_right = most(end - whole, 1)", "n_masked_right = most(end - whole - 1, 1)",
         NAPS),
        ("left_off_by_one", "first = None if e.left is None else own - e.left - start",
         "first = None if e.left is None else own - e.left + 1 - start", WINDOW)),
    *family(
        "packed", FOLDER + "forward/tile_scheduler.py",
        ("a_sequence_too_far", "lane = cute.arch.popc(cute.arch.vote_ballot_sync(self.state[UPTO] <= unit))",
         "lane = cute.arch.popc(cute.arch.vote_ballot_sync(self.state[UPTO] < unit))", PACKED)),
)

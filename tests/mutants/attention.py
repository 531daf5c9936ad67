"""Faults in attention's forward."""
from .mutant import family, pressed

NAPS, LOADS, READS, BRIDGE, CLUSTER_LOADS, CLUSTER_READS, WINDOW, WINDOW_LOADS, WINDOW_READS, PACKED = (
    pressed(x) for x in (
        "naps-attention", "loads-attention", "reads-attention", "naps-attention_bridge", "loads-attention_cluster",
        "reads-attention_cluster", "naps-attention_window", "loads-attention_window", "reads-attention_window",
        "naps-attention_packed"))
FOLDER = "tkq/attention/"

MUTANTS = (
    *family(
        "attention", FOLDER + "forward/consumer.py",
        # A block of its own loads Q behind K, and TMA brings both in that order: of two, each brings half of K.
        ("no_wait_for_k_of_a_task", """
            s.k_pipe.wait(c.k)
            tk.mm_ABt(c.s, s.q[self.q_at(c)], s.k[c.k.stage])
            tk.mma_wait()
         """, """
            tk.mm_ABt(c.s, s.q[self.q_at(c)], s.k[c.k.stage])
            tk.mma_wait()
         """, CLUSTER_LOADS),
        ("no_wait_for_k", """
            s.k_pipe.wait(c.k)
            c.ping_pong.take()
         """, "c.ping_pong.take()", LOADS),
        ("no_wait_for_v", """
            s.v_pipe.wait(c.v)
            tk.mma_AB(c.o, c.p, s.v[c.v.stage])
            c.ping_pong.give()
         """, """
            tk.mma_AB(c.o, c.p, s.v[c.v.stage])
            c.ping_pong.give()
         """, LOADS),
        ("no_wait_for_the_last_v", """
            s.v_pipe.wait(c.v)
            tk.mma_AB(c.o, c.p, s.v[c.v.stage])
            self.keep_statistics(c)
         """, """
            tk.mma_AB(c.o, c.p, s.v[c.v.stage])
            self.keep_statistics(c)
         """, LOADS),
        ("k_freed_before_its_product", """
            tk.mma_wait(1)
            self.release(s.k_pipe, c.k)
         """, """
            self.release(s.k_pipe, c.k)
            tk.mma_wait(1)
         """, READS),
        ("v_freed_before_its_product", """
            tk.mma_wait(0)
            self.release(s.v_pipe, c.v)
            tk.copy(c.p, c.s)
            self.correct_if(c, moved)
         """, """
            self.release(s.v_pipe, c.v)
            tk.mma_wait(0)
            tk.copy(c.p, c.s)
            self.correct_if(c, moved)
         """, READS),
        ("no_wait_for_q", "tk.wait(s.q_full[i], c.q.phase)", "", LOADS),
        # One stage of Q: of two, K's and V's stages keep the producer from the next but one.
        ("q_freed_before_its_products", """
            self.steps(g, s, c)
            if const_expr(not config.o_reuses_q_smem):
                tk.arrive(s.q_empty[self.q_at(c)])
         """, """
            if const_expr(not config.o_reuses_q_smem):
                tk.arrive(s.q_empty[self.q_at(c)])
            self.steps(g, s, c)
         """, CLUSTER_READS),
        ("no_correction_of_o", "tk.mul_row(c.o, c.o, c.correct)", "tk.mul(c.o, c.o, cutlass.Float32(1.0))", NAPS),
        ("o_not_divided", "tk.mul_row(c.o, c.o, c.last_norm)", "tk.mul_row(c.o, c.o, c.norm)", BRIDGE),
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
        ("other_block_of_v", "self.load(s.v, v, s.v_pipe, v_ring, v_of, end - j)",
         "self.load(s.v, v, s.v_pipe, v_ring, v_of, end - 1 - j)", NAPS)),
    *family(
        "attention", FOLDER + "forward/softmax.py",
        ("lse_of_the_next_task", "c.last_max.tensor[r] + cute.math.log2(norm, fastmath=True)) * tk.LN2",
         "c.max.tensor[r] + cute.math.log2(norm, fastmath=True)) * tk.LN2",
         ("tests/gpu/attention/test_attention.py::test_each_task_has_its_own_largest_scores[False-True]",)),
        ("norm_not_corrected", "tk.mul(c.norm, c.norm, c.correct)", "tk.copy(c.norm, c.norm)", NAPS)),
    *family(
        "attention", FOLDER + "common/mask.py",
        ("mask_off_by_one", "return first, None if e.right is None else own + e.right + 1 - start, e.rows_k - start",
         "return first, None if e.right is None else own + e.right + 2 - start, e.rows_k - start", NAPS),
        ("keys_past_the_end", "return first, None if e.right is None else own + e.right + 1 - start, e.rows_k - start",
         "return first, None if e.right is None else own + e.right + 1 - start, e.rows_k - start + 1",
         BRIDGE),
        ("one_mask_too_few", "n_masked_right = most(end - whole, 1)", "n_masked_right = most(end - whole - 1, 1)",
         NAPS),
        ("left_off_by_one", "first = None if e.left is None else own - e.left - start",
         "first = None if e.left is None else own - e.left + 1 - start", WINDOW)),
    *family(
        "window", FOLDER + "forward/window.py",
        ("no_wait_for_k", """
            s.k_pipe.wait(c.k)
            c.ping_pong.take()
            self.scores(s, c, seen)
         """, """
            c.ping_pong.take()
            self.scores(s, c, seen)
         """, WINDOW_LOADS),
        ("no_wait_for_v", """
            s.v_pipe.wait(c.v)
            self.sum(s, c, before)
         """, "self.sum(s, c, before)", WINDOW_LOADS),
        ("k_freed_before_its_product", """
            tk.mma_wait(1)
            self.release(s.k_pipe, c.k)
         """, """
            self.release(s.k_pipe, c.k)
            tk.mma_wait(1)
         """, WINDOW_READS),
        ("v_freed_before_its_product", """
            tk.mma_wait(0)
            self.release(s.v_pipe, c.v)
            self.weights(c, seen)
         """, """
            self.release(s.v_pipe, c.v)
            tk.mma_wait(0)
            self.weights(c, seen)
         """, WINDOW_READS),
        ("other_half_of_k", "tk.mm_ABt(c.half, q, k, b_part=KEYS[seen][0] // HALF)",
         "tk.mm_ABt(c.half, q, k, b_part=1 - KEYS[seen][0] // HALF)", WINDOW)),
    *family(
        "packed", FOLDER + "forward/tile_scheduler.py",
        ("a_sequence_too_far", "lane = cute.arch.popc(cute.arch.vote_ballot_sync(self.state[UPTO] <= unit))",
         "lane = cute.arch.popc(cute.arch.vote_ballot_sync(self.state[UPTO] < unit))", PACKED)),
)

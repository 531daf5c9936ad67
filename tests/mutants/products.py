"""Faults in the GEMMs: 16 bits and float8, small M, grouped."""
from .mutant import family, pressed

NAPS, LONG, OVERLAPPED, CLUSTER, WAVE_SYNC, FEW, FP8, PROMOTED, BLOCKS, FP8_FEW, GROUPED = (pressed(x) for x in (
    "naps-gemm", "reads-gemm_long", "reads-gemm", "naps-gemm_cluster", "naps-gemm_wave_sync", "naps-gemm_small_m",
    "naps-fp8", "naps-fp8_promoted", "naps-fp8_blocks", "naps-fp8_small_m", "naps-grouped"))
SPLITS = ("tests/gpu/gemm/test_gemm_small_m.py::test_every_split[small_m64x128_split8]",)
FOLDER = "tkq/gemm/"
ONE_BUFFER = (FOLDER + "dense/config.py", "BUFFERS = 2  # epilogue subtiles in shared memory, for each consumer",
              "BUFFERS = 1")

MUTANTS = (
    *family(
        "gemm", FOLDER + "dense/consumer.py",
        ("no_wait_for_a_stage", """
            s.pipe.wait(u.full)
            product(u.acc, s.a[u.full.stage], s.b[u.full.stage], a_part=wg)
         """, "product(u.acc, s.a[u.full.stage], s.b[u.full.stage], a_part=wg)", NAPS),
        ("stage_freed_too_early", """
            self.multiply(s, u, self.mma, wg)
            tk.mma_wait(1)
            self.release(s, u)
         """, """
            self.multiply(s, u, self.mma, wg)
            self.release(s, u)
            tk.mma_wait(1)
         """, LONG),
        ("last_stage_freed_too_early", """
            tk.mma_wait(0)
            self.release(s, u)
            if const_expr(x.hold_in_registers):
         """, """
            self.release(s, u)
            tk.mma_wait(0)
            if const_expr(x.hold_in_registers):
         """, OVERLAPPED),
        # That the sums are read too early cannot show: where the wait is missing, the assembler waits behind every
        # instruction instead. What shows is that the last product's stage goes before anybody has waited for it.
        ("no_wait_for_the_last_product", """
            tk.mma_wait(0)
            self.release(s, u)
            if const_expr(x.hold_in_registers):
                self.epilogue.finish(g, u, t, wg)
         """, """
            self.release(s, u)
            if const_expr(x.hold_in_registers):
                self.epilogue.finish(g, u, t, wg)
         """, OVERLAPPED),
        ("written_as_the_next_tile", """
            if number >= order.workers():  # not this block's first
                self.epilogue.write(g, s, u, self.matrices.tile(g, s, order, number - order.workers()), wg)
         """, """
            if number >= order.workers():  # not this block's first
                self.epilogue.write(g, s, u, self.matrices.tile(g, s, order, number), wg)
         """, NAPS)),
    *family(
        "gemm", FOLDER + "dense/matrices.py",
        ("loads_into_a_stage_in_use", """
            sem = s.pipe.acquire(r)
            a_t, b_t = self.spec.transposed
         """, """
            sem = s.pipe.full[r.stage]
            tk.expect_bytes(sem, s.pipe.bytes)
            a_t, b_t = self.spec.transposed
         """, NAPS),
        ("other_rows_of_a_in_the_cluster", "return Tile(batch, row * self.config.cluster + tk.cluster_rank(), col)",
         "return Tile(batch, row * self.config.cluster + (tk.cluster_rank() ^ 1), col)", pressed("naps-gemm"))),
    *family(
        "gemm", FOLDER + "dense/epilogue.py",
        ("subtile_written_over_before_it_left", """
            tk.store_wait(0 if self.tiles.n_stores % BUFFERS else BUFFERS - 1)
            tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
            tk.store(buffer, part)
         """, "tk.store(buffer, part)", NAPS, (ONE_BUFFER,)),
        ("subtile_sent_before_all_wrote", """
            tk.publish()
            tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
            if tk.first_warp_of_group():
         """, """
            tk.publish()
            if tk.first_warp_of_group():
         """, NAPS)),
    *family(
        "gemm", FOLDER + "epilogue/registers.py",
        ("bias_of_the_next_column",
         "v.tensor[i, k] = src[cutlass.min(col0 + 64 * k + 2 * tk.lane_id() + i, last)]",
         "v.tensor[i, k] = src[cutlass.min(col0 + 64 * k + 2 * tk.lane_id() + i + 1, last)]",
         ("tests/gpu/gemm/test_gemm_epilogue.py::test_linear_forms_are_exact[None]",))),
    *family(
        "gemm", FOLDER + "wave_sync.py",
        ("paced_counter_not_back", "count_up(g.counter, Uint32((waves + 1) * cute.arch.grid_dim()[0] - 1))",
         "count_up(g.counter, Uint32((waves + 2) * cute.arch.grid_dim()[0] - 1))",
         ("tests/gpu/gemm/test_gemm_wave_sync.py::test_rounds[6]",))),
    *family(
        "few", FOLDER + "dense/small_m_kernel.py",
        ("rows_no_wait_for_a_stage", """
            s.pipe.wait(full)
            for part in cutlass.range_constexpr(self.config.parts):
         """, "for part in cutlass.range_constexpr(self.config.parts):", FEW),
        ("rows_stage_freed_too_early", """
            tk.mma_wait(self.config.parts)
            s.pipe.release(done)
         """, """
            s.pipe.release(done)
            tk.mma_wait(self.config.parts)
         """, pressed("reads-gemm_small_m")),
        ("rows_no_wait_for_the_other_blocks", "tk.wait(s.sent, 0)", "", FEW),
        ("rows_a_block_s_sums_twice", "self.send(s, acc, reducer, (rank - reducer + x.split - 1) % x.split)",
         "self.send(s, acc, reducer, (rank - reducer + x.split) % (x.split - 1))",
         SPLITS),
        ("rows_fewer_steps_of_k", "first, end = g.steps * rank // x.split, g.steps * (rank + 1) // x.split",
         "first, end = g.steps * rank // x.split, g.steps // x.split * (rank + 1)",
         SPLITS),  # where the blocks' numbers of steps differ
        ("rows_bytes_of_one_block_too_few", "tk.expect_bytes(s.sent, x.exchange_bytes)",
         "tk.expect_bytes(s.sent, x.exchange_bytes - 16)", FEW)),
    *family(
        "fp8", FOLDER + "fp8/matrices.py",
        ("no_wait_for_a_stage", "s.pipe.wait(u.full)", "", FP8),
        ("scales_of_the_rows_below", "return t.row * self.config.m", "return t.row * self.config.m + 1",
         BLOCKS),
        ("scales_not_awaited", "tk.copy_async_arrive(sem)", "cutlass.cute.arch.mbarrier_arrive(sem.ptr)",
         pressed("loads-fp8_blocks"))),
    *family(
        "fp8", FOLDER + "fp8/mainloop.py",
        ("stage_freed_too_early", """
            tk.mma_wait(x.m_subtiles * x.wgmma_in_flight)
            self.release(s, u)
         """, """
            self.release(s, u)
            tk.mma_wait(x.m_subtiles * x.wgmma_in_flight)
         """, pressed("reads-fp8_not_overlapped")),
        ("overlapped_stage_freed_too_early", """
            tk.mma_wait(0)
            self.release(s, u)
            self.multiply(s, u, self.operands.mma, wg)
         """, """
            self.release(s, u)
            tk.mma_wait(0)
            self.multiply(s, u, self.operands.mma, wg)
         """, pressed("reads-fp8"))),
    *family(
        "fp8", FOLDER + "fp8/promotion.py",
        ("promoted_stage_freed_too_early", """
            tk.mma_wait(0)
            if const_expr(i == n - 1 and self.spec.scale_b != "1x128"):
                s.pipe.release(u.full)
         """, """
            if const_expr(i == n - 1 and self.spec.scale_b != "1x128"):
                s.pipe.release(u.full)
            tk.mma_wait(0)
         """, pressed("reads-fp8_promoted")),
        ("rolling_stage_freed_too_early", """
            tk.mma_wait(1 if more else 0)
            if p == n - 1:
                s.pipe.release(u.done)
                u.done.advance()
         """, """
            if p == n - 1:
                s.pipe.release(u.done)
                u.done.advance()
            tk.mma_wait(1 if more else 0)
         """, pressed("reads-fp8_blocks"))),
    *family(
        "fp8", FOLDER + "fp8/small_m_kernel.py",
        ("small_m_scale_of_another_row", "tk.load_cols(of_a, g.scale_a, Int32(m), cute.size(g.out, mode=[1]))",
         "tk.load_cols(of_a, g.scale_a, Int32(m) + 1, cute.size(g.out, mode=[1]))", FP8_FEW),
        ("small_m_scales_not_awaited", "tk.copy_async_arrive(sem)", "cute.arch.mbarrier_arrive(sem.ptr)",
         pressed("loads-fp8_small_m_blocks")),
        ("small_m_no_wait_for_a_stage", "s.pipe.wait(full)", "", pressed("naps-fp8_small_m_blocks")),
        ("small_m_stage_freed_too_early", """
            tk.mma_wait(0)
            self.promote(s, full, acc, part, row)
            s.pipe.release(full)
         """, """
            s.pipe.release(full)
            tk.mma_wait(0)
            self.promote(s, full, acc, part, row)
         """, pressed("reads-fp8_small_m_blocks"))),
    *family(
        "grouped", FOLDER + "grouped/k_grouped.py",
        ("masked_end_of_a_group", "if first > 0 or end < STEP:", "if first > 0:",
         ("tests/gpu/gemm/test_grouped.py::test_float8_groups_along_k_do_not_touch_each_other[row]",)),
        ("masked_a_row_of_the_group_before", "if byte + i >= first:", "if byte + i >= first - 1:",
         ("tests/gpu/gemm/test_grouped.py::test_float8_groups_along_k_do_not_touch_each_other[row]",))),
    *family(
        "grouped", FOLDER + "grouped/table.py",
        ("group_begins_a_row_early", "begins[group + 1] = end  # the next group writes the same, but for the last",
         "begins[group + 1] = end - 1", GROUPED)),
    *family(
        "grouped", FOLDER + "fp8/mainloop.py",
        ("stages_not_let_go", """
            s.pipe.wait(u.full)
            u.full.advance()
            self.release(s, u)
         """, """
            u.full.advance()
            self.release(s, u)
         """, pressed("naps-grouped_long"))),
    *family(
        "grouped", FOLDER + "grouped/groups.py",
        ("a_group_s_end_written_over", "tk.store_async(g.c.part(t.size), subtile, (t.first + t.size, 0, *at))",
         "tk.store_async(g.c.part(t.size + 1), subtile, (t.first + t.size + 1, 0, *at))", GROUPED)),
)

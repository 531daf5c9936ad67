"""Faults in kernels of rows: norms, softmax, cross entropy, quantisation, rope, gated activations."""
from .mutant import family, pressed

NORM, WARPS, NORM_LOADS, NORM_READS, LONG, QUANTISED = (pressed(x) for x in (
    "naps-norm_backward", "naps-norm_backward_warps", "loads-norm_backward", "reads-norm_backward_warps",
    "naps-norm_backward_cluster", "naps-norm_quantised"))
LONG_STARTS, NORM_STARTS, SOFTMAX_STARTS, LOSS_STARTS = (pressed("starts-" + x) for x in (
    "norm_backward_cluster", "norm_cluster", "softmax", "cross_entropy"))
TRACED_LOSS = ("tests/gpu/losses/test_cross_entropy.py -k the_op_that_is_traced",)
HELD = pressed("starts-rows_held")
HELD_AROUND, HELD_CLUSTER = (("tests/gpu/rows/test_rows_held.py -k " + k,) for k in ("around --slow",
                                                                                     "'two_exchanges and 40000'"))
SOFTMAX, LOSS, QUANTIZE, TICKETED, ROPE, GATED = (pressed(x) for x in (
    "naps-softmax", "naps-cross_entropy", "naps-quantize", "naps-quantize_ticketed", "naps-rope", "naps-gated"))

MUTANTS = (
    *family(
        "rows", "tkq/rows/persistent/ring.py",
        ("no_wait_for_a_stage", "tk.wait(self.full[r.stage], r.phase)", "cute.arch.sync_warp()", NORM_LOADS),
        ("loads_into_a_stage_in_use", "tk.wait(self.empty[r.stage], r.phase ^ 1)", "", NORM),
        ("other_bytes_announced", "tk.expect_bytes(self.full[stage], rows * s.limit * width)",
         "tk.expect_bytes(self.full[stage], (rows - 1) * s.limit * width)", NORM)),
    *family(
        "rows", "tkq/rows/persistent/engine.py",
        ("stage_freed_before_it_is_read", "if const_expr(age == self.elements.last_read and not self.plan.direct):",
         "if const_expr(age == self.elements.last_read - 1 and not self.plan.direct):", NORM_READS),
        ("no_wait_for_the_cluster", """
                tk.cluster_arrive_relaxed()
                tk.cluster_wait()
            elif const_expr(needed):
                tk.sync_block()
         """, """
                tk.cluster_arrive_relaxed()
                tk.sync_block()
            elif const_expr(needed):
                tk.sync_block()
         """, LONG_STARTS),
        ("no_wait_for_the_block_s_start", """
            elif const_expr(needed):
                tk.sync_block()
         """, "", HELD),
        ("held_rows_past_the_last_written", """
            if const_expr(self.elements.first_finishes):
                self._finish_by_first(c, state, row, r)
            else:
                self.elements.write(c, views, row, c.part.exists(row), r)
         """, """
            if const_expr(self.elements.first_finishes):
                self._finish_by_first(c, state, row, r)
            else:
                self.elements.write(c, views, row, True, r)
         """, HELD_AROUND)),
    *family(
        "rows", "tkq/rows/persistent/partition.py",
        ("held_blocks_of_the_first_part", "unit, units, rank = block, blocks, cute.arch.block_idx()[1]",
         "unit, units, rank = block, blocks, Int32(0)", HELD_CLUSTER)),
    *family(
        "rows", "tkq/rows/persistent/held.py",
        ("held_of_one_row", "row = Int64(cutlass.min(part.row(0), part.share.rows - 1))",
         "row = Int64(cutlass.min(part.share.first, part.share.rows - 1))", HELD_AROUND)),
    *family(
        "rows", "tkq/rows/persistent/exchange.py",
        ("no_wait_for_the_other_warps", "tk.wait(self.met[r.stage * p.groups + part.group], r.phase)", "", WARPS),
        ("fewer_warps_awaited", "tk.init(self.met[i], 1 if p.cluster > 1 else p.warps_per_row)",
         "tk.init(self.met[i], 1)", WARPS),
        ("slot_of_the_row_before", """
            at = self.data[None, None, part.share.rank * p.warps_per_row + part.warp, part.group, r.stage]
         """, """
            at = self.data[None, None, part.share.rank * p.warps_per_row + part.warp, part.group, r.stage * 0]
         """, WARPS),
        ("bytes_of_one_warp_too_few", "tk.expect_bytes(sem, 4 * padded_sums(self.monoid.sums) * p.width)",
         "tk.expect_bytes(sem, 4 * padded_sums(self.monoid.sums) * (p.width - 1))", LONG)),
    *family(
        "rows", "tkq/rows/persistent/columns.py",
        ("slabs_read_before_all_flushed",
         "tk.grid_wait(self.counter.iterator.toint(), cute.arch.grid_dim()[0])\n"
         "cute.arch.mbarrier_arrive(self.total.ptr)",
         "cute.arch.mbarrier_arrive(self.total.ptr)", NORM),
        ("no_wait_for_the_grid", "tk.wait(self.total, 0)", "cute.arch.sync_warp()", NORM),
        ("block_s_sums_not_awaited", "tk.wait(self.flushed, 0)", "", NORM),
        ("box_read_before_it_is_written", """
            tk.sync(COMPUTING, p.threads)
            quads = cute.make_tensor(self.scratch, cute.make_layout((QUAD, padded // QUAD, p.merges),
         """, """
            quads = cute.make_tensor(self.scratch, cute.make_layout((QUAD, padded // QUAD, p.merges),
         """, NORM),
        ("rows_added_twice", "held.append((totals[n], x, u0 + k * rows < units))",
         "held.append((totals[n], x, u0 + k * rows <= units))",
         ("tests/gpu/norms/test_norm_backward.py::test_mixed_types[layernorm-fp32-fp32-fp32]",))),
    *family(
        "rows", "tkq/tile/grid.py",
        ("grid_waits_for_one_block_less", "ptx([Int64(counter), Uint32(blocks), _last(blocks)],",
         "ptx([Int64(counter), Uint32(blocks) - Uint32(1), _last(blocks)],", NORM),
        ("grid_counter_not_back", "return Uint32(2 * Uint32(blocks) - 1)", "return Uint32(2 * Uint32(blocks))", NORM)),
    *family(
        "softmax", "tkq/softmax/forward.py",
        ("no_wait_for_the_cluster", """
            if self.rows.cluster_n > 1:
                tk.cluster_wait()
            top, total = online.join(mine, total, row)
         """, "top, total = online.join(mine, total, row)", SOFTMAX_STARTS)),
    *family(
        "softmax", "tkq/softmax/backward.py",
        ("backward_no_wait_for_the_cluster",
         "hook_fn=tk.cluster_wait if rows.cluster_n > 1 else None)", "hook_fn=None)", SOFTMAX_STARTS),
        ("backward_of_dy_alone", "part = dy.block(j) if self.log else dy.block(j) * y.block(j)",
         "part = dy.block(j)", SOFTMAX)),
    *family(
        "softmax", "tkq/softmax/online.py",
        ("parts_not_brought_together", "totals = [part * exp(other - below) for other, part in pairs]",
         "totals = [part for other, part in pairs]", SOFTMAX)),
    *family(
        "softmax", "tkq/rows/one_pass/kernel.py",
        ("predicate_of_the_last_column", "inside = Uint32(self.first(row.place, j) + i) < self.N",
         "inside = Uint32(self.first(row.place, j) + i) <= self.N",
         ("tests/gpu/losses/test_softmax.py -k 'rows_that_begin_anywhere and (1024-1026 or 1001-1009) and bf16'",))),
    *family(
        "softmax", "tkq/utils.py",
        ("exchange_not_awaited", "cute.arch.mbarrier_wait(mbar_ptr, phase if const_expr(phase is not None) else 0)", "",
         SOFTMAX)),
    *family(
        "loss", "tkq/losses/forward.py",
        ("no_wait_for_the_cluster", """
            if rows.cluster_n > 1:
                tk.cluster_wait()
            top, total = online.join(mine, total, row)
         """, "top, total = online.join(mine, total, row)", LOSS_STARTS),
        ("of_the_part_of_a_row",
         "classes.put_loss(mLoss, saved, loss, (top, rest, weights), place, writes, first, mX.shape[0])",
         "classes.put_loss(mLoss, saved, loss, (mine, rest, weights), place, writes, first, mX.shape[0])", LOSS)),
    *family(
        "norm", "tkq/norms/forward/rmsnorm.py",
        ("no_wait_for_the_cluster",
         "hook = tk.cluster_wait if first and kernel.cluster_n > 1 else None", "hook = None", NORM_STARTS)),
    *family(
        "norm", "tkq/norms/forward/row_norm.py",
        ("statistics_of_the_sum_itself", "self._store_statistics(g, mine, [of_row[-1] for of_row in statistics])",
         "self._store_statistics(g, mine, [of_row[0] for of_row in statistics])",
         ("tests/gpu/norms/test_norm_stored_sum.py::test_the_statistics[1000-layernorm]",))),
    *family(
        "norm", "tkq/norms/forward/fp8_output.py",
        ("scale_of_a_part_of_the_row", "return m if inside is True else cutlass.select_(inside, m, Float32(0))",
         "return m * 0.5", QUANTISED)),
    *family(
        "quantize", "tkq/quantize/two_phase.py",
        ("amax_read_before_all_found_theirs", """
                _wait_for(found, tiles)
            tk.sync_block()
            place = Int32(_same(place))  # so that nothing else is held over the wait
         """, """
            tk.sync_block()
            place = Int32(_same(place))  # so that nothing else is held over the wait
         """, TICKETED),
        ("counted_before_all_threads_found", """
                self.find.finish(g, al, t, tile, held)
                tk.sync_block()
                if t == 0:
                    _count(found)
            else:
         """, """
                self.find.finish(g, al, t, tile, held)
                if t == 0:
                    _count(found)
            else:
         """, pressed("barriers-quantize_ticketed_few")),
        ("half_not_cleared", """
            tile = number // across, number % across
            held = self.find.held(g, t, tile)
            self.clear_half(workspace, 1 - second, number * THREADS + t, tiles * THREADS)
         """, """
            tile = number // across, number % across
            held = self.find.held(g, t, tile)
         """, TICKETED),
        ("cooperative_amax_read_before_all_found_theirs", """
            _wait_for(found, tiles)
            if number == 0:  # all blocks have read it
         """, "if number == 0:  # all blocks have read it", pressed("barriers-quantize_few")),
        ("cooperative_counted_before_all_threads_found", """
            tk.sync_block()
            if t == 0:
                _count(found)
                _wait_for(found, tiles)
         """, """
            if t == 0:
                _count(found)
                _wait_for(found, tiles)
         """, pressed("barriers-quantize_few")),
        ("cooperative_half_not_cleared", """
            g, tile = Operands(x, q, scale, qt, scale_t, amax), (number // across, number % across)
            held = self.find.held(g, t, tile)
            self.clear_half(workspace, 1 - second, number * THREADS + t, tiles * THREADS)
         """, """
            g, tile = Operands(x, q, scale, qt, scale_t, amax), (number // across, number % across)
            held = self.find.held(g, t, tile)
         """, QUANTIZE)),
    *family(
        "quantize", "tkq/quantize/tiles.py",
        ("transposed_before_it_is_written", """
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(VECTOR):
                column = t // SIDE + i * SIDE  # sixteen threads take one, a vector of its rows each
         """, """
            for i in cutlass.range_constexpr(VECTOR):
                column = t // SIDE + i * SIDE  # sixteen threads take one, a vector of its rows each
         """, QUANTIZE)),
    *family(
        "loss", "tkq/losses/backward.py",
        ("backward_of_another_row", "top, rest = saved.rows[2 * place.there], saved.rows[2 * place.there + 1]",
         "top, rest = saved.rows[2 * place.there], saved.rows[2 * (place.there ^ 1) + 1]",
         ("tests/gpu/losses/test_cross_entropy.py::test_types[plain-1000-fp32]",))),
    *family(
        "loss", "tkq/losses/ops.py",
        ("traced_without_class_weights", "return [saved[of_mean:of_classes], saved[losses:]]",
         "return [saved[of_mean:]]", TRACED_LOSS),
        ("traced_with_unwritten_numbers", "return [saved[of_mean:of_classes], saved[losses:]]", "return []",
         TRACED_LOSS)),
    *family(
        "gated", "tkq/pointwise/gated.py",
        ("last_vector_left_out", """
            if mine[j] < work.vectors:  # all the work, not only the store: or the compiler moves loads down past work
         """, "if mine[j] < work.vectors - 1:", GATED),
        ("up_without_its_gate", "return [act(g) * u for g, u in self._pairs(gate, up)]",
         "return [g * u for g, u in self._pairs(gate, up)]", GATED)),
    *family(
        "rope", "tkq/pointwise/rope.py",
        ("heads_past_the_last", "if (unit < work.units) & (head < heads.count):",
         "if (unit < work.units) & (head <= heads.count):", ROPE),
        ("sign_of_the_sine", "return cos, [g.sign * s for s in sin]", "return cos, [s for s in sin]", ROPE)),
)

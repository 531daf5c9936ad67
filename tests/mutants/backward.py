"""Faults in attention's backward."""
from .mutant import family, pressed

WHOLE, WHOLE_READS, LATE, LATE_READS, WIDE, ORDER, FIRST, CHAIN = (pressed(x) for x in (
    "naps-backward_of_one_task", "reads-backward_of_one_task", "naps-backward_helper_warps",
    "reads-backward_helper_warps", "naps-backward_wide", "naps-backward_in_order", "stores-backward_first",
    "stores-backward_chain"))
WHOLE_LOADS = pressed("loads-backward_of_one_task")
LATE_LOADS, LATE_ROLES, WIDE_LOADS, WIDE_ROLES, ORDER_LOADS, ORDER_READS, FIRSTS, SEAMLESS, GROUPED = (
    pressed(x) for x in (
        "loads-backward_helper_warps", "roles-backward_helper_warps", "loads-backward_wide",
        "roles-backward_wide_one_p", "loads-backward_in_order", "reads-backward_in_order",
        "firsts-backward_first_at_once", "roles-backward_seamless", "stores-backward_grouped_at_once"))
ORDERED, ORDERED_STORES, ORDERED_AT_ONCE = (pressed(x) for x in (
    "naps-backward_ordered", "stores-backward_ordered", "naps-backward_ordered_at_once"))
ORDERED_WIDE, ORDERED_WIDE_AT_ONCE = (pressed(x) for x in (
    "naps-backward_ordered_wide", "naps-backward_ordered_wide_at_once"))
EQUAL, EQUAL_WIDE = ((f"tests/gpu/attention/test_attention_backward.py::test_equal_accuracy[{case}]",)
                     for case in ("False-128", "True-256"))
FOLDER = "tkq/attention/"
# Before the producer loads over dO it has waited for that tile's Q, which is given back later than dO by the same
# warps: a dO that is given back too early does not show, in whatever time. With dO first, as right as Q first, it does.
DO_FIRST = (FOLDER + "backward/producer.py", """
    head, sem = self.scheduler.query_head(g, t, h), s.q_pipe.acquire(ring)
    tk.load_async(s.q[ring.stage], q, (t.batch_q, head, m, 0), sem)
    self.load_stats(g, s, self.scheduler.tile_number(g, t, head, m), ring.stage, sem)
    tk.load_async(s.do[ring.stage], do, (t.batch_q, head, m, 0), s.do_pipe.acquire(ring))
    ring.advance()
 """, """
    head = self.scheduler.query_head(g, t, h)
    tk.load_async(s.do[ring.stage], do, (t.batch_q, head, m, 0), s.do_pipe.acquire(ring))
    sem = s.q_pipe.acquire(ring)
    tk.load_async(s.q[ring.stage], q, (t.batch_q, head, m, 0), sem)
    self.load_stats(g, s, self.scheduler.tile_number(g, t, head, m), ring.stage, sem)
    ring.advance()
 """)
# Likewise K, which is given back behind the product that V's was for.
V_FIRST = (FOLDER + "backward/dq_kernel.py", """
    tk.load_async(s.k[k_ring.stage], k, (at.batch_k, kv_head, n, 0), s.k_pipe.acquire(k_ring))
    k_ring.advance()
    tk.load_async(s.v[v_ring.stage], v, (at.batch_k, kv_head, n, 0), s.v_pipe.acquire(v_ring))
    v_ring.advance()
 """, """
    tk.load_async(s.v[v_ring.stage], v, (at.batch_k, kv_head, n, 0), s.v_pipe.acquire(v_ring))
    v_ring.advance()
    tk.load_async(s.k[k_ring.stage], k, (at.batch_k, kv_head, n, 0), s.k_pipe.acquire(k_ring))
    k_ring.advance()
 """)
# TMA brings what a warp loads in the order of the loads, though it need not: with K and V before Q and dO, which is
# right likewise, a missing wait for Q shows.
Q_LAST = (FOLDER + "backward/dq_kernel.py", """
    tk.expect_bytes(s.q_full, 4 * self.q_tile.bytes)
    for wg in cutlass.range_constexpr(2):
        tk.load_async(s.q[wg], q, (at.batch_q, at.head, 2 * at.number + wg, 0), s.q_full)
        tk.load_async(s.do[wg], do, (at.batch_q, at.head, 2 * at.number + wg, 0), s.q_full)
    k_ring, v_ring = s.k_pipe.ring(), s.v_pipe.ring()
    for n in cutlass.range(seen.first, seen.end, unroll=1):
        tk.load_async(s.k[k_ring.stage], k, (at.batch_k, kv_head, n, 0), s.k_pipe.acquire(k_ring))
        k_ring.advance()
        tk.load_async(s.v[v_ring.stage], v, (at.batch_k, kv_head, n, 0), s.v_pipe.acquire(v_ring))
        v_ring.advance()
 """, """
    tk.expect_bytes(s.q_full, 4 * self.q_tile.bytes)
    k_ring, v_ring = s.k_pipe.ring(), s.v_pipe.ring()
    for n in cutlass.range(seen.first, seen.end, unroll=1):
        tk.load_async(s.k[k_ring.stage], k, (at.batch_k, kv_head, n, 0), s.k_pipe.acquire(k_ring))
        k_ring.advance()
        tk.load_async(s.v[v_ring.stage], v, (at.batch_k, kv_head, n, 0), s.v_pipe.acquire(v_ring))
        v_ring.advance()
        if n == seen.first:
            for wg in cutlass.range_constexpr(2):
                tk.load_async(s.q[wg], q, (at.batch_q, at.head, 2 * at.number + wg, 0), s.q_full)
                tk.load_async(s.do[wg], do, (at.batch_q, at.head, 2 * at.number + wg, 0), s.q_full)
 """)

MUTANTS = (
    *family(
        "backward", FOLDER + "backward/dkv.py",
        ("no_wait_for_q", """
            s.q_pipe.wait(c.ring)
            c.ping_pong.take()
            tk.mm_ABt(scores, s.k[c.wg], s.q[stage])
         """, """
            c.ping_pong.take()
            tk.mm_ABt(scores, s.k[c.wg], s.q[stage])
         """, WHOLE_LOADS),
        ("no_wait_for_do", """
            s.do_pipe.wait(c.ring)
            tk.mm_ABt(dp, s.v[c.wg], s.do[stage])
         """, "tk.mm_ABt(dp, s.v[c.wg], s.do[stage])", WHOLE),
        ("do_freed_before_dv", """
            tk.mma_AB(c.dk, c.ds, s.q[c.ring.stage], k=queries)
            tk.mma_wait(1)  # dV
            s.do_pipe.release(c.ring)
         """, """
            tk.mma_AB(c.dk, c.ds, s.q[c.ring.stage], k=queries)
            s.do_pipe.release(c.ring)
         """, WHOLE_READS, (DO_FIRST,)),
        ("q_freed_before_dk", """
            tk.mma_AB(c.dk, c.ds, s.q[c.ring.stage], k=queries)
            tk.mma_wait(1)  # dV
            s.do_pipe.release(c.ring)
            tk.mma_wait(0)
            s.q_pipe.release(c.ring)
         """, """
            tk.mma_AB(c.dk, c.ds, s.q[c.ring.stage], k=queries)
            tk.mma_wait(1)  # dV
            s.do_pipe.release(c.ring)
            s.q_pipe.release(c.ring)
            tk.mma_wait(0)
         """, WHOLE_READS),
        ("late_no_wait_for_q", """
            s.q_pipe.wait(c.ring)
            c.ping_pong.take()
            tk.mm_ABt(scores, s.k[c.wg], s.q[stage])
         """, """
            c.ping_pong.take()
            tk.mm_ABt(scores, s.k[c.wg], s.q[stage])
         """, LATE_LOADS),
        ("first_part_of_dk_left_out", """
            tk.mma_AB(c.dv, c.p, s.do[c.ring.stage], k=(first, end))
            tk.mma_AB(c.dk, c.ds, s.q[c.ring.stage], k=(first, end))
         """, "tk.mma_AB(c.dv, c.p, s.do[c.ring.stage], k=(first, end))", WHOLE),
        ("mask_of_another_part", "p = seen(p, which[0] + col, *limits)", "p = seen(p, col, *limits)", LATE),
        ("delta_of_a_part_of_the_wrong_sign", "return p, p * (dp + delta)", "return p, p * (dp - delta)", WHOLE),
        ("ds_of_rounded_p", "return p, p * (dp + delta)",
         "return p, cutlass.Float32(cutlass.BFloat16(p)) * (dp + delta)", EQUAL),
        ("ds_of_a_rounded_difference", "return p, p * (dp + delta)",
         "return p, p * cutlass.Float32(cutlass.BFloat16(dp + delta))", EQUAL),
        ("ds_written_over_what_is_read", """
            s.ds_pipe.acquire_empty(c.ds_ring)
            tk.store(to, c.ds)
         """, "tk.store(to, c.ds)", WHOLE),
        ("ds_announced_before_it_is_written", """
            tk.store(to, c.ds)
            self.clear_dead_keys(t, c, to)
            tk.publish()
            s.ds_pipe.commit(c.ds_ring)
         """, """
            s.ds_pipe.commit(c.ds_ring)
            tk.store(to, c.ds)
            self.clear_dead_keys(t, c, to)
            tk.publish()
         """, WHOLE),
        ("dk_not_scaled", """
            tk.mul(c.dk, c.dk, g.scale)
            self.output.write(g, g.dk, c.dk, t, number)
         """, "self.output.write(g, g.dk, c.dk, t, number)", LATE),
        ("dk_written_over_k_that_is_read", """
            if const_expr(self.config.adds_dq(self.spec)):
                self.wait_for_dq(s, c)
            self.output.send(piece(g.layout, g.dk, t.rows_k), s.k[c.wg], c.dk, at, barrier)
         """, "self.output.send(piece(g.layout, g.dk, t.rows_k), s.k[c.wg], c.dk, at, barrier)", WHOLE),
        ("no_wait_for_keys", """
            for i in cutlass.range_constexpr(2):
                tk.wait(s.kv_full[i], kv.phase)
            self.visit(g, s, t, c)
         """, "self.visit(g, s, t, c)", LATE)),
    *family(
        "backward", FOLDER + "backward/dkv_hdim256.py",
        ("wide_p_not_scaled_back", "tk.mul(x, x, 2.0**-P_BITS)", "pass", WIDE),
        ("wide_delta_not_scaled", "delta.tensor[i] = delta.tensor[i] * less", "pass", WIDE),
        ("wide_delta_of_the_wrong_sign",
         "tk.apply_narrow(c.ds, lambda p, dp, delta: p * cute.math.fma(dp, less, delta), p, c.dp, delta)",
         "tk.apply_narrow(c.ds, lambda p, dp, delta: p * cute.math.fma(dp, less, -delta), p, c.dp, delta)", WIDE),
        ("wide_ds_of_rounded_p", "tk.copy(c.slope, p)", "tk.copy(p, c.p)\ntk.copy(c.slope, p)", EQUAL_WIDE)),
    *family(
        "backward", FOLDER + "backward/producer.py",
        ("k_loaded_over_k_that_is_read", """
            tk.wait(s.kv_empty[0], kv.phase ^ 1)
            self.load_kv(g, s, t, 0)
         """, "self.load_kv(g, s, t, 0)", LATE_ROLES),
        ("v_loaded_over_v_that_is_read", """
            tk.wait(s.kv_empty[1], kv.phase ^ 1)
            self.load_kv(g, s, t, 1)
         """, "self.load_kv(g, s, t, 1)", LATE_READS),
        ("statistics_of_another_tile",
         "tk.bulk_load(s.stats[None, stage].iterator.toint(), g.stats.iterator.toint() + number * size, size,",
         "tk.bulk_load(s.stats[None, stage].iterator.toint(), g.stats.iterator.toint() + number // 2 * size, size,",
         WHOLE)),
    *family(
        "backward", FOLDER + "backward/dq_warpgroup.py",
        ("dq_no_wait_for_ds", """
            s.ds_pipe.wait(ring)
            self.store.add(g, s, dq, ring, self.number(g, t, h, m))
         """, "self.store.add(g, s, dq, ring, self.number(g, t, h, m))", WHOLE),
        ("keys_freed_after_the_first_tile", "number, now = self.number(g, t, h, m), i == last",
         "number, now = self.number(g, t, h, m), i == 0", SEAMLESS)),
    *family(
        "backward", FOLDER + "backward/dq_tile.py",
        ("dq_ds_freed_before_its_product", """
            self.make(s, dq, ring, a_part=i // cols, b_part=i % cols)
            if const_expr(i == rows * cols - 1):
                s.ds_pipe.release(ring)
                last()
         """, """
            if const_expr(i == rows * cols - 1):
                s.ds_pipe.release(ring)
                last()
            self.make(s, dq, ring, a_part=i // cols, b_part=i % cols)
         """, WHOLE),
        ("dq_staging_overwritten_before_it_left", """
            tk.store_wait(pending)
            cute.arch.sync_warp()
            self.write_rows(staging, dq)
         """, """
            cute.arch.sync_warp()
            self.write_rows(staging, dq)
         """, FIRST)),
    *family(
        "backward", FOLDER + "backward/helper_warps.py",
        ("dq_read_before_all_was_added",
         "wait_count(counters.added, head, 4 * self.blocks(at.rows_k))", "", LATE),
        ("dq_added_before_it_is_zero",
         "wait_count(g.helper_warps.counters.ready, t.sequence * g.kv_heads + t.head, self.tiles_of(g, t.rows_q))", "",
         LATE),
        ("ordered_dq_read_before_all_was_added", "wait_count_backoff(words_of(g), Int32(self.number(g, at)), seen)",
         "wait_count_backoff(words_of(g), Int32(self.number(g, at)), seen - 1)", ORDERED),
        ("dq_signed_off_too_often", "wait_count(counters.added, head, 4 * self.blocks(at.rows_k))",
         "wait_count(counters.added, head, 3 * self.blocks(at.rows_k))", LATE)),
    *family(
        "backward", FOLDER + "backward/dq_first_store.py",
        ("dq_announced_before_it_left", """
            if first:
                tk.store_wait(read=False)
         """, "if first:", FIRSTS),
        ("dq_added_to_what_is_not_there", """
            if owner(found) != mine:
                wait_count(words_of(g), number, THERE)
         """, "", FIRSTS)),
    *family(
        "backward", FOLDER + "backward/dq_ordered.py",
        ("ordered_dq_out_of_order", "wait_count(words, Int32(number), before)", "", ORDERED_AT_ONCE),
        ("ordered_dq_counted_before_it_is_there", """
                self.send_part(self.buffer(s, sender), address + i * self.part_bytes, before == 0)
                tk.store_wait()
                cute.arch.sync_warp()
                s.dq_pipe.release(part)
            tk.store_wait(read=False)
            signal(words, Int32(number))
         """, """
                if const_expr(i == 0):
                    signal(words, Int32(number))
                self.send_part(self.buffer(s, sender), address + i * self.part_bytes, before == 0)
                tk.store_wait()
                cute.arch.sync_warp()
                s.dq_pipe.release(part)
            tk.store_wait(read=False)
         """, ORDERED_AT_ONCE),
        ("ordered_dq_part_not_awaited", "s.dq_pipe.wait(part)", "", ORDERED),
        ("ordered_dq_freed_before_it_left", """
                tk.store_wait()
                cute.arch.sync_warp()
                s.dq_pipe.release(part)
         """, "    s.dq_pipe.release(part)", ORDERED_STORES),
        ("ordered_dq_over_another_senders", """
                for other in range(DQ_SENDERS):
                    s.dq_pipe.acquire_empty(PartOfSender(other, 0))
         """, "    pass", ORDERED_AT_ONCE)),
    *family(
        "backward", FOLDER + "backward/dq_ordered_registers.py",
        ("ordered_wide_dq_out_of_order",
         "wait_count(words, Int32(number), self.scheduler.blocks_before(g, t, m))", "", ORDERED_WIDE_AT_ONCE),
        ("ordered_wide_dq_without_its_turn", """
            if const_expr(i == 0):
                s.dq_pipe.wait(turn)
         """, "", ORDERED_WIDE_AT_ONCE),
        ("ordered_wide_dq_counted_before_it_left", "tk.wait(s.dq_pipe.empty[turn.stage], turn.phase)", "",
         ORDERED_WIDE_AT_ONCE),
        ("ordered_wide_dq_added_to_what_is_not_there", "first = self.scheduler.blocks_before(g, t, m) == 0",
         "first = self.scheduler.blocks_before(g, t, m) < 0", ORDERED_WIDE)),
    *family(
        "backward", FOLDER + "backward/postprocess.py",
        ("ordered_wide_dq_that_no_block_has_stored", "return None if added is None else added[n] > 0", "return None",
         ("tests/gpu/attention/test_attention_backward_forms.py::test_ordered[256-True-]",))),
    *family(
        "backward", FOLDER + "backward/dq_serial.py",
        ("dq_signalled_before_it_is_there", """
            tk.store_wait(but * rows * cols, read=False)
            cute.arch.sync_warp()
         """, "cute.arch.sync_warp()", CHAIN),
        ("dq_out_of_order", "self.wait_contributions(g, t, c, m, at)", "put(c.ready, Int32(1))", CHAIN),
        ("dq_sums_not_awaited", "tk.wait(s.dq_full[warp], c.sums.phase)", "cute.arch.sync_warp()", CHAIN)),
    *family(
        "backward", FOLDER + "backward/dq_kernel.py",
        ("order_dq_not_scaled", "tk.mul(c.dq, c.dq, g.scale)", "", ORDER),
        ("order_no_wait_for_k", "s.k_pipe.wait(c.k)", "", ORDER),
        ("order_no_wait_for_v", "s.v_pipe.wait(c.v)", "", ORDER),
        ("order_no_wait_for_q", "tk.wait(s.q_full, 0)", "", ORDER_LOADS, (Q_LAST,)),
        ("order_v_freed_before_dp", """
            tk.mma_wait(0)  # dP
            s.v_pipe.release(c.v)
         """, """
            s.v_pipe.release(c.v)
            tk.mma_wait(0)  # dP
         """, ORDER_READS, (V_FIRST,)),
        ("order_k_freed_before_dq", """
            tk.mma_wait(0)
            s.k_pipe.release(c.k)
         """, """
            s.k_pipe.release(c.k)
            tk.mma_wait(0)
         """, ORDER_READS)),
    *family(
        "backward", FOLDER + "backward/dkv_hdim256.py",
        ("wide_p_written_over_what_is_read", """
            s.p_pipe.acquire_empty(c.p_ring)
            self.hand_over(c.slope, s.p, c.p_ring, False)
         """, "self.hand_over(c.slope, s.p, c.p_ring, False)", WIDE_ROLES),
        ("wide_no_wait_for_q", """
            s.q_pipe.wait(c.ring)
            tk.mm_ABt(c.s, s.k[0], s.q[c.ring.stage])
         """, "tk.mm_ABt(c.s, s.k[0], s.q[c.ring.stage])", WIDE),
        ("wide_p_announced_before_it_is_written", """
            self.hand_over(c.slope, s.p, c.p_ring, False)
            s.p_pipe.commit(c.p_ring)
         """, """
            s.p_pipe.commit(c.p_ring)
            self.hand_over(c.slope, s.p, c.p_ring, False)
         """, WIDE_ROLES),
        ("wide_no_wait_for_p", "s.p_pipe.wait(c.p_ring)", "", WIDE_ROLES),
        ("wide_p_freed_before_it_is_read", """
            self.take_p(s, c)
            s.q_pipe.wait(c.ring)
            delta = stats_of(s, c.ring, 1, self.config.tile)
            tk.mma_wait(0)
            s.do_pipe.release(c.ring)
            self.make_ds(s, c, delta)
            s.p_pipe.release(c.p_ring)  # not before dP is there: the dV warpgroup may then write over V
         """, """
            s.p_pipe.release(c.p_ring)
            self.take_p(s, c)
            s.q_pipe.wait(c.ring)
            delta = stats_of(s, c.ring, 1, self.config.tile)
            tk.mma_wait(0)
            s.do_pipe.release(c.ring)
            self.make_ds(s, c, delta)
         """, WIDE_ROLES),
        ("wide_no_wait_for_do", """
            s.do_pipe.wait(c.ring)
            self.accumulate(c.dv, c.p, do)
         """, "self.accumulate(c.dv, c.p, do)", WIDE_LOADS),
        ("wide_do_freed_before_dv", """
            tk.mma_wait(0)
            s.do_pipe.release(c.ring)
            c.ring.advance()
         """, """
            s.do_pipe.release(c.ring)
            tk.mma_wait(0)
            c.ring.advance()
         """, WIDE_ROLES)),
    *family(
        "backward", FOLDER + "backward/gqa_split.py",
        ("sums_of_parts_not_awaited", """
            wait_count(dkv_partials.counts, at, head)
            for i in cutlass.range_constexpr(len(tiles)):
                _add(tiles[i], sums, i, warp)
         """, """
            for i in cutlass.range_constexpr(len(tiles)):
                _add(tiles[i], sums, i, warp)
         """, GROUPED)),
    *family(
        "backward", FOLDER + "backward/math.py",
        ("mask_off_by_one", "return e if end is None else cutlass.select_(col < end, e, Float32(0.0))",
         "return e if end is None else cutlass.select_(col <= end, e, Float32(0.0))",
         ORDER),
        ("causal_off_by_one", "e = e if first is None else cutlass.select_(first <= col, e, Float32(0.0))",
         "e = e if first is None else cutlass.select_(first < col, e, Float32(0.0))", WHOLE),
        ("delta_of_the_wrong_sign",
         "tk.apply_narrow(ds, lambda slope, dp, delta: slope * (dp + delta), slope, dp, delta)",
         "tk.apply_narrow(ds, lambda slope, dp, delta: slope * (dp - delta), slope, dp, delta)",
         ("tests/gpu/attention/test_attention_backward.py::test_softcap[64-True-False]",))),
    *family(
        "backward", FOLDER + "backward/preprocess.py",
        ("statistics_of_a_shifted_row", "of_row = rows.lse[batch, head, row0 + i]",
         "of_row = rows.lse[batch, head, row0 + (i ^ 1)]", WHOLE)),
    *family(
        "backward", FOLDER + "common/query_mask.py",
        ("last_tile_of_queries_left_out",
         "tiles, last_key = ceil_div(e.rows_q, e.tile), least(first_key + e.block, e.rows_k)",
         "tiles, last_key = e.rows_q // e.tile, least(first_key + e.block, e.rows_k)", WHOLE)),
)

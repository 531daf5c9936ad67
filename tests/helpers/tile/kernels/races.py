"""What kernels do between their warps, as small as can be: rows by bulk copies and by cp.async, and partial sums
through slots. Each once in order and once not, for compute-sanitizer's racecheck: what does it follow? See
`tests/helpers/sanitizer/racecheck_kernels.py`."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

import tkq.tile as tk

from .common import one_block, sym, tensor

STAGES, WIDTH, WARPS = 2, 128, 4


def build_scales(order):
    """As ``build_copies``, by cp.async, four elements a thread: how `tkq.gemm.fp8.matrices` brings the scales of a
    step."""
    return build_copies(order, "threads")


def build_copies(order, by="bulk"):
    """y = -x, (n, 128) fp32: warp 4 copies rows into a ring of two, 128 threads read them.

    order: "mbarrier" (wait full, read, arrive at empty, as `tkq.rows.persistent.ring` does), "block" (one row at a time
    between barriers of the block, after the same wait) or "none" (the wait comes after the read)."""
    @cute.jit
    def copy(x, buffer, full, i, stage):
        if cutlass.const_expr(by == "threads"):
            for j in cutlass.range_constexpr(WIDTH // 32):
                at = 32 * j + tk.lane_id()
                tk.copy_async(buffer, (at, stage), x, (i, at))
            tk.copy_async_arrive(full[stage])
        else:
            bulk(x, buffer, full, i, stage)

    @cute.jit
    def bulk(x, buffer, full, i, stage):
        tk.expect_bytes(full[stage], 4 * WIDTH)
        with cute.arch.elect_one():
            tk.bulk_load((buffer.iterator + stage * WIDTH).toint(), x.iterator.toint() + Int64(i) * (4 * WIDTH),
                         4 * WIDTH, full[stage].ptr.toint())

    @cute.jit
    def produce(x, buffer, full, empty):
        r = tk.ring(STAGES)
        for i in cutlass.range(cute.size(x, mode=[0]), unroll=1):
            tk.wait(empty[r.stage], r.phase ^ 1)
            copy(x, buffer, full, i, r.stage)
            r.advance()

    @cute.jit
    def consume(y, buffer, full, empty):
        r = tk.ring(STAGES)
        for i in cutlass.range(cute.size(y, mode=[0]), unroll=1):
            if cutlass.const_expr(order == "mbarrier"):
                tk.wait(full[r.stage], r.phase)
            y[i, tk.thread_in_warpgroup()] = -buffer[tk.thread_in_warpgroup(), r.stage]
            if cutlass.const_expr(order == "none"):
                tk.wait(full[r.stage], r.phase)  # too late; but no copy is under way when the block ends
            cute.arch.sync_warp()
            tk.arrive(empty[r.stage])
            r.advance()

    @cute.jit
    def in_turn(x, y, buffer, full):
        thread = cute.arch.thread_idx()[0]
        for i in cutlass.range(cute.size(y, mode=[0]), unroll=1):
            if tk.warp_id() == WARPS:
                copy(x, buffer, full, i, 0)
                tk.wait(full[0], i & 1)
            tk.sync_block()
            if thread < WIDTH:
                y[i, thread] = -buffer[thread, 0]
            tk.sync_block()

    @cute.jit
    def body(x, y):
        al = tk.SharedAllocator()
        buffer = al.allocate_tensor(Float32, cute.make_layout((WIDTH, STAGES)), 128)
        full, empty = al.semaphores(STAGES), al.semaphores(STAGES)

        def init():
            for s in range(STAGES):
                tk.init(full[s], 32 if by == "threads" else 1)
                tk.init(empty[s], WARPS)

        tk.init_block(init)
        if cutlass.const_expr(order == "block"):
            in_turn(x, y, buffer, full)
        else:
            if tk.warp_id() == WARPS:
                produce(x, buffer, full, empty)
            else:
                consume(y, buffer, full, empty)

    n = sym()
    return one_block(body, (tensor("fp32", n, WIDTH), tensor("fp32", n, WIDTH)), 32 * WARPS + 32)


def build_sums(order):
    """y[i] = the sum of x[i, :], (n, 128) fp32, in every thread: a warp's first lane writes the warp's sum into slot
    i % 4, and all read all four, as `tkq.rows.persistent.exchange` does.

    order: "mbarrier" (arrive after the write, wait before the read), "block" (a barrier of the block instead) or "none"
    (none waits)."""
    @cute.jit
    def body(x, y):
        al = tk.SharedAllocator()
        slots, met = al.allocate_tensor(Float32, cute.make_layout((WARPS, 4)), 16), al.semaphores(4)

        def init():
            for s in range(4):
                tk.init(met[s], WARPS)

        tk.init_block(init)
        r, thread = tk.ring(4), cute.arch.thread_idx()[0]
        for i in cutlass.range(cute.size(x, mode=[0]), unroll=1):
            part = cute.arch.warp_reduction_sum(x[i, thread])
            if tk.lane_id() == 0:
                slots[tk.warp_id(), r.stage] = part
                if cutlass.const_expr(order == "mbarrier"):
                    cute.arch.mbarrier_arrive(met[r.stage].ptr)
            if cutlass.const_expr(order == "mbarrier"):
                tk.wait(met[r.stage], r.phase)
            if cutlass.const_expr(order == "block"):
                tk.sync_block()
            total = slots[0, r.stage]
            for w in cutlass.range_constexpr(1, WARPS):
                total = total + slots[w, r.stage]
            y[i, thread] = total
            r.advance()

    n = sym()
    return one_block(body, (tensor("fp32", n, WIDTH), tensor("fp32", n, WIDTH)), 32 * WARPS)

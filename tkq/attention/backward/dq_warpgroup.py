"""The warpgroup of attention's backward that adds dQ up: which tiles it takes, and for what it waits. What it does with
a tile is a part of it (``AddDq``, ``FirstStoreDq``)."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dq_atomic import AddDq
from tkq.attention.backward.spec import BackwardSpec


class DqByTask:
    """dQ = dS K, tile by tile of a task. It waits for helper warps, and signals them, once in each task. With
    ``fuse_preprocess`` K is free for the next task when the last product with it is done, before that has been added to
    dQ."""

    def __init__(self, config: BackwardConfig, store: AddDq, scheduler, helper_warps):
        self.config, self.store, self.scheduler, self.helper_warps = config, store, scheduler, helper_warps

    @cute.jit
    def run(self, g, s):
        dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1)
        cute.arch.griddepcontrol_wait()  # the accumulator is zero
        self.scheduler.each_task(g, s, lambda t, reload_task: self.add_task(g, s, t, reload_task, dq, ring, kv))
        tk.store_wait()  # of what is read; the next kernel waits for the whole launch

    @cute.jit
    def add_task(self, g, s, t, reload_task: Constexpr, dq, ring, kv):
        tk.wait(s.kv_full[0], kv.phase)
        if const_expr(self.helper_warps is not None):
            self.helper_warps.wait_ready(g, t)
        if const_expr(self.config.fuse_preprocess):
            self.add_and_release(g, s, t, dq, ring)
        else:
            def add(_, h, m):
                s.ds_pipe.wait(ring)
                self.store.add(g, s, dq, ring, self.number(g, t, h, m))
                ring.advance()

            self.scheduler.each_tile(g, t, add)
            self.scheduler.release_kv(s, 0)
        self.scheduler.next_kv(kv)
        if const_expr(self.helper_warps is not None):
            self.helper_warps.signal_added(g, reload_task())

    @cute.jit
    def add_and_release(self, g, s, t, dq, ring):
        """K behind the last product."""
        last = g.heads_per_kv * (t.end - t.first) - 1

        def add(i, h, m):
            s.ds_pipe.wait(ring)
            number, now = self.number(g, t, h, m), i == last
            self.store.add(g, s, dq, ring, number, lambda: self.release_k_if(s, now))
            ring.advance()

        self.scheduler.each_tile(g, t, add)
        self.release_k_if(s, last < 0)

    def number(self, g, t, h, m):
        return self.scheduler.tile_number(g, t, self.scheduler.query_head(g, t, h), m)

    @cute.jit
    def release_k_if(self, s, condition):
        if condition:
            self.scheduler.release_kv(s, 0)


class DqByQueryHead:
    """With ``by_query_head``: dQ of a head is converted while the next ones are added up, and warps that have no task
    left help to convert. A head is signalled when the first tile of the next one has gone: by then it has arrived."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, store, scheduler, helper_warps):
        self.config, self.store, self.scheduler, self.helper_warps = config, store, scheduler, helper_warps
        rows, cols = config.dq_parts(spec.width)
        self.parts = rows * cols  # of a tile

    @cute.jit
    def run(self, g, s):
        dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1)
        cute.arch.griddepcontrol_wait()  # the counters are zero
        self.scheduler.each_task(g, s, lambda t, reload_task: self.add_task(g, s, t, reload_task, dq, ring, kv))
        self.helper_warps.run(g)

    @cute.jit
    def add_task(self, g, s, t, reload_task: Constexpr, dq, ring, kv):
        tk.wait(s.kv_full[0], kv.phase)
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            head = self.scheduler.query_head(g, t, h)
            self.helper_warps.wait_head(g, t, head)
            for m in cutlass.range(t.first, t.end, unroll=1):
                self.store.add_tile(g, s, t, dq, ring, head, m)
                if (h > 0) & (m == t.first):
                    self.helper_warps.signal_head_added(g, t.sequence, head - 1, self.parts)
            if (h > 0) & (t.first == t.end):
                self.helper_warps.signal_head_added(g, t.sequence, head - 1)
        self.scheduler.release_kv(s, 0)
        self.scheduler.next_kv(kv)
        last = reload_task()
        self.helper_warps.signal_head_added(g, last.sequence, self.scheduler.query_head(g, last, g.heads_per_kv - 1))

"""What the kernels of attention's backward that own keys share: the launches, the producer, a task, writing out."""
from dataclasses import fields
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dq_kernel import DqKernel
from tkq.attention.backward.gqa_split import DkvPartials
from tkq.attention.backward.helper_warps import Counters, HelperOperands, HelperWarps
from tkq.attention.backward.math import Scores, limits
from tkq.attention.backward.postprocess import BackwardPostprocess
from tkq.attention.backward.preprocess import BackwardPreprocess, Rows, Workspace
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import DqSerialOperands, Globals, Scalars, Shared, Task
from tkq.attention.backward.tile_scheduler import BackwardTasks, values_of
from tkq.attention.common.counters import claim
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import BackwardOperands, Gradients, Sequences
from tkq.attention.common.query_mask import mask_limits
from tkq.attention.common.sequences import DenseBatch, VarlenBatch, heads_outside, loads, piece, stores, with_batch
from tkq.attention.common.tile_order import l2_section_of, serial_heads, zero_ahead_of
from tkq.tile import WARPGROUP


class BackwardBase(BackwardTasks):
    """A block has ``config.block`` keys of one K/V head; the queries that see them pass by in tiles. A subclass says
    which roles there are (``roles``) and with how many warpgroups (``warpgroups``)."""

    warpgroups = 0
    kv_warpgroups = 2  # consumer warpgroups of Q and dO
    kv_releases = 8, 8  # warps that arrive on the empty barriers of K and of V

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        self.spec, self.config = spec, config.check(spec.width)
        if config.helper_warps and not spec.adds_dq:
            raise NotImplementedError("attention backward: helper_warps without dQ to be added up")
        if config.dq_serial and (spec.left or not spec.adds_dq):
            raise NotImplementedError("attention backward: dq_serial with a limit on the left, or without dQ")
        self.helper_warps = HelperWarps(spec, config) if config.helper_warps else None
        dtype = tk.element_type(spec.dtype)
        self.q_tile = tk.st(config.tile, spec.width, dtype)
        self.kv_tile = tk.st(64, spec.width, dtype)
        self.out_tile = tk.st(64, min(spec.width, 128), dtype)  # of dK and dV
        self.ds_tile = tk.st(64, config.tile, dtype)
        self.kv_tiles = config.block // 64  # tiles of K, of V and of dS
        self.stats_bytes = 8 * config.tile

    def roles(self, g, s):
        """A tuple of ``tk.Role``."""
        raise NotImplementedError

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, operands: BackwardOperands, gradients: Gradients, workspace: cute.Tensor,
                 sequences: Optional[Sequences], scalars: Scalars, stream: cuda.CUstream):
        """q, dq (B, Sq, H, D), o, do (B, Sq, H, Dv), k, dk (B, Sk, Hk, D), v, dv (B, Sk, Hk, Dv), lse, dlse (B, H, Sq)
        fp32; varlen: without B, and sequences. workspace: fp32, uninitialised, see ``config.workspace_floats``."""
        spec, c, ragged = self.spec, self.config, self.spec.varlen
        do, q, k, v, o, lse, dlse = operands
        dq, dk, dv = gradients
        layout = (VarlenBatch(sequences, q.shape[0], k.shape[0]) if const_expr(ragged) else
                  DenseBatch(q.shape[1], k.shape[1], q.shape[0]))
        heads, kv_heads, batches = q.shape[-2], k.shape[-2], 1 if const_expr(ragged) else q.shape[0]
        kv_heads, splits_per_kv_head = self.parts_of_heads(heads, kv_heads)
        tiles, blocks = layout.slots(False, c.tile), layout.slots(True, c.block)
        tasks = blocks * kv_heads * batches
        # of a K/V head: Q, dO and the accumulator of its query heads; bounded, to stay in 32 bits
        row_bytes = spec.width * (2 * self.q_tile.dtype.width // 8 + 4) * cutlass.min(heads // kv_heads, Int32(16))
        l2_section = row_bytes if const_expr(ragged) else l2_section_of(
            q.shape[1], row_bytes, c.l2_section_bytes, kv_heads * batches)
        # heads with twice as many blocks as there are at once: the longest then begin early enough. Half of that where
        # L2 is needed for more, by helper warps or query heads that share a K/V head
        waves = Int32(1) if const_expr(c.helper_warps) else cutlass.select_(heads == kv_heads, Int32(2), Int32(1))
        tail_heads = Int32(0) if const_expr(ragged) else ceil_div(waves * scalars.num_sms, blocks)
        parts = self.parts_of(workspace, tiles * heads * batches, kv_heads * layout.sequences,
                              None if const_expr(splits_per_kv_head is None) else tasks // splits_per_kv_head)
        stats, acc, counters, dkv_partials, dq_serial = parts
        if const_expr(c.dq_serial):
            dq_serial = self.dq_serial_operands(dq, counters, scalars, kv_heads * batches, l2_section, tail_heads,
                                                heads // kv_heads * tiles)
            parts = parts._replace(dq_serial=dq_serial)
        rows = Rows(*[None if const_expr(x is None) else with_batch(x, ragged) for x in (do, o, lse, dlse)])
        BackwardPreprocess(spec, c)(rows, parts._replace(acc=None) if const_expr(c.helper_warps) else parts, layout,
                                    stream)
        g = Globals(
            q=loads(q, self.q_tile, ragged), do=loads(do, self.q_tile, ragged),
            k=loads(k, self.kv_tile, ragged), v=loads(v, self.kv_tile, ragged),
            dk=self.output(dk), dv=self.output(dv), stats=stats, acc=acc, dkv_partials=dkv_partials,
            dq_serial=dq_serial,
            next=counters if c.persistent else None, tasks=tasks, layout=layout,
            left=scalars.left, right=scalars.right, heads=heads, kv_heads=kv_heads, heads_per_kv=heads // kv_heads,
            splits_per_kv_head=splits_per_kv_head, tiles=tiles, scale=scalars.scale, l2_section=l2_section,
            tail_heads=tail_heads,
            helper_warps=self.helper_operands(dq, counters,
                                              zero_ahead_of(l2_section, tail_heads, heads // kv_heads * tiles),
                                              scalars.num_sms),
            scores=Scores.of(scalars.scale, scalars.softcap, spec.softcap))
        grid = tk.blocks_for("dynamic" if c.persistent else "single", tasks, scalars.num_sms)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[self.warpgroups * WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=True)
        if const_expr(spec.adds_dq and not c.helper_warps and not (c.dq_serial and self.all_serial)):
            BackwardPostprocess(spec, c)(acc, dq, layout, scalars.scale, dq_serial.tiles if const_expr(c.dq_serial)
                                         else 0, stream)
        elif const_expr(spec.dq and not spec.adds_dq):
            DqKernel(spec, c)((do, q, k, v, dq), stats, layout, scalars, stream)

    def parts_of_heads(self, heads, kv_heads):
        """(K/V heads in number, as many as have tasks of their own; how many of them are of one K/V head, or None)."""
        return kv_heads, None

    def helper_operands(self, dq, counters, zero_ahead, num_sms):
        """counters: all of them. zero_ahead: of equal sequences; of others, at least the tiles of two blocks for each
        that is there at once."""
        c, ragged = self.config, self.spec.varlen
        if not c.helper_warps:
            return None
        at_least = 2 * num_sms * ceil_div(c.block, c.tile)
        return HelperOperands(with_batch(dq, ragged), Counters.of(counters), at_least if ragged else zero_ahead)

    @property
    def all_serial(self):
        """No heads at the end whose longest tasks come first."""
        return self.spec.varlen or not (self.spec.right and self.config.longest_first)

    def dq_serial_operands(self, dq, counters, scalars, heads, l2_section, tail_heads, tiles) -> DqSerialOperands:
        """heads: of K and V, of all batches. tiles: of a K/V head's query heads."""
        counts = cute.make_tensor(counters.iterator + 1, cute.make_layout((cute.size(counters) - 1,)))
        if self.all_serial:
            serial = Int32(1 << 30), Int32((1 << 31) - 1)
        else:
            first = serial_heads(heads, l2_section, tail_heads)
            serial = first, first * tiles
        return DqSerialOperands(with_batch(dq, self.spec.varlen), counts, *serial, scalars.right)

    def output(self, x):
        """dk or dv, as it is written."""
        return heads_outside(x, self.spec.varlen) if self.config.store_from_registers else stores(x, self.out_tile,
                                                                                                  self.spec.varlen)

    def parts_of(self, workspace, tiles, heads, blocks=None) -> Workspace:
        """Of so many tiles, K/V heads and blocks of keys: the statistics; the accumulator, where dQ is added up;
        counters, where blocks take one task after the other; where dK and dV are handed on (blocks; None: nowhere)."""
        spec, c = self.spec, self.config
        of_stats, of_acc = 2 * c.tile, c.tile * spec.width  # floats of a tile
        end, acc = workspace.iterator + Int64(tiles) * of_stats, None
        stats = cute.make_tensor(workspace.iterator, cute.make_layout((tiles, of_stats), stride=(of_stats, 1)))
        if spec.adds_dq:
            end = end.align(16)
            acc = cute.make_tensor(end, cute.make_layout((tiles, of_acc), stride=(of_acc, 1)))
            end = end + Int64(tiles) * of_acc
        if c.persistent:
            count = Counters.count(heads) if c.helper_warps else 1 + 4 * tiles if c.dq_serial else 1
            counters = cute.make_tensor(cute.recast_ptr(end, dtype=Int32), cute.make_layout((count,)))
            dkv_partials = None if blocks is None else DkvPartials.of(end + count, blocks, spec.width)
            return Workspace(stats, acc, counters, dkv_partials)
        return Workspace(stats, acc)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c, warps = self.config, 4 * self.kv_warpgroups
        dq_warps = 4 if self.spec.adds_dq else 0
        al = tk.SharedAllocator()
        s = Shared(
            k=al.tile(self.kv_tile, self.kv_tiles), v=al.tile(self.kv_tile, self.kv_tiles),
            q=al.tile(self.q_tile, c.stages), do=al.tile(self.q_tile, c.stages),
            ds=al.tile(self.ds_tile, self.kv_tiles * c.ds_stages),
            stats=al.vector(2 * c.tile, c.stages),
            p=self.p_ring(al), dq=self.dq_staging(al), dq_full=al.semaphores(4) if c.dq_serial else None,
            task=al.vector(len(fields(Task)), 1, Int32) if self.spec.varlen and not c.persistent else None,
            tasks=al.mailbox(len(fields(Task)), 2, warps + dq_warps) if c.persistent else None,
            kv_full=al.semaphores(2), kv_empty=al.semaphores(2),
            q_pipe=al.pipe(c.stages, self.q_tile.bytes + self.stats_bytes, warps),
            do_pipe=al.pipe(c.stages, self.q_tile.bytes, warps),
            ds_pipe=al.pipe(c.ds_stages, 0, 4, producers=4 * self.kv_tiles),
            p_pipe=al.pipe(c.p_stages, 0, 4, producers=4))

        def initialise():
            for pipe in (s.q_pipe, s.do_pipe, s.ds_pipe, s.p_pipe):
                pipe.init()
            for i, kv_releases in enumerate((self.kv_releases[0] + dq_warps, self.kv_releases[1])):
                tk.init(s.kv_full[i], 1)
                tk.init(s.kv_empty[i], kv_releases)
            if const_expr(s.tasks is not None):
                s.tasks.init()
            if const_expr(c.dq_serial):
                for i in range(4):
                    tk.init(s.dq_full[i], 1)

        tk.init_block(initialise)
        if const_expr(c.persistent):
            tk.assign(self.roles(g, s))
        elif const_expr(self.spec.varlen):
            self.post_task(g, s.task)
            t = self.task(g, s)
            self.assign_if(self.first_key(t) < t.rows_k, self.roles(g, s))  # else the slot has no key
        else:
            tk.assign(self.roles(g, s))

    def p_ring(self, al):
        """Where warpgroups hand P to each other, if they do."""
        return

    def dq_staging(self, al):
        """(4, lane, quads, warps [, parts]) fp32: a part of dQ as the threads have it."""
        if self.config.dq_reduce != "bulk" or not self.spec.adds_dq:
            return None
        rows, cols = self.config.dq_parts(self.spec.width)
        shape = 4, 32, self.config.dq_cols // 8, 4, *((rows * cols,) if self.config.dq_serial else ())
        return al.allocate_tensor(Float32, cute.make_layout(shape), 128)

    # ---- producer ------------------------------------------------------------------------------

    def first_role(self, g, s, registers):
        """The first warpgroup's: the producer is one warp of it."""
        return tk.Role(lambda _: self.first_group(g, s), registers, warps=4 if self.config.helper_warps else 1)

    @cute.jit
    def first_group(self, g, s):
        if const_expr(self.config.helper_warps):
            if tk.first_warp_of_group():
                self.producer(g, s)
            else:
                self.helper_warps.run(g)
        else:
            self.producer(g, s)

    @cute.jit
    def producer(self, g, s):
        c, ring = self.config, s.q_pipe.ring()
        tk.prefetch(g.q, g.do, g.k, g.v, *[g.dk, g.dv] * (not c.store_from_registers))
        if const_expr(c.persistent):
            self.one_after_the_other(g, s, ring)
        else:
            t = self.task(g, s)
            for i in cutlass.range_constexpr(2):
                self.load_kv(g, s, t, i)
            cute.arch.griddepcontrol_wait()  # what comes next is BackwardPreprocess's
            self.load_q_do(g, s, t, ring)

    @cute.jit
    def one_after_the_other(self, g, s, ring):
        """V, which is free first, then the first queries, then K."""
        kv, box = tk.ring(1), s.tasks.ring()
        cute.arch.griddepcontrol_wait()  # the counter is zero, the statistics are there
        number = claim(g.next, 0)
        while number < g.tasks:
            t = self.find_task(g, number)
            if self.first_key(t) < t.rows_k:  # else the slot has no key
                s.tasks.post(box, *values_of(t))
                tk.wait(s.kv_empty[1], kv.phase ^ 1)
                self.load_kv(g, s, t, 1)
                self.load_q_do(g, s, t, ring, kv)
                kv.advance()
            number = claim(g.next, 0)
        s.tasks.post(box, *[Int32(0) for _ in fields(Task)])

    @cute.jit
    def load_q_do(self, g, s, t, ring, kv=None):
        """All tiles of Q and dO; kv: K behind the first, when it is free."""
        q, do = piece(g.layout, g.q, t.rows_q), piece(g.layout, g.do, t.rows_q)

        def load(i, h, m):
            head, sem = self.query_head(g, t, h), s.q_pipe.acquire(ring)
            tk.load_async(s.q[ring.stage], q, (t.batch_q, head, m, 0), sem)
            self.load_stats(g, s, self.tile_number(g, t, head, m), ring.stage, sem)
            tk.load_async(s.do[ring.stage], do, (t.batch_q, head, m, 0), s.do_pipe.acquire(ring))
            ring.advance()
            self.load_k_behind(g, s, t, kv, i == 0)

        self.each_tile(g, t, load)
        self.load_k_behind(g, s, t, kv, t.end == t.first)

    @cute.jit
    def each_tile(self, g, t, work: cutlass.Constexpr):
        """``work(i, h, m)`` for each tile m of each query head h, in the order in which all roles go through them; i is
        0 the first time."""
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            for m in cutlass.range(t.first, t.end, unroll=1):
                work(h + m - t.first, h, m)

    @cute.jit
    def load_k_behind(self, g, s, t, kv, now):
        if const_expr(kv is not None):
            if now:
                self.load_free_k(g, s, t, kv)

    def load_free_k(self, g, s, t, kv):
        tk.wait(s.kv_empty[0], kv.phase ^ 1)
        self.load_kv(g, s, t, 0)

    def load_kv(self, g, s, t, which):
        """K (0) or V (1)."""
        tile, src = ((s.k, g.k), (s.v, g.v))[which]
        src = piece(g.layout, src, t.rows_k)
        tk.expect_bytes(s.kv_full[which], self.kv_tiles * self.kv_tile.bytes)
        for i in range(self.kv_tiles):
            tk.load_async(tile[i], src, (t.batch_k, self.kv_head(g, t), self.kv_tiles * t.block + i, 0),
                          s.kv_full[which])

    def load_stats(self, g, s, number, stage, sem):
        with cute.arch.elect_one():
            tk.bulk_load(s.stats[None, stage].iterator.toint(),
                         g.stats.iterator.toint() + number * self.stats_bytes, self.stats_bytes, sem.ptr.toint())

    # ---- for the warpgroups with keys --------------------------------------------------------------

    @cute.jit
    def visit(self, g, s, t, c, step: cutlass.Constexpr):
        """``step(g, s, t, c, m, masked)`` for each tile of each query head, in the order of ``each_tile``."""
        for _ in cutlass.range(g.heads_per_kv, unroll=1):
            for m in cutlass.range(t.first, t.first_unmasked, unroll=1):
                step(g, s, t, c, m, True)
            for m in cutlass.range(t.first_unmasked, t.end_unmasked, unroll=1):
                step(g, s, t, c, m, False)
            if const_expr(self.spec.left):
                for m in cutlass.range(t.end_unmasked, t.end, unroll=1):
                    step(g, s, t, c, m, True)

    def release_kv(self, s, which):
        """A warp reads K (0) or V (1) of its task no more."""
        if self.config.persistent:
            cute.arch.sync_warp()
            tk.arrive(s.kv_empty[which])

    def next_kv(self, kv):
        """To the next task's K and V."""
        if self.config.persistent:
            kv.advance()

    def limits(self, g, t, m, half):
        """Of ``probabilities``: which queries of tile m see which of 64 keys."""
        key = t.block * self.config.block + half * 64
        return limits(*mask_limits(self.extent(g, t.rows_q, t.rows_k), key, m), rows=t.rows_k - key)

    def stats(self, s, ring, which):
        """A row of the tile's statistics, as a value for each query."""
        tile, v = self.config.tile, tk.cv(self.config.tile)
        row = cute.make_tensor(s.stats[None, ring.stage].iterator + which * tile, cute.make_layout((tile,)))
        tk.load_shared_cols(v, row)
        return v

    def acquire_after(self, pipe, ring):
        """Wait until what was handed over last, at the position before ``ring``'s, has been taken."""
        for _ in range(pipe.stages - 1):
            ring.advance()
        pipe.acquire_empty(ring)

    @cute.jit
    def send(self, dst, tile, x, at, barrier):
        """Write a warpgroup's x through a shared tile that is no longer read."""
        tk.store(tile, x)
        tk.publish()
        tk.sync(barrier, WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(dst, tile, at)

    def write(self, g, dst, x, t, number, part=0):
        """x, from registers, to rows of dK or dV: 64 from 64 * number on, columns of part ``part`` of x's width."""
        first = t.batch_k - t.rows_k if self.spec.varlen else 0
        head = self.kv_head(g, t)
        head = dst[None, None, head] if self.spec.varlen else dst[None, None, head, t.batch_k]
        rows, cols = head.shape
        cols = cute.make_tensor(head.iterator + part * x.cols, cute.make_layout((rows, cols - part * x.cols),
                                                                                stride=head.stride))
        tk.store_narrow(cols, x, first + 64 * number, first + t.rows_k)

"""Flash attention backward (Dao et al., 2022, algorithm 4) on the tile layer: dK, dV, and dQ added up in fp32. The
kernel is composed here of its parts; see ``BackwardConfig`` for what chooses them."""
from dataclasses import fields
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import DQ_SENDERS, BackwardConfig
from tkq.attention.backward.dkv import Dkv
from tkq.attention.backward.dkv_hdim256 import DkvHdim256
from tkq.attention.backward.dq_atomic import AddDq
from tkq.attention.backward.dq_first_store import FirstStoreDq
from tkq.attention.backward.dq_kernel import DqKernel
from tkq.attention.backward.dq_ordered import OrderedDq
from tkq.attention.backward.dq_ordered_registers import OrderedDqFromRegisters
from tkq.attention.backward.dq_serial import SerialDq
from tkq.attention.backward.dq_tile import DqTile
from tkq.attention.backward.dq_warpgroup import DqByQueryHead, DqByTask
from tkq.attention.backward.fuse_preprocess_warps import PreprocessHelperWarps
from tkq.attention.backward.helper_warps import ConvertHelperWarps, Counters, HelperOperands, HelperWarps, SendersAlone
from tkq.attention.backward.math import Scores
from tkq.attention.backward.postprocess import BackwardPostprocess
from tkq.attention.backward.preprocess import TILES_PREPROCESSED_BEFORE, BackwardPreprocess, PreprocessFirstTiles, Rows
from tkq.attention.backward.producer import Producer
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import Globals, Scalars, Shared, Task, Tiles
from tkq.attention.backward.tile_scheduler import TileScheduler
from tkq.attention.backward.workspace import lay_out
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import BackwardOperands, Gradients, Sequences
from tkq.attention.common.sequences import DenseBatch, VarlenBatch, loads, with_batch
from tkq.attention.common.tile_order import l2_section_of, zero_ahead_of
from tkq.runtime.compile import fake
from tkq.tile import WARPGROUP

WARPGROUPS = 4


class BackwardKernel:
    """dV = P' dO, dK = scale * dS' Q, dQ = scale * dS K, with P = exp(scale * Q K' - lse) and
    dS = P * (dO V' - rowsum(o * do) + dlse).

    A task, one for each block or one after the other, is ``config.block`` keys of one K/V head; all queries that see
    them, of all its query heads, pass by in tiles. Scores are transposed, (key, query), so that P' and dS' are operands
    in registers as they are.

      producer (warp 0)        K V, then Q dO of one tile after the other
      2 warpgroups (dK, dV)    S' = K Q' | P, dP' = V dO' under it | dS by parts of the queries: dV += P' dO and
                               dK += dS' Q of one under the next | dS' to shared memory | next tile .. | write dK, dV
      1 warpgroup (dQ)         dQ = dS K | added to the accumulator in global memory | next tile ..
      helper warps (warps 1-3) see ``HelperWarps``

      pipe      stages     full (arrivals)             empty (arrivals)
      Q, stats  stages     producer's bytes (1)        every warp with keys (8)
      dO        stages     producer's bytes (1)        every warp with keys (8)
      dS        ds_stages  every warp with keys (8)    the dQ warpgroup's warps (4)
      K, V      1          producer's bytes (1)        persistent: every warp with keys (8), for K the dQ warps too (4)
      tasks     2          the producer (mailbox)      persistent: every warp with keys (8), the dQ warps (4), and
                                                       those that send dQ (``OrderedDq``)

    Of these parts, chosen by spec and config:

      producer       ``Producer``
      dK, dV         ``Dkv``; above head_dim 128 ``DkvHdim256``, whose roles and pipes are drawn there
      dQ             ``DqByTask`` or ``DqByQueryHead``, of a tile ``AddDq`` or ``FirstStoreDq``; ``SerialDq``
                     or ``OrderedDq``, ``OrderedDqFromRegisters``. Where it is not added up, ``DqKernel`` makes it
                     behind
      helper warps   ``HelperWarps``, ``PreprocessHelperWarps``, ``ConvertHelperWarps``, ``SendersAlone``
                     or none
      scheduler      ``TileScheduler``

    The dK/dV warpgroups synchronise at the pipes alone: one's elementwise work overlaps another's wgmma. Adding to dQ,
    whose traffic comes in bursts, holds up its own warpgroup only. ``BackwardPreprocess`` makes the statistics of the
    rows, where rows past the end and rows that see no key have P = 0, so that no query needs a mask; without helper
    warps it zeroes the accumulator, and ``BackwardPostprocess`` makes dQ of it.

    Raises:
        NotImplementedError, ValueError: a spec that the config cannot serve, a config that cannot run.
    """

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, scheduler=None, dkv=None):
        """scheduler, and dkv(its arguments): of others than those below."""
        self.spec, self.config = spec, config.check(spec.width)
        refuse(spec, config)
        self.tiles = Tiles.of(spec, config)
        self.scheduler = scheduler or TileScheduler(spec, config)
        self.helper_warps = helper_warps_of(spec, config, self.scheduler)
        self.producer = Producer(config, self.tiles, self.scheduler, self.helper_warps)
        self.dkv = (dkv or (DkvHdim256 if spec.width > 128 else Dkv))(spec, config, self.tiles, self.scheduler)
        self.dq_tile = DqTile(spec, config, self.tiles)
        self.dq = dq_of(spec, config, self.dq_tile, self.scheduler, self.helper_warps)

    def __str__(self):
        """Part of the kernel's name: the parts that it has."""
        parts = (self.helper_warps, self.dkv, getattr(self.dkv, "ds", None), self.dq, getattr(self.dq, "store", None))
        return " ".join(("tkqattentionbackward BackwardKernel", *[type(x).__name__ for x in parts if x is not None]))

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
        kv_heads, splits_per_kv_head = self.scheduler.split_heads(heads, kv_heads)
        heads_per_kv = heads // kv_heads
        tiles, blocks = layout.slots(False, c.tile), layout.slots(True, c.block)
        all_tiles, tasks = tiles * heads * batches, blocks * kv_heads * batches
        # of a K/V head: Q, dO and the accumulator of its query heads; bounded, to stay in 32 bits
        row_bytes = spec.width * (2 * self.tiles.q.dtype.width // 8 + 4) * cutlass.min(heads_per_kv, Int32(16))
        l2_section = row_bytes if const_expr(ragged) else l2_section_of(
            q.shape[1], row_bytes, c.l2_section_bytes, kv_heads * batches)
        # heads with twice as many blocks as there are at once: the longest then begin early enough. Half of that where
        # L2 is needed for more, by helper warps or query heads that share a K/V head
        waves = Int32(1) if const_expr(c.helper_warps) else cutlass.select_(heads == kv_heads, Int32(2), Int32(1))
        tail_heads = Int32(0) if const_expr(ragged) else ceil_div(waves * scalars.num_sms, blocks)
        parts = lay_out(spec, c, workspace, all_tiles, kv_heads * layout.sequences,
                        None if const_expr(splits_per_kv_head is None) else tasks // splits_per_kv_head)
        if const_expr(c.serial):
            parts = parts._replace(dq_serial=self.dq.operands(
                dq, parts.counters, scalars.right, kv_heads * batches, l2_section, tail_heads, heads_per_kv * tiles))
        rows = Rows(*[None if const_expr(x is None) else with_batch(x, ragged) for x in (do, o, lse, dlse)])
        rest = ()  # what helper warps need for the rows of which there are no statistics yet
        if const_expr(c.fuse_preprocess):
            known = cutlass.min(all_tiles, TILES_PREPROCESSED_BEFORE * scalars.num_sms)
            rest = rows, known
            PreprocessFirstTiles(spec, c)(rows, parts, layout, known, stream)
        else:
            BackwardPreprocess(spec, c)(rows, parts._replace(acc=None) if const_expr(c.helper_warps) else parts, layout,
                                        stream)
        helper_operands = None
        if const_expr(c.helper_warps):
            zero_ahead = None
            if const_expr(self.helper_warps.zeroes):
                zero_ahead = self.zero_ahead(l2_section, tail_heads, heads_per_kv * tiles, scalars.num_sms)
            helper_operands = HelperOperands(with_batch(dq, ragged), Counters.of(parts.counters), zero_ahead, *rest)
        g = Globals(
            q=loads(q, self.tiles.q, ragged), do=loads(do, self.tiles.q, ragged),
            k=loads(k, self.tiles.kv, ragged), v=loads(v, self.tiles.kv, ragged),
            dk=self.dkv.output.globals(dk), dv=self.dkv.output.globals(dv), stats=parts.stats, acc=parts.acc,
            dkv_partials=parts.dkv_partials, dq_serial=parts.dq_serial,
            next=parts.counters if c.persistent else None, tasks=tasks, layout=layout,
            left=scalars.left, right=scalars.right, heads=heads, kv_heads=kv_heads, heads_per_kv=heads_per_kv,
            splits_per_kv_head=splits_per_kv_head, tiles=tiles, scale=scalars.scale, l2_section=l2_section,
            tail_heads=tail_heads, helper_warps=helper_operands,
            scores=Scores.of(scalars.scale, scalars.softcap, spec.softcap),
            descending=self.scheduler.descending(kv_heads * batches, l2_section, tail_heads) if c.ordered else None)
        grid = tk.blocks_for("dynamic" if c.persistent else "single", tasks, scalars.num_sms)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[WARPGROUPS * WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=True)
        if const_expr(c.converts_behind):
            BackwardPostprocess(spec, c)(parts.acc, dq, layout, scalars.scale, 0, stream,
                                         helper_operands.counters.ready)
        elif const_expr(c.adds_dq(spec) and not c.helper_warps and not (c.serial and self.dq.all_serial)):
            BackwardPostprocess(spec, c)(parts.acc, dq, layout, scalars.scale, parts.dq_serial.tiles
                                         if const_expr(c.serial) else 0, stream)
        elif const_expr(spec.dq and not c.adds_dq(spec)):
            DqKernel(spec, c)((do, q, k, v, dq), parts.stats, layout, scalars, stream)

    def zero_ahead(self, l2_section, tail_heads, tiles, num_sms):
        """Tiles that helper warps zero ahead: of equal sequences; of others, at least the tiles of two blocks for each
        that is there at once."""
        c = self.config
        if self.spec.varlen:
            return 2 * num_sms * ceil_div(c.block, c.tile)
        found = zero_ahead_of(l2_section, tail_heads, tiles)
        return found * c.tail_waves if c.by_query_head else found

    def fake_arguments(self) -> tuple:
        """What the kernels are compiled for: any B, Sq, Sk, H, Hk, D and Dv up to the width, and strides that are
        multiples of 16 bytes."""
        spec = self.spec
        B, Bp, Sq, Sk, H, Hk = (fake.sym() for _ in range(6))
        D, Dv = (fake.sym(divisibility=8) for _ in range(2))
        batch = () if spec.varlen else (B,)

        def operand(seqlen, heads, cols):
            shape = *batch, seqlen, heads, cols
            return fake.tensor(spec.dtype, shape, (*(fake.sym64(divisibility=8) for _ in shape[1:]), 1), align=16)

        def rows():
            shape = *batch, H, Sq
            return fake.tensor("fp32", shape, tuple(fake.sym64() for _ in shape), align=4)

        def ints(n, there=True):
            return fake.tensor("int32", (n,), align=4) if there else None

        q, dq, o, do = (operand(Sq, H, cols) for cols in (D, D, Dv, Dv))
        k, dk, v, dv = (operand(Sk, Hk, cols) for cols in (D, D, Dv, Dv))
        sequences = None
        if spec.varlen:
            sequences = Sequences(ints(Bp), ints(Bp), ints(B, spec.seqused_q), ints(B, spec.seqused_k))
        return (
            BackwardOperands(do, q, k, v, o, rows(), rows() if spec.dlse else None),
            Gradients(dq if spec.dq else None, dk, dv), fake.tensor("fp32", (fake.sym64(),)), sequences,
            Scalars(Float32(1.0), Float32(0.0), Int32(0), Int32(0), Int32(1)))

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c, tiles, warps = self.config, self.tiles, 8  # with keys
        dq_warps, senders = 4 if c.adds_dq(self.spec) else 0, DQ_SENDERS if c.ordered else 0
        al = tk.SharedAllocator()
        s = Shared(
            k=al.tile(tiles.kv, tiles.of_keys), v=al.tile(tiles.kv, tiles.of_keys),
            q=al.tile(tiles.q, c.stages), do=al.tile(tiles.q, c.stages),
            ds=al.tile(tiles.ds, tiles.of_keys * c.ds_stages),
            stats=al.vector(2 * c.tile, c.stages),
            p=self.dkv.p_ring(al), dq=self.dq_tile.staging(al), dq_full=al.semaphores(4) if c.serial else None,
            dq_pipe=self.dq.pipe(al) if c.ordered else None,
            task=al.vector(len(fields(Task)), 1, Int32) if self.spec.varlen and not c.persistent else None,
            tasks=al.mailbox(len(fields(Task)), 2, warps + dq_warps + senders) if c.persistent else None,
            kv_full=al.semaphores(2), kv_empty=al.semaphores(2),
            q_pipe=al.pipe(c.stages, tiles.q.bytes + tiles.stats_bytes, warps),
            do_pipe=al.pipe(c.stages, tiles.q.bytes, warps),
            ds_pipe=al.pipe(c.ds_stages, 0, 4, producers=4 * tiles.of_keys),
            p_pipe=al.pipe(c.p_stages, 0, 4, producers=4))

        def initialise():
            for pipe in (s.q_pipe, s.do_pipe, s.ds_pipe, s.p_pipe, *[s.dq_pipe] * c.ordered):
                pipe.init()
            for i, kv_releases in enumerate((self.dkv.kv_releases[0] + dq_warps, self.dkv.kv_releases[1])):
                tk.init(s.kv_full[i], 1)
                tk.init(s.kv_empty[i], kv_releases)
            if const_expr(s.tasks is not None):
                s.tasks.init()
            if const_expr(c.serial):
                for i in range(4):
                    tk.init(s.dq_full[i], 1)

        tk.init_block(initialise)
        if const_expr(c.persistent):
            tk.assign(self.roles(g, s))
        elif const_expr(self.spec.varlen):
            self.scheduler.post_task(g, s.task)
            t = self.scheduler.task(g, s)
            self.assign_if(self.scheduler.first_key(t) < t.rows_k, self.roles(g, s))  # else the slot has no key
        else:
            tk.assign(self.roles(g, s))

    @cute.jit
    def assign_if(self, condition, roles: cutlass.Constexpr):
        if condition:
            tk.assign(roles)
        else:  # where no block has a key: a kernel that waits for this one waits for BackwardPreprocess through it
            cute.arch.griddepcontrol_wait()

    def roles(self, g, s):
        """A tuple of ``tk.Role``: the first warpgroup, of which the producer is one warp, the dQ warpgroup, and those
        with keys."""
        producer, dq, *dkv = self.config.registers
        return (tk.Role(lambda _: self.first_group(g, s), producer, warps=4 if self.config.helper_warps else 1),
                tk.Role(lambda _: self.dq_warpgroup(g, s), dq), *self.dkv.roles(g, s, dkv))

    @cute.jit
    def first_group(self, g, s):
        if const_expr(self.config.helper_warps):
            if tk.first_warp_of_group():
                self.producer.run(g, s)
            else:
                if const_expr(self.config.ordered):
                    self.dq.send(g, s)
                self.helper_warps.run(g)
        else:
            self.producer.run(g, s)

    @cute.jit
    def dq_warpgroup(self, g, s):
        if const_expr(self.config.adds_dq(self.spec)):
            self.dq.run(g, s)


# ---- which parts -------------------------------------------------------------------------------------


def refuse(spec: BackwardSpec, config: BackwardConfig) -> None:
    """NotImplementedError for what a config cannot do with a spec."""
    if config.helper_warps and not config.adds_dq(spec):
        raise NotImplementedError("attention backward: helper_warps without dQ to be added up")
    if config.serial and (spec.left or not config.adds_dq(spec)):
        raise NotImplementedError("attention backward: dq_reduce serial with a limit on the left, or without dQ")
    if config.ordered and spec.left:
        raise NotImplementedError("attention backward: dq_reduce ordered with a limit on the left")
    if config.by_query_head and (spec.varlen or spec.left):
        raise NotImplementedError("attention backward: helper_warps by_query_head, of packed sequences or with a limit "
                                  "on the left")


def helper_warps_of(spec: BackwardSpec, config: BackwardConfig, scheduler: TileScheduler):
    """Or None."""
    if not config.helper_warps:
        return None
    kind = (PreprocessHelperWarps if config.fuse_preprocess else SendersAlone if config.converts_behind else
            ConvertHelperWarps if config.ordered or config.dq_reduce == "first_store" else HelperWarps)
    return kind(spec, config, scheduler)


def dq_of(spec: BackwardSpec, config: BackwardConfig, tile: DqTile, scheduler: TileScheduler, helper_warps):
    """What the dQ warpgroup runs."""
    if config.serial:
        return SerialDq(spec, config, tile, scheduler)
    if config.ordered:
        kind = OrderedDqFromRegisters if config.dq_from_registers else OrderedDq
        return kind(spec, config, tile, scheduler, helper_warps)
    if config.by_query_head:
        store = FirstStoreDq(tile, scheduler) if config.dq_reduce == "first_store" else AddDq(config, tile, scheduler)
        return DqByQueryHead(spec, config, store, scheduler, helper_warps)
    return DqByTask(config, AddDq(config, tile, scheduler), scheduler, helper_warps)

"""Flash attention forward (Dao et al., 2022; the pipelining of Shah et al., 2024; FlashAttention-4's rule for
when O is corrected) on the tile layer."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import Operands, Scalars, Sequences
from tkq.attention.common.tile_order import even_l2_section, heads_in_l2_section
from tkq.attention.forward.config import AttentionConfig
from tkq.attention.forward.consumer import Consumer
from tkq.attention.forward.producer import Producer
from tkq.attention.forward.spec import AttentionSpec
from tkq.attention.forward.state import Globals, Shared, Tiles, field_names
from tkq.attention.forward.tile_scheduler import Dense, Varlen
from tkq.runtime.compile import fake


class AttentionForward:
    """o = softmax(scale * q @ k.T) @ v, and the log-sum-exp of each row where it is asked for.

    A task is 64 rows of Q for each consumer warpgroup of a block; its K and V pass by in blocks, the last ones (those
    with a mask on the right) first.

      producer (warp 0)     K(n-1) | task and Q | K(n-2) V(n-1) | K(n-3) V(n-2) | .. | next task | V(0)
      consumer warpgroups   S = Q K(n-1)' softmax | S' = Q K(i-1)' and O += P V(i), softmax of S' under P V | ..
                            .. | next task's first S and softmax under this one's last P V (``overlap_tasks``) | write O

      pipe      stages    full (arrivals)                  empty (arrivals)
      K, V      stages    producer's bytes (1)             every warp of every consumer (4 x consumers x cluster)
      Q, task   q_stages  producer's bytes (1), for each   the consumer's own warps (4), after its last S; where O goes
                          consumer by itself               out through Q's tile (``o_reuses_q_smem``), after that

    Consumers ping-pong: they issue their wgmma in turns (``ping_pong``), so that one's softmax overlaps another's
    products. The producer alone knows the schedule: what a task is travels beside its Q tile, under the same semaphore,
    and a task of no blocks says that all is done. Cluster of 2: two blocks, one above the other, share each K and V
    tile; where tasks are fetched, the first one's producer passes them to the other's (``next_task_slot``).

    ``pack`` query heads of one K/V head share a tile: its row r is query r // pack of head r % pack.
    """

    def __init__(self, spec: AttentionSpec, config: AttentionConfig, tiles: Optional[Tiles] = None):
        """tiles: of K and V laid out in another way than `Tiles.of` has them, for another producer."""
        if spec != spec.kernel():
            raise ValueError(f"{type(self).__name__}: {spec} is not a kernel's; that is {spec.kernel()}")
        self.spec, self.config, self.tiles = spec, config, tiles or Tiles.of(spec, config)
        self.producer, self.consumer = Producer(spec, config), Consumer(spec, config)

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, operands: Operands, sequences: Optional[Sequences], counter: cute.Tensor, scalars: Scalars,
                 stream: cuda.CUstream):
        """counter: (1,) int32 that is 0. sequences: None unless varlen."""
        spec, cfg = self.spec, self.config
        # (batch, row, head, col) to (row, col, head, batch)
        order = [0, 2, 1] if const_expr(spec.varlen) else [1, 3, 2, 0]
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, order)) for x in operands[:4]]
        tasks, number = self.tasks(q, k, sequences, scalars)
        capped = const_expr(spec.softcap)
        g = Globals(
            q=tk.gl.load(tk.packed(q, spec.pack), self.tiles.q), k=tk.gl.load(k, self.tiles.k, cfg.cluster),
            v=tk.gl.load(tk.ragged(v) if spec.varlen else v, self.tiles.v, cfg.cluster),
            o=self.output(o),
            lse=self.packed_lse(operands.lse) if const_expr(operands.lse is not None) else None, sinks=operands.sinks,
            tasks=tasks, schedule=tk.Schedule(number, cfg.schedule, cfg.cluster, counter),
            left=scalars.left if const_expr(spec.left) else None,
            right=scalars.right if const_expr(spec.right) else None,
            scale=(scalars.softcap if capped else scalars.scale) * tk.LOG2E,
            cap=scalars.scale / scalars.softcap if capped else None)
        blocks = tk.blocks_for(cfg.schedule, number, scalars.num_sms, cfg.cluster)
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[tk.WARPGROUP * (cfg.consumers + 1), 1, 1],
                              cluster=[cfg.cluster, 1, 1] if const_expr(cfg.cluster > 1) else None, stream=stream,
                              min_blocks_per_mp=1)

    def output(self, o):
        """o as the consumers write it."""
        if self.config.o_from_registers:
            return tk.packed(o, self.spec.pack)
        return tk.gl.store(tk.packed(tk.ragged_store(o) if self.spec.varlen else o, self.spec.pack), self.tiles.o)

    def packed_lse(self, lse):
        """lse ([batch,] head, row) with ``pack`` heads' rows between each other, as a tile has them."""
        pack = self.spec.pack
        if pack == 1:
            return lse
        *batch, heads, rows = lse.shape
        *outer, head, row = lse.stride
        return cute.make_tensor(lse.iterator, cute.make_layout(
            (*batch, heads // pack, (pack, rows)), stride=(*outer, head * pack, (head, row))))

    def tasks(self, q, k, sequences, scalars):
        """(what knows the tasks, how many there are; of sequences of any length, how many there may be)"""
        spec, cfg = self.spec, self.config
        heads, heads_per_kv = q.shape[2] // spec.pack, q.shape[2] // k.shape[2] // spec.pack
        queries = cfg.tile_rows // spec.pack
        key_bytes = (spec.head_dim + spec.head_dim_v) * self.tiles.k.dtype.width // 8
        if spec.varlen:
            tiles = ceil_div(q.shape[0], queries) + sequences.cu_q.shape[0]
            return Varlen(*sequences, q.shape[0], k.shape[0], heads, heads_per_kv, queries, cfg.kv, key_bytes,
                          cfg.l2_section_mb << 20, spec.longest_first), tiles * heads
        tiles, all_heads = ceil_div(q.shape[0], queries), heads * q.shape[3]
        window, keys = const_expr(spec.left and (spec.causal or spec.right)), cutlass.min(k.shape[0], Int32(1 << 20))
        if window:  # what a tile of rows and its neighbour see; a head's first tiles see fewer keys than the others
            right = cutlass.min(scalars.right, keys) if const_expr(spec.right) else 0
            keys = cutlass.min(keys, cutlass.min(scalars.left, keys) + right + 2 * queries)
        l2_section = heads_in_l2_section(keys * key_bytes, cfg.l2_section_mb << 20, heads_per_kv, all_heads)
        l2_section = even_l2_section(l2_section, heads_per_kv, all_heads)
        return Dense(q.shape[0], k.shape[0], heads, heads_per_kv, tiles, all_heads, l2_section,
                     spec.longest_first or window), tiles * all_heads

    def fake_arguments(self) -> tuple:
        """What it is compiled for: any B, Sq, Sk, H, Hk, any head dims that its tiles hold, and strides that are
        multiples of 16 bytes."""
        spec = self.spec
        B, Sq, Sk, H, Hk = (fake.sym() for _ in range(5))
        D, Dv = (fake.sym(divisibility=8) for _ in range(2))

        def operand(seqlen, heads, cols):
            shape = (seqlen, heads, cols) if spec.varlen else (B, seqlen, heads, cols)
            strides = (*(fake.sym64(divisibility=8) for _ in shape[1:]), 1)
            return fake.tensor(spec.dtype, shape, strides, align=16)

        def ints(n, there):
            return fake.tensor("int32", (n,), align=4) if there else None

        Bp = fake.sym()
        lse = fake.tensor("fp32", (H, Sq) if spec.varlen else (B, H, Sq), align=4) if spec.lse else None
        sinks = fake.tensor(spec.sinks, (H,), align=4 if spec.sinks == "fp32" else 2) if spec.sinks else None
        sequences = Sequences(ints(Bp, True), ints(Bp, True), ints(B, spec.seqused_q), ints(B, spec.seqused_k))
        return (
            Operands(operand(Sq, H, D), operand(Sk, Hk, D), operand(Sk, Hk, Dv), operand(Sq, H, Dv), lse, sinks),
            sequences if spec.varlen else None, ints(1, True),
            Scalars(Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1)))

    # ---- device --------------------------------------------------------------------------------

    def shared(self, al: tk.SharedAllocator) -> Shared:
        cfg, tiles = self.config, self.tiles
        n, releases = cfg.consumers * cfg.q_stages, (4 * cfg.consumers, cfg.cluster)
        q = al.tile(tiles.q, n)
        o = q if cfg.o_reuses_q_smem or cfg.o_from_registers else al.tile(tiles.o, cfg.consumers)
        k = al.tile(tiles.k, cfg.stages)
        v = al.tile(tiles.v, cfg.stages)
        task = al.vector(len(field_names(self.spec)), n, Int32)
        q_full, q_empty = al.semaphores(n), al.semaphores(n)
        k_pipe = al.pipe(cfg.stages, tiles.k.bytes, *releases)
        v_pipe = al.pipe(cfg.stages, tiles.v.bytes, *releases)
        next_task_slot = (al.vector(1, 1, Int32),
                          al.semaphores(2)) if cfg.cluster > 1 and cfg.schedule == "dynamic" else None
        return Shared(q, o, k, v, task, q_full, q_empty, k_pipe, v_pipe, next_task_slot)

    @cute.kernel
    def kernel(self, g: Globals):
        cfg, smem = self.config, self.shared(tk.SharedAllocator())
        n = cfg.consumers * cfg.q_stages

        def initialise():
            smem.k_pipe.init()
            smem.v_pipe.init()
            for i in cutlass.range_constexpr(n):
                tk.init(smem.q_full[i], 1)
                tk.init(smem.q_empty[i], 4)
            if const_expr(smem.next_task_slot is not None):
                for i in cutlass.range_constexpr(2):
                    tk.init(smem.next_task_slot[1][i], 1)

        tk.init_block(initialise, cfg.cluster)
        tk.specialise(lambda: self.producer.run(g, smem), lambda wg: self.consumer.run(g, smem, wg), cfg.consumers,
                      cfg.registers)
        if const_expr(cfg.cluster > 1):
            tk.cluster_sync()  # no block exits while another may still write to its shared memory

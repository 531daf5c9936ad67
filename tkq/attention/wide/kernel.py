"""Flash attention forward for heads of more than 256 columns, of which no warpgroup could hold O."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.operands import Operands, Scalars, Sequences
from tkq.attention.forward.kernel import AttentionForward
from tkq.attention.forward.state import field_names
from tkq.attention.wide.config import GROUPS, PARTS, WideConfig
from tkq.attention.wide.output import Output
from tkq.attention.wide.producer import Producer
from tkq.attention.wide.scores import Scores
from tkq.attention.wide.spec import WideSpec
from tkq.attention.wide.state import Globals, Shared, Tiles, in_slots


class WideForward:
    """o = softmax(scale * q @ k.T) @ v, and the log-sum-exp of each row where it is asked for.

    A task is 64 rows of Q, for each block of a cluster. One warpgroup makes the scores and their softmax, two others
    multiply P by V, each for its half of O's columns. K and V pass by in slots of a ring, in the order in which they
    are multiplied; a cluster's blocks load each slot together.

      producer (warp 0)      task and Q | K(n-1) | K(n-2) V(n-1) | .. | V(0) | next task
      score warpgroup        S = Q K(n-1)' | softmax: P | S = Q K(i)', under it P to shared memory | softmax | .. | norm
      output warpgroups (2)  O += P V(i+1), begun when S = Q K(i)' is nearly done, goes on under its softmax | write O

      pipe      stages   full (arrivals)           empty (arrivals)
      K and V   stages   producer's bytes (1)      the four warps of the one warpgroup that multiplies it, of each block
      Q, task   1        producer's bytes (1)      all consumer warps (12): outputs once they have read the task
      P         1        score warps (4)           output warps (8)
      norm      1        score warps (4)           output warps (8)

    Deadlock-free: whoever waits for a slot waits on slots before it alone, as all take them in the ring's order.
    """

    def __init__(self, spec: WideSpec, config: WideConfig):
        if spec != spec.kernel():
            raise ValueError(f"{type(self).__name__}: {spec} is not a kernel's; that is {spec.kernel()}")
        self.spec, self.config, self.tiles = spec, config, Tiles.of(spec, config)
        self.base = AttentionForward(spec, config)
        self.producer = Producer(spec, config, self.base.producer)
        self.scores, self.output = Scores(spec, config), Output(spec, config)

    @cute.jit
    def __call__(self, operands: Operands, sequences: Optional[Sequences], counter: cute.Tensor, scalars: Scalars,
                 stream: cuda.CUstream):
        """counter: (1,) int32 that is 0. sequences: None unless varlen."""
        spec, cfg = self.spec, self.config
        # (batch, row, head, col) to (row, col, head, batch)
        order = [0, 2, 1] if const_expr(spec.varlen) else [1, 3, 2, 0]
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, order)) for x in operands[:4]]
        tasks, number = self.base.tasks(q, k, sequences, scalars)
        capped = const_expr(spec.softcap)
        g = Globals(
            q=tk.gl.load(tk.packed(q, spec.pack), self.tiles.q), k=tk.gl.load(k, self.tiles.k, cfg.cluster),
            v=tk.gl.load(tk.ragged(v) if spec.varlen else v, self.tiles.v, cfg.cluster), o=tk.packed(o, spec.pack),
            lse=self.base.packed_lse(operands.lse) if const_expr(operands.lse is not None) else None,
            sinks=operands.sinks, tasks=tasks, schedule=tk.Schedule(number, cfg.schedule, cfg.cluster, counter),
            left=scalars.left if const_expr(spec.left) else None,
            right=scalars.right if const_expr(spec.right) else None,
            scale=(scalars.softcap if capped else scalars.scale) * tk.LOG2E,
            cap=scalars.scale / scalars.softcap if capped else None)
        blocks = tk.blocks_for(cfg.schedule, number, scalars.num_sms, cfg.cluster)
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[tk.WARPGROUP * GROUPS, 1, 1],
                              cluster=[cfg.cluster, 1, 1] if const_expr(cfg.cluster > 1) else None, stream=stream,
                              min_blocks_per_mp=1)

    def fake_arguments(self) -> tuple:
        """As of ``AttentionForward``."""
        return self.base.fake_arguments()

    def shared(self, al: tk.SharedAllocator) -> Shared:
        cfg, tiles = self.config, self.tiles
        q = al.tile(tiles.q)
        p = al.tile(tiles.p, cfg.key_parts)
        ring = al.tile(max(tiles.k, tiles.v, key=lambda t: t.bytes), cfg.stages)
        k, v = in_slots(ring, tiles.k), in_slots(ring, tiles.v)
        factors, moved = al.vector(64, 2), al.vector(4, 1, Int32)
        task = al.vector(len(field_names(self.spec)), 1, Int32)
        q_full, q_empty = al.semaphores(1), al.semaphores(1)
        k_pipe = al.pipe(cfg.stages, tiles.k.bytes, 4, cfg.cluster)
        v_pipe = tk.Pipe(k_pipe.full, k_pipe.empty, cfg.stages, tiles.v.bytes, 4, cfg.cluster)
        p_pipe, end_pipe = (al.pipe(1, 0, 4 * PARTS, producers=4) for _ in range(2))
        next_task_slot = (al.vector(1, 1, Int32),
                          al.semaphores(2)) if cfg.cluster > 1 and cfg.schedule == "dynamic" else None
        return Shared(q, q.scratch(tiles.q_part), p, k, v, factors, moved[None, 0], task[None, 0], q_full[0],
                      q_empty[0], k_pipe, v_pipe, p_pipe, end_pipe, next_task_slot)

    @cute.kernel
    def kernel(self, g: Globals):
        cfg, smem = self.config, self.shared(tk.SharedAllocator())

        def initialise():
            for pipe in (smem.k_pipe, smem.p_pipe, smem.end_pipe):
                pipe.init()
            tk.init(smem.q_full, 1)
            tk.init(smem.q_empty, 4 * (1 + PARTS))
            if const_expr(smem.next_task_slot is not None):
                for i in cutlass.range_constexpr(2):
                    tk.init(smem.next_task_slot[1][i], 1)

        tk.init_block(initialise, cfg.cluster)
        few, scores, out = cfg.registers
        tk.assign((tk.Role(lambda _: self.producer.run(g, smem), few, 1, 1),
                   tk.Role(lambda _: self.scores.run(g, smem), scores),
                   tk.Role(lambda part: self.output.run(g, smem, part), out, PARTS)))
        if const_expr(cfg.cluster > 1):
            tk.cluster_sync()  # no block exits while another may still write to its shared memory

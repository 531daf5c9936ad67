"""Attention's backward for heads of more than 256 columns."""
from dataclasses import dataclass
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import BackwardOperands, Gradients, Scalars, Sequences
from tkq.attention.common.sequences import with_batch
from tkq.attention.common.tile_order import even_l2_section, heads_in_l2_section
from tkq.attention.forward.tile_scheduler import Dense, Varlen
from tkq.attention.wide.backward.producer import PassProducer
from tkq.attention.wide.backward.scores import PassScores
from tkq.attention.wide.backward.spec import WideBackwardSpec
from tkq.attention.wide.backward.state import PassGlobals, PassShared, PassTiles, fields_of
from tkq.attention.wide.backward.stats import RowStats
from tkq.attention.wide.config import GROUPS, PARTS
from tkq.attention.wide.output import Output
from tkq.attention.wide.state import in_slots
from tkq.runtime.compile import fake


@dataclass(frozen=True)
class Rows:
    """What the forward's output warpgroups ask of a spec."""

    head_dim: int
    varlen: bool = False
    pack: int = 1


class WideBackward:
    """dq, dk and dv of ``WideForward``, from q, k, v, o, lse and do: a kernel for the rows' statistics, then one a
    gradient. No additions in memory: the same bits in every run."""

    def __init__(self, spec: WideBackwardSpec, configs: tuple):
        self.spec, self.stats = spec, RowStats(spec.width)
        self.passes = [Pass(name, spec, config) for name, config in zip(spec.passes, configs)]

    @cute.jit
    def __call__(self, stats: cute.Tensor, operands: BackwardOperands, gradients: Gradients,
                 sequences: Optional[Sequences], counter: cute.Tensor, scalars: Scalars, stream: cuda.CUstream):
        """stats: (2, B, H, Sq) fp32, of varlen (2, 1, H, total). sequences: None unless varlen. counter: (1,) int32
        that is 0."""
        do, q, k, v, o, lse, dlse = operands
        self.stats.launch(*self.of_rows(do, o, lse, dlse), stats, stream)
        for one in self.passes:
            one.launch(stats, (do, q, k, v, getattr(gradients, one.name)), sequences, counter, scalars, stream)

    def of_rows(self, *tensors):
        """With a batch dimension, of 1 where sequences are packed."""
        return [None if x is None else with_batch(x, self.spec.varlen) for x in tensors]

    def fake_arguments(self) -> tuple:
        """Any B, Sq, Sk, H, Hk, any head dims that the tiles hold, and strides that are multiples of 16 bytes."""
        spec = self.spec
        B, Sq, Sk, H, Hk = (fake.sym() for _ in range(5))
        D = fake.sym(divisibility=8)

        def operand(rows, heads):
            shape = (rows, heads, D) if spec.varlen else (B, rows, heads, D)
            return fake.tensor(spec.dtype, shape, (*(fake.sym64(divisibility=8) for _ in shape[1:]), 1), align=16)

        def of_rows():
            shape = (H, Sq) if spec.varlen else (B, H, Sq)
            return fake.tensor("fp32", shape, tuple(fake.sym64() for _ in shape), align=4)

        def ints(n, there):
            return fake.tensor("int32", (n,), align=4) if there else None

        Bp = fake.sym()
        sequences = Sequences(ints(Bp, True), ints(Bp, True), ints(B, spec.seqused_q), ints(B, spec.seqused_k))
        stats = fake.tensor("fp32", (2, 1 if spec.varlen else B, H, Sq), align=4)
        q, k, v = operand(Sq, H), operand(Sk, Hk), operand(Sk, Hk)
        return (stats, BackwardOperands(operand(Sq, H), q, k, v, operand(Sq, H), of_rows(),
                                        of_rows() if spec.dlse else None),
                Gradients(operand(Sq, H) if spec.dq else None, operand(Sk, Hk), operand(Sk, Hk)),
                sequences if spec.varlen else None, ints(1, True),
                Scalars(Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1)))


class Pass:
    """One gradient, with the roles of ``WideForward``. A task is 64 rows, for each block of a cluster, of queries (dq)
    or of keys.

      score warpgroup        S = Q K' and dP = dO V', or transposed | P or dS | ..
      output warpgroups (2)  dq += dS K, dk += dS' Q, dv += P' dO, each its half of the columns | write
    """

    def __init__(self, name, spec, config):
        self.name, self.spec, self.config, self.tiles = name, spec, config, PassTiles.of(spec, config)
        self.producer = PassProducer(name, spec, config)
        self.scores = PassScores(name, spec, config)
        self.output = Output(Rows(spec.width, spec.varlen), config, fields_of(spec))

    def launch(self, stats, tensors, sequences, counter, scalars, stream):
        """tensors: do, q, k, v and the gradient."""
        spec, cfg, tiles = self.spec, self.config, self.tiles
        order = [0, 2, 1] if spec.varlen else [1, 3, 2, 0]  # to (row, col, head[, batch])
        do, q, k, v, out = [cute.make_tensor(x.iterator, cute.select(x.layout, order)) for x in tensors]
        passing = tk.ragged if spec.varlen else lambda x: x
        stay, columns, values = {"dq": ((q, do), (k, v), k), "dk": ((k, v), (q, do), q),
                                 "dv": ((k,), (q,), do)}[self.name]
        tasks, number = self.tasks(q, k, sequences)
        g = PassGlobals(
            stay=tuple(tk.gl.load(x, tiles.rows) for x in stay),
            columns=tuple(tk.gl.load(passing(x), tiles.column, cfg.cluster) for x in columns),
            values=tk.gl.load(passing(values), tiles.values, cfg.cluster), o=out, stats=stats, tasks=tasks,
            schedule=tk.Schedule(number, cfg.schedule, cfg.cluster, counter), heads=q.shape[2] // k.shape[2],
            left=scalars.left if spec.left else None, right=scalars.right if spec.right else None,
            scale=(scalars.softcap if spec.softcap else scalars.scale) * tk.LOG2E,
            cap=scalars.scale / scalars.softcap if spec.softcap else None,
            factor=Float32(1.0) if self.name == "dv" else scalars.scale)
        blocks = tk.blocks_for(cfg.schedule, number, scalars.num_sms, cfg.cluster)
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[tk.WARPGROUP * GROUPS, 1, 1],
                              cluster=[cfg.cluster, 1, 1] if cfg.cluster > 1 else None, stream=stream,
                              min_blocks_per_mp=1)

    def tasks(self, q, k, sequences):
        """(what knows the tasks, how many there are; of sequences of any length, how many there may be)"""
        spec, by_rows, rows = self.spec, self.name == "dq", self.config.tile_rows
        mine, others = (q, k) if by_rows else (k, q)
        shared, bytes_of_row = q.shape[2] // k.shape[2] if by_rows else 1, 4 * spec.width
        longest_first = spec.right and not spec.left
        if spec.varlen:
            (cu_q, cu_k), used = sequences[:2], sequences[2:]
            cu, used = ((cu_q, cu_k), used) if by_rows else ((cu_k, cu_q), used[::-1])
            tiles = ceil_div(mine.shape[0], rows) + cu_q.shape[0]
            return Varlen(*cu, *used, mine.shape[0], others.shape[0], mine.shape[2], shared, rows, self.config.kv,
                          bytes_of_row, self.config.l2_section_mb << 20, longest_first), tiles * mine.shape[2]
        tiles, all_heads = ceil_div(mine.shape[0], rows), mine.shape[2] * mine.shape[3]
        bytes = cutlass.min(others.shape[0], Int32(1 << 18)) * bytes_of_row
        section = heads_in_l2_section(bytes, self.config.l2_section_mb << 20, shared, all_heads)
        return Dense(mine.shape[0], others.shape[0], mine.shape[2], shared, tiles, all_heads,
                     even_l2_section(section, shared, all_heads), longest_first), tiles * all_heads

    def shared(self, al: tk.SharedAllocator) -> PassShared:
        cfg, tiles = self.config, self.tiles
        stay = tuple(al.tile(tiles.rows) for _ in range(cfg.products))
        x = al.tile(tiles.x, cfg.key_parts)
        ring = al.tile(max(tiles.column, tiles.values, key=lambda t: t.bytes), cfg.stages)
        factors, moved = al.vector(64, 2), al.vector(4, 1, Int32)
        task = al.vector(len(fields_of(self.spec)), 1, Int32)
        q_full, q_empty = al.semaphores(1), al.semaphores(1)
        k_pipe = al.pipe(cfg.stages, tiles.column.bytes, 4, cfg.cluster)
        v_pipe = tk.Pipe(k_pipe.full, k_pipe.empty, cfg.stages, tiles.values.bytes, 4, cfg.cluster)
        p_pipe, end_pipe = (al.pipe(1, 0, 4 * PARTS, producers=4) for _ in range(2))
        next_task_slot = (al.vector(1, 1, Int32),
                          al.semaphores(2)) if cfg.cluster > 1 and cfg.schedule == "dynamic" else None
        return PassShared(stay, tuple(s.scratch(tiles.part) for s in stay), x, in_slots(ring, tiles.column),
                          in_slots(ring, tiles.values), factors, moved[None, 0], task[None, 0], q_full[0], q_empty[0],
                          k_pipe, v_pipe, p_pipe, end_pipe, next_task_slot)

    @cute.kernel
    def kernel(self, g: PassGlobals):
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
            tk.cluster_sync()

"""Attention with a score function and a mask of the user's own, forward."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import Operands
from tkq.attention.common.operands import Scalars as AttentionScalars
from tkq.attention.flex.fakes import captured, ints
from tkq.attention.flex.operands import BlockLists, Captured, FlexScalars
from tkq.attention.flex.roles import FlexConsumer, FlexProducer
from tkq.attention.flex.scheduler import FlexSchedulerWarp, FlexTask
from tkq.attention.flex.spec import FlexSpec
from tkq.attention.flex.state import FlexGlobals, KeyTiles
from tkq.attention.forward.config import AttentionConfig
from tkq.attention.forward.kernel import AttentionForward
from tkq.runtime.compile import fake


class FlexForward:
    """o = softmax(score(scale * q @ k.T) where the mask holds) @ v, and the log-sum-exp of each row.

    Roles and pipes are ``AttentionForward``'s, of which this kernel is made. Three parts differ: a task's key tiles
    come from the block lists (``KeyTiles``), those that need the mask first; a scheduler warp beside the producer looks
    the next task up in them (``FlexSchedulerWarp``); and between Q @ K.T and the exponentials the functions' graphs are
    evaluated, element by element in registers (``FlexSoftmax``)."""

    def __init__(self, spec: FlexSpec, config: AttentionConfig):
        self.spec, self.config = spec, config
        self.base = AttentionForward(spec.attention, config)
        self.producer, self.consumer = FlexProducer(spec, config), FlexConsumer(spec, config)
        self.scheduler = FlexSchedulerWarp(spec, config)

    @cute.jit
    def __call__(self, operands: Operands, lists: Optional[BlockLists], score: Optional[Captured],
                 mask: Optional[Captured], counter: cute.Tensor, scalars: FlexScalars, stream: cuda.CUstream):
        """counter: (1,) int32 that is 0. score, mask: what the functions' graphs take, None where that is nothing."""
        spec, cfg, tiles = self.spec, self.config, self.base.tiles
        # (batch, row, head, col) to (row, col, head, batch)
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in operands[:4]]
        tasks, number = self.base.tasks(q, k, None, AttentionScalars(
            scalars.scale, Float32(0.0), Int32(0), Int32(0), scalars.num_sms))
        scored = const_expr(spec.score is not None)
        g = FlexGlobals(
            q=tk.gl.load(q, tiles.q), k=tk.gl.load(k, tiles.k), v=tk.gl.load(v, tiles.v), o=self.base.output(o),
            lse=operands.lse, sinks=None, tasks=tasks, schedule=tk.Schedule(number, cfg.schedule, 1, counter),
            scale=Float32(tk.LOG2E) if scored else scalars.scale * tk.LOG2E, score_scale=scalars.scale,
            keys=KeyTiles(lists, spec.mask is not None, spec.full, spec.q_per, spec.kv_per,
                          ceil_div(k.shape[0], cfg.kv)), score=score, mask=mask)
        blocks = tk.blocks_for(cfg.schedule, number, scalars.num_sms, 1)
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[tk.WARPGROUP * (cfg.consumers + 1), 1, 1], stream=stream,
                              min_blocks_per_mp=1)

    def fake_arguments(self) -> tuple:
        """What it is compiled for: any B, Sq, Sk, H, Hk, any head dims that its tiles hold, and strides that are
        multiples of 16 bytes."""
        spec = self.spec
        B, Sq, Sk, H, Hk, R = (fake.sym() for _ in range(6))

        D, Dv = (fake.sym(divisibility=8) for _ in range(2))

        def operand(seqlen, heads, cols):
            strides = (*(fake.sym64(divisibility=8) for _ in range(3)), 1)
            return fake.tensor(spec.dtype, (B, seqlen, heads, cols), strides, align=16)

        lists = None
        if spec.blocks:
            full = (ints(B, H, R), ints(B, H, R, fake.sym())) if spec.full else (None, None)
            lists = BlockLists(ints(B, H, R), ints(B, H, R, fake.sym()), *full)
        lse = fake.tensor("fp32", (B, H, Sq), align=4) if spec.lse else None
        return (Operands(operand(Sq, H, D), operand(Sk, Hk, D), operand(Sk, Hk, Dv), operand(Sq, H, Dv), lse), lists,
                captured(spec.score), captured(spec.mask), fake.tensor("int32", (1,), align=4),
                FlexScalars(Float32(1.0), Int32(1)))

    @cute.kernel
    def kernel(self, g: FlexGlobals):
        cfg, allocator = self.config, tk.SharedAllocator()
        smem, numbers = self.base.shared(allocator), allocator.vector(1, cfg.stages, Int32)
        mail = allocator.mailbox(len(FlexTask._fields), 1, 1)
        n = cfg.consumers * cfg.q_stages

        def initialise():
            smem.k_pipe.init()
            smem.v_pipe.init()
            mail.init()
            for i in cutlass.range_constexpr(n):
                tk.init(smem.q_full[i], 1)
                tk.init(smem.q_empty[i], 4)

        tk.init_block(initialise, 1)
        tk.specialise(lambda: self.first_warps(g, smem, numbers, mail),
                      lambda wg: self.consumer.run(g, smem, numbers, wg), cfg.consumers, cfg.registers, 2)

    @cute.jit
    def first_warps(self, g: FlexGlobals, smem, numbers, mail):
        if tk.warp_id() == 0:
            self.producer.run(g, smem, numbers, mail)
        else:
            self.scheduler.run(g, mail)

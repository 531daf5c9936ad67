"""Flash attention forward of float8 q, k and v (e4m3) on the tile layer."""
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.operands import Scalars, Sequences
from tkq.attention.forward.kernel import AttentionForward
from tkq.attention.fp8.config import ONES, Fp8Config
from tkq.attention.fp8.consumer import Consumer
from tkq.attention.fp8.producer import Producer
from tkq.attention.fp8.spec import Fp8Spec
from tkq.attention.fp8.state import Globals, Shared, Tiles, field_names
from tkq.runtime.compile import fake

ONE = 0x38  # in e4m3


class Operands(NamedTuple):
    """k (B, Sk, Hk, D); v (B, Hk, D, Sk or more), transposed, in the order of ``tkq.attention.fp8.transpose``; o (B,
    Sq, H, D); lse (B, H, Sq) fp32 or None; q_descale, k_descale, v_descale (B, Hk) fp32 or None; sequences: None unless
    varlen. varlen: q, o (total, H, D), k (total, Hk, D), v (Hk, D, whole tiles) of ``tkq.attention.fp8.packed``, lse
    (H, total)."""

    k: Any
    v: Any
    o: Any
    lse: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    sequences: Any = None


class Fp8Forward:
    """o = softmax(scale * q_descale * k_descale * q @ k.T) @ v * v_descale, and the log-sum-exp of each row where it
    is asked for: of q, k and v in e4m3, with P rounded to e4m3.

    A task is 64 rows of Q for each consumer warpgroup of a block; its K and V pass by in blocks, the last ones first.
    Producer, pipes and ping-pong are those of ``AttentionForward``, with these differences:

      V      is transposed in memory: products of 8 bits need both operands contiguous along the sum. Its keys lie in
             the order in which a thread has the columns of S, so that S becomes P without an exchange.
      P      has its largest value near 2 ** 8 (``Fp8Softmax``)
      P V    two_level: each block's product begins at zero and is then added to O in float32, as the tensor cores keep
             fewer bits of a sum than float32 has; fast: they add it to O

      overlap      S = Q K(i)' and P V(i+1) issued together | softmax of S | O += P V(i+1)
      no overlap   O += P V(i+1), part by part | S = Q K(i)' in the same registers | softmax of S
    """

    def __init__(self, spec: Fp8Spec, config: Fp8Config):
        if spec != spec.kernel():
            raise ValueError(f"{type(self).__name__}: {spec} is not a kernel's; that is {spec.kernel()}")
        self.spec, self.config, self.tiles = spec, config, Tiles.of(spec, config)
        self.base = AttentionForward(spec, config)
        self.producer, self.consumer = Producer(spec, config), Consumer(spec, config)

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, q: cute.Tensor, operands: Operands, counter: cute.Tensor, scalars: Scalars,
                 stream: cuda.CUstream):
        """counter: (1,) int32 that is 0."""
        spec, cfg, x = self.spec, self.config, operands
        # ([batch,] row, head, col), of v ([batch,] head, col, row), to (row, col, head[, batch]) and (col, row, head
        # [, batch])
        order, of_v = ([0, 2, 1], [1, 2, 0]) if const_expr(spec.varlen) else ([1, 3, 2, 0], [2, 3, 1, 0])
        q, k, o = [cute.make_tensor(t.iterator, cute.select(t.layout, order)) for t in (q, x.k, x.o)]
        v = cute.make_tensor(x.v.iterator, cute.select(x.v.layout, of_v))
        tasks, number = self.base.tasks(q, k, x.sequences, scalars)
        g = Globals(
            q=tk.gl.load(q, self.tiles.q), k=tk.gl.load(k, self.tiles.k), v=tk.gl.load(v, self.tiles.v), o=o,
            lse=x.lse, q_descale=x.q_descale, k_descale=x.k_descale, v_descale=x.v_descale, tasks=tasks,
            schedule=tk.Schedule(number, cfg.schedule, 1, counter),
            left=scalars.left if const_expr(spec.left) else None,
            right=scalars.right if const_expr(spec.right) else None, scale=scalars.scale * tk.LOG2E)
        blocks = tk.blocks_for(cfg.schedule, number, scalars.num_sms)
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[tk.WARPGROUP * (cfg.consumers + 1), 1, 1], stream=stream,
                              min_blocks_per_mp=1)

    def fake_arguments(self) -> tuple:
        """What it is compiled for: any B, Sq, Sk, H, Hk, any head_dim that its tiles hold, and strides that are
        multiples of 16 bytes."""
        spec = self.spec
        B, Sq, Sk, H, Hk = (fake.sym() for _ in range(5))
        D, keys = fake.sym(divisibility=32), fake.sym(divisibility=16)

        def operand(dtype, shape, unit):
            shape = shape[1:] if spec.varlen else shape
            return fake.tensor(dtype, shape, (*(fake.sym64(divisibility=unit) for _ in shape[1:]), 1), align=16)

        def ints(n, there=True):
            return fake.tensor("int32", (n,), align=4) if there else None

        def descale(name):
            strides = fake.sym64(), fake.sym64()
            return fake.tensor("fp32", (B, Hk), strides, align=4) if name in spec.descales else None

        Bp = fake.sym()
        sequences = Sequences(ints(Bp), ints(Bp), ints(B, spec.seqused_q), ints(B, spec.seqused_k))
        lse = fake.tensor("fp32", (H, Sq) if spec.varlen else (B, H, Sq), align=4) if spec.lse else None
        return (operand("e4m3", (B, Sq, H, D), 16), Operands(
            operand("e4m3", (B, Sk, Hk, D), 16), operand("e4m3", (B, Hk, D, keys), 16),
            operand(spec.out, (B, Sq, H, D), 8), lse, *(descale(name) for name in "qkv"),
            sequences if spec.varlen else None), ints(1),
            Scalars(Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1)))

    # ---- device --------------------------------------------------------------------------------

    def shared(self, al: tk.SharedAllocator) -> Shared:
        cfg, tiles = self.config, self.tiles
        n, releases = cfg.consumers * cfg.q_stages, 4 * cfg.consumers
        q, k, v = al.tile(tiles.q, n), al.tile(tiles.k, cfg.stages), al.tile(tiles.v, cfg.stages)
        task = al.vector(len(field_names(self.spec)), n, Int32)
        q_full, q_empty = al.semaphores(n), al.semaphores(n)
        k_pipe = al.pipe(cfg.stages, tiles.k.bytes, releases)
        v_pipe = al.pipe(cfg.stages, tiles.v.bytes, releases)
        ones = al.tile(tk.st(ONES, cfg.kv, tiles.v.dtype)) if cfg.row_sum == "mma" else None
        return Shared(q, k, v, ones, task, q_full, q_empty, k_pipe, v_pipe)

    @cute.jit
    def write_ones(self, smem):
        """By all threads, before the block begins."""
        words = ONES * self.config.kv // 4
        at = cute.make_tensor(cute.recast_ptr(smem.ones.staged.iterator, dtype=Int32), cute.make_layout(words))
        thread, threads = cute.arch.thread_idx()[0], tk.WARPGROUP * (self.config.consumers + 1)
        for i in cutlass.range_constexpr(-(-words // threads)):
            if thread + i * threads < words:
                at[thread + i * threads] = Int32(ONE * 0x01010101)
        tk.publish()

    @cute.kernel
    def kernel(self, g: Globals):
        cfg, smem = self.config, self.shared(tk.SharedAllocator())
        if const_expr(cfg.row_sum == "mma"):
            self.write_ones(smem)

        def initialise():
            smem.k_pipe.init()
            smem.v_pipe.init()
            for i in cutlass.range_constexpr(cfg.consumers * cfg.q_stages):
                tk.init(smem.q_full[i], 1)
                tk.init(smem.q_empty[i], 4)

        tk.init_block(initialise)
        tk.specialise(lambda: self.producer.run(g, smem), lambda wg: self.consumer.run(g, smem, wg), cfg.consumers,
                      cfg.registers)

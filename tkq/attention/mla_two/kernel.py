"""Absorbed MLA over a latent cache: one launch for all sequences, and one that merges what several blocks share."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode.plan import ROWS
from tkq.attention.mla.spec import HEAD_DIM, HEAD_DIM_V
from tkq.attention.mla_two.combine import Combine
from tkq.attention.mla_two.producer import Producer
from tkq.attention.mla_two.scores import Scores
from tkq.attention.mla_two.state import HALF, ROPE, Globals, Operands, Scalars, Shared, Tiles
from tkq.attention.mla_two.values import Values
from tkq.runtime.compile import fake


class MlaTwo:
    """o = softmax(scale * q @ k.T) @ k[:, :512] over the keys of each sequence, and the log-sum-exp.

    All heads of all queries are packed rows: row r is query r // heads of head r % heads; a task has 64 of them. A
    block takes a part of the plan's work (stream-K), as `decode.kernel` does. A tile of 64 keys is read once: as keys
    by all columns, as values by the first 512, in two halves.

      producer (4 warps)    pages of block i + 1 | left(i) | rope(i) right(i) by cp.async | ..
      scores                S = Q left(i)' | O(i - 1) done | S += Q rope(i)', Q right(i)' | softmax | P(i) | O += P left(i)
      values                                                                              | P(i) | O += P right(i)

      pipe    full (arrivals)                                      empty (arrivals)
      left    every producer thread's copies, and each warp (132)  warps of scores (4)
      right   the same                                             warps of values (4)
      P       warps of scores (4)                                  right's: P lies in the rope part of its block
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.producer = Producer(spec, config)
        self.scores, self.values = Scores(spec, config), Values(spec, config)
        self.combine = Combine(spec, config)
        self.dtype = tk.element_type(spec.dtype)

    def fake_arguments(self):
        """Any sizes but the head dims; strides of q, the cache and o are multiples of 16 bytes."""
        spec = self.spec
        B, Sq, H, pages, page, slots, rows = (fake.sym() for _ in range(7))

        def four(*shape, unit=8):
            return fake.tensor(spec.dtype, shape, (*(fake.sym64(divisibility=unit) for _ in range(3)), 1), align=16)

        ints = lambda *shape: fake.tensor("int32", shape, (*(fake.sym64() for _ in shape[1:]), 1), align=4)
        return four(B, Sq, H, HEAD_DIM), Operands(
            four(pages, page, 1, HEAD_DIM), ints(B, fake.sym()), ints(B), ints(fake.sym()),
            four(B, Sq, H, HEAD_DIM_V), fake.tensor("fp32", (B, H, Sq), align=4) if spec.lse else None,
            fake.tensor("fp32", (slots, rows, HEAD_DIM_V), align=16), fake.tensor("fp32", (slots, rows), align=4),
        ), Scalars(Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(1))

    @cute.jit
    def __call__(self, q: cute.Tensor, operands: Operands, scalars: Scalars, stream: cuda.CUstream):
        x, sc = operands, scalars
        B, Sq, H, _ = q.shape
        page = x.k.shape[1]
        g = Globals(
            q=q, k=x.k, table=x.table, seqlens=x.seqlens, plan=x.plan, o=x.o, lse=x.lse, partial=x.partial,
            partial_lse=x.partial_lse, scale=sc.scale * tk.LOG2E, left=Int32(-1), right=sc.right, split=sc.split,
            batch=Int32(B), heads_kv=Int32(1), group=Int32(H), queries=Int32(Sq),
            tiles=Int32((Sq * H + ROWS * sc.together - 1) // (ROWS * sc.together)), together=sc.together,
            page_size=Int32(page),
            capacity=Int32(page * x.table.shape[1]), key_block=self.config.keys)
        self.kernel(g).launch(grid=[sc.parts, sc.together, 1], block=[3 * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=self.config.pdl)
        self.combine.launch(g, sc.parts, stream)

    def tiles(self, al: tk.SharedAllocator, rows, stages) -> Tiles:
        return Tiles(*(al.tile(tk.st(rows, columns, self.dtype), stages) for columns in (HALF, HALF, ROPE)))

    def shared(self, al: tk.SharedAllocator) -> Shared:
        cfg = self.config
        pipe = lambda: al.pipe(cfg.stages, 0, 4, producers=4, copies=tk.WARPGROUP)
        return Shared(self.tiles(al, ROWS, 1), self.tiles(al, cfg.keys, cfg.stages), al.vector(4, cfg.stages, Int32),
                      al.vector(4, cfg.stages, Int32), al.vector(ROWS, cfg.stages), al.vector(ROWS, 1), pipe(), pipe(),
                      al.semaphores(cfg.stages), al.semaphores(cfg.stages))

    @cute.kernel
    def kernel(self, g: Globals):
        smem = self.shared(tk.SharedAllocator())

        def initialise():
            smem.left_pipe.init()
            smem.right_pipe.init()
            for stage in range(self.config.stages):
                tk.init(smem.p_full[stage], 4)
                tk.init(smem.s_full[stage], 4)

        tk.init_block(initialise)
        if const_expr(self.config.pdl):  # up to here nothing was read or written that another kernel has to do with
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        few, many, others = self.config.registers
        tk.assign((tk.Role(lambda i: self.producer.run(g, smem), few), tk.Role(lambda i: self.scores.run(g, smem), many),
                   tk.Role(lambda i: self.values.run(g, smem), others)))

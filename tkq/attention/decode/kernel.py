"""Attention of a few queries over a cache of keys and values: one launch, the last block to arrive merges."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode.consumer import Consumer
from tkq.attention.decode.direct.warps import Direct, DirectShared
from tkq.attention.decode.plan import ROWS, padded
from tkq.attention.decode.producer import Producer
from tkq.attention.decode.state import Globals, Operands, Scalars, Shared
from tkq.attention.decode.widening import WideningProducer
from tkq.runtime.compile import fake


class Decode:
    """o = softmax(scale * q @ k.T) @ v over the keys of each sequence, and the log-sum-exp.

    All query heads of a K/V head, of all queries, are the rows of one tile: row r is query r // group of head r %
    group. A block takes a part of the plan's work (stream-K): the end of a task, some whole ones, the beginning of
    another. Of a task that several blocks share each writes what it found and its log-sum-exp; the last one to arrive
    merges them all, in the order of the keys: the same bits in every run. Of a shared prefix, whose tiles are full of
    rows and few, `MergeState` does that instead, on all SMs.

      producer (4 warps)    pages of block i + 1 | K(i) V(i) by cp.async | ..
      consumer warpgroup    S = Q K(i)' | under O += P V(i-1): softmax of S | ..

      pipe   full (arrivals)                                     empty (arrivals)
      K, V   every producer thread's copies, and each warp (132) the consumer's warps (4)
             of float8 each warp (4)

    A float8 cache is widened to fp16 by the producers, and all products are of fp16: q is scaled to it row by row. Of
    few queries (``spec.few``) there are neither producers nor a consumer: `Direct`.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.direct = self.producer = self.consumer = None
        if spec.few:
            self.direct = Direct(spec, config)
        else:
            self.producer = (WideningProducer if spec.cache else Producer)(spec, config)
            self.consumer = Consumer(spec, config)
        self.dtype = tk.element_type(spec.inner)

    def fake_arguments(self):
        """Any sizes but the head dims; strides of the caches are multiples of 16 bytes."""
        spec = self.spec
        B, Sq, H, Hk, D, Dv = *(fake.sym() for _ in range(4)), spec.head_dim, spec.head_dim_v
        place = 1 if spec.ragged else B

        def four(*shape, unit=8, dtype=spec.dtype):
            return fake.tensor(dtype, shape, (*(fake.sym64(divisibility=unit) for _ in range(3)), 1), align=16)

        ints = lambda *shape: fake.tensor("int32", shape, (*(fake.sym64() for _ in shape[1:]), 1), align=4)
        pages, page, slots, rows = (fake.sym() for _ in range(4))
        cache = dict(unit=16, dtype=spec.cache) if spec.cache else {}
        return four(place, Sq, H, D), Operands(
            four(pages, page, Hk, D, **cache), four(pages, page, Hk, Dv, **cache),
            ints(B, fake.sym()) if spec.paged else None, ints(B), ints(fake.sym()), four(place, Sq, H, Dv),
            fake.tensor("fp32", (place, H, Sq), align=4) if spec.lse else None,
            fake.tensor(spec.sinks, (H,), align=tk.element_type(spec.sinks).width // 8) if spec.sinks else None,
            fake.tensor("fp32", (slots, rows, Dv), align=16), fake.tensor("fp32", (slots, rows), align=4),
            *self.fake_scales({None: None, "head": (Hk,), "sequence": (B, Hk), "token": (pages, page, Hk)}[
                spec.scales]), ints(fake.sym()) if spec.ragged else None,
            fake.tensor("int64", (B, Sq), (fake.sym64(), fake.sym64()), align=8) if spec.tree else None,
        ), Scalars(Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(0), Int32(1), Int32(1), Int32(1))

    def fake_scales(self, shape):
        """Of K and of V, of any strides."""
        return [shape and fake.tensor("fp32", shape, tuple(fake.sym64() for _ in shape), align=4) for _ in range(2)]

    @cute.jit
    def __call__(self, q: cute.Tensor, operands: Operands, scalars: Scalars, stream: cuda.CUstream):
        spec, x, sc = self.spec, operands, scalars
        B, Sq, H, _ = q.shape
        Hk = x.k.shape[2]
        group = H // Hk
        page = x.k.shape[1]
        queries = sc.queries if const_expr(spec.ragged) else Int32(Sq)
        g = Globals(
            q=q, k=x.k, v=x.v, table=x.table, seqlens=x.seqlens, plan=x.plan, o=x.o, lse=x.lse, sinks=x.sinks,
            partial=x.partial, partial_lse=x.partial_lse, k_descale=x.k_descale, v_descale=x.v_descale,
            cu=x.cu, tree=x.tree,
            scale=(sc.softcap if const_expr(spec.softcap) else sc.scale) * tk.LOG2E,
            cap=sc.scale / sc.softcap if const_expr(spec.softcap) else None,
            left=sc.left, right=sc.right, split=sc.split, batch=sc.batch if const_expr(spec.ragged) else Int32(B),
            heads_kv=Int32(Hk), group=Int32(group), queries=queries,
            tiles=Int32((queries * group + ROWS - 1) // ROWS), page_size=Int32(page),
            capacity=Int32(page * x.table.shape[1]) if const_expr(spec.paged) else Int32(page),
            key_block=self.config.keys)
        threads = 32 * self.config.warps if const_expr(spec.few) else 2 * tk.WARPGROUP
        self.kernel(g).launch(grid=[sc.parts, 1, 1], block=[threads, 1, 1], stream=stream,
                              min_blocks_per_mp=self.config.blocks,
                              # So much of the SM's shared memory that the blocks fit: known without a device.
                              preferred_smem_carveout=self.carveout() if const_expr(self.config.blocks > 1) else None,
                              use_pdl=self.config.pdl)

    def carveout(self):
        """Per cent of 228 KB. The rest is L1, which holds the loads in flight of the `direct` form."""
        return 50 if self.spec.few else 100

    def shared(self, al: tk.SharedAllocator) -> Shared | DirectShared:
        if self.direct:
            return self.direct.shared(al)
        spec, cfg = self.spec, self.config
        k = tk.st(cfg.keys, padded(spec.head_dim), self.dtype)
        v = tk.st(cfg.keys, padded(spec.head_dim_v), self.dtype)
        pipe = lambda: al.pipe(cfg.stages, 0, 4, producers=4, copies=0 if spec.cache else tk.WARPGROUP)
        q = None if cfg.q_in_registers else al.tile(tk.st(ROWS, padded(spec.head_dim), self.dtype))
        scales = al.vector(2 * cfg.keys + 4, cfg.stages) if spec.scales == "token" else None
        return Shared(q, al.tile(k, cfg.stages), al.tile(v, cfg.stages), al.vector(4, cfg.stages, Int32),
                      al.vector(4, cfg.stages, Int32), al.vector(1, 1, Int32), pipe(), pipe(), scales)

    @cute.kernel
    def kernel(self, g: Globals):
        smem = self.shared(tk.SharedAllocator())

        def initialise():
            smem.k_pipe.init()
            smem.v_pipe.init()

        if const_expr(self.direct is None):
            tk.init_block(initialise)
        if const_expr(self.config.pdl):  # up to here nothing was read or written that another kernel has to do with
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        if const_expr(self.direct is not None):
            self.direct.run(g, smem)
        else:
            self.specialised(g, smem)

    def specialised(self, g, smem):
        tk.specialise(lambda: self.producer.run(g, smem), lambda wg: self.consumer.run(g, smem), 1,
                      self.config.registers, producer_warps=4)

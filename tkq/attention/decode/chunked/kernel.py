"""Chunked prefill: attention of many queries of each sequence over a cache, by the forward's consumers."""
from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div
from tkq.attention.decode import words
from tkq.attention.decode.chunked.plan import PANEL
from tkq.attention.decode.chunked.producer import PagedProducer
from tkq.attention.decode.chunked.softmax import AHEAD, PagedSoftmax
from tkq.attention.decode.chunked.state import Operands, Results, Scalars, Shared, Sizes
from tkq.attention.decode.chunked.tasks import Tasks
from tkq.attention.decode.output import Output
from tkq.attention.decode.plan import ROWS, key_block
from tkq.attention.decode.spec import DecodeSpec
from tkq.attention.forward.consumer import Consumer
from tkq.attention.forward.kernel import AttentionForward
from tkq.attention.forward.state import Globals, Tiles
from tkq.runtime.compile import fake


class ChunkedPrefill:
    """As `AttentionForward`, of keys and values that lie in pages, or in rows of their own, with the lengths and the
    plan of decoding. Chosen for many queries, see `plan.many_queries`.

      producer (1 to 4      pages of block n - 2 | word and boxes of K(n-1) | task and Q | K(n-2) V(n-1) | .. | V(0)
      warps)
      consumer warpgroups   as the forward's

    Of the plan the lengths count, of ragged queries the list of tiles, and its first counter, from which tasks are
    fetched: how keys are divided among SMs does not."""

    def __init__(self, spec, cache, config):
        if config.overlap_tasks or config.cluster > 1:
            raise ValueError(f"ChunkedPrefill: {config}: no overlap_tasks, no cluster")
        self.spec, self.cache, self.config = spec, cache, config
        tiles = Tiles.of(spec, config)
        tiles = replace(tiles, **{name: replace(getattr(tiles, name), row_groups=cache.row_groups) for name in "kv"})
        self.forward = AttentionForward(spec, config, tiles)  # whose shared memory and results' form it has
        self.producer = PagedProducer(spec, cache, config)
        self.consumer = Consumer(spec, config, PagedSoftmax(spec, cache, config))
        self.output = Output(DecodeSpec(spec.dtype, spec.head_dim, spec.head_dim_v, lse=spec.lse))  # its refusal

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Any sizes but the head dims; strides are multiples of 16 bytes."""
        spec = self.spec
        B, Sq, H, Hk, D, Dv = *(fake.sym() for _ in range(4)), spec.head_dim, spec.head_dim_v
        place = 1 if self.cache.ragged else B
        four = lambda *shape: fake.tensor(spec.dtype, shape, (*(fake.sym64(divisibility=8) for _ in range(3)), 1),
                                          align=16)
        ints = lambda *shape: fake.tensor("int32", shape, (*(fake.sym64() for _ in shape[1:]), 1), align=4)
        pages, page = fake.sym(), fake.sym()
        return four(place, Sq, H, D), Operands(
            four(pages, page, Hk, D), four(pages, page, Hk, Dv), ints(B, fake.sym()) if self.cache.paged else None,
            ints(B), ints(fake.sym()), four(place, Sq, H, Dv),
            fake.tensor("fp32", (place, H, Sq), align=4) if spec.lse else None,
            fake.tensor(spec.sinks, (H,), align=tk.element_type(spec.sinks).width // 8) if spec.sinks else None,
            ints(fake.sym()) if self.cache.ragged else None,
        ), Scalars(Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(1), Int32(1))

    @cute.jit
    def __call__(self, q: cute.Tensor, operands: Operands, scalars: Scalars, stream: cuda.CUstream):
        spec, cfg, x, sc = self.spec, self.config, operands, scalars
        rows, cols = self.rows(q), self.rows(x.o)
        k, v = self.by_rows(x.k), self.by_rows(x.v)
        sizes = self.sizes(q, x, sc)
        batch = sizes.batch
        number = batch * sizes.heads * sizes.tiles
        tiles = self.forward.tiles
        tasks = Tasks(x.seqlens, x.table, x.cu, Results(x.o, x.lse, x.plan), sizes,
                      (spec.head_dim + spec.head_dim_v) * tiles.k.dtype.width // 8, cfg.l2_section_mb << 20,
                      spec.longest_first)
        counter = cute.make_tensor(x.plan.iterator + words.counters(batch), cute.make_layout(1))
        capped = const_expr(spec.softcap)
        g = Globals(
            q=tk.gl.load(tk.packed(rows, spec.pack), tiles.q), k=self.boxes(k, tiles.k), v=self.boxes(v, tiles.v),
            o=self.forward.output(cols), lse=self.lse(x.lse) if const_expr(x.lse is not None) else None, sinks=x.sinks,
            tasks=tasks, schedule=tk.Schedule(number, cfg.schedule, cfg.cluster, counter),
            left=sc.left if const_expr(spec.left) else None, right=sc.right if const_expr(spec.right) else None,
            scale=(sc.softcap if capped else sc.scale) * tk.LOG2E, cap=sc.scale / sc.softcap if capped else None)
        self.kernel(g).launch(grid=[tk.blocks_for(cfg.schedule, number, sc.num_sms), 1, 1],
                              block=[tk.WARPGROUP * (cfg.consumers + 1), 1, 1], stream=stream, min_blocks_per_mp=1)

    def boxes(self, x, tile):
        """What a copy brings of x (row, col, head, page), of a tile."""
        if self.cache.row_groups:
            return tk.gl.load(tk.row_groups(x, PANEL), replace(tile, rows=self.cache.box))
        return tk.gl.load(x, tk.st(self.cache.box, PANEL, tile.dtype))

    def by_rows(self, x):
        """(row, col, head, page) of pages."""
        return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))

    def rows(self, x):
        """(row, col, head) of x (B, Sq, H, D), whose sequences lie one behind the other."""
        (batch, rows, heads, cols), (_, row, head, _) = x.shape, x.stride
        return cute.make_tensor(x.iterator, cute.make_layout((batch * rows, cols, heads), stride=(row, 1, head)))

    def lse(self, lse):
        """(head, row), as rows of tiles are packed."""
        (batch, heads, rows), (place, head, row) = lse.shape, lse.stride
        if self.cache.ragged:
            flat = cute.make_layout((heads, rows), stride=(head, row))
        else:
            flat = cute.make_layout((heads, (rows, batch)), stride=(head, (row, place)))
        return self.forward.packed_lse(cute.make_tensor(lse.iterator, flat))

    def sizes(self, q, x, sc) -> Sizes:
        ragged, queries = self.cache.ragged, self.config.tile_rows // self.spec.pack
        (batch, rows, heads, _), heads_kv, page = q.shape, x.k.shape[2], x.k.shape[1]
        group, of_table = heads // heads_kv, x.table.shape[1] if self.cache.paged else 1
        planned = Int32(queries) if ragged else Int32(rows)
        return Sizes(
            batch=sc.batch if ragged else Int32(batch), rows=Int32(rows),
            tiles=Int32(1) if ragged else Int32(ceil_div(rows, queries)), heads=Int32(heads // self.spec.pack),
            heads_per_kv=Int32(group // self.spec.pack), heads_kv=Int32(heads_kv), group=Int32(group), planned=planned,
            planned_tiles=Int32(ceil_div(planned * group, ROWS)), parts=sc.parts, page=Int32(page),
            pages=Int32(x.k.shape[0]), capacity=Int32(page * of_table), left=sc.left,
            key_block=key_block(self.spec.head_dim, self.spec.head_dim_v), groups=self.groups(x.k))

    def groups(self, k):
        """Of 8 rows, from a page of k (page, row, head, col) to the next."""
        return tk.groups_apart(self.by_rows(k)) if self.cache.row_groups else None

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        cfg, al = self.config, tk.SharedAllocator()
        x = self.forward.shared(al)
        smem = Shared(x.q, x.o, x.k, x.v, x.task, x.q_full, x.q_empty, x.k_pipe, x.v_pipe, x.next_task_slot,
                      al.vector(1, cfg.stages + AHEAD, Int32), al.vector(1, 2, Int32))

        def initialise():
            smem.k_pipe.init()
            smem.v_pipe.init()
            for i in cutlass.range_constexpr(cfg.consumers * cfg.q_stages):
                tk.init(smem.q_full[i], 1)
                tk.init(smem.q_empty[i], 4)

        tk.init_block(initialise)
        tk.specialise(lambda: self.producer.run(g, smem), lambda wg: self.consume(g, smem, wg), cfg.consumers,
                      cfg.registers, self.producer.warps)

    @cute.jit
    def consume(self, g, smem, wg):
        self.consumer.run(g, smem, wg)
        if g.tasks.matches():
            pass
        elif wg == 0:
            self.output.refuse(g.tasks.results)

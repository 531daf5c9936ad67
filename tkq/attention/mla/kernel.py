"""Absorbed MLA over a latent cache: one launch for all sequences, and one that merges what several blocks share."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode.plan import ROWS
from tkq.attention.mla.bulk_producer import BulkProducer
from tkq.attention.mla.combine import Combine
from tkq.attention.mla.float8 import SCALE_BYTES
from tkq.attention.mla.float8_producer import Float8Producer
from tkq.attention.mla.producer import Producer
from tkq.attention.mla.scores import Scores
from tkq.attention.mla.spec import HEAD_DIM, HEAD_DIM_V, ROW_BYTES
from tkq.attention.mla.state import AHEAD, FIELDS, HALF, Globals, Operands, Scalars, Shared
from tkq.attention.mla.values import Values
from tkq.runtime.compile import fake

DEEP, PAIR = 3, 2  # tiles of the left half, of which the scores are ahead, and of all else


class Mla:
    """o = softmax(scale * q @ k.T) @ k[:, :512] over the keys of each sequence, and the log-sum-exp.

    All heads of all queries are packed rows: row r is query r // heads of head r % heads; a tile has 64 of them.
    Queries that have a list of keys each are sequences of one query, and the list is a table of pages of one row. A
    block takes a part of the plan's work, as `decode.kernel` does; blocks beside each other take the same
    part for different tiles, so that all but one find the keys in L2. A tile of 64 keys is read once: as keys by all
    columns, as values by the first 512, in two halves.

      producer (4 warps; 1 with TMA)
                            announce a segment | left(i) rope(i) right(i) by cp.async, pages of block i + 1 | ..
      scores                S = Q K(i)' | softmax | P(i)       | S = Q K(i + 1)'   | softmax
      right half of values                        | O += P(i) right(i)             |
      left half of values                         | (waits for S of i + 1)         | O += P(i) left(i)

    Pages of whole tiles of 64 come by TMA from one warp, and where all blocks beside each other have a tile of queries
    two of them form a cluster, of which each loads half of a tile's rows for both. Float8 rows are widened by the
    producer warps, see `mla.float8_producer`.

    The tensor cores have work at all times: one half lies beside the next scores, the other one under their softmax.

      pipe     stages  full (arrivals)                                      empty (arrivals)
      left     3       every producer thread's copies, each warp (132);     warps of the left half (4 x cluster)
                       TMA: bytes (1); of float8 rows: each warp (4)
      right    2       the same                                             warps of the right half (4 x cluster)
      rope     2       the same; of float8 rows, with the right half        warps of scores (4 x cluster)
      P        2       warps of scores (4), with the factors of O's rows    warps of both halves (8)
      segment  4       the first producer warp (1)                          all consumer warps (12)
      scored   2       warps of scores (4): scores have been read           none
    """

    def __init__(self, spec, config):
        self.spec, self.config, self.dtype = spec, config, tk.element_type(spec.dtype)
        many = BulkProducer if config.multicast else Producer
        self.producer = (Float8Producer if spec.float8 else many)(spec, config)
        self.scores, self.combine = Scores(spec, config), Combine(spec, config)
        self.left, self.right = Values(spec, config, True), Values(spec, config, False)

    def fake_arguments(self):
        """Any sizes but the head dims; strides of q, the cache and o are multiples of 16 bytes."""
        spec = self.spec
        B, Sq, H, pages, page, slots, rows, keys = (fake.sym() for _ in range(8))

        def four(*shape, unit=8):
            return fake.tensor(spec.dtype, shape, (*(fake.sym64(divisibility=unit) for _ in range(3)), 1), align=16)

        ints = lambda *shape: fake.tensor("int32", shape, (*(fake.sym64() for _ in shape[1:]), 1), align=4)
        cache = four(pages, page, 1, HEAD_DIM)
        if spec.float8:
            strides = *(fake.sym64(divisibility=16) for _ in range(3)), 1
            cache = fake.tensor("uint8", (pages, page, 1, ROW_BYTES), strides, align=16)
        lengths = ints(B)
        if spec.sparse:
            n = spec.lengths
            lengths = fake.tensor("int32", (B, Sq)[:n], [fake.sym64() for _ in range(n)], align=4) if n else None
        return four(B, Sq, H, HEAD_DIM), Operands(
            cache, ints(B, Sq, keys) if spec.sparse else ints(B, keys), lengths,
            ints(fake.sym()),
            four(B, Sq, H, HEAD_DIM_V), fake.tensor("fp32", (B, H, Sq), align=4) if spec.lse else None,
            fake.tensor("fp32", (slots, rows, HEAD_DIM_V), align=16), fake.tensor("fp32", (slots, rows), align=4),
        ), Scalars(Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(1))

    @cute.jit
    def __call__(self, q: cute.Tensor, operands: Operands, scalars: Scalars, stream: cuda.CUstream):
        x, sc = operands, scalars
        B, Sq, H, _ = q.shape
        page, rows = x.k.shape[1], ROWS * sc.together
        sequences, queries, room = B, Sq, page * x.table.shape[1]
        if const_expr(self.spec.sparse):
            sequences, queries, room = B * Sq, 1, x.table.shape[2]
        g = Globals(
            q=q, k=x.k, table=x.table, seqlens=x.seqlens, plan=x.plan, o=x.o, lse=x.lse, partial=x.partial,
            partial_lse=x.partial_lse, scale=sc.scale * tk.LOG2E, left=Int32(-1), right=sc.right, split=sc.split,
            batch=Int32(sequences), heads_kv=Int32(1), group=Int32(H), queries=Int32(queries),
            tiles=Int32((queries * H + rows - 1) // rows), together=sc.together, page_size=Int32(page),
            capacity=Int32(room), latent=self.descriptor(x.k), key_block=self.config.keys,
            rows_per_page=cute.fast_divmod_create_divisor_v2(page) if self.spec.float8 else None)
        self.kernel(g).launch(grid=[sc.parts, sc.together, 1], block=[4 * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=self.config.pdl,
                              cluster=[1, 2, 1] if const_expr(self.config.cluster == 2) else None)
        self.combine.launch(g, sc.parts, stream)

    def descriptor(self, k):
        """Of pages of rows, for TMA."""
        if not self.config.multicast:
            return None
        pages, page, _, columns = k.shape
        rows = cute.make_tensor(k.iterator, cute.make_layout((page, columns, pages),
                                                             stride=(k.stride[1], 1, k.stride[0])))
        return tk.gl.load(rows, tk.st(ROWS, 64, self.dtype), self.config.multicast)

    def shared(self, al: tk.SharedAllocator) -> Shared:
        keys, many, float8 = self.config.keys, self.config.multicast, self.spec.float8
        pipe = lambda stages, tile, copies=tk.WARPGROUP: al.pipe(stages, tile.type.bytes, 4, many) if many else al.pipe(
            stages, 0, 4, producers=4, copies=copies)
        ring = lambda columns, stages, rows=keys: al.tile(tk.st(rows, columns, self.dtype), stages)
        left, right, rope, p = ring(HALF, DEEP), ring(HALF, PAIR), ring(64, PAIR), ring(keys, PAIR, ROWS)
        q_rope, last, whole = ring(64, 1, ROWS), ring(HALF // 2, 1, ROWS), tk.st(ROWS, HALF, self.dtype)
        # A tile of 256 columns of which the last 128 are there: what lies in front of them is never read.
        q = tk.SharedTile(cute.make_tensor(last.staged.iterator - ROWS * (HALF // 2), whole.layout(1).outer), whole)
        scales = al.vector(ROWS * SCALE_BYTES // 4, PAIR) if float8 else None
        addresses = al.vector(2 * ROWS, 1, Int32) if float8 else None
        copies = 0 if float8 else tk.WARPGROUP
        return Shared(q, q_rope, left, right, rope, p, al.vector(4, DEEP, Int32), al.vector(4, DEEP, Int32),
                      al.vector(4, AHEAD, Int32), al.vector(ROWS, PAIR), al.vector(ROWS, 1),
                      al.vector(FIELDS, AHEAD, Int32), pipe(DEEP, left, copies), pipe(PAIR, right, copies),
                      None if float8 else pipe(PAIR, rope), al.pipe(PAIR, 0, 8, producers=4), al.pipe(AHEAD, 0, 12),
                      al.semaphores(PAIR), scales, addresses)

    @cute.kernel
    def kernel(self, g: Globals):
        smem = self.shared(tk.SharedAllocator())

        def initialise():
            for pipe in (smem.left_pipe, smem.right_pipe, smem.rope_pipe, smem.p_pipe, smem.segment_pipe):
                if const_expr(pipe is not None):
                    pipe.init()
            for stage in range(PAIR):
                tk.init(smem.scored[stage], 4)

        if const_expr(self.config.multicast > 0):
            if tk.warp_id() == 0:
                tk.prefetch(g.latent)
        tk.init_block(initialise, self.config.cluster)
        if const_expr(self.config.pdl):  # up to here nothing was read or written that another kernel has to do with
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()  # which may read the plan
        few, scores, values = self.config.registers
        tk.assign((tk.Role(lambda i: self.producer.run(g, smem), few, warps=1 if self.config.multicast else 4),
                   tk.Role(lambda i: self.scores.run(g, smem), scores),
                   tk.Role(lambda i: self.left.run(g, smem), values),
                   tk.Role(lambda i: self.right.run(g, smem), values)))
        if const_expr(self.config.cluster == 2):  # the other block may still copy to this one
            tk.cluster_sync()

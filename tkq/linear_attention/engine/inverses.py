"""The inverses of all chunks' triangular matrices at once: none needs another's, nor a state."""
from dataclasses import dataclass
from typing import Any, Optional

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.delta import Delta
from tkq.linear_attention.engine.fields import Task
from tkq.linear_attention.engine.gates import Gate
from tkq.linear_attention.engine.packed import Sequences, any_strides
from tkq.linear_attention.spec import LinearSpec
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

BARRIER, BLOCKS = 1, 4  # a block's named barrier; blocks of an SM, as registers allow


@dataclass(frozen=True)
class Globals:
    k: tk.gl
    kept: tk.gl
    g: Optional[cute.Tensor]
    beta: cute.Tensor
    scale: Float32
    tokens: Int32
    heads_per_k: Int32


@dataclass(frozen=True)
class Shared:
    k: tk.SharedTile
    gate: Any
    delta: Any
    tokens: tk.Pipe


class Inverses:
    """(I + M)^-1 of each chunk, as `Delta` has it, where what follows are launches that are given it: a block, of one
    warpgroup, has a chunk of a head, and an SM four blocks, which wait for one another's memory and barriers.

    k: (B, S, H, K). g: None, (HO,) or (B, S, HO) fp32. beta: (B, S, HO). inverse: (B, S, HO, 64), of k's dtype."""

    def __init__(self, spec: LinearSpec):
        """spec: with delta, gates, K and dtypes of the launches that follow; not reversed, with inverse "out"."""
        self.spec, self.gate, dtype = spec, Gate(spec), element_type(spec.dtype)
        self.k_tile, self.tile = tk.st(CHUNK, spec.head_dim, dtype), tk.st(CHUNK, CHUNK, dtype)
        self.delta, self.sequences = Delta(spec, self.tile, BARRIER, True, "out"), Sequences(spec)

    def fake_arguments(self):
        """Compiled for any B, S and heads, and strides of k that are multiples of 16 bytes."""
        spec, (B, S, H, HO) = self.spec, (fake.sym() for _ in range(4))
        strides = [fake.sym64(divisibility=8) for _ in range(3)]
        g = {"none": None, "head": fake.tensor("fp32", (HO,), align=4), "token": any_strides("fp32", (B, S, HO))}
        return (fake.tensor(spec.dtype, (B, S, H, spec.head_dim), (*strides, 1)),
                (g[spec.gate], any_strides(spec.delta, (B, S, HO)), fake.tensor(spec.dtype, (B, S, HO, CHUNK))))

    @cute.jit
    def __call__(self, k: cute.Tensor, others: Any, stream: cuda.CUstream):
        """others: g, beta and the inverse."""
        gates, beta, inverse = others
        B, S, HO, _ = inverse.shape
        at = self.sequences
        g = Globals(at.loads(at.rows(k), self.k_tile), at.stores(at.rows(inverse), self.tile), gates, beta,
                    Float32(1.0), Int32(S), HO // k.shape[2])
        self.kernel(g, Int32(HO)).launch(grid=[cute.ceil_div(S, CHUNK) * HO, B, 1], block=[tk.WARPGROUP, 1, 1],
                                         stream=stream, min_blocks_per_mp=BLOCKS, preferred_smem_carveout=100)

    @cute.kernel
    def kernel(self, g: Globals, heads: Int32):
        al = tk.SharedAllocator()
        s = Shared(al.tile(self.k_tile, 1), self.gate.shared(al), self.delta.shared(al),
                   al.pipe(1, self.k_tile.bytes, 4))
        tk.init_block(lambda: [s.tokens.init()])
        block, batch, _ = cute.arch.block_idx()
        chunk, head = block // heads, block % heads
        t = Task(batch, batch, head, head // g.heads_per_k, head, Int32(0), Int32(1), None)
        self.chunk(g, s, t, chunk)

    @cute.jit
    def chunk(self, g, s, t, chunk):
        ring, first, x = s.tokens.ring(), tk.warp_id() == 0, tk.rt_fl(CHUNK)
        if first:
            tk.load_async(s.k[0], g.k, (t.batch, t.head_k, chunk, 0), s.tokens.acquire(ring))
        gates, mine = self.gate.begin(g, t, chunk), self.delta.begin(g, t, chunk)
        s.tokens.wait(ring)
        self.delta.products(x, s.k[0])
        self.gate.factors(g, t, chunk, (s.gate, 0), gates)
        self.delta.factors(g, s.delta, mine, self.gate.sums_of(s.gate), 0)
        tk.sync(BARRIER, tk.WARPGROUP)
        between = self.gate.between(s.gate, gates, 0)
        tk.mma_wait(0)
        self.delta.put(s.delta, x, mine, between, 0)
        self.delta.invert(s.delta, x, mine, 0)
        tk.publish()
        tk.sync(BARRIER, tk.WARPGROUP)
        if first:
            tk.store_async(g.kept, s.delta.inverse[0], (t.batch, t.head, chunk, 0))
            tk.store_wait()

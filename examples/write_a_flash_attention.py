"""Flash attention, forward, written on tkq.tile in under 100 lines, and called from PyTorch.
Run it: with a Hopper GPU it is checked against PyTorch and timed beside tkq.flash_attn; without, compiled for it, nothing
timed.
"""
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr

import tkq
import tkq.tile as tk
from tkq import runtime
from tkq.runtime import arch, counters, fake
from tkq.testing import sass, timing


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: tk.gl
    schedule: tk.Schedule
    tiles: Int32  # of 128 rows, in a sequence
    rows: Int32
    heads: Int32
    heads_per_kv: Int32
    scale: Float32  # of the scores, times log2(e)


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile  # two, one for each consumer; o likewise
    o: tk.SharedTile
    k: tk.SharedTile  # rings of two tiles
    v: tk.SharedTile
    q_pipe: tk.Pipe
    k_pipe: tk.Pipe
    v_pipe: tk.Pipe
    mail: tk.Mailbox


@dataclass(frozen=True)
class Registers:
    s: tk.RegTile  # scores, then exponentials, of 64 rows and 128 keys
    p: tk.RegTile  # the exponentials in bf16
    o: tk.RegTile
    max: tk.RowVec
    norm: tk.RowVec  # the sum of the exponentials
    correct: tk.RowVec
    max_scaled: tk.RowVec


class FlashAttention:
    """A task is 128 rows of Q of one head: 64 for each of two consumer warpgroups. K and V pass by in tiles of 128
    keys, the last one first: it alone needs a mask.

      producer (warp 0)      K(n) Q | K(n-1) V(n) | K(n-2) V(n-1) | .. | V(0), the next task's number
      consumers (2)          S = Q K(n)', mask, softmax | S = Q K(i-1)' and O += P V(i), softmax of S under P V | ..
                             | O += P V(0), write O

    Each pipe: full[stage] has 1 arrival, the producer's, with the bytes; empty[stage] 8, one a consumer warp. The
    consumers take turns to issue their products, so that one's softmax runs under the other's."""

    stages, turns = 2, True
    qo, kv = tk.st(64, 128), tk.st(128, 128)

    def __init__(self, causal):
        self.causal = causal

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, scale: Float32,
                 counter: cute.Tensor, processors: Int32, stream: cuda.CUstream):
        # (batch, row, head, col) to (row, col, head, batch)
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in (q, k, v, o)]
        tiles = cute.ceil_div(q.shape[0], 128)
        tasks = tiles * q.shape[2] * q.shape[3]
        g = Globals(tk.gl.load(q, self.qo), tk.gl.load(k, self.kv), tk.gl.load(v, self.kv), tk.gl.store(o, self.qo),
                    tk.Schedule(tasks, "dynamic", counter=counter), tiles, q.shape[0], q.shape[2],
                    q.shape[2] // k.shape[2], scale * tk.LOG2E)
        self.kernel(g).launch(grid=[tk.blocks_for("dynamic", tasks, processors), 1, 1], block=[384, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, g: Globals):
        al, n = tk.SharedAllocator(), self.stages
        s = Shared(al.tile(self.qo, 2), al.tile(self.qo, 2), al.tile(self.kv, n), al.tile(self.kv, n),
                   al.pipe(1, 2 * self.qo.bytes, 8), al.pipe(n, self.kv.bytes, 8), al.pipe(n, self.kv.bytes, 8),
                   al.mailbox(1, 2, 8))
        tk.init_block(lambda: [x.init() for x in (s.q_pipe, s.k_pipe, s.v_pipe, s.mail)])
        tk.specialise(lambda: self.producer(g, s), lambda wg: self.consumer(g, s, wg), 2)

    def task(self, g, number):
        """(batch and head, tile, key blocks) of a task. The last rows, which see the most keys, come first."""
        head, tile = number // g.tiles, g.tiles - 1 - number % g.tiles
        return (head // g.heads, head % g.heads), tile, tile + 1 if self.causal else g.tiles

    @cute.jit
    def producer(self, g, s):
        q, k, v, post = s.q_pipe.ring(), s.k_pipe.ring(), s.v_pipe.ring(), s.mail.ring()
        number = g.schedule.first()
        while number < g.schedule.tasks:
            (batch, head), tile, blocks = self.task(g, number)
            of = batch, head // g.heads_per_kv
            self.load(s.k, g.k, s.k_pipe, k, (*of, blocks - 1, 0))
            sem = s.q_pipe.acquire(q)
            for w in cutlass.range_constexpr(2):
                tk.load_async(s.q[w], g.q, (batch, head, tile * 2 + w, 0), sem)
            q.advance()
            for i in cutlass.range(1, blocks, unroll=1):
                self.load(s.k, g.k, s.k_pipe, k, (*of, blocks - 1 - i, 0))
                self.load(s.v, g.v, s.v_pipe, v, (*of, blocks - i, 0))
            fetched = g.schedule.fetch()
            self.load(s.v, g.v, s.v_pipe, v, (*of, 0, 0))
            number = g.schedule.following(number, fetched)
            s.mail.post(post, number)

    def load(self, dst, src, pipe, ring, at):
        tk.load_async(dst[ring.stage], src, at, pipe.acquire(ring))
        ring.advance()

    @cute.jit
    def consumer(self, g, s, wg):
        c = Registers(tk.rt_fl(128), tk.rt_bf(128), tk.rt_fl(128), tk.rv(), tk.rv(), tk.rv(), tk.rv())
        q, k, v, take = s.q_pipe.ring(), s.k_pipe.ring(), s.v_pipe.ring(), s.mail.ring()
        turns = tk.Turns(2, wg, self.turns)
        turns.start()
        number = g.schedule.first()
        while number < g.schedule.tasks:
            of, tile, blocks = self.task(g, number)
            tk.zero(c.o)
            tk.zero(c.norm)
            tk.neg_infty(c.max)
            s.q_pipe.wait(q)
            s.k_pipe.wait(k)
            tk.mm_ABt(c.s, s.q[wg], s.k[k.stage])
            tk.mma_wait()
            self.release(s.k_pipe, k)
            if const_expr(self.causal):
                tk.right_fill(c.s, wg * 64 + 1, -Float32.inf, diagonal=True)
            else:
                tk.right_fill(c.s, g.rows - (blocks - 1) * 128, -Float32.inf)
            self.softmax(g, c)
            tk.copy(c.p, c.s)
            for _ in cutlass.range(1, blocks, unroll=1):
                s.k_pipe.wait(k)
                turns.take()
                tk.mm_ABt(c.s, s.q[wg], s.k[k.stage])
                s.v_pipe.wait(v)
                tk.mma_AB(c.o, c.p, s.v[v.stage])
                turns.give()
                tk.mma_wait(1)  # for S; P @ V, of the block before, goes on
                self.release(s.k_pipe, k)
                self.softmax(g, c)
                tk.mma_wait(0)
                self.release(s.v_pipe, v)
                tk.copy(c.p, c.s)
                tk.mul_row(c.o, c.o, c.correct)
            self.release(s.q_pipe, q)
            s.v_pipe.wait(v)
            tk.mma_AB(c.o, c.p, s.v[v.stage])
            tk.quad_sum(c.norm)
            tk.mma_wait(0)
            self.release(s.v_pipe, v)
            tk.div_row(c.o, c.o, c.norm)
            self.write(g, s, c, wg, (*of, tile * 2 + wg, 0))
            number = s.mail.take(take)[0]
        tk.store_wait()

    def release(self, pipe, ring):
        pipe.release(ring)
        ring.advance()

    def softmax(self, g, c):
        """s becomes exp2(scale * (s - max)); max and norm move on, and ``correct`` is what O so far is owed."""
        tk.copy(c.correct, c.max)
        tk.row_max(c.max, c.s, c.max)
        tk.sub(c.correct, c.correct, c.max)
        tk.mul(c.correct, c.correct, g.scale)
        tk.exp2(c.correct, c.correct)
        tk.mul(c.max_scaled, c.max, g.scale)
        tk.mul(c.s, c.s, g.scale)  # one instruction with the next line
        tk.sub_row(c.s, c.s, c.max_scaled)
        tk.exp2(c.s, c.s)
        tk.mul(c.norm, c.norm, c.correct)
        tk.row_sum_partial(c.norm, c.s, c.norm)

    @cute.jit
    def write(self, g, s, c, wg, at):
        tk.store_wait()  # the task before has left the tile
        tk.sync(8 + wg, tk.WARPGROUP)
        tk.store(s.o[wg], c.o)
        tk.publish()
        tk.sync(8 + wg, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(g.o, s.o[wg], at)


def build(causal):
    B, S, H, Hk = (fake.sym() for _ in range(4))
    q, k, v, o = (fake.tensor("bf16", (B, S, heads, 128)) for heads in (H, Hk, Hk, H))
    return FlashAttention(causal), (q, k, v, o, Float32(1.0), fake.tensor("int32", (1,), align=4), 1)


RECIPES = {causal: runtime.Recipe("write_a_flash_attention:build", (causal,)) for causal in (False, True)}


def flash_attention(q, k, v, causal=False):
    """(B, S, H, 128), twice (B, S, H / n, 128) bf16 to (B, S, H, 128)."""
    o = torch.empty_like(q)
    kernel = runtime.function(RECIPES[causal])
    kernel(q, k, v, o, q.shape[-1]**-0.5, counters.counter(q.get_device()), arch.processors(q.device))
    return o

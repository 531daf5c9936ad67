"""Flash attention, forward, on tkq.tile: a class and a call of under 100 lines, without comments.
Run it: with a Hopper GPU it is checked against PyTorch and timed with tkq.flash_attn; without one it is only compiled.
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
class Stream:
    """Tiles that the producer loads and the consumers take in the same order; ``at`` is this thread's ring position."""

    source: tk.gl
    tiles: tk.SharedTile
    pipe: tk.Pipe
    at: tk.Ring

    def load(self, *coord):
        tk.load_async(self.tiles[self.at.stage], self.source, coord, self.pipe.acquire(self.at))
        self.at.advance()

    def wait(self):
        self.pipe.wait(self.at)
        return self.tiles[self.at.stage]

    def release(self):
        self.pipe.release(self.at)
        self.at.advance()


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: cute.Tensor
    schedule: tk.Schedule
    scale: Float32  # of the scores, times log2(e)

    def task(self, number, causal):
        """(batch, head, tile of rows, number of key tiles). Heads are grouped so that 16 MB of K and V, less than L2,
        are live at once. In a group the last rows come first: in a causal problem they see the most keys."""
        rows, _, heads, batches = self.o.shape
        tiles = cute.ceil_div(rows, 128)
        together = cutlass.max(256 // tiles, 1)
        first = number // (together * tiles) * together
        width, within = cutlass.min(together, heads * batches - first), number - first * tiles
        head, tile = first + within % width, tiles - 1 - within // width
        return head // heads, head % heads, tile, tile + 1 if causal else tiles


@dataclass(frozen=True)
class Registers:
    s: tk.RegTile  # scores of 64 rows and 128 keys, then their exponentials
    p: tk.RegTile  # the exponentials in bf16
    o: tk.RegTile
    max: tk.RowVec  # subtracted from a row's scores times scale
    sum: tk.RowVec
    correct: tk.RowVec  # factor that rescales o and sum when max changes


def exceeds(threshold, s, max, scale):
    """Does some score of the warp, times scale, exceed its row's max by more than threshold? The maximum includes 0, as
    non-negative floats compare like integers, and one instruction finds the largest of three integers."""
    found = cutlass.Boolean(False)
    for r in range(2):  # this thread's rows
        scores = [s.rows_view[r, j].bitcast(Int32) for j in range(s.cols // 4)]
        top = [Int32(0), Int32(0)]  # two chains
        for i in range(0, len(scores), 2):
            top[i // 2 % 2] = cutlass.max(cutlass.max(top[i // 2 % 2], scores[i]), scores[i + 1])
        found = found | (cutlass.max(*top).bitcast(Float32) * scale - max.tensor[r] > threshold)
    return cute.arch.vote_any_sync(found)


class FlashAttention:
    """One task is 128 rows of Q of one head, 64 for each of two consumer warpgroups. K and V pass by in tiles of 128
    keys, the last one first: that one alone needs a mask.

      producer (warp 0)    the task, K(n) Q | K(n-1) V(n) | K(n-2) V(n-1) | .. | V(0), the next task's number
      consumers (2)        S = Q K(n)', mask, softmax | S = Q K(i-1)' and O += P V(i), softmax of S under P V | ..
                           | O += P V(0), O / sum to global memory

    Pipes of q, k, v: full[stage] 1 arrival, the producer's, with the bytes; empty[stage] 8, one of each consumer warp.
    Ping-pong: the consumers take turns at issuing wgmma, so that one's softmax overlaps the other's GEMMs."""

    tile, stages, turns = tk.st(128, 128), (2, 2, 3), True

    def __init__(self, causal):
        self.causal = causal

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, scale: Float32,
                 counter: cute.Tensor, num_sms: Int32, stream: cuda.CUstream):
        # (batch, row, head, col) to (row, col, head, batch)
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in (q, k, v, o)]
        tasks = cute.ceil_div(q.shape[0], 128) * q.shape[2] * q.shape[3]
        g = Globals(*[tk.gl.load(x, self.tile) for x in (q, k, v)], o,
                    tk.Schedule(tasks, "dynamic", counter=counter), scale * tk.LOG2E)
        self.kernel(g).launch(grid=[tk.blocks_for("dynamic", tasks, num_sms), 1, 1], block=[384, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, g: Globals):
        al = tk.SharedAllocator()
        tiles = [al.tile(self.tile, n) for n in self.stages]
        pipes = [al.pipe(n, self.tile.bytes, 8) for n in self.stages]
        qkv = [Stream(*x, x[-1].ring()) for x in zip((g.q, g.k, g.v), tiles, pipes)]
        mail = al.mailbox(4, 2, 8)
        tk.init_block(lambda: [x.init() for x in (*pipes, mail)])
        tk.specialise(lambda: self.producer(g, mail, *qkv), lambda wg: self.consumer(g, mail, wg, *qkv), 2)

    @cute.jit
    def producer(self, g, mail, q, k, v):
        post, number = mail.ring(), g.schedule.first()
        while number < g.schedule.tasks:
            batch, head, tile, blocks = g.task(number, self.causal)
            mail.post(post, batch, head, tile, blocks)
            head_k = head // (g.q.tensor.shape[2] // g.k.tensor.shape[2])
            k.load(batch, head_k, blocks - 1, 0)
            q.load(batch, head, tile, 0)
            for i in cutlass.range(1, blocks, unroll=1):
                k.load(batch, head_k, blocks - 1 - i, 0)
                v.load(batch, head_k, blocks - i, 0)
            fetched = g.schedule.fetch()
            v.load(batch, head_k, 0, 0)
            number = g.schedule.following(number, fetched)
        mail.post(post, 0, 0, 0, 0)  # end of the tasks

    @cute.jit
    def consumer(self, g, mail, wg, q, k, v):
        c = Registers(tk.rt_fl(128), tk.rt_bf(128), tk.rt_fl(128), tk.rv(), tk.rv(), tk.rv())
        take, turns = mail.ring(), tk.PingPong(2, wg, self.turns)
        turns.start()
        batch, head, tile, blocks = mail.take(take)
        while blocks > 0:
            tk.zero(c.o)
            tk.zero(c.sum)
            tk.neg_infty(c.max)
            q_tile = q.wait()
            tk.mm_ABt(c.s, q_tile, k.wait(), a_part=wg)
            tk.mma_wait(0)
            k.release()
            end = wg * 64 + 1 if const_expr(self.causal) else g.o.shape[0] - (blocks - 1) * 128
            tk.right_fill(c.s, end, -Float32.inf, diagonal=self.causal)
            self.softmax(g, c)
            tk.copy(c.p, c.s)
            for _ in cutlass.range(1, blocks, unroll=1):
                k_tile = k.wait()
                turns.take()
                tk.mm_ABt(c.s, q_tile, k_tile, a_part=wg)
                tk.mma_AB(c.o, c.p, v.wait())
                turns.give()
                tk.mma_wait(1)  # for S; O of the previous keys overlaps the softmax
                k.release()
                moved = self.softmax(g, c)
                tk.mma_wait(0)
                v.release()
                tk.copy(c.p, c.s)
                if moved:
                    tk.mul_row(c.o, c.o, c.correct)
            q.release()
            tk.mma_AB(c.o, c.p, v.wait())
            tk.quad_sum(c.sum)
            tk.mma_wait(0)
            v.release()
            tk.div_row(c.o, c.o, c.sum)
            tk.store_narrow(g.o[None, None, head, batch], c.o, tile * 128 + wg * 64, g.o.shape[0])
            batch, head, tile, blocks = mail.take(take)

    @cute.jit
    def softmax(self, g, c):
        """s becomes exp2(scale * s - max), and sum accumulates. max cancels out in the end, so it changes only if an
        exponential of the warp would exceed 2^8. Returns whether it changed, and so o has to be rescaled."""
        moved = exceeds(8, c.s, c.max, g.scale)
        if moved:
            tk.copy(c.correct, c.max)
            tk.row_max(c.max, c.s)
            tk.mul(c.max, c.max, g.scale)
            tk.apply(c.max, cute.arch.fmax, c.max, c.correct)
            tk.sub(c.correct, c.correct, c.max)
            tk.exp2(c.correct, c.correct)
            tk.mul(c.sum, c.sum, c.correct)
        tk.mul(c.s, c.s, g.scale)  # one FMA together with the next line
        tk.sub_row(c.s, c.s, c.max)
        tk.exp2(c.s, c.s)
        tk.row_sum_partial(c.sum, c.s, c.sum)
        return moved


def build(causal):
    B, S, H, Hk = (fake.sym() for _ in range(4))
    q, k, v, o = (fake.tensor("bf16", (B, S, heads, 128)) for heads in (H, Hk, Hk, H))
    return FlashAttention(causal), (q, k, v, o, Float32(1.0), fake.tensor("int32", (1,), align=4), 1)


RECIPES = {causal: runtime.Recipe("write_a_flash_attention:build", (causal,)) for causal in (False, True)}


def flash_attention(q, k, v, causal=False):
    """o = softmax(q @ k.T / sqrt(128)) @ v. q, o: (B, S, H, 128) bf16; k, v: (B, S, Hk, 128), Hk a divisor of H."""
    o = torch.empty_like(q)
    kernel, counter = runtime.function(RECIPES[causal]), counters.counter(q.get_device())
    kernel(q, k, v, o, 128**-0.5, counter, arch.num_sms(q.device))
    return o


def check(S, causal):
    """Against float32: at most twice PyTorch's own error in bf16, and 2^-9. Four query heads share a head of keys."""
    q, k, v = [torch.randn(2, S, heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2)]
    theirs, exact = [torch.nn.functional.scaled_dot_product_attention(
        *[x.transpose(1, 2).to(dtype) for x in (q, k, v)], is_causal=causal, enable_gqa=True).transpose(1, 2).float()
        for dtype in (torch.bfloat16, torch.float32)]
    error, peer = [(o.float() - exact).abs().max().item() for o in (flash_attention(q, k, v, causal), theirs)]
    assert error <= 2 * peer + 2**-9, f"S {S}, causal {causal}: error {error}, PyTorch's is {peer}"
    return error


def main():
    if not torch.cuda.is_available():  # the causal one has all the code of the other
        print(sass.shown("flash attention, causal", RECIPES[True]))
        print("No GPU: compiled for sm_90a, nothing run or timed.")
        return
    for causal in (False, True):
        error = max(check(S, causal) for S in (1, 200, 1024))
        make = lambda i: [torch.randn(4, 4096, 16, 128, device="cuda").bfloat16() for _ in range(3)]
        both = timing.compare({"this": lambda q, k, v, c=causal: flash_attention(q, k, v, c),
                               "tkq.flash_attn": lambda q, k, v, c=causal: tkq.flash_attn(q, k, v, causal=c)}, make)
        print(f"causal {causal}: error {error:.1e},", *[f"{t.name} {t.median_ms:.3f} ms," for t in both.timings],
              f"{timing.ratio(both['this'], both['tkq.flash_attn']):.2f} of its speed")


if __name__ == "__main__":
    main()

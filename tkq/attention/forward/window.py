"""Flash attention forward with a window on both sides: each warpgroup goes through the keys that its own rows see."""
from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.common.mask import LOWER, ROWS, TILE, UPPER, tiles_of_warpgroup
from tkq.attention.forward.config import WindowConfig
from tkq.attention.forward.consumer import Consumer
from tkq.attention.forward.kernel import AttentionForward
from tkq.attention.forward.producer import Producer
from tkq.attention.forward.softmax import LEFT, RIGHT, Softmax
from tkq.attention.forward.spec import AttentionSpec
from tkq.attention.forward.state import Shared, State, extent, field_names

# ---- The producer warp of the window kernel: gives each consumer the tiles that its own 64 rows see.


def fields_of(spec) -> tuple:
    """The fields of a task that a consumer reads: those of ``field_names`` for its own rows, and before, after and cut
    of ``common.mask.tiles_of_warpgroup``."""
    return (*field_names(spec), "before", "after", "cut")


class WindowProducer(Producer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = fields_of(spec)

    def load_q(self, g, smem, ring, t, seen):
        """Each consumer's Q tile, and the task with it."""
        e = extent(self.spec, self.config, g, t.rows_q, t.rows_k)
        for w in range(self.config.consumers):
            known = {**t._asdict(), **tiles_of_warpgroup(e, seen, t.tile * e.tile_rows + w * ROWS)}
            i = self.acquire_q(smem, ring, w)
            with cute.arch.elect_one():
                for f, name in enumerate(self.fields):
                    smem.task[f, i] = Int32(known[name])
                cute.arch.mbarrier_arrive_and_expect_tx(smem.q_full[i].ptr, self.tiles.q.bytes)
            tk.load_async(smem.q[i], g.q, (t.batch, t.head, t.tile * self.config.consumers + w, 0), smem.q_full[i])
        ring.advance()


# ---- A consumer warpgroup of the window kernel: 64 rows of Q, the key tiles that they see, and halves of such tiles.


HALF = TILE // 2
BOTH = (0, TILE)
KEYS = {LOWER: (0, HALF), UPPER: (HALF, TILE)}  # of a tile


class HalfTileSoftmax(Softmax):
    """Of scores of one half of a tile's keys, from key ``start`` on."""

    def __init__(self, spec, config, start):
        super().__init__(spec, config)
        self.start = start

    def limits(self, g, regs, i):
        return [None if x is None else x - self.start for x in super().limits(g, regs, i)]


@dataclass(frozen=True)
class WindowState(State):
    half: tk.RegTile  # scores of half a tile's keys

    def of_half(self):
        """The same registers, for a softmax of the half."""
        return replace(self, s=self.half)


class WindowConsumer(Consumer):
    """``Consumer``, but tiles that its rows do not see it lets pass, and halves it leaves out: ``seen`` is BOTH, LOWER
    or UPPER."""

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = fields_of(spec)
        self.half_softmax = {half: HalfTileSoftmax(spec, config, KEYS[half][0]) for half in KEYS}

    def state(self, smem, wg):
        all_of = super().state(smem, wg)
        return WindowState(**{f.name: getattr(all_of, f.name) for f in fields(all_of)}, half=tk.rt_fl(HALF))

    @cute.jit
    def begin(self, g, smem, regs):
        self.skip_tiles(smem, regs, regs.task["before"])
        smem.k_pipe.wait(regs.k)
        if regs.task["cut"] == LOWER:
            self.first(g, smem, regs, LOWER)
        else:
            self.first(g, smem, regs, BOTH)

    @cute.jit
    def skip_tiles(self, smem, regs, tiles):
        """Key tiles that none of the rows sees. A turn for each: both consumers take as many."""
        for _ in cutlass.range(tiles, unroll=1):
            regs.ping_pong.take()
            regs.ping_pong.give()
            smem.k_pipe.wait(regs.k)
            self.release(smem.k_pipe, regs.k)
            smem.v_pipe.wait(regs.v)
            self.release(smem.v_pipe, regs.v)

    def first(self, g, smem, regs, seen):
        """The first S and its softmax."""
        self.scores(smem, regs, seen)
        tk.mma_wait()
        self.release(smem.k_pipe, regs.k)
        self.softmax_of(regs, seen, lambda softmax, regs: softmax.first(g, regs))
        self.weights(regs, seen)

    @cute.jit
    def steps(self, g, smem, regs):
        blocks, n_masked_right = regs.task["blocks"], regs.task["n_masked_right"]
        whole, end = blocks - regs.task["n_masked_left"], blocks
        for i in cutlass.range(1, n_masked_right, unroll=1):
            self.tile(g, smem, regs, i, RIGHT | LEFT, BOTH)
        if regs.task["cut"] == LOWER:
            self.tile(g, smem, regs, n_masked_right, 0, BOTH, before=LOWER)
            n_masked_right = n_masked_right + 1
        if regs.task["cut"] == UPPER:
            end = end - 1
        for i in cutlass.range(n_masked_right, whole, unroll=1):
            self.tile(g, smem, regs, i, 0, BOTH)
        for i in cutlass.range(whole, end, unroll=1):
            self.tile(g, smem, regs, i, LEFT, BOTH)
        if end < blocks:
            self.tile(g, smem, regs, end, LEFT, UPPER)

    def tile(self, g, smem, regs, i, sides, seen, before=BOTH):
        """The i-th tile of the visit; before: what was seen of the tile before."""
        self.pair(smem, regs, seen, before)
        moved = self.softmax_of(regs, seen, lambda softmax, regs: softmax.step(g, regs, i, sides))
        tk.mma_wait(0)
        self.release(smem.v_pipe, regs.v)
        self.weights(regs, seen)
        self.correct_if(regs, moved)

    def pair(self, smem, regs, seen, before):
        """The next S, and O += P @ V of the tile before; wait for S."""
        smem.k_pipe.wait(regs.k)
        regs.ping_pong.take()
        self.scores(smem, regs, seen)
        smem.v_pipe.wait(regs.v)
        self.sum(smem, regs, before)
        regs.ping_pong.give()
        tk.mma_wait(1)
        self.release(smem.k_pipe, regs.k)

    @cute.jit
    def end(self, smem, regs):
        smem.v_pipe.wait(regs.v)
        if regs.last["cut"] == UPPER:
            self.sum(smem, regs, UPPER)
        else:
            self.sum(smem, regs, BOTH)
        self.save_statistics(regs)
        tk.mma_wait()
        self.release(smem.v_pipe, regs.v)

    def finish(self, g, smem, regs):
        super().finish(g, smem, regs)
        self.skip_tiles(smem, regs, regs.last["after"])

    def scores(self, smem, regs, seen):
        """S = Q @ K.T"""
        q, k = smem.q[self.q_at(regs)], smem.k[regs.k.stage]
        if seen is BOTH:
            tk.mm_ABt(regs.s, q, k)
        else:
            tk.mm_ABt(regs.half, q, k, b_part=KEYS[seen][0] // HALF)

    def sum(self, smem, regs, seen):
        """O += P @ V"""
        tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage], k=seen if seen is BOTH else KEYS[seen])

    def softmax_of(self, regs, seen, do):
        """do(softmax, state), of the scores of a tile or of half of it."""
        return do(self.softmax, regs) if seen is BOTH else do(self.half_softmax[seen], regs.of_half())

    def weights(self, regs, seen):
        """P, as the tensor cores take it."""
        if seen is BOTH:
            tk.copy(regs.p, regs.s)
        else:
            tk.copy(tk.columns(regs.p, KEYS[seen][0], HALF), regs.half)


class WindowForward(AttentionForward):
    """``AttentionForward`` of rows that see a number of keys on either side of their own.

    A block's 128 rows see a key tile of 128 more than each of its two warpgroups' 64 rows need: of a window of 1024
    keys nine tiles, where 64 rows see eight and a half. So a warpgroup computes no scores of the half tile that none
    of its rows sees, and of whole tiles where there are such. What limits these short tasks is how long a warpgroup
    takes for its tiles one after the other, not the tensor cores or what comes out of L2.

      key tiles of the task    t   t-1  t-2 ..  t-7  t-8     (window 1023 before, causal: t is the rows' own)
      warpgroup 0, rows 0-63   ==  ==== ====    ==== ====    of tile t the lower half
      warpgroup 1, rows 64-127 ==== ==== ====   ==== ==      of tile t-8 the upper half

    Roles and pipes are those of ``AttentionForward``: both warpgroups wait for and release each tile, seen or not."""

    def __init__(self, spec: AttentionSpec, config: WindowConfig):
        if spec.varlen or spec.pack > 1 or not spec.long_window or not (spec.causal or spec.right):
            raise ValueError(f"WindowForward: {spec}, needed are limits far left and right, one length, no packing")
        super().__init__(spec, config.check(spec.head_dim, spec.head_dim_v))
        self.producer, self.consumer = WindowProducer(spec, config), WindowConsumer(spec, config)

    def shared(self, al: tk.SharedAllocator) -> Shared:
        n = self.config.consumers * self.config.q_stages
        return replace(super().shared(al), task=al.vector(len(fields_of(self.spec)), n, Int32))

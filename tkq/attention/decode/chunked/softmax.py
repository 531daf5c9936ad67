"""The forward's softmax, of blocks of keys some of which may not be there."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode.chunked.plan import PANEL
from tkq.attention.decode.copies import store16
from tkq.attention.forward.softmax import LEFT, RIGHT, Softmax

INF, NAN = Float32.inf, Float32.nan
LOWEST = -3.4028234e38
FAULT = -(1 << 31)  # of a block's word, beside a bit for each box whose keys are skipped
AHEAD = 2  # words beside a stage each: K may be two blocks before the last V whose stage was free
ROW_BYTES = 128  # of a row in a panel of a tile
BARRIER = 1


@dataclass(frozen=True)
class Blocks:
    """What a consumer knows of blocks of keys. words: from the producer, one for each block; there is one more than
    stages for each block that K is ahead of V, so that none is written over before it is read. at: the next one.
    fault (1,): is the task's result NaN?"""

    words: cute.Tensor
    at: tk.Ring
    fault: Any
    v: tk.SharedTile
    v_pipe: tk.Pipe


class PagedSoftmax:
    """Scores of keys that are not there become -inf. Any block may have none for a row that has not seen any before:
    its max is the lowest number, and not -inf, so that nothing has to ask for it.

    V of a box that is not there is zeros, as TMA brings it; rows behind the last key, in a box that has it, become
    zeros here, before they are multiplied by 0: NaN would stay."""

    def __init__(self, spec, cache, config):
        self.spec, self.cache, self.config, self.inner = spec, cache, config, Softmax(spec, config)

    def state(self, smem):
        return Blocks(smem.words, tk.ring(self.config.stages + AHEAD), cute.make_rmem_tensor((1,), Int32), smem.v,
                      smem.v_pipe)

    def first(self, g, regs):
        inner = self.inner
        tk.zero(regs.norm)
        tk.fill(regs.max, LOWEST)
        inner.scores(g, regs, 0, RIGHT | LEFT)
        regs.blocks.fault[0] = Int32(0)
        self.hide_if(regs, self.word(regs))
        inner.move(g, regs, guarded=False)
        inner.exponentials(g, regs, guarded=False)
        self.clear(regs)

    def step(self, g, regs, i, sides):
        """As the forward's. Keys that are not there share the branch of a max that moves: a block with all keys takes
        none of its own, and its word may arrive while the scores are looked at. Those of such keys are 0 until then, as
        TMA brings K, which is in range; a max that need not move is moved by nothing."""
        inner = self.inner
        inner.scores(g, regs, i, sides)
        word = self.word(regs)
        moved = inner.out_of_range(g, regs, self.cache.paged and word != 0)
        self.move_if(g, regs, word, moved)
        inner.exponentials(g, regs, guarded=False)
        return moved

    @cute.jit
    def move_if(self, g, regs, word, moved):
        if moved:
            if const_expr(self.cache.paged):
                self.hide(regs, word)
            self.inner.move(g, regs, False)

    def word(self, regs):
        """Of the next block."""
        word = cute.arch.make_warp_uniform(regs.blocks.words[0, regs.blocks.at.stage])
        regs.blocks.at.advance()
        regs.blocks.fault[0] = regs.blocks.fault[0] | word
        return word

    @cute.jit
    def hide_if(self, regs, word):
        if const_expr(self.cache.paged):
            if word != 0:
                cute.arch.sync_warp()  # or the compiler selects 64 scores, to save a branch
                self.hide(regs, word)

    @cute.jit
    def hide(self, regs, word):
        """Scores of the boxes that a word names become -inf."""
        view = regs.s.rows_view
        for j in cutlass.range_constexpr(self.config.kv // 4):
            if word & Int32(1 << (8 * (j // 2) // self.cache.box)) != 0:
                view[0, j] = -INF
                view[1, j] = -INF

    @cute.jit
    def clear(self, regs):
        """Rows of the first block of V that are behind the sequence's last key, to the end of its box: all consumers
        together."""
        kv, box, threads = self.config.kv, self.cache.box, tk.WARPGROUP * self.config.consumers
        block = regs.task["blocks"] - 1
        if const_expr(self.spec.left):
            block = block + regs.task["first"]
        begin = regs.task["rows_k"] - block * kv
        end = (begin + box - 1) // box * box
        if begin > 0 and begin < kv and begin < end:
            tile, pipe = regs.blocks.v, regs.blocks.v_pipe
            pipe.wait(regs.v)
            chunks = (end - begin) * (ROW_BYTES // 16)
            at = Int32(tile.staged.iterator.toint()) + regs.v.stage * tile.type.bytes
            zeros = [Int32(0)] * 4
            me = regs.wg * tk.WARPGROUP + tk.thread_in_warpgroup()
            for panel in cutlass.range_constexpr(self.spec.head_dim_v // PANEL):
                for i in cutlass.range(me, chunks, threads, unroll=1):
                    store16(at + self.chunk_at(begin * (ROW_BYTES // 16) + i, panel), zeros)
            tk.publish()
            tk.sync(BARRIER, threads)

    def chunk_at(self, chunk, panel):
        """Bytes from a tile of V to 16 of a panel's, of which ``chunk`` come before."""
        if not self.cache.row_groups:
            return panel * (self.config.kv * ROW_BYTES) + chunk * 16
        chunks = 8 * ROW_BYTES // 16  # of a group of 8 rows
        group, panels = chunk // chunks, self.spec.head_dim_v // PANEL
        return (group * panels + panel) * (8 * ROW_BYTES) + (chunk - group * chunks) * 16

    @cute.jit
    def statistics(self, g, regs, lse):
        self.inner.statistics(g, regs, lse)
        if regs.blocks.fault[0] < 0:
            norm, of = regs.last_norm.tensor, lse.tensor
            for r in cutlass.range_constexpr(2):
                norm[r] = NAN
                of[r] = NAN

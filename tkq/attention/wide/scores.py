"""The score warpgroup of attention with wide heads: S = Q @ K.T and its softmax."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention.forward.softmax import LEFT, RIGHT, Softmax
from tkq.attention.forward.state import Fields, field_names
from tkq.attention.wide.config import PARTS
from tkq.attention.wide.state import ScoreState, Tiles, skip

STORE_UNDER = 1  # P of the block before is stored under the product of this K slot, and of those behind it


class Scores:
    """A thread has S and, in 16 bits, P of the block before: P's shared tile is free only when the outputs have
    multiplied the one before that."""

    def __init__(self, spec, config):
        self.spec, self.config, self.softmax = spec, config, Softmax(spec, config)
        self.tiles, self.fields = Tiles.of(spec, config), field_names(spec)
        self.slots, self.others = config.key_slots(spec.head_dim), PARTS * config.value_slots(spec.head_dim)

    def state(self, smem):
        kv = self.config.kv
        return ScoreState(
            s=tk.rt_fl(kv), p=tk.rt(kv, self.tiles.q.dtype), max=tk.rv(), norm=tk.rv(), correct=tk.rv(), shift=tk.rv(),
            last_max=tk.rv(), last_norm=tk.rv(), moved=cute.make_rmem_tensor((1,), Int32), task=Fields.new(self.fields),
            last=Fields.new(self.fields), ring=smem.k_pipe.ring(), q=tk.ring(1), p_ring=smem.p_pipe.ring(),
            end=smem.end_pipe.ring(), wg=Int32(0))

    @cute.jit
    def run(self, g, smem):
        regs = self.state(smem)
        blocks = self.next_task(smem, regs)
        while blocks > 0:
            self.products(smem, regs, True)
            self.first(g, regs)
            self.steps(g, smem, regs)
            self.end(g, smem, regs)
            blocks = self.next_task(smem, regs)

    def next_task(self, smem, regs):
        """Wait for the next task and its Q. How many blocks it has: none, and all is done."""
        return take_task(smem, regs.q, regs.task)

    @cute.jit
    def steps(self, g, smem, regs):
        """Each further block of the visit."""
        for i in cutlass.range(1, regs.task["blocks"], unroll=1):
            self.products(smem, regs, False)
            self.softmax_of(g, regs, i)
            tk.copy(regs.p, regs.s)

    @cute.jit
    def softmax_of(self, g, regs, i):
        """Of the i-th block of the visit: those with a mask on the right come first, on the left last."""
        masked, whole = Int32(1), regs.task["blocks"]
        if const_expr(self.spec.causal or self.spec.right):
            masked = regs.task["n_masked_right"]
        if const_expr(self.spec.left):
            whole = whole - regs.task["n_masked_left"]
        if const_expr(self.spec.causal or self.spec.right):
            if i < masked:
                self.step(g, regs, i, RIGHT | LEFT)
        if const_expr(self.spec.left):
            if i >= whole:
                self.step(g, regs, i, LEFT)
        if i >= masked and i < whole:
            self.step(g, regs, i, 0)

    def first(self, g, regs):
        """The first softmax of a task."""
        self.softmax.first(g, regs)
        regs.moved[0] = Int32(0)
        tk.copy(regs.p, regs.s)

    def step(self, g, regs, i, sides):
        regs.moved[0] = Int32(self.softmax.step(g, regs, i, sides))

    @cute.jit
    def products(self, smem, regs, first: Constexpr[bool]):
        """S = Q @ K.T, slot by slot. Under it P of the block before goes to the outputs, who begin when all but
        ``early`` slots are multiplied: before, they would only take the tensor cores from this product, and leave them
        idle under the softmax."""
        for i in cutlass.range_constexpr(self.slots):
            smem.k_pipe.wait(regs.ring)
            k, q = smem.k[regs.ring.stage], smem.q_parts[i]
            if const_expr(i == 0):
                tk.mm_ABt(regs.s, q, k)
            else:
                tk.mma_ABt(regs.s, q, k)
                tk.mma_wait(1)
                release_before(smem.k_pipe, regs.ring, 1)
            regs.ring.advance()
            if const_expr(not first and i == STORE_UNDER):
                self.store_p(smem, regs)
            if const_expr(not first and i == self.slots - self.config.early):
                self.commit_p(smem, regs)
        tk.mma_wait(0)
        release_before(smem.k_pipe, regs.ring, 1)
        if const_expr(not first):
            skip(regs.ring, self.others)
            if const_expr(self.config.early == 0):
                self.commit_p(smem, regs)

    @cute.jit
    def store_p(self, smem, regs):
        """P, and by what O is to be multiplied before."""
        keys, moved = self.config.value_keys, smem.moved
        smem.p_pipe.acquire_empty(regs.p_ring)
        for i in cutlass.range_constexpr(self.config.key_parts):
            tk.store(smem.p[i], tk.columns(regs.p, i * keys, keys))
        if regs.moved[0] != 0:
            store_factors(smem, regs.correct, 0)
        if tk.lane_id() == 0:
            moved[tk.warp_id() % 4] = regs.moved[0]
        tk.publish()

    def commit_p(self, smem, regs):
        smem.p_pipe.commit(regs.p_ring)
        regs.p_ring.advance()

    def end(self, g, smem, regs):
        """The last P, and what O is to be divided by; the log-sum-exp."""
        tk.arrive(smem.q_empty)
        self.store_p(smem, regs)
        self.commit_p(smem, regs)
        skip(regs.ring, self.others)
        for f in range(len(self.fields)):
            regs.last.values[f] = regs.task.values[f]
        tk.copy(regs.last_max, regs.max)
        tk.copy(regs.last_norm, regs.norm)
        lse = tk.rv()
        self.softmax.statistics(g, regs, lse)
        smem.end_pipe.acquire_empty(regs.end)
        store_factors(smem, regs.last_norm, 1)
        smem.end_pipe.commit(regs.end)
        regs.end.advance()
        if self.spec.lse:
            self.store_lse(g, regs.last, lse)

    def store_lse(self, g, t, lse):
        first, end = rows_of(self.spec, g, t)
        of = g.lse[t["head"], None] if self.spec.varlen else g.lse[t["batch"], t["head"], None]
        tk.store_rows(of, lse, first + t["tile"] * self.config.rows, end)


@cute.jit
def take_task(smem, q: tk.Ring, task: Fields):
    """Wait for a task and read it; its number of blocks."""
    tk.wait(smem.q_full, q.phase)
    for f in cutlass.range_constexpr(len(task.names)):
        task.values[f] = cute.arch.make_warp_uniform(smem.task[f])
    q.advance()
    return task["blocks"]


def release_before(pipe, ring, n):
    """Release the slot ``n`` places before the ring's."""
    before = tk.ring(ring.stages)
    before.count[0] = ring.count[0] - n
    pipe.release(before)


@cute.jit
def store_factors(smem, v: tk.RowVec, column: Constexpr[int]):
    """A value a row, from one thread of each quad."""
    row, factors = tk.first_row(), smem.factors
    if tk.lane_id() % 4 == 0:
        for r in cutlass.range_constexpr(2):
            factors[row + 8 * r, column] = v.tensor[r]


def rows_of(spec, g, t):
    """(first, end) of the sequence's rows in lse, and in O as a tile has it; packed heads' rows each by itself."""
    rows = g.tasks.lengths(t)[0]
    first = (t["batch"] - rows) * spec.pack if spec.varlen else 0
    return first, first + rows * spec.pack

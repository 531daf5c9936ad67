"""Attention's backward for query heads that share a K/V head, of short sequences.

What is at work at once, Q, dO and the accumulator of all query heads of each part, nearly fills L2; zeroes made far
ahead, and what the background reads to finish dQ, do not fit beside it. So the background makes zeroes only, just
before the first task that needs them, which saves writing and reading them in memory; a kernel behind makes dQ."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

import tkq.tile as tk
from tkq.attention.backward import build as build_alike
from tkq.attention.backward_background import ZEROED
from tkq.attention.backward_grouped import GroupedBackground, GroupedBackward
from tkq.attention.backward_post import BackwardPost
from tkq.attention.backward_seamless_background import rest
from tkq.attention.backward_sequences import Equal
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.backward_state import Numbers
from tkq.attention.backward_tasks import claim
from tkq.attention.backward_zeroes_config import ZeroesConfig, heads_begun
from tkq.attention.launch import BackwardOperands, Gradients, Sequences

RESTS = 3  # between two looks: all warps look at the same number


class ZeroesAhead(GroupedBackground):
    """Each warp holds one tile, in the order of the tasks, until its turn: so there are as many zeroes as tasks need,
    and no more, whoever makes them."""

    @cute.jit
    def run(self, g):
        counters, tiles = g.background.counters, cute.size(g.acc, mode=[0])
        cute.arch.griddepcontrol_wait()  # the counters are zero
        n = claim(counters.next, ZEROED)
        while n < tiles:
            while self.wanted(g) <= n:
                for _ in cutlass.range_constexpr(RESTS):
                    rest()
            self.zero(g, self.tile(g, n))
            n = claim(counters.next, ZEROED)

    @cute.jit
    def wanted(self, g):
        """How many tiles there should be, by the tasks that have been given out. Only to be kept to, no data hang on
        it."""
        c, blocks = self.config, g.tasks // (g.kv_heads * g.places.batches)
        given = Int32(cute.arch.load(g.next.iterator, Int32, sem="relaxed", scope="gpu"))
        begun = heads_begun(cute.arch.make_warp_uniform(given) + c.ahead, blocks, g.kv_heads * g.places.batches,
                            g.section, g.tail * c.rounds)
        return begun * (g.heads_per_kv * g.tiles)

    def sign_off_head(self, g, sequence, head, but: Constexpr[int] = 0):
        """Nobody waits for what has been added."""


class ZeroesBackward(GroupedBackward):
    """``GroupedBackward`` with zeroes in the background, and dQ made behind."""

    def __init__(self, spec: BackwardSpec, config: ZeroesConfig):
        super().__init__(spec, config)
        self.background = ZeroesAhead(spec, config, self.turn)

    @cute.jit
    def __call__(self, operands: BackwardOperands, gradients: Gradients, workspace: cute.Tensor,
                 sequences: Optional[Sequences], numbers: Numbers, stream: cuda.CUstream):
        """As ``BackwardBase``'s."""
        GroupedBackward.__call__(self, operands, gradients, workspace, sequences, numbers, stream)
        q, dq = operands.q, gradients.dq
        places = Equal(q.shape[1], operands.k.shape[1], q.shape[0])
        acc = self.parts_of(workspace, places.slots(False, self.config.tile) * q.shape[2] * q.shape[0], 0, 1).acc
        BackwardPost(self.spec, self.config)(acc, dq, places, numbers.scale, 0, stream)

    @cute.jit
    def queries(self, g, s):
        dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1)
        cute.arch.griddepcontrol_wait()  # the counters are zero
        self.each_task(g, s, lambda t, again: self.add_by_heads(g, s, t, again, dq, ring, kv))
        tk.store_wait()


def build(spec: BackwardSpec, config: ZeroesConfig):
    """The kernels and their fake arguments, as ``tkq.attention.backward.build``."""
    return ZeroesBackward(spec, config), build_alike(spec, config)[1]
